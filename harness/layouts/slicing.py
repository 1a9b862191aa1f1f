"""Slicing: rows over tensor-parallel ranks (Megatron's sequence parallelism) and over Ulysses
ranks, and the order of flattened rows.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from rollproof.errors import LayoutError
from rollproof.layouts.context import contiguous_rows
from rollproof.layouts.sources import Indexes

__all__ = ["Order", "flat_rows", "padded_length", "tensor_rows", "ulysses_rows"]


class Order(StrEnum):
    """How a batch ``(batch, width)`` is flattened to router rows."""

    SEQUENCE_MAJOR = "sequence-major"
    """Row ``s * batch + b``: hidden states are (sequence, batch, hidden) (Megatron)."""
    BATCH_MAJOR = "batch-major"
    """Row ``b * width + s``: hidden states are (batch, sequence, hidden) (HF transformers)."""


def tensor_rows(total: int, size: int, rank: int) -> Indexes:
    """Rows that tensor-parallel ``rank`` of ``size`` sees under sequence parallelism: one
    contiguous piece, ``(total / size,)``.

    Megatron's ``scatter_to_sequence_parallel_region``. Raises ``LayoutError`` where the rows do not
    divide.
    """
    return contiguous_rows(total, size, rank)


def padded_length(length: int, size: int) -> int:
    """``length`` rounded up to a multiple of ``size``: what Ulysses pads token ids and routes to
    (verl ``ulysses_pad``).
    """
    return -(-length // size) * size


def ulysses_rows(length: int, size: int, rank: int) -> Indexes:
    """Rows of Ulysses ``rank``, ``(padded_length(length, size) / size,)``; indexes at and beyond
    ``length`` are padding.
    """
    return contiguous_rows(padded_length(length, size), size, rank)


def flat_rows(order: Order, batch: int, width: int) -> Indexes:
    """For each router row, its index in the C order of ``(batch, width)``: ``(batch * width,)``."""
    if batch < 0 or width < 0:
        raise LayoutError(f"A batch of {batch} x {width} does not exist.")
    places = np.arange(batch * width, dtype=np.int64).reshape(batch, width)
    return places.T.reshape(-1) if order is Order.SEQUENCE_MAJOR else places.reshape(-1)
