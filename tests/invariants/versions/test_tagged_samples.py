"""How tags and the versions that sampled tokens are put into words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollproof.core.events.rollout import Weights
from rollproof.core.records import Span, Version
from rollproof.invariants.versions.published_labels import _Apart
from rollproof.invariants.versions.sample_tags import (
    _by_call,
    _highest,
    _lowest,
    _matches,
    _min_max_hint,
)
from rollproof.invariants.versions.samplers import Key, Sampler
from rollproof.invariants.versions.tagged_samples import (
    as_spans,
    mislabelled,
    sampled_by,
    tag_list,
)
from tests.support.scripted_rollouts import ScriptedCall, script_rollout
from tests.support.trace_script import TraceScript, finds, passes


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


def test_tokens_of_calls_count_from_the_label_on() -> None:
    """A call that was cut back, or that had not begun, takes or gives none."""
    event = Weights(server_id="s0", version=1, label=1)
    apart = _Apart(event, lags=False, sampled={1: 3, 2: 5, 3: 2})
    assert 0 == apart.until(None)
    assert 5 == apart.until({1: 4, 2: 4, 3: 6, 4: 9})
    for call, tokens, total in ((1, 7, 4), (2, 4, 4), (4, 9, 4), (1, 9, 4), (3, 3, 5)):
        apart.ended(call, tokens)
        assert total == apart.tokens
    assert 5 == apart.until({1: 9, 2: 9, 3: 9})


@pytest.mark.parametrize(
    ("tag", "low", "high", "aborted", "labels", "begins", "zero"),
    [
        (5, 5, 6, (4, 7), (1, 2), "No token was sampled by version 5; call 4 was aborted", False),
        (1, 1, 6, (4,), (1, 2), "Update both tags", False),
        (5, 5, 6, (), (1, 2), "Update both tags", False),
        (1, 1, 1, (), (0, 1), "The tag of one call is used for all", True),
        (0, 0, 0, (), (0, 1), "The tag of one call is used for all", False),
        (1, 1, 2, (), (0, 2), "Update both tags", True),
        (1, 1, 2, (), (1, 3), "Update both tags", False),
    ],
)
def test_the_hint_says_how_a_bound_may_have_been_lost(
    tag: int,
    low: int,
    high: int,
    aborted: tuple[int, ...],
    labels: tuple[int, ...],
    begins: str,
    zero: bool,
) -> None:
    """By a call without tokens, by one call for all, or because 0 is false."""
    empty = SimpleNamespace(output=SimpleNamespace(token_ids=()))
    full = SimpleNamespace(output=SimpleNamespace(token_ids=(1,)))
    view: Any = SimpleNamespace(
        segments=[
            SimpleNamespace(call=SimpleNamespace(call_id=1), consumed=full),
            SimpleNamespace(call=SimpleNamespace(call_id=2), consumed=None),
            *(
                SimpleNamespace(call=SimpleNamespace(call_id=number), consumed=empty)
                for number in aborted
            ),
        ]
    )
    parts = [_sampler(i, i + 1, label, label) for i, label in enumerate(labels)]
    hint = _min_max_hint(view, tag, low, high, parts)
    assert hint.startswith(begins)
    assert zero == ("Or version 0 was skipped" in hint)


@pytest.mark.parametrize(
    ("tags", "kind", "observed"),
    [
        (None, "no token versions", "token versions are absent"),
        (
            (None, None),
            "token versions without a version",
            "token versions are None for 2 sampled tokens",
        ),
    ],
)
def test_tags_that_are_there_and_say_nothing_are_another_fault(
    tags: tuple[None, ...] | None, kind: str, observed: str
) -> None:
    """Than tags that are not there."""
    part = ScriptedCall(tokens=(11, 12), reason="stop")
    finding = finds(
        "versions.present",
        script_rollout(part, versions="token", sample={"token_versions": tags}),
    )
    assert (kind, observed) == (finding.kind, finding.observed)


def test_without_spans_no_token_is_mislabelled() -> None:
    """versions.present reports that there are none."""
    view: Any = None
    assert [] == mislabelled(view, [_sampler(0, 2, 1, 1)], [])


def test_a_label_is_true_while_no_update_of_its_server_is_known() -> None:
    """One of another server, while the call ran, changes nothing."""
    story = TraceScript(versions="sample").submit(max_tokens=2)
    call = story.call((1, 2))
    story.weights(1, "s1").weights(2, "s1")
    story.reply(call, (11, 12), version=1, true_tokens=None)
    story.result((11, 12), version=1)
    passes("versions.sample-tag", story, samples_under_one_version=1)


def test_a_bound_is_judged_by_the_tokens_whose_version_is_known() -> None:
    """Another call showed none."""
    parts = (
        ScriptedCall(tokens=(11,)),
        ScriptedCall(
            tokens=(21,), version=1, shown=None, reply={"true_tokens": None}, reason="stop"
        ),
    )
    bounds = {"min_version": 1, "max_version": 1}
    finding = finds("versions.bounds", script_rollout(*parts, versions="bounds", sample=bounds))
    assert "Tokens of the sample were sampled by weights older than its lower bound" == (
        finding.title
    )
    assert (0, 1) == (finding.where["index"], finding.where["version"])
