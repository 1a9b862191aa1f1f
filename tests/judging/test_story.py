"""The story of a finding: its events, their words, and which one is marked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Outcome, Purpose, Step
from rollproof.core.events.rollout import Abort, Admit, Gauge, Result, Update, UpdatePhase
from rollproof.core.records import Span
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check, Collector, Finding, request_check, trace_check
from rollproof.judging.event_words import describe
from rollproof.judging.judge_context import JudgeContext
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import RequestView
from rollproof.judging.story import Moment, shortened_story
from rollproof.verification.traces import judge
from tests.support.trace_script import TraceScript


def each_request(**where: Any) -> Check:
    """A request check with a finding at ``where`` for each request."""

    @request_check("test.request", promise="p", needs="n", exercised_by="things")
    def check(view: RequestView, out: Collector) -> None:
        out.finding("wrong", expected="e", observed="o", where=view.place(**where))

    return check


def at(*kinds: type[Event], **where: Any) -> Check:
    """A trace check with a finding at each event of a kind; without kinds: at the end."""

    @trace_check("test.trace", promise="p", needs="n", exercised_by="things")
    class At:
        def __init__(self, _context: JudgeContext) -> None: ...

        @property
        def kinds(self) -> tuple[type[Event], ...]:
            return kinds

        def event(self, _event: Event, out: Collector) -> None:
            out.finding("wrong", expected="e", observed="o", where=where)

        def finish(self, out: Collector) -> None:
            if not kinds:
                out.finding("wrong", expected="e", observed="o", where=where)

    return At


def told(script: TraceScript, check: Check) -> list[str]:
    """The story of the first finding; ``>>`` stands before the marked events."""
    finding: Finding = judge(script.trace(), Registry([check])).results[0].findings[0]
    return [(">> " if moment.broke else "") + moment.text for moment in finding.story]


def resumed() -> TraceScript:
    """Request r0: three tokens, an abort, an update, and one more token."""
    script = TraceScript()
    script.submit()
    call = script.call((1, 2))
    script.abort(call)
    script.reply(call, [5, 6, 7], "abort", version=0)
    script.pause().weights(1).resume()
    script.reply(script.call((1, 2, 5, 6, 7)), [4], "length", version=1)
    script.result([5, 6, 7, 4])
    return script


def test_a_call_has_one_number_in_a_finding_and_in_its_story() -> None:
    """Also where another request called first, so that the ids of a request do not begin at 1. The
    reply to the call that was wrong is marked.
    """
    script = TraceScript()
    script.submit("r1", prompt=(8, 9))
    script.reply(script.call((8, 9), request_id="r1"), [5], "stop", version=0)
    script.submit("r0", prompt=(1, 2))
    call = script.call((1, 2), request_id="r0")
    script.reply(call, [5, 6, 7], "abort", version=0)
    script.reply(script.call((1, 2), request_id="r0"), [4], "length", version=0)
    script.result([4], request_id="r0")
    registry = default_registry().select(["stitch.resume-prompt"])
    finding = judge(script.trace(), registry)["stitch.resume-prompt"].findings[0]
    assert "Call 3 throws away 3 of 3 tokens delivered before it" == finding.title
    assert 3 == finding.where["call"]
    assert ["call 3 on s0 (v0) got 2 tokens, sampled 1 token, ended by length: segment 1"] == [
        moment.text for moment in finding.story if moment.broke
    ]


def test_a_request_is_told_from_its_submission_to_its_sample() -> None:
    """Calls with their servers, weights, tokens and segments, and what happened to the servers
    between, in the order of the trace; the delivery broke the promise.
    """
    assert [
        "r0 submitted: 2 prompt tokens, at most 4 new",
        "call 1 on s0 got 2 tokens",
        "abort of all calls on s0",
        "call 1 (v0) sampled 3 tokens, aborted: segment 0",
        "pause of s0 (abort)",
        "sync to v1 on s0",
        "resume of s0",
        "call 2 on s0 (v1) got 5 tokens, sampled 1 token, ended by length: segment 1",
        ">> r0 delivered: 4 tokens, ended by length",
    ] == told(resumed(), each_request())


@pytest.mark.parametrize(
    ("abort", "said"),
    [
        ({"wanted": "call-1", "call_ids": (1,)}, "abort of call 1 on s0"),
        ({"wanted": "a" * 32, "call_ids": (1,)}, "abort of call 1 on s0"),
        ({"wanted": "g", "call_ids": (1, 2)}, "abort of g (calls 1, 2) on s0"),
        ({"wanted": "r7", "call_ids": ()}, "abort of r7 on s0"),
        ({"wanted": "r" * 99, "call_ids": ()}, f"abort of {'r' * 37}... on s0"),
        ({"wanted": "*", "call_ids": (1,)}, "abort of all calls on s0"),
    ],
)
def test_an_abort_names_the_calls_that_it_met(abort: dict[str, Any], said: str) -> None:
    """A handle is named if it met no call, or several: one that the engine made up is in no
    program.
    """
    assert said == describe(Abort(server_id="s0", **abort))


def test_a_finding_at_a_call_marks_its_reply() -> None:
    """A check of the sample that blames one call marks the reply of that call, and not the
    delivery.
    """
    marked = [text for text in told(resumed(), each_request(call=1)) if text.startswith(">>")]
    assert [">> call 1 (v0) sampled 3 tokens, aborted: segment 0"] == marked


def test_a_check_of_events_marks_the_event_that_it_read() -> None:
    """An event that is none of the request's own is appended to its story."""
    script = TraceScript()
    script.submit()
    script.admit(script.send())
    assert [
        "r0 submitted: 2 prompt tokens, at most 4 new",
        "call 1 on s0 got 2 tokens",
        ">> call 1 admitted on s0",
    ] == told(script, at(Admit, call=1))


