"""Dtypes: expert ids in as few bytes as they fit, as bytes on the wire, and wide again where they
index.

uint8 holds the ids of 256 experts and no more (verl#5240, verl#7407, prime-rl#3051); NCCL has no
16-bit integers, so that ids travel as a view of bytes (verl ``merge_router_topk_indices``);
``gather`` takes int32 or int64 only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.errors import LayoutError

__all__ = ["compact", "compact_dtype", "from_bytes", "to_bytes", "widened"]


def compact_dtype(experts: int, *, sentinel: bool = False) -> np.dtype[Any]:
    """The smallest integer type that holds the ids of so many experts, and -1 where ``sentinel``."""
    signed = ("int8", "int16", "int32", "int64")
    names = signed if sentinel else ("uint8", "int16", "uint16", "int32", "int64")
    return np.dtype(next(name for name in names if np.iinfo(name).max >= experts - 1))


def compact(ids: IntArray, dtype: npt.DTypeLike) -> IntArray:
    """``ids`` in ``dtype``, value by value. Raises ``LayoutError`` for an id that ``dtype`` cannot
    hold.
    """
    limits = np.iinfo(dtype)
    if ids.size and (int(ids.min()) < limits.min or int(ids.max()) > limits.max):
        raise LayoutError(
            f"Expert ids from {ids.min()} to {ids.max()} do not fit {limits.dtype}, which holds"
            f" {limits.min} to {limits.max}."
        )
    return ids.astype(dtype)


def widened(ids: IntArray) -> npt.NDArray[np.int64]:
    """``ids`` as int64, what indexing needs."""
    return ids.astype(np.int64)


def to_bytes(ids: IntArray) -> npt.NDArray[np.uint8]:
    """A view of the bytes: ``(..., k)`` becomes ``(..., k * itemsize)`` uint8."""
    return np.ascontiguousarray(ids).view(np.uint8)


def from_bytes(data: npt.NDArray[np.uint8], dtype: npt.DTypeLike) -> IntArray:
    """The ids that ``to_bytes`` viewed. Raises ``LayoutError`` where the bytes do not divide into
    ids.
    """
    size = np.dtype(dtype).itemsize
    if data.shape[-1] % size:
        raise LayoutError(f"{data.shape[-1]} bytes do not divide into ids of {size} bytes.")
    out: IntArray = np.ascontiguousarray(data).view(dtype)
    return out
