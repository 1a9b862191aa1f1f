"""Row pieces: views into replies make the same rows as filling one array position by position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollproof.judging.route_slices import RowPiece, cut_pieces, join_pieces, overlay


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(1, 9), st.booleans(), st.none() | st.integers(0, 12)
        ),
        max_size=6,
    )
)
def test_pieces_are_what_an_array_filled_by_position_would_be(
    steps: list[tuple[int, int, bool, int | None]],
) -> None:
    """Overlay with and without ``keep`` and cuts, in any order, against the plain fill; pieces stay
    disjoint and ascending.
    """
    owner, value = np.full(24, -1), np.zeros(24, dtype=np.int64)
    pieces: tuple[RowPiece, ...] = ()
    for attempt, (start, length, keep, cut) in enumerate(steps):
        if cut is not None:
            pieces = cut_pieces(pieces, cut)
            owner[cut:] = -1
            value[cut:] = 0
        rows = 100 * attempt + np.arange(start, start + length)
        pieces = overlay(pieces, RowPiece(start, attempt, rows.reshape(-1, 1, 1)), keep=keep)
        for position in range(start, start + length):
            if not keep or owner[position] < 0:
                owner[position], value[position] = attempt, rows[position - start]
    rows_joined, source = join_pieces(pieces)
    count = len(source)
    assert owner[:count].tolist() == source.tolist()
    assert (owner[count:] < 0).all()
    if rows_joined is not None:
        assert value[:count].tolist() == rows_joined.reshape(-1).tolist()
    assert all(a.end <= b.start for a, b in pairwise(pieces))
    assert all(len(piece.rows) for piece in pieces)


def test_nothing_is_copied() -> None:
    """A piece is a view of the reply it came from."""
    rows = np.arange(10).reshape(10, 1, 1)
    first, second = overlay((RowPiece(0, 0, rows[:4]),), RowPiece(0, 1, rows), keep=True)
    assert (first.start, first.end, second.start, second.end) == (0, 4, 4, 10)
    assert np.shares_memory(second.rows, rows)