def test_a_check_of_events_marks_the_event_that_it_names() -> None:
    """What broke the promise is often judged later: the index in the place of the finding counts.
    A call that is one line with its reply has the index of either.
    """
    script = TraceScript()
    script.weights(1)
    script.submit()
    script.reply(script.call((1, 2)), [5], output={"routes": None})
    script.result([5])
    script.gauges()
    stories = [told(script, at(Gauge, server="s0", index=0))]
    stories += [told(script, at(Gauge, request="r0", index=index)) for index in (2, 4)]

    assert [">> sync to v1 on s0"] == stories[0]
    for story in stories[1:]:
        assert [
            "r0 submitted: 2 prompt tokens, at most 4 new",
            ">> call 1 on s0 (v0) got 2 tokens, sampled 1 token, ended by length: segment 0",
            "r0 delivered: 1 token, ended by length",
        ] == story


def test_a_finding_of_a_call_tells_what_its_server_met_before() -> None:
    """The request of the call is told, and the updates and weights before it."""
    script = TraceScript()
    script.weights(1).add(Update(version=2, label=2, phase=UpdatePhase.ASKED))
    script.submit()
    script.reply(script.call((1, 2)), [5])
    script.result([5])

    assert [
        "sync to v1 on s0",
        "update to v2 requested",
        "r0 submitted: 2 prompt tokens, at most 4 new",
        "call 1 on s0 (v0) got 2 tokens, sampled 1 token, ended by length: segment 0",
        ">> r0 delivered: 1 token, ended by length",
    ] == told(script, at(Result, call=1))


def test_a_finding_at_the_end_says_so() -> None:
    """A request that never ended: no event broke the promise but the end of the trace."""
    script = TraceScript()
    script.submit()
    script.call((1, 2))
    assert [
        "r0 submitted: 2 prompt tokens, at most 4 new",
        "call 1 on s0 got 2 tokens",
        ">> the trace ends",
    ] == told(script, each_request())
    assert ">> the trace ends" == told(script, at(request="r0"))[-1]


def test_weights_that_change_within_a_reply_are_told() -> None:
    """What really sampled is told where it is known, with the token from which on it did."""
    script = TraceScript()
    script.submit()
    script.reply(
        script.call((1, 2)),
        [5, 6, 7],
        true_tokens=(Span(start=0, end=1, version=0), Span(start=1, end=3, version=1)),
    )
    script.result([5, 6, 7])
    assert "call 1 on s0 (v0, v1 from token 1) got 2 tokens" in told(script, each_request())[1]


def test_a_finding_without_a_request_tells_of_its_server() -> None:
    """Events of other servers are left out; those of calls of no known request are told."""
    script = TraceScript(driven=False)
    script.pause(server="s1").pause()
    script.reply(script.call((1, 2), request_id=""), [5])
    script.gauges()
    assert [
        "pause of s0 (abort)",
        "call 1 on s0 with 2 tokens",
        "call 1 sampled 1 token, ended by length",
        ">> in flight = 0 at the start of the run",
    ] == told(script, at(Gauge, server="s0"))


def test_a_finding_of_a_step_marks_the_step() -> None:
    """A trainer's step is judged when the next one begins, which broke nothing."""
    script = TraceScript(header={"about": "replay"})
    for name in ("a", "b", "c"):
        script.add(
            Step(
                episode="e",
                name=name,
                action=Action.REPLAY,
                purpose=Purpose.TRAIN,
                microbatches=(),
            ),
            Outcome(step=name),
        )
    check = replace(at(Step, step="b"), about="replay")
    findings = judge(script.trace(), Registry([check])).results[0].findings

    assert [
        "step a (replay, train) with 0 samples",
        "step a done",
        "step b (replay, train) with 0 samples",
        "step b done",
    ] == [moment.text for moment in findings[2].story]
    assert [False, False, False, True] == [moment.broke for moment in findings[2].story]


def test_other_requests_are_left_out() -> None:
    """Neither their calls nor the aborts that met only those."""
    script = TraceScript()
    script.submit("r0")
    script.submit("r1", prompt=(3,))
    own = script.call((1, 2))
    script.abort(script.call((3,), request_id="r1"))
    script.reply(own, [5])
    script.result([5])
    assert not [text for text in told(script, each_request()) if "r1" in text or "abort" in text]


def test_errors_of_a_stack_take_one_line() -> None:
    """A long text with line breaks is cut."""
    script = TraceScript()
    script.submit()
    script.result(event={"error": "ValueError: " + "x\n" * 5000})
    (*_, last) = told(script, at(Result, request="r0"))
    assert last.startswith(">> r0 failed: ValueError: x x")
    assert last.endswith("...")
    assert len(last) < 200


def test_a_hostile_name_is_cut() -> None:
    """A moment has some hundred characters, however long a name is."""
    script = TraceScript()
    script.submit("r" * 100_000)
    script.result(request_id="r" * 100_000)
    assert [603, 606] == [len(text) for text in told(script, each_request())]


def test_a_long_story_keeps_its_ends_and_what_broke() -> None:
    """What is left out is counted, on each side of a marked event."""
    story = [Moment(index=i, time=i, text=str(i), broke=i == 5) for i in range(12)]
    assert ["0", "1", "... 3 more events", "5", "... 3 more events", "9", "10", "11"] == [
        moment.text for moment in shortened_story(story, first=2, last=3)
    ]
