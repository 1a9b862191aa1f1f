"""Which rows a rank sees: context parallelism, sequence parallelism, Ulysses.

Zigzag (Megatron, Transformer Engine issue 1368): each padded sequence is cut into 2 * cp chunks,
and rank r has chunks r and 2 * cp - 1 - r, so that causal attention costs all ranks the same.
Contiguous (DeepSeek-V4, slime's allgather CP): rank r has rows ``[r * n / cp, (r + 1) * n / cp)``
of *all* packed rows, sequences being cut wherever that falls. In slime#2175 and ms-swift#9981 the
one was taken for the other.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

import numpy as np

from rollproof.errors import LayoutError
from rollproof.layouts.sources import Indexes

__all__ = [
    "Context",
    "Order",
    "context_rows",
    "contiguous_rows",
    "contiguous_rows_of_each",
    "flat_rows",
    "padded_length",
    "zigzag_rows",
]


class Context(StrEnum):
    """How rows are divided over context-parallel ranks."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"
    """One piece of all packed rows."""
    EACH_CONTIGUOUS = "contiguous-per-sequence"
    """One piece of each sequence."""


def zigzag_rows(cumulative: Indexes, size: int, rank: int) -> Indexes:
    """Return the indexes of the packed rows of ``rank`` of ``size``, ``(packed / size,)``.

    With ``size`` 1 they are all rows. Raises ``LayoutError`` if a padded sequence is no multiple of
    ``2 * size``.
    """
    if size == 1:
        return np.arange(cumulative[-1], dtype=np.int64)
    _divides(cumulative, 2 * size, "2 * cp")
    pieces: list[Indexes] = []
    for start, stop in pairwise(cumulative.tolist()):
        # an early and a late chunk: causal attention costs all ranks the same
        chunk = (stop - start) // (2 * size)
        pieces += [
            np.arange(start + n * chunk, start + (n + 1) * chunk)
            for n in (rank, 2 * size - 1 - rank)
        ]
    return _joined(pieces)


def contiguous_rows(total: int, size: int, rank: int) -> Indexes:
    """Return one contiguous piece of the indexes of ``total`` rows, ``(total / size,)``.

    Raises ``LayoutError`` if they do not divide.
    """
    if total % size:
        raise LayoutError(
            f"{total} packed rows do not divide over {size} ranks: align their sum to the parallel"
            " size."
        )
    part = total // size
    return np.arange(rank * part, (rank + 1) * part, dtype=np.int64)


def contiguous_rows_of_each(cumulative: Indexes, size: int, rank: int) -> Indexes:
    """Return the indexes of one contiguous piece of each sequence."""
    _divides(cumulative, size, "cp")
    starts = zip(cumulative[:-1], np.diff(cumulative) // size, strict=True)
    return _joined(
        [np.arange(start + rank * part, start + (rank + 1) * part) for start, part in starts]
    )


def context_rows(kind: Context, cumulative: Indexes, size: int, rank: int) -> Indexes:
    """Return the indexes of the rows of a context-parallel rank under ``kind``."""
    if kind is Context.ZIGZAG:
        return zigzag_rows(cumulative, size, rank)
    if kind is Context.CONTIGUOUS:
        return contiguous_rows(int(cumulative[-1]), size, rank)
    return contiguous_rows_of_each(cumulative, size, rank)


def _divides(cumulative: Indexes, multiple: int, name: str) -> None:
    bad = [int(length) for length in np.diff(cumulative) if length % multiple]
    if bad:
        raise LayoutError(
            f"Padded sequences of {bad} rows are not multiples of {name} = {multiple}: align every"
            " sequence before the slice."
        )


def _joined(pieces: list[Indexes]) -> Indexes:
    return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64)


class Order(StrEnum):
    """How a batch ``(batch, width)`` is flattened to router rows."""

    SEQUENCE_MAJOR = "sequence-major"
    """Row ``s * batch + b``: hidden states are (sequence, batch, hidden) (Megatron)."""
    BATCH_MAJOR = "batch-major"
    """Row ``b * width + s``: hidden states are (batch, sequence, hidden) (HF transformers)."""


def padded_length(length: int, size: int) -> int:
    """Round up to a multiple of ``size``, as Ulysses pads token ids and routes (verl
    ``ulysses_pad``).
    """
    return -(-length // size) * size


def flat_rows(order: Order, batch: int, width: int) -> Indexes:
    """Return the index of each router row in the C order of ``(batch, width)``: ``(batch *
    width,)``.
    """
    if batch < 0 or width < 0:
        raise LayoutError(f"A batch cannot have {batch} x {width} places.")
    places = np.arange(batch * width, dtype=np.int64).reshape(batch, width)
    return places.T.reshape(-1) if order is Order.SEQUENCE_MAJOR else places.reshape(-1)
