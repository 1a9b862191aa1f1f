"""Route checks at the engine: its rows against an oracle, their weights, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Admit, Reply, Result
from rollproof.core.records import Span
from rollproof.core.trace import Trace
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judgement
from rollproof.verification.traces import judge
from tests.support.routed_requests import REGISTRY, RoutedRequest, Segment, failing, only_finding
from tests.support.trace_builder import contract


class _Oracle:
    """The policy of a story: rows over all layers."""

    def __init__(self, story: RoutedRequest) -> None:
        self._story = RoutedRequest(
            request_id=story.request_id,
            changes={**story.changes, "layer_axis": "all"},
            seed=story.seed,
        )

    def routes(self, version: Any, ids: Sequence[int], start: int = 0) -> np.ndarray:
        return self._story.rows(start, len(ids), int(version))

    def logprobs(self, version: Any, ids: Sequence[int], start: int) -> np.ndarray:
        raise NotImplementedError("route checks ask for no logprobs")


def _judged(story: RoutedRequest, trace: Trace) -> Judgement:
    return judge(trace, REGISTRY, _Oracle(story))


def _with_reply(trace: Trace, number: int, **changes: Any) -> Trace:
    replies = [e for e in trace.events if isinstance(e, Reply)]
    return replace(
        trace,
        events=tuple(replace(e, **changes) if e is replies[number] else e for e in trace.events),
    )


def test_every_row_that_an_engine_returned_is_compared_with_the_oracle() -> None:
    """All replies count, on either layer axis; a correct engine passes."""
    for changes in (
        {},
        {"num_layers": 5, "moe_layers": (1, 3, 4), "layer_axis": "moe"},
        {"num_layers": 4, "moe_layers": (1, 2, 3)},
    ):
        story = RoutedRequest(changes=changes)
        judged = _judged(story, story.trace(story.good()))
        assert failing(judged) == set()
        assert judged["routes.engine"].exercised == {"engine rows compared": 16}


def test_a_reply_without_the_truth_is_left_out_and_a_duplicate_counts_once() -> None:
    """The replies after them are compared."""
    story = RoutedRequest()
    trace = story.trace(story.good())
    first, second = (event for event in trace.events if isinstance(event, Reply))
    events = list(trace.events)
    events[events.index(first)] = replace(first, true_rows=None)
    events.insert(events.index(second) + 1, replace(second, duplicate=True))
    result = _judged(story, trace.with_events(events))["routes.engine"]
    assert (Verdict.PASS, {"engine rows compared": 9}) == (result.verdict, result.exercised)


def _spoilt(story: RoutedRequest, start: int, *spans: Span) -> Judgement:
    """Judge a reply of one call with the rows from ``start`` on, of which row 6 is wrong."""
    rows = story.good().copy()
    rows[6] = RoutedRequest(request_id="r7").rows(6, 7, 1)
    trace = story.trace(rows)
    output = replace(_first_reply(story).output, routes=rows[start:], routes_start=start)
    return _judged(story, _with_reply(trace, 0, output=output, true_rows=spans))


@pytest.mark.parametrize(("start", "compared"), [(0, 7), (1, 6), (3, 4)])
def test_rows_are_compared_span_by_span(start: int, compared: int) -> None:
    """A mixed span and one of unknown version have no oracle; those after them do, wherever the
    reply begins.
    """
    story = RoutedRequest(segments=(Segment(5),))
    result = _spoilt(
        story,
        start,
        Span(start=0, end=3, version=1),
        Span(start=3, end=4, version="mixed"),
        Span(start=4, end=5, version=None),
        Span(start=5, end=12, version=1),
    )["routes.engine"]
    assert {"engine rows compared": compared} == result.exercised
    (finding,) = result.findings
    assert 6 == finding.where["position"]
    assert "wrong in 1 of 4 rows (position 6), in 3 of 3 MoE layers" in finding.observed


def test_the_oracle_is_not_asked_for_rows_that_the_reply_does_not_hold() -> None:
    """It may not know the weights that computed them."""
    story = RoutedRequest(segments=(Segment(5),))
    spans = (Span(start=0, end=9, version=1), Span(start=9, end=12, version="unheard of"))
    judged = _judged(story, _with_reply(story.trace(story.good()), 0, true_rows=spans))
    assert set() == failing(judged)
    assert {"engine rows compared": 9} == judged["routes.engine"].exercised


def test_rows_with_columns_for_dense_layers_are_found_where_none_are_declared() -> None:
    """The engine declares the axis of MoE layers, of which there are three."""
    changes = {"num_layers": 5, "moe_layers": (1, 3, 4), "layer_axis": "moe"}
    story = RoutedRequest(segments=(Segment(5),), changes=changes)
    every = RoutedRequest(segments=story.segments, changes={**changes, "layer_axis": "all"}).good()
    output = replace(_first_reply(story).output, routes=every)
    (finding,) = _judged(story, _with_reply(story.trace(story.good()), 0, output=output))[
        "routes.engine"
    ].findings
    assert "rows of shape (5, 2)" == finding.observed
    assert (0, 1) == (finding.where["position"], finding.where["layer"])


def test_a_stale_slot_is_the_engines_fault_alone() -> None:
    """Rows of another forward in the engine's buffer: the stack that hands them over is not
    blamed.
    """
    story = RoutedRequest(segments=(Segment(5),))
    rows = story.good().copy()
    rows[3:5] = RoutedRequest(request_id="r7").rows(3, 5, 1)
    trace = story.trace(rows)
    reply = next(e for e in trace.events if isinstance(e, Reply))
    finding = only_finding(
        _judged(story, _with_reply(trace, 0, output=replace(reply.output, routes=rows))),
        "routes.engine",
    )
    assert "wrong in 2 of 9 rows (position 3-4), in 3 of 3 MoE layers" in finding.observed
    assert finding.where == {
        "request": "r0",
        "call": 1,
        "position": 3,
        "layer": 0,
        "version": 1,
        "server": "s0",
    }
    assert "SGLang #34319" in finding.hint


def test_rows_over_a_mixed_cache_have_no_oracle() -> None:
    """KV of two versions: no single version explains the row, so none is expected."""
    story = RoutedRequest(segments=(Segment(5),))
    trace = _with_reply(
        story.trace(story.good()), 0, true_rows=(Span(start=0, end=9, version="mixed"),)
    )
    judged = _judged(story, trace)
    assert failing(judged) == set()
    assert judged["routes.engine"].verdict is Verdict.UNKNOWN


def test_a_recompute_must_not_overwrite_the_rows_of_sampled_tokens() -> None:
    """Retract under new weights: the tokens are of version 1, their rows of version 2, and every
    shape is right.
    """
    story = RoutedRequest(segments=(Segment(5, 1),), with_truth=False)
    trace = _with_reply(
        story.trace(story.good()),
        0,
        true_tokens=(Span(start=0, end=3, version=1), Span(start=3, end=5, version=2)),
        true_rows=(Span(start=0, end=9, version=2),),
    )
    finding = only_finding(judge(trace, REGISTRY), "routes.immutable")
    assert finding.expected == "rows 4-6 of version 1, which sampled the tokens 5-7"
    assert finding.observed == "rows of version 2: 3 rows of 9"
    assert "miles #3277" in finding.hint
    kept = _with_reply(
        trace, 0, true_rows=(Span(start=0, end=7, version=1), Span(start=7, end=9, version=2))
    )
    judged = judge(kept, REGISTRY)
    assert failing(judged) == set()
    assert judged["routes.immutable"].exercised == {"rows that predicted a sampled token": 5}


@pytest.mark.parametrize(("rows", "found"), [(7, 0), (8, 1)])
def test_only_rows_in_the_reply_can_be_overwritten(rows: int, found: int) -> None:
    """The recomputed ones begin at row 7."""
    story = RoutedRequest(segments=(Segment(5, 1),), with_truth=False)
    trace = story.trace(story.good())
    trace = _with_reply(
        trace,
        0,
        output=replace(_first_reply(story).output, routes=story.good()[:rows]),
        true_tokens=(Span(start=0, end=5, version=1),),
        true_rows=(Span(start=0, end=7, version=1), Span(start=7, end=9, version=2)),
    )
    result = judge(trace, REGISTRY)["routes.immutable"]
    assert found == result.found
    assert {"rows that predicted a sampled token": rows - 4} == result.exercised


@pytest.mark.parametrize(("token", "row"), [(None, 2), (1, None), (1, "mixed"), ("mixed", 2)])
def test_rows_and_tokens_of_unknown_weights_are_not_compared(token: Any, row: Any) -> None:
    """Nor those over a cache of several versions; the others of the reply are."""
    story = RoutedRequest(segments=(Segment(5, 1),), with_truth=False)
    trace = _with_reply(
        story.trace(story.good()),
        0,
        true_tokens=(Span(start=0, end=3, version=token), Span(start=3, end=5, version=1)),
        true_rows=(Span(start=0, end=7, version=row), Span(start=7, end=9, version=1)),
    )
    result = judge(trace, REGISTRY)["routes.immutable"]
    assert (Verdict.PASS, 0) == (result.verdict, result.found)
    assert {"rows that predicted a sampled token": 2} == result.exercised


@pytest.mark.parametrize("lacks", ["true_rows", "true_tokens"])
def test_a_reply_without_the_truth_hides_no_overwritten_rows(lacks: str) -> None:
    """It is left out, and the next one is judged."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(2, 1)), with_truth=False)
    truth: dict[str, Any] = {
        "true_tokens": (Span(start=0, end=2, version=1),),
        "true_rows": (Span(start=0, end=9, version=2),),
    }
    trace = _with_reply(story.trace(story.good()), 0, **{**truth, lacks: None})
    finding = only_finding(judge(_with_reply(trace, 1, **truth), REGISTRY), "routes.immutable")
    assert "rows 7-8 of version 1, which sampled the tokens 8-9" == finding.expected
    assert (2, 7) == (finding.where["call"], finding.where["position"])


