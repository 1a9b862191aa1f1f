"""Judge: verdicts, their three values, and streaming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.events.base import Event
from rollproof.errors import UsageError
from rollproof.judging.checks import Check, Collector, Verdict, request_check, trace_check
from rollproof.judging.judge import Tally
from rollproof.judging.judge_context import JudgeContext
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import RequestView
from rollproof.verification.traces import judge, judge_events
from tests.support.trace_builder import TraceBuilder, contract


def _check(judge_single: Any, **fields: Any) -> Check:
    return request_check(
        fields.pop("id", "test.one"), promise="p", needs="n", exercised_by="things", **fields
    )(judge_single)


def _trace(requests: int = 1) -> Any:
    built = TraceBuilder(contract())
    for i in range(requests):
        built.submit(f"r{i}", prompt=(1, 2, i))
        built.reply(built.call((1, 2, i), f"r{i}"), [5, 6])
        built.result([5, 6], f"r{i}", prompt=(1, 2, i))
    return built.trace()


def test_exercised_and_silent_is_a_pass() -> None:
    """A check that compared something and found nothing passes."""
    result = judge(
        _trace(2), Registry([_check(lambda view, out: out.exercised("things"))])
    ).results[0]

    assert (Verdict.PASS, {"things": 2}) == (result.verdict, dict(result.exercised))


def test_never_exercised_is_unknown() -> None:
    """Silence alone is not a pass."""
    result = judge(_trace(), Registry([_check(lambda view, out: None)])).results[0]

    assert (Verdict.UNKNOWN, "not exercised: no things occurred") == (result.verdict, result.reason)


def test_absent_data_is_unknown_with_its_reason() -> None:
    """A check without its data in the trace says what is missing."""
    result = judge(
        _trace(), Registry([_check(lambda view, out: out.absent("no versions were shown"))])
    ).results[0]

    assert (Verdict.UNKNOWN, "no versions were shown") == (result.verdict, result.reason)


def test_what_is_absent_from_a_few_traces_is_not_why_a_check_is_unknown() -> None:
    """None of many traces with the data exercised the check: that is the reason, and the absence is
    mentioned.
    """

    def judge_single(view: RequestView, out: Collector) -> None:
        if view.request.request_id == "r0":
            out.absent("no logprobs")

    tally = Tally(Registry([_check(judge_single)]))
    for number in range(3):
        built = TraceBuilder(contract())
        built.submit(f"r{number}", prompt=(1, 2))
        built.reply(built.call((1, 2), f"r{number}"), [5, 6])
        built.result([5, 6], f"r{number}", prompt=(1, 2))
        judge_events(built.trace().header, built.trace().events, tally)

    (result,) = tally.judgement().results
    assert (
        Verdict.UNKNOWN,
        "not exercised: no things occurred (1 times in 3 traces: no logprobs)",
    ) == (result.verdict, result.reason)


def test_a_reason_counts_the_traces_in_which_it_holds() -> None:
    """Ten requests of one trace lack their logprobs, one of each of two others its versions: the
    reason of most traces is shown. Traces with a request that the check was not shown count, too.
    """

    def judge_single(view: RequestView, out: Collector) -> None:
        many = view.request.prompt_ids[0] == 7
        out.absent("no logprobs" if many else "no versions")
        if view.request.prompt_ids[0] == 8:
            out.skipped("not shown")

    tally = Tally(Registry([_check(judge_single)]))
    for first, requests in ((7, 10), (1, 1), (8, 1)):
        built = TraceBuilder(contract())
        for number in range(requests):
            built.submit(f"r{number}", prompt=(first, number))
            built.result(request_id=f"r{number}", prompt=(first, number))
        judge_events(built.trace().header, built.trace().events, tally)

    (result,) = tally.judgement().results
    assert "not exercised: no things occurred (2 times in 3 traces: no versions)" == result.reason


def test_a_crashing_check_is_unknown_even_if_exercised() -> None:
    """A check that crashes is never a pass, and the other checks go on."""

    def crash(view: RequestView, out: Collector) -> None:
        out.exercised("things")
        raise KeyError("boom")

    results = judge(
        _trace(),
        Registry([_check(crash), _check(lambda view, out: out.exercised("things"), id="test.two")]),
    ).results

    assert [Verdict.UNKNOWN, Verdict.PASS] == [result.verdict for result in results]
    assert "the check itself crashed: KeyError: 'boom'" == results[0].reason


def test_a_finding_dominates_a_crash() -> None:
    """What was found stays found when the check crashes later."""

    def find_then_crash(view: RequestView, out: Collector) -> None:
        if view.request.request_id == "r1":
            raise ValueError
        out.finding("t", expected="a", observed="b")

    assert Verdict.FAIL is judge(_trace(2), Registry([_check(find_then_crash)])).results[0].verdict


def test_a_contract_rules_checks_out() -> None:
    """What does not apply is listed apart, with the contract's reason, and is not run."""

    def never(view: RequestView, out: Collector) -> None:
        raise AssertionError

    result = judge(_trace(), Registry([_check(never, applies=lambda declared: "no rows")])).results[
        0
    ]

    assert (Verdict.NOT_APPLICABLE, "no rows") == (result.verdict, result.reason)


