"""Merge what ranks, chunks and engine calls recorded into one payload per sample.

R2 records in the trainer's own forward pass: rows come from sequence-parallel and context-parallel
ranks, layers from pipeline ranks and chunks, microbatches in schedule order. R3 records in the
rollout engine: rows come from the calls of one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.core.records import IntArray, Version
from rollproof.errors import LayoutError
from rollproof.layouts.sources import Source

__all__ = ["Segment", "joined_segments", "scattered"]


def scattered(pieces: Iterable[tuple[Source, IntArray]], lengths: Sequence[int]) -> list[IntArray]:
    """Return the rows ``(length, ...)`` of each sample, from pieces with rows ``(rows, ...)``.

    Rows in padding are dropped. Raises ``LayoutError`` for a piece of another length than its
    source, for rows that are in no piece, and for two pieces that disagree about a row.
    """
    pieces = list(pieces)
    for source, rows in pieces:
        if len(source) != len(rows):
            raise LayoutError(f"A piece has {len(rows)} rows, but its layout has {len(source)}.")
    inner = pieces[0][1].shape[1:] if pieces else ()
    kind: Any = np.result_type(*(rows.dtype for _, rows in pieces)) if pieces else np.int64
    out: list[IntArray] = [np.zeros((length, *inner), dtype=kind) for length in lengths]
    present = [np.zeros(length, dtype=bool) for length in lengths]
    for source, rows in pieces:
        for sample in np.unique(source.sample[source.filled]):
            chosen = source.sample == sample
            position, values = source.position[chosen], rows[chosen]
            again = present[sample][position]
            # tensor-parallel ranks without sequence parallelism record the same rows
            if not np.array_equal(out[sample][position[again]], values[again]):
                raise LayoutError(
                    f"Two ranks disagree about rows of sample {sample}: they recorded different"
                    " passes, or one layout is wrong."
                )
            out[sample][position] = values
            present[sample][position] = True
    lost = {
        i: np.flatnonzero(~rows).tolist()[:8] for i, rows in enumerate(present) if not rows.all()
    }
    if lost:
        raise LayoutError(
            f"No rank recorded the positions {lost} (by sample): a rank is missing, or the layout"
            " is not the one recorded."
        )
    return out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """The routes that one engine call returned: ``(rows, columns, k)``.

    Row 0 is that of position ``start``; weights ``version`` computed them.
    """

    routes: IntArray
    start: int
    version: Version


def joined_segments(
    segments: Sequence[Segment], *, latest: bool = False
) -> tuple[IntArray, list[Version]]:
    """Return the rows of a resumed sample, each position once, and the version that computed each.

    If several calls computed a position, the row of the first counts (verl#6046), or with
    ``latest`` that of the last. Raises ``LayoutError`` if a position is missing.
    """
    rows: dict[int, tuple[Any, Version]] = {}
    for segment in segments:
        for i, row in enumerate(segment.routes):
            # the first call has the row of the weights that sampled the token (verl#6046)
            if latest or segment.start + i not in rows:
                rows[segment.start + i] = (row, segment.version)
    # closing a gap would move every later row to another token
    if sorted(rows) != list(range(len(rows))):
        raise LayoutError(
            f"The segments have positions {sorted(rows)[:8]}...: a call's rows are missing. Do not"
            " close the gap."
        )
    ordered = [rows[position] for position in range(len(rows))]
    empty = segments[0].routes[:0] if segments else np.zeros((0, 0, 0), dtype=np.int64)
    return (np.stack([row for row, _ in ordered]) if ordered else empty), [
        version for _, version in ordered
    ]
