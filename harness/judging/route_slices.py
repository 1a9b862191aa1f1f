"""Row pieces: the route rows that a rollout must have, as views into the engines' replies.

A resumed rollout takes its rows from several replies. Keeping slices instead of one joined array
spares a copy of every row, so that judging a long trace costs one comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray

__all__ = ["RowPiece", "cut_pieces", "join_pieces", "overlay"]


@dataclass(frozen=True, slots=True, eq=False)
class RowPiece:
    """Rows ``(n, layers, top_k)`` of absolute positions ``start`` to ``start + n``, all from the
    reply of one attempt.
    """

    start: int
    attempt: int
    rows: IntArray

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.start + len(self.rows)

    def part(self, start: int, end: int) -> RowPiece:
        """The rows of positions ``start`` to ``end``, which must lie within."""
        return RowPiece(start, self.attempt, self.rows[start - self.start : end - self.start])


def cut_pieces(pieces: Sequence[RowPiece], stop: int) -> tuple[RowPiece, ...]:
    """The rows of positions below ``stop``."""
    return tuple(
        piece if piece.end <= stop else piece.part(piece.start, stop)
        for piece in pieces
        if piece.start < stop
    )


def overlay(pieces: Sequence[RowPiece], new: RowPiece, *, keep: bool) -> tuple[RowPiece, ...]:
    """Add the rows of a reply: with ``keep`` only where nothing stands, without it over what stands
    there.

    ``pieces`` are disjoint and ascending, and so is the result.
    """
    if keep:
        gaps, at = [], new.start
        for piece in pieces:
            if piece.start > at:
                gaps.append(new.part(at, max(at, min(piece.start, new.end))))
            at = max(at, piece.end)
        if at < new.end:
            gaps.append(new.part(at, new.end))
        added, kept = [gap for gap in gaps if len(gap.rows)], list(pieces)
    else:
        kept = [
            piece.part(piece.start, min(piece.end, new.start))
            for piece in pieces
            if piece.start < new.start
        ]
        kept += [
            piece.part(max(piece.start, new.end), piece.end)
            for piece in pieces
            if piece.end > new.end
        ]
        added = [new]
    return tuple(sorted([*kept, *added], key=lambda piece: piece.start))


def join_pieces(pieces: Sequence[RowPiece]) -> tuple[IntArray | None, npt.NDArray[np.int64]]:
    """``(n, layers, top_k)`` rows from position 0 on, zeros where nothing was captured, and
    ``(n,)`` the attempts (-1: none).
    """
    if not pieces:
        return None, np.zeros(0, dtype=np.int64)
    size = max(piece.end for piece in pieces)
    rows = np.zeros(
        (size, *pieces[0].rows.shape[1:]),
        dtype=np.result_type(*(piece.rows.dtype for piece in pieces)),
    )
    source = np.full(size, -1, dtype=np.int64)
    for piece in pieces:
        rows[piece.start : piece.end] = piece.rows
        source[piece.start : piece.end] = piece.attempt
    return rows, source
