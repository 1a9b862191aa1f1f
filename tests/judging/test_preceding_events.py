"""Which events a finding says that it arose after, and in which words."""

from __future__ import annotations

from typing import Any

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Result, Update, UpdatePhase
from rollproof.judging.checks import Check, Collector, Finding, request_check, trace_check
from rollproof.judging.judge_context import JudgeContext
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import RequestView
from rollproof.verification.traces import judge
from tests.support.trace_script import TraceScript


@request_check("test.request", promise="p", needs="n", exercised_by="things")
def each_request(view: RequestView, out: Collector) -> None:
    out.finding("wrong", expected="e", observed="o", where={"request": view.request.request_id})


def at_results(**where: Any) -> Check:
    """A trace check with a finding at ``where`` for each request that ends."""

    @trace_check("test.trace", promise="p", needs="n", exercised_by="things")
    class AtResults:
        kinds = (Result,)

        def __init__(self, _context: JudgeContext) -> None: ...

        def event(self, _event: Result, out: Collector) -> None:
            out.finding("wrong", expected="e", observed="o", where=where)

        def finish(self, _out: Collector) -> None: ...

    return AtResults


def found(script: TraceScript, check: Check = each_request) -> tuple[Finding, ...]:
    return judge(script.trace(), Registry([check])).results[0].findings


def aborted(script: TraceScript, *tokens: int, **call: Any) -> TraceScript:
    """A call that is aborted after ``tokens``."""
    script.reply(script.call((1, 2), **call), tokens, "abort")
    return script


def test_a_request_names_its_aborts_and_the_syncs_between() -> None:
    """In order: where each abort met its call, the pauses and weights of its servers, and what the
    environment said.
    """
    script = TraceScript(case={"flavour": "sglang"})
    script.submit()
    aborted(script, 5, 6, 7).pause().weights(1).resume().observe(8, 9)
    script.reply(script.call((1, 2, 5, 6, 7, 8, 9)), [4])
    script.result([5, 6, 7, 4])
    (finding,) = found(script)

    assert (
        "abort of call 1 on s0 at 3 tokens",
        "pause of s0 (abort)",
        "sync to v1 on s0",
        "resume of s0",
        "2 tokens of the environment",
    ) == finding.after
    assert "sglang" == finding.flavour


def test_what_happened_to_others_is_left_out() -> None:
    """Neither another request's abort and environment, nor another server's weights, nor what was
    before the request or after its last reply.
    """
    script = TraceScript()
    script.weights(1)
    script.submit("r0")
    script.submit("r1", prompt=(3,))
    aborted(script, 5, request_id="r1", server="s1").weights(2, "s1")
    script.observe(7, request_id="r1")
    script.fault("lost-reply", call_id=1)
    script.reply(script.call((1, 2)), [5, 6])
    script.weights(3)
    script.result([5, 6])
    finding, other = found(script)

    assert () == finding.after
    assert (
        "abort of call 1 on s1 at 1 token",
        "sync to v2 on s1",
        "1 token of the environment",
        "lost reply of call 1",
    ) == other.after


def test_a_call_without_an_answer_met_everything_until_the_end() -> None:
    """A request that hangs names the death of its server, though no reply came after it."""
    script = TraceScript()
    script.submit()
    script.call((1, 2))
    script.fault("death", server="s0")
    script.result(event={"hung": True, "error": "TimeoutError: awaits"})

    assert ("death of s0",) == found(script)[0].after


def test_labels_and_equal_weights_are_named() -> None:
    """A label that loads nothing, a load under another label, and one of equal weights."""
    script = TraceScript()
    script.submit()
    script.weights(0, label="v9", loaded=False).weights(2, label=1).weights("step-3", identity=True)
    script.reply(script.call((1, 2)), [5])
    script.result([5])

    assert (
        "label v9 published on s0",
        "sync to v2 on s0 under the label 1",
        "sync to step-3 on s0, equal weights",
    ) == found(script)[0].after


def test_a_finding_of_a_server_names_its_own_events() -> None:
    """Updates concern every server, pauses and aborts only theirs; a finding without a place has
    all.
    """
    script = TraceScript()
    script.add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
    script.pause(PauseMode.KEEP, "s0").abort(wanted="r0", server="s1").abort(server="s0")
    script.add(Update(version=1, label=1, phase=UpdatePhase.FAILED))
    script.submit()
    script.result()
    of_server, of_all = (
        found(script, at_results(**where))[0] for where in ({"server": "s1"}, {"version": 1})
    )

    assert (
        "update to v1 requested",
        "abort of r0 on s1",
        "update to v1 failed",
    ) == of_server.after
    assert (
        "update to v1 requested",
        "pause of s0 (keep)",
        "abort of r0 on s1",
        "abort of all calls on s0",
        "update to v1 failed",
    ) == of_all.after


def test_a_trace_check_names_the_events_of_its_request() -> None:
    """If its place is a request, open or just ended, the events are those of that request."""
    script = TraceScript()
    script.submit()
    aborted(script, 5).pause(server="s1")
    script.reply(script.call((1, 2, 5)), [6])
    script.result([5, 6])
    script.submit("r1")
    script.result(request_id="r1")
    expected = ("abort of call 1 on s0 at 1 token",)

    assert [expected, expected] == [
        finding.after for finding in found(script, at_results(request="r0"))
    ]


def test_the_last_six_are_listed() -> None:
    """Of more events the earlier ones are counted; the same one again says nothing new."""
    script = TraceScript()
    script.submit()
    for tokens in range(9):
        aborted(script, *range(tokens))
    script.resume().resume()
    script.reply(script.call((1, 2)), [5])
    script.result([5])
    (finding,) = found(script)

    assert 7 == len(finding.after)
    assert ("4 earlier events", "abort of call 5 on s0 at 4 tokens") == finding.after[:2]
    assert ("abort of call 9 on s0 at 8 tokens", "resume of s0") == finding.after[-2:]


def test_a_trace_without_a_flavour_names_none() -> None:
    """A recorded trace has no case, so the engine's flavour is unknown."""
    script = TraceScript(driven=False)
    script.submit()
    script.result()
    result = judge(script.trace(), Registry([each_request])).results[0]

    assert ("", {}) == (result.findings[0].flavour, dict(result.flavours))
