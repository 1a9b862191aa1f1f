"""Narrow: integers that are held in a narrower type than the one that they are shown in."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.records import IntArray

__all__ = ["Narrow", "narrow"]


class Narrow(np.ndarray[Any, np.dtype[np.integer[Any]]]):
    """Stands for the same numbers in ``shown_as``; a trace file says that they are of that type.

    Only what goes to a trace file and nowhere else may be held so: whoever else looks at an array
    trusts its ``dtype``. A served engine's int32 rows are four times as large as what they were
    drawn in, and to make them, to look at them and to cut them down again took more time than
    anything else that the trace takes.
    """

    shown_as: np.dtype[Any]


def narrow(array: IntArray, shown_as: np.dtype[Any]) -> Narrow:
    """A view of ``array`` that stands for its numbers in ``shown_as``, which holds all of them."""
    held: Narrow = array.view(Narrow)
    held.shown_as = shown_as
    return held
