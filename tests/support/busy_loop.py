"""Stuck: what a subject does that never ends."""

from __future__ import annotations

__all__ = ["spin"]


async def spin() -> None:
    """Compute for ever, without an await."""
    turns = 0
    while True:
        turns += 1
