"""Wording: numbers of things in sentences."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["counted"]

_ONE: Mapping[str, str] = {"are": "is", "have": "has", "were": "was"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """``1 token``, ``1,200 tokens``; with the verb ``have``: ``1 token has``, ``3 sequences have``."""
    one = number == 1
    told = f"{number:,} {noun}{'' if one else 's'}"
    return f"{told} {_ONE[verb] if one else verb}" if verb else told
