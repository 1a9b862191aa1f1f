"""Cells: the table of expert choices that routes of the coded policy are looked up in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.fakes.coded.hashing import N_STEP, finish

__all__ = ["TABLE_BITS", "cells_of"]

TABLE_BITS = 14


@lru_cache(maxsize=64)
def cells_of(num_experts: int, top_k: int) -> npt.NDArray[Any]:
    """``(2**14,)`` cells, each ``top_k`` distinct experts in an order, packed into one element of
    ``top_k`` ids.

    Drawn uniformly among the ordered choices: number k is drawn among the experts that are left,
    and its rank among those is turned into an id by stepping over the ids already taken, in
    ascending order.
    """
    dtype = np.dtype(np.min_scalar_type(num_experts - 1))
    # random cases draw a model each: passes over narrow columns build its table in a tenth of the
    # time of int64 rows that are sorted
    narrow = np.dtype(np.uint16 if num_experts < 1 << 16 else np.uint32)
    size = 1 << TABLE_BITS
    out = np.empty((size, top_k), dtype=dtype)
    taken: list[npt.NDArray[Any]] = []
    for slot in range(top_k):
        seeds = np.arange(slot * size + 1, (slot + 1) * size + 1, dtype=np.uint64) * N_STEP
        pick = (finish(seeds) % np.uint64(num_experts - slot)).astype(narrow)
        for column in taken:
            pick += pick >= column
        out[:, slot] = pick
        if slot + 1 < top_k:
            _insert(taken, pick)
    width = top_k * dtype.itemsize
    packed = f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"
    cells = out.view(packed)[:, 0]
    cells.setflags(write=False)
    return cells


def _insert(taken: list[npt.NDArray[Any]], pick: npt.NDArray[Any]) -> None:
    """Add a column to columns that ascend in every row, so that they still do."""
    for number, column in enumerate(taken):
        taken[number] = np.minimum(column, pick)
        pick = np.maximum(column, pick)
    taken.append(pick)