def test_an_engine_that_declares_overwriting_is_not_held_to_it() -> None:
    """SGLang stores rows by slot: under latest-prefill the check is not applicable."""
    story = RoutedRequest(segments=(Segment(5, 1),), with_truth=False)
    trace = _with_reply(
        story.trace(story.good()),
        0,
        true_tokens=(Span(start=0, end=5, version=1),),
        true_rows=(Span(start=0, end=9, version=2),),
    )
    engine = contract(provenance="latest-prefill", resume="engine")
    judged = judge(replace(trace, header=replace(trace.header, engine=engine)), REGISTRY)
    assert failing(judged) == set()
    result = judged["routes.immutable"]
    assert (result.verdict, result.reason) == (
        Verdict.NOT_APPLICABLE,
        "the engines declare provenance='latest-prefill'",
    )


def test_rows_out_of_a_stale_prefix_cache_are_found_where_an_update_should_have_flushed_it() -> (
    None
):
    """The second call was admitted under version 2 and gets rows of version 1; with
    kv_policy='keep' that is declared.
    """
    for policy in ("recompute", "keep"):
        story = RoutedRequest(changes={"kv_policy": policy})
        spans = (Span(start=0, end=4, version=1), Span(start=4, end=9, version=2))
        judged = judge(_with_reply(story.trace(story.good()), 1, true_rows=spans), REGISTRY)
        if policy == "keep":
            assert judged["routes.prefix-cache"].verdict is Verdict.NOT_APPLICABLE
            continue
        finding = only_finding(judged, "routes.prefix-cache")
        assert finding.expected == "rows of version 2, in service when the call was admitted"
        assert finding.observed == "rows 0-3 of version 1, of 9 rows"
        assert "cache_salt" in finding.hint


