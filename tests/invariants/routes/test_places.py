"""Where route checks look: every reply, every layer, rows of replies without tokens, both sides of
the bounds of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Reply
from rollproof.core.records import Span
from rollproof.core.trace import Trace
from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.routed_requests import REGISTRY, RoutedRequest, Segment, failing, only_finding


class _Oracle:
    """The policy of a story: rows over all layers."""

    def __init__(self, story: RoutedRequest) -> None:
        self._story = replace(story, changes={**story.changes, "layer_axis": "all"})

    def routes(self, version: Any, ids: Sequence[int], start: int = 0) -> np.ndarray:
        return self._story.rows(start, len(ids), int(version))


def _with_reply(trace: Trace, number: int, **changes: Any) -> Trace:
    replies = [event for event in trace.events if isinstance(event, Reply)]
    return trace.with_events(
        [replace(event, **changes) if event is replies[number] else event for event in trace.events]
    )


def _returning(trace: Trace, number: int, routes: np.ndarray) -> Trace:
    reply = [event for event in trace.events if isinstance(event, Reply)][number]
    return _with_reply(trace, number, output=replace(reply.output, routes=routes))


def test_an_engine_that_returns_rows_of_another_shape_is_told_from_the_first_moe_layer() -> None:
    """The place is the first row that was compared and the first layer with a router."""
    story = RoutedRequest(
        segments=(Segment(5),), changes={"num_layers": 5, "moe_layers": (1, 3, 4)}
    )
    narrow = _returning(story.trace(story.good()), 0, story.good()[:, :, :1])
    finding = judge(narrow, REGISTRY, _Oracle(story))["routes.engine"].findings[0]
    assert "rows of shape (5, 1)" == finding.observed
    assert (0, 1) == (finding.where["position"], finding.where["layer"])
    expected = story.rows(0, 1, 1)[0, 1].tolist()
    assert f"experts {expected} at position 0, computed by version 1" == finding.expected


def test_a_reply_without_provenance_hides_no_later_one() -> None:
    """The first reply does not say which weights computed its rows; the second was overwritten."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(2, 1)), with_truth=False)
    trace = _with_reply(
        story.trace(story.good()),
        1,
        true_tokens=(Span(start=0, end=2, version=1),),
        true_rows=(Span(start=0, end=9, version=2),),
    )
    finding = only_finding(judge(trace, REGISTRY), "routes.immutable")
    assert "rows 7-8 of version 1, which sampled the tokens 8-9" == finding.expected
    assert (2, 7) == (finding.where["call"], finding.where["position"])


def test_rows_of_mixed_weights_hide_no_later_ones() -> None:
    """A row over a cache of two versions has no version to compare; the next one has."""
    story = RoutedRequest(segments=(Segment(5, 1),), with_truth=False)
    trace = _with_reply(
        story.trace(story.good()),
        0,
        true_tokens=(Span(start=0, end=5, version=1),),
        true_rows=(Span(start=0, end=6, version="mixed"), Span(start=6, end=9, version=2)),
    )
    finding = only_finding(judge(trace, REGISTRY), "routes.immutable")
    assert "rows 6-8 of version 1, which sampled the tokens 7-9" == finding.expected


@pytest.mark.parametrize("rows_of", [1, 2])
def test_the_rows_of_a_reply_without_tokens_may_be_handed_over(rows_of: int) -> None:
    """A forward pass computed them too, if they have the shape; other weights' rows are no
    alternative.
    """
    story = RoutedRequest(segments=(Segment(3, 1), Segment(0, 2), Segment(2, 3)))
    trace = story.trace(story.good())
    later = story.rows(0, 8, 2)
    routes = story.good().copy()
    routes[:7] = story.rows(0, 7, rows_of)
    trace = story.trace(routes)
    judged = judge(_returning(trace, 1, later), REGISTRY)
    assert set() == failing(judged)
    without = judge(_returning(trace, 1, later[:, :1]), REGISTRY)
    assert (rows_of == 1) == (set() == failing(without))


def test_rows_beyond_the_prompt_of_a_reply_without_tokens_are_no_alternative() -> None:
    """Nothing was forwarded there: the row of the prompt's last token is the last that counts."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(0, 2), Segment(2, 2)))
    routes = story.good().copy()
    routes[7] = story.rows(7, 8, 5)[0]
    assert set() != failing(judge(story.trace(routes), REGISTRY))
    beyond = np.concatenate([story.rows(0, 7, 2), story.rows(7, 8, 5)])
    assert set() == failing(judge(_returning(story.trace(routes), 1, beyond), REGISTRY))
    assert set() != failing(judge(_returning(story.trace(routes), 1, beyond[:-1]), REGISTRY))


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_last_expert_is_in_range_and_the_next_is_not(beyond: int) -> None:
    """An engine's own row with the largest id is legal; one more names no expert."""
    story = RoutedRequest(
        segments=(Segment(5),), changes={"num_experts": 300, "dtype": "int32"}, with_truth=False
    )
    rows = story.good().copy()
    rows[3, 1, 0] = 299 + beyond
    judged = judge(_returning(story.trace(rows), 0, rows), REGISTRY)
    assert ({"routes.in-range"} if beyond else set()) == failing(judged)


def test_declared_rows_are_compared_without_replies() -> None:
    """A trace without replies: all rows of T - 1, all but the filler of T."""
    for changes, count in (({}, 9), ({"rows": "T", "final_row": "arange"}, 9)):
        story = RoutedRequest(segments=(Segment(5),), changes=changes)
        trace = story.trace(story.good())
        bare = trace.with_events([e for e in trace.events if not isinstance(e, Reply)])
        result = judge(bare, REGISTRY)["routes.in-range"]
        assert Verdict.PASS == result.verdict
        assert [count] == list(result.exercised.values())
