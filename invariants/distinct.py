"""Distinct: finds cells that name an expert twice, at the speed of a memory pass.

A cell's k ids are compared with each other by comparing the flat array with itself displaced by 1 to k-1 places. What
lies across the border of two cells must not count: where the integer type has a bit to spare, every other cell has its top bit
flipped, so that ids of neighbouring cells never look equal; where it has none, those places are masked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.records import IntArray

__all__ = ["has_repeats", "repeats"]

_BLOCK = 1 << 17
"""Bytes looked at in one go: the block and its two scratch buffers stay in the second-level cache."""
Mask: TypeAlias = "npt.NDArray[np.bool_]"
Bytes: TypeAlias = "npt.NDArray[Any]"


def has_repeats(rows: IntArray, num_experts: int) -> bool:
    """Whether a cell of ``rows`` ``(rows, layers, top_k)`` may name an expert twice. Never misses one.

    False alarms are possible where ids are out of range; ``repeats`` decides.
    """
    k = rows.shape[2]
    if k == 1 or not rows.size:
        return False
    flat = np.ascontiguousarray(rows).reshape(-1).view(f"u{rows.dtype.itemsize}")
    size = max(k, _BLOCK // flat.itemsize // (2 * k) * 2 * k)
    marks = _marks(flat.dtype.str, min(size, len(flat)), k)
    spare = num_experts <= 1 << (8 * flat.itemsize - 1)
    scratch = np.empty(min(size, len(flat)), dtype=flat.dtype) if spare else None
    equal = np.empty(min(size, len(flat)), dtype=bool)
    for low in range(0, len(flat), size):
        block = flat[low : low + size]
        if scratch is not None:
            block = np.bitwise_xor(block, marks[: len(block)], out=scratch[: len(block)])
        for lag in range(1, k):
            same = np.equal(block[lag:], block[:-lag], out=equal[: len(block) - lag])
            if scratch is None:
                same &= _inside(len(block) - lag, k, lag)
            if np.count_nonzero(same):
                return True
    return False


def repeats(rows: IntArray) -> Mask:
    """Which cells of ``rows`` ``(rows, layers, top_k)`` name an expert twice: ``(rows, layers)``."""
    ordered = np.sort(rows, axis=2)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))


@lru_cache(maxsize=8)
def _marks(dtype: str, size: int, k: int) -> Bytes:
    """The top bit in every other cell of k places."""
    top = np.array(1, dtype=dtype) << (8 * np.dtype(dtype).itemsize - 1)
    return np.where(np.arange(size) // k % 2, top, 0).astype(dtype)


@lru_cache(maxsize=64)
def _inside(size: int, k: int, lag: int) -> Mask:
    """Which places have their partner ``lag`` places on in the same cell."""
    return np.arange(size) % k < k - lag
