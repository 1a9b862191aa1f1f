"""Wording: the phrases that findings are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollproof.invariants._shared.phrases import (
    count,
    listing,
    ranges,
    share,
    verb,
    version_name,
    window,
)


def test_numbers_agree_with_their_nouns() -> None:
    """One, none, many, and plurals that are not made with an s."""
    assert ["1 token", "no tokens", "3 tokens", "2 entries"] == [
        count(1, "token"),
        count(0, "token"),
        count(3, "token"),
        count(2, "entry|entries"),
    ]
    assert ["3 of 48 layers", "1 of 1 token", "1 of 2 entries"] == [
        share(3, 48, "layer"),
        share(1, 1, "token"),
        share(1, 2, "entry|entries"),
    ]
    assert ["is", "are", "are"] == [verb(number, "is", "are") for number in (1, 0, 2)]


@pytest.mark.parametrize(
    ("indexes", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 2, 0, 5], "0-2, 5"),
        ([2, 2, 1], "1-2"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10 and 14 more"),
    ],
)
def test_ranges(indexes: list[int], text: str) -> None:
    """Indexes are joined, sorted, and counted beyond the sixth range."""
    assert text == ranges(indexes)


@given(st.lists(st.integers(0, 500), max_size=60), st.integers(1, 8))
def test_ranges_lose_no_index(indexes: list[int], shown: int) -> None:
    """The shown ranges and the rest that is counted make up all indexes."""
    text = ranges(indexes, shown)
    head, _, rest = text.partition(" and ")
    seen: set[int] = set()
    for piece in head.split(", ") if head else []:
        low, _, high = piece.partition("-")
        seen |= set(range(int(low), int(high or low) + 1))
    assert seen <= set(indexes)
    assert len(set(indexes)) == len(seen) + (int(rest.split()[0]) if rest else 0)


@given(st.lists(st.integers(0, 99), max_size=30), st.integers(0, 30))
def test_a_window_shows_the_place(values: list[int], at: int) -> None:
    """At most six values, in their order, among them the one at the place; dots stand for the
    others.
    """
    text = window(values, at)
    shown = [piece for piece in text.strip("[]").split(", ") if piece and piece != "..."]
    assert min(6, len(values)) == len(shown)
    if at < len(values):
        assert str(values[at]) in shown
    assert text.startswith("[...") == (len(values) > 6 and at - 3 > 0)


def test_listings_and_versions() -> None:
    """Commas and a last word; text labels are quoted so that ``"7"`` and 7 look different."""
    assert ["", "a", "a and b", "a, b or c"] == [
        listing([]),
        listing("a"),
        listing("ab"),
        listing("abc", "or"),
    ]
    assert ["version 0", 'version "step-1"', "no version"] == [
        version_name(0),
        version_name("step-1"),
        version_name(None),
    ]
