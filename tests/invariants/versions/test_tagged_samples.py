"""How tags and the versions that sampled tokens are put into words."""

from __future__ import annotations

import pytest

from rollproof.core.records import Span, Version
from rollproof.invariants.versions.sample_tags import _by_call, _highest, _lowest, _matches
from rollproof.invariants.versions.samplers import Key, Sampler
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


_RANKS: dict[Key, int] = {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.mark.parametrize(
    ("label_sets", "lowest", "highest"),
    [
        ([{"b"}], ["b"], ["b"]),
        ([{"a"}, {"c"}, {"b"}], ["a"], ["c"]),
        ([{"a", "c"}, {"b"}], ["a", "b"], ["b", "c"]),
        ([{"b", "d"}, {"a", "c"}], ["a", "b", "c"], ["b", "c", "d"]),
        ([{"a", "d"}, {"b", "c"}], ["a", "b", "c"], ["b", "c", "d"]),
        ([{"a", None}, {"b"}], ["a"], ["b"]),
        ([{"a", "b"}, {"c", "d"}], ["a", "b"], ["c", "d"]),
    ],
)
def test_the_labels_that_can_be_the_smallest_and_the_greatest(
    label_sets: list[set[Key]], lowest: list[Key], highest: list[Key]
) -> None:
    """If each call contributes one of its own, in their order."""
    frozen = [frozenset(labels) for labels in label_sets]
    assert (lowest, highest) == (_lowest(frozen, _RANKS), _highest(frozen, _RANKS))


def _calls(*calls: str) -> list[tuple[int, bool, frozenset[Key] | None]]:
    """Calls by what their tags may be: ``*`` anything, ``?`` behind that a tag may be left out."""
    return [
        (i, text.endswith("?"), None if text[0] == "*" else frozenset(text.rstrip("?")))
        for i, text in enumerate(calls)
    ]


@pytest.mark.parametrize(
    ("tags", "calls", "right"),
    [
        ("a", ["a"], True),
        ("b", ["a"], False),
        ("", ["a"], False),
        ("ab", ["a"], False),
        ("ab", ["a", "b"], True),
        ("ba", ["a", "b"], False),
        ("b", ["a?", "b"], True),
        ("ab", ["a?", "b"], True),
        ("a", ["a", "b?"], True),
        ("ac", ["a", "b?"], False),
        ("ab", ["ab", "ab"], True),
        ("x", ["*"], True),
        ("", ["*?"], True),
        ("bb", ["*?", "b?", "b"], True),
        ("bbbb", ["*?", "b?", "b"], False),
        ("", ["a?", "b?"], True),
    ],
)
def test_tags_match_the_calls_in_order(tags: str, calls: list[str], right: bool) -> None:
    """Those that may have none may be left out, and no other."""
    assert right == _matches(tuple(tags), _calls(*calls))


def test_a_call_may_have_the_tag_of_any_of_its_parts() -> None:
    """And any tag if one of them may."""

    def part(attempt: int, *accepted: Key, unknown: bool = False) -> Sampler:
        return Sampler(
            start=0,
            end=1,
            attempt=attempt,
            labels=None,
            shown=None,
            accepted=None if unknown else frozenset(accepted),
        )

    parts = [
        *(part(0, 1), part(0, 2)),
        *(part(1, 3), part(1, unknown=True), part(1, 4)),
        *(part(2, unknown=True), part(2, 5)),
        part(3),
    ]
    assert {0: {1, 2}, 1: None, 2: None, 3: frozenset()} == _by_call(parts)