def test_replies_are_judged_once_a_server_has_had_two_versions() -> None:
    """The first load is no update, and one of the same weights brings no older ones."""
    for versions, exercised in (((1, 2), 1), ((1, 1), 0), ((1, 2, 2), 2)):
        story = RoutedRequest(segments=tuple(Segment(2, version) for version in versions))
        result = judge(story.trace(story.good()), REGISTRY)["routes.prefix-cache"]
        counted = result.exercised.get("replies admitted after an update", 0)
        assert exercised == counted, versions


@pytest.mark.parametrize("lacks", ["rows", "admission"])
def test_a_reply_that_lacks_the_truth_hides_no_stale_rows(lacks: str) -> None:
    """It is left out, and the next one is judged."""
    story = RoutedRequest()
    stale = (Span(start=0, end=4, version=1), Span(start=4, end=9, version=2))
    trace = _with_reply(story.trace(story.good()), 1, true_rows=stale)
    if lacks == "rows":
        trace = _with_reply(trace, 0, true_rows=None)
    else:
        first = next(event for event in trace.events if isinstance(event, Admit))
        trace = trace.with_events([event for event in trace.events if event is not first])
    finding = only_finding(judge(trace, REGISTRY), "routes.prefix-cache")
    assert "rows 0-3 of version 1, of 9 rows" == finding.observed


@pytest.mark.parametrize(("cached", "found"), [(4, 0), (5, 1), (None, 1), (99, 1)])
def test_only_the_cached_part_of_a_reply_is_judged(cached: int | None, found: int) -> None:
    """Rows of old weights after it were computed by them: weights.served-after-update is for
    that.
    """
    story = RoutedRequest()
    trace = story.trace(story.good())
    second = [event for event in trace.events if isinstance(event, Reply)][1]
    spans = (Span(start=0, end=4, version=2), Span(start=4, end=9, version=1))
    output = replace(second.output, cached_tokens=cached)
    result = judge(_with_reply(trace, 1, true_rows=spans, output=output), REGISTRY)
    assert found == result["routes.prefix-cache"].found