def _soft(*, of: str = "", then: Callable[[Collector], None] = lambda out: None) -> Check:
    """A check that calls the request ``of`` (empty: every one) inapplicable, and does ``then`` in
    the others.
    """

    def judge_request(view: RequestView, out: Collector) -> None:
        if of in ("", view.request.request_id):
            out.inapplicable("the engine shows no tag")
        else:
            then(out)

    return _check(judge_request)


def test_a_check_that_calls_every_trace_inapplicable_is_not_applicable() -> None:
    """If it was never exercised, its own reason is the verdict; data that was also absent changes
    nothing.
    """
    soft = _soft(of="r0", then=lambda out: out.absent("no sample"))
    result = judge(_trace(2), Registry([soft])).results[0]

    assert (Verdict.NOT_APPLICABLE, "the engine shows no tag") == (result.verdict, result.reason)


def test_a_trace_that_is_not_called_inapplicable_leaves_the_check_unknown() -> None:
    """Its situation could have arisen there, and did not."""
    registry = Registry(
        [
            _check(
                lambda view, out: (
                    out.inapplicable("by engine") if view.contract.versions == "none" else None
                )
            )
        ]
    )
    tallies = [Tally(registry) for _ in range(2)]
    for tally, kind in zip(tallies, ("none", "token"), strict=True):
        trace = _trace()
        judge_events(
            replace(trace.header, contract=replace(trace.header.contract, versions=kind)),
            trace.events,
            tally,
        )
    assert Verdict.NOT_APPLICABLE == tallies[0].judgement().results[0].verdict
    tallies[0].add(tallies[1])

    result = tallies[0].judgement().results[0]
    assert (Verdict.UNKNOWN, "not exercised: no things occurred") == (result.verdict, result.reason)


@pytest.mark.parametrize(
    ("then", "verdict"),
    [
        (lambda out: out.exercised("things"), Verdict.PASS),
        (lambda out: out.finding("t", expected="e", observed="o"), Verdict.FAIL),
        (lambda out: {}["boom"], Verdict.UNKNOWN),
    ],
    ids=["exercised", "finding", "crash"],
)
def test_exercise_findings_and_crashes_dominate_inapplicable(
    then: Callable[[Collector], None], verdict: Verdict
) -> None:
    """What was seen counts, whatever the check had called the trace."""
    assert verdict == judge(_trace(2), Registry([_soft(of="r0", then=then)])).results[0].verdict


def test_findings_are_counted_beyond_those_kept() -> None:
    """A report stays short, and still says how much is wrong."""
    result = judge(
        _trace(20),
        Registry([_check(lambda view, out: out.finding("t", expected="a", observed="b"))]),
    ).results[0]

    assert (20, 8) == (result.found, len(result.findings))


def test_undeclared_counters_are_refused() -> None:
    """The registry's word on what exercises a check holds."""
    with pytest.raises(UsageError, match="declares only"):
        Collector(_check(lambda view, out: None)).exercised("other")


def test_trace_checks_see_every_event_once_and_in_order() -> None:
    """A trace check is fed the events of its trace, then finished."""
    seen: list[int] = []

    class Fold:
        kinds = None

        def __init__(self, context: JudgeContext) -> None:
            self.count = 0

        def event(self, event: Event, out: Collector) -> None:
            seen.append(event.index)

        def finish(self, out: Collector) -> None:
            out.exercised("events", len(seen))

    trace = _trace(2)
    check = trace_check("test.fold", promise="p", needs="n", exercised_by="events")(Fold)
    result = judge(trace, Registry([check])).results[0]

    assert list(range(len(trace.events))) == seen
    assert {"events": len(trace.events)} == dict(result.exercised)


def test_memory_holds_open_requests_and_few_ended_ones() -> None:
    """Views of ended requests are let go: neighbours are bounded."""
    most = []
    judge(_trace(100), Registry([_check(lambda view, out: most.append(len(view.neighbours)))]))

    assert 16 == max(most)


def test_requests_that_never_end_are_judged_without_a_result() -> None:
    """A trace that stops early still shows its open requests to the checks."""
    built = TraceBuilder(contract()).submit()
    built.reply(built.call((1, 2)), [5], "abort")
    seen: list[Any] = []
    judge(
        built.trace(),
        Registry([_check(lambda view, out: seen.append((view.result, len(view.attempts))))]),
    )

    assert [(None, 1)] == seen


def test_unknown_ids_are_answered_with_near_ones() -> None:
    """A misspelt id lists what was probably meant, and the families."""
    registry = Registry([_check(lambda view, out: None, id="routes.rows")])

    with pytest.raises(
        UsageError, match=r"No check or family is named 'routes\.row'\. Did you mean routes\.rows"
    ):
        registry.select(["routes.row"])


def test_two_checks_may_not_share_an_id() -> None:
    """Ids are what users write into files: they are unique."""
    with pytest.raises(UsageError, match=r"Two checks have the id 'test.one'"):
        Registry([_check(lambda view, out: None), _check(lambda view, out: None)])


def test_tallies_add_up() -> None:
    """Two tallies over one registry merge into the totals of both."""
    registry = Registry([_check(lambda view, out: out.exercised("things"))])
    total, part = Tally(registry), Tally(registry)
    for tally in (total, part):
        judge_events(_trace(3).header, _trace(3).events, tally)
    total.add(part)

    assert ({"things": 6}, 2) == (dict(total.judgement().results[0].exercised), total.traces)
