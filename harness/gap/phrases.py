"""Wording: numbers of things in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["counted", "listed", "some_of"]

_ONE: Mapping[str, str] = {"are": "is", "have": "has", "were": "was"}
_SHOWN = 6


def counted(number: int, noun: str, verb: str = "") -> str:
    """``1 token``, ``1,200 tokens``; with the verb ``have``: ``1 token has``, ``3 sequences have``."""
    one = number == 1
    told = f"{number:,} {noun}{'' if one else 's'}"
    return f"{told} {_ONE[verb] if one else verb}" if verb else told


def listed(names: Iterable[object]) -> str:
    """``1, 2, 3``; beyond six names dots stand for the rest."""
    told = list(map(str, names))
    return ", ".join(told[:_SHOWN]) + (" ..." if len(told) > _SHOWN else "")


def some_of(chosen: Sequence[int], sequences: Sequence[Any]) -> str:
    """``2 of 64 sequences (7, 31)``: those ``chosen`` by index, the first of them by name."""
    return (
        f"{len(chosen):,} of {counted(len(sequences), 'sequence')}"
        f" ({listed(sequences[index] for index in chosen)})"
    )