def test_all_stale_rows_of_a_prefix_cache_are_named() -> None:
    """They came from two calls, each under its own older weights: from the first row to the last,
    as far as the cache reaches.
    """
    story = RoutedRequest(segments=(Segment(2, 1), Segment(2, 2), Segment(2, 3)))
    spans = (
        Span(start=0, end=2, version=1),
        Span(start=2, end=4, version=2),
        Span(start=4, end=10, version=3),
    )
    judged = judge(_with_reply(story.trace(story.good()), 2, true_rows=spans), REGISTRY)
    finding = only_finding(judged, "routes.prefix-cache")
    assert "rows of version 3, in service when the call was admitted" == finding.expected
    assert "rows 0-3 of version 1, of 10 rows" == finding.observed
    assert (0, 1) == (finding.where["position"], finding.where["version"])


def test_routes_that_change_later_share_an_engines_memory() -> None:
    """The runner looked again at the end of the run."""
    story = RoutedRequest()
    trace = story.trace(story.good(), event={"later_changed": ("routes",)})
    assert "view of memory" in only_finding(judge(trace, REGISTRY), "routes.handed-over").observed
    other = story.trace(story.good(), event={"later_changed": ("logprobs",)})
    assert failing(judge(other, REGISTRY)) == set()


def test_writing_into_a_reply_is_found() -> None:
    """Only what concerns routes is this check's: other objects of the caller belong to the family
    stitch.
    """
    story = RoutedRequest()
    event = {
        "caller_changed": (
            "routes of call 1: its contents changed",
            "request: 'max_tokens' was added (3)",
        )
    }
    finding = only_finding(
        judge(story.trace(story.good(), event=event), REGISTRY), "routes.reply-untouched"
    )
    assert finding.observed == "routes of call 1: its contents changed"


def test_a_duplicate_or_lost_reply_changes_nothing() -> None:
    """A reply that was not received, and one that came twice."""
    story = RoutedRequest()
    trace = story.trace(story.good())
    first = next(e for e in trace.events if isinstance(e, Reply))
    events = [
        *trace.events[:-1],
        replace(first, duplicate=True),
        replace(first, delivered=False),
        trace.events[-1],
    ]
    assert isinstance(events[-1], Result)
    assert failing(_judged(story, trace.with_events(events))) == set()


def test_a_recording_compares_no_arrays() -> None:
    """Only the runner does: the two checks of memory say so, and do not pass."""
    story = RoutedRequest()
    trace = story.trace(story.good())
    recorded = replace(trace, header=replace(trace.header, case=None))
    judged = judge(recorded, REGISTRY)

    for check_id in ("routes.handed-over", "routes.reply-untouched"):
        assert judged[check_id].verdict is Verdict.UNKNOWN
        assert (judged[check_id].reason or "").startswith("a recording does not compare")


@pytest.mark.parametrize("axis", ["all", "moe"])
def test_a_wrong_choice_is_told_with_its_layer(axis: str) -> None:
    """The order within a cell does not count; the columns of dense layers hold nothing."""
    changes = {"num_layers": 5, "moe_layers": (1, 3, 4), "layer_axis": axis}
    story = RoutedRequest(segments=(Segment(5),), changes=changes)
    column = story.contract.moe_columns[1]
    rows = story.good().copy()
    rows[:] = rows[:, :, ::-1]
    free = sorted(set(range(8)) - set(rows[4, column].tolist()))
    rows[[4, 6], column, 0] = free[0], 9
    trace = _with_reply(
        story.trace(rows), 0, output=replace(_first_reply(story).output, routes=rows)
    )
    finding = judge(trace, REGISTRY, _Oracle(story))["routes.engine"].findings[0]
    assert finding.observed == (
        f"experts {rows[4, column].tolist()}; wrong in 2 of 9 rows (position 4, 6), in 1 of 3 MoE"
        " layers"
    )
    assert (4, 3) == (finding.where["position"], finding.where["layer"])
    assert finding.expected == (
        f"experts {story.good()[4, column].tolist()} at position 4, computed by version 1"
    )


def _first_reply(story: RoutedRequest) -> Reply:
    return next(e for e in story.trace(story.good()).events if isinstance(e, Reply))
