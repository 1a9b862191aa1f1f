"""Rows without their padding, as trainers have them after packing."""

from __future__ import annotations

from typing import Any

__all__ = ["response_length"]


def response_length(mask: Any) -> int:
    """Return the length of a response: up to its last trained token, by its row of the mask."""
    # not the number of trained tokens: those of the environment lie between them
    trained = mask.nonzero()
    return int(trained[-1]) + 1 if len(trained) else 0
