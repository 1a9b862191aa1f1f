"""The route rows that a rollout must have, as views into the engines' replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray

__all__ = ["RowPiece", "cut_pieces", "join_pieces", "overlay"]


# A resumed rollout takes its rows from several replies. Slices in place of one joined array save a
# copy of every row, so that judging a long trace costs one comparison.
@dataclass(frozen=True, slots=True, eq=False)
class RowPiece:
    """Rows ``(n, layers, top_k)`` of positions ``start`` to ``start + n``, all from the reply of
    one attempt.
    """

    start: int
    attempt: int
    rows: IntArray

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.rows)

    def part(self, start: int, end: int) -> RowPiece:
        """Return the rows of positions ``start`` to ``end``, which must lie within the piece."""
        return RowPiece(start, self.attempt, self.rows[start - self.start : end - self.start])


def cut_pieces(pieces: Sequence[RowPiece], stop: int) -> tuple[RowPiece, ...]:
    """Return the rows of positions below ``stop``."""
    return tuple(
        piece if piece.end <= stop else piece.part(piece.start, stop)
        for piece in pieces
        if piece.start < stop
    )


def overlay(pieces: Sequence[RowPiece], new: RowPiece, *, keep: bool) -> tuple[RowPiece, ...]:
    """Add the rows of a reply to ``pieces``.

    Args:
        pieces: Disjoint pieces in ascending order; the result is so, too.
        new: The rows to add.
        keep: Whether rows that exist stay. Otherwise the new rows replace them.
    """
    if keep:
        gaps, position = [], new.start
        for piece in pieces:
            if piece.start > position:
                gaps.append(new.part(position, max(position, min(piece.start, new.end))))
            position = max(position, piece.end)
        if position < new.end:
            gaps.append(new.part(position, new.end))
        added, remaining = [gap for gap in gaps if len(gap.rows)], list(pieces)
    else:
        remaining = [
            piece.part(piece.start, min(piece.end, new.start))
            for piece in pieces
            if piece.start < new.start
        ]
        remaining += [
            piece.part(max(piece.start, new.end), piece.end)
            for piece in pieces
            if piece.end > new.end
        ]
        added = [new]
    return tuple(sorted([*remaining, *added], key=lambda piece: piece.start))


def join_pieces(pieces: Sequence[RowPiece]) -> tuple[IntArray | None, npt.NDArray[np.int64]]:
    """Join pieces into arrays from position 0 on.

    Returns:
        The rows ``(n, layers, top_k)``, zeros if nothing was captured, and the attempt of each row
        ``(n,)``, -1 for none.
    """
    if not pieces:
        return None, np.zeros(0, dtype=np.int64)
    size = max(piece.end for piece in pieces)
    # Only tests and reports need the joined array; checks compare piece by piece.
    rows = np.zeros(
        (size, *pieces[0].rows.shape[1:]),
        dtype=np.result_type(*(piece.rows.dtype for piece in pieces)),
    )
    source = np.full(size, -1, dtype=np.int64)
    for piece in pieces:
        rows[piece.start : piece.end] = piece.rows
        source[piece.start : piece.end] = piece.attempt
    return rows, source
