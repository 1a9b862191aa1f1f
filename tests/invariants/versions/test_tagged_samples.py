"""How tags and the versions that sampled tokens are put into words."""

from __future__ import annotations

import pytest

from rollproof.core.records import Span, Version
from rollproof.invariants.versions.samplers import Sampler
from rollproof.invariants.versions.tagged_samples import as_spans, sampled_by, tag_list


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ((0,), "0"),
        ((0, 1), "0 and 1"),
        ((0, None, "step-2"), '0, none and "step-2"'),
        (tuple(range(8)), "0, 1, 2, 3, 4, 5, 6 and 7"),
        (tuple(range(9)), "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
        (tuple(range(12)), "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"),
    ],
)
def test_up_to_eight_tags_are_listed(tags: tuple[Version, ...], words: str) -> None:
    """The rest is counted."""
    assert words == tag_list(tags)
    assert words.replace(" and ", " or ") == tag_list(tags, "or")


def _sampler(start: int, end: int, shown: Version, *labels: Version) -> Sampler:
    return Sampler(
        start=start,
        end=end,
        attempt=0,
        labels=frozenset(labels),
        shown=shown,
        accepted=None,
    )


def test_versions_are_named_with_all_their_tokens() -> None:
    """Each once, in the order of its first token."""
    parts = [
        _sampler(0, 2, 5, 1),
        _sampler(2, 3, 6, 0, 3),
        _sampler(3, 4, 5, 1),
        _sampler(6, 7, None),
    ]
    assert (
        "version 1 for tokens 0-1, 3, version 0 or 3 for token 2, weights without a label for"
        " token 6"
    ) == sampled_by(parts)
    assert (
        "version 5 for tokens 0-1, 3, version 6 for token 2, version none for token 6"
    ) == sampled_by(parts, shown=True)


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ((), []),
        ((0,), [(0, 1, 0)]),
        ((0, 0, 1), [(0, 2, 0), (2, 3, 1)]),
        ((1, None, None, 1), [(0, 1, 1), (1, 3, None), (3, 4, 1)]),
    ],
)
def test_equal_tags_in_a_row_are_one_span(
    tags: tuple[Version, ...], spans: list[tuple[int, int, Version]]
) -> None:
    """Without a gap, from the first token to the last."""
    assert [Span(start=a, end=b, version=v) for a, b, v in spans] == as_spans(tags)
