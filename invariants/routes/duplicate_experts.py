"""A fast search for cells that name an expert twice, at the speed of one memory pass.

A cell's k ids are compared with each other by subtracting from the flat array the same array
shifted by 1 to k-1 places: a difference of 0 is a repeated id.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray

__all__ = ["has_repeats", "repeats"]

_CELLS = 1 << 14
"""Cells per block, an even number: small enough for the caches, large enough that the calls cost
nothing.
"""
_SMALL = 1 << 11
"""The number of ids up to which sorting costs less than the setup of the fast search."""
Mask: TypeAlias = "npt.NDArray[np.bool_]"
Bytes: TypeAlias = "npt.NDArray[Any]"


def has_repeats(rows: IntArray, num_experts: int) -> bool:
    """Return whether a cell of ``rows`` ``(rows, layers, top_k)`` may name an expert twice.

    It never misses one. If ids are out of range, false alarms are possible: ``repeats`` decides.
    """
    k = rows.shape[2]
    if k == 1 or not rows.size:
        return False
    if rows.size <= _SMALL:
        return bool(repeats(rows).any())
    flat = np.ascontiguousarray(rows).ravel().view(f"u{rows.dtype.itemsize}")
    size = _CELLS * k
    largest = min(size, len(flat))
    # Ids of two neighbouring cells must not count as equal. If the integer type has a spare bit,
    # every other cell gets its top bit flipped; if not, the differences across a border are made 1.
    spare = num_experts <= 1 << (8 * flat.itemsize - 1)
    marked, buffer = (np.empty(largest, dtype=flat.dtype) for _ in range(2))
    for low in range(0, len(flat), size):
        block = flat[low : low + size]
        count = len(block)
        if spare:
            block = np.bitwise_xor(
                block, _marks(flat.dtype.str, size, k)[:count], out=marked[:count]
            )
        for lag in range(1, k):
            differ = np.subtract(block[lag:], block[:-lag], out=buffer[: count - lag])
            if not spare:
                np.bitwise_or(
                    differ, _borders(flat.dtype.str, size, k, lag)[: count - lag], out=differ
                )
            if not np.minimum.reduce(differ):
                return True
    return False


def repeats(rows: IntArray) -> Mask:
    """Return which cells of ``rows`` ``(rows, layers, top_k)`` name an expert twice: ``(rows,
    layers)``.
    """
    ordered = np.sort(rows, axis=2)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))


@lru_cache(maxsize=8)
def _marks(dtype: str, size: int, k: int) -> Bytes:
    """Return the top bit in every other cell of k places."""
    top = np.array(1, dtype=dtype) << (8 * np.dtype(dtype).itemsize - 1)
    return np.where(np.arange(size) // k % 2, top, 0).astype(dtype)


@lru_cache(maxsize=64)
def _borders(dtype: str, size: int, k: int, lag: int) -> Bytes:
    """Return 1 at the places with their partner, ``lag`` places on, in another cell."""
    return (np.arange(size) % k >= k - lag).astype(dtype)
