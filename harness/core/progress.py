"""The progress of a long run, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How many steps of a run are done."""

    done: int
    total: int
    """0: not known."""
    what: str
    """What is being worked on."""
