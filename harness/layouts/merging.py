"""Merging: what ranks, chunks and calls recorded, put together to one payload per sample.

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
    """The rows ``(length, ...)`` of each sample, from pieces whose rows ``(rows, ...)`` came from
    these places.

    Rows in padding are dropped. Raises ``LayoutError`` for pieces of other lengths than their
    source, for rows that no piece holds, and for two pieces that disagree about one.
    """
    pieces = list(pieces)
    for source, rows in pieces:
        if len(source) != len(rows):
            raise LayoutError(f"A piece has {len(rows)} rows, and its layout {len(source)}.")
    inner = pieces[0][1].shape[1:] if pieces else ()
    kind: Any = np.result_type(*(rows.dtype for _, rows in pieces)) if pieces else np.int64
    out: list[IntArray] = [np.zeros((length, *inner), dtype=kind) for length in lengths]
    held = [np.zeros(length, dtype=bool) for length in lengths]
    for source, rows in pieces:
        for sample in np.unique(source.sample[source.filled]):
            chosen = source.sample == sample
            position, values = source.position[chosen], rows[chosen]
            known = held[sample][position]
            if not np.array_equal(out[sample][position[known]], values[known]):
                raise LayoutError(
                    f"Two ranks disagree about rows of sample {sample}: they recorded different"
                    " passes, or one layout is wrong."
                )
            out[sample][position] = values
            held[sample][position] = True
    lost = {
        i: np.flatnonzero(~there).tolist()[:8] for i, there in enumerate(held) if not there.all()
    }
    if lost:
        raise LayoutError(
            f"No rank recorded the positions {lost} (by sample): a rank is missing, or the layout"
            " is not the one recorded."
        )
    return out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """What one engine call returned: ``routes`` ``(rows, columns, k)`` with row 0 at position
    ``start``, by weights ``version``.
    """

    routes: IntArray
    start: int
    version: Version


def joined_segments(
    segments: Sequence[Segment], *, latest: bool = False
) -> tuple[IntArray, list[Version]]:
    """The rows of a resumed sample and the version that computed each: every position once.

    A position that several calls computed keeps the row of the first (verl#6046), or of the last
    one where ``latest``. Raises ``LayoutError`` where a position is left out.
    """
    rows: dict[int, tuple[Any, Version]] = {}
    for segment in segments:
        for i, row in enumerate(segment.routes):
            if latest or segment.start + i not in rows:
                rows[segment.start + i] = (row, segment.version)
    if sorted(rows) != list(range(len(rows))):
        raise LayoutError(
            f"The segments hold positions {sorted(rows)[:8]}...: a call's rows are missing, and"
            " must not be closed up."
        )
    ordered = [rows[position] for position in range(len(rows))]
    empty = segments[0].routes[:0] if segments else np.zeros((0, 0, 0), dtype=np.int64)
    return (np.stack([row for row, _ in ordered]) if ordered else empty), [
        version for _, version in ordered
    ]
