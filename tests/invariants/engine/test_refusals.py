"""``engine.refusals``: calls that can be served and were not, each by what it got."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.engine_contract import PausedCalls, PauseMode
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Pause, Reply, Result, Resume
from rollproof.core.records import FinishReason
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import fake_target
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.verification.engines import run_experiments
from tests.support.trace_script import check

ID = "engine.refusals"


@pytest.fixture(scope="module")
def ends() -> Trace:
    """Calls that can all be served."""
    return run_experiments(fake_target("vllm"), only=["ends"]).traces[0]


def _calls(trace: Trace) -> list[Call]:
    return [event for event in trace.events if isinstance(event, Call)]


def _judged(
    trace: Trace, *, empty: tuple[int, ...] = (), failed: tuple[int, ...] = ()
) -> CheckResult:
    """The verdict on the trace in which some calls got no token, or an error."""
    requests = {call.request_id for call in _calls(trace) if call.call_id in failed}
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Reply) and event.call_id in failed:
            continue
        if isinstance(event, Reply) and event.call_id in empty:
            output = replace(
                event.output, token_ids=(), logprobs=None, finish_reason=FinishReason.LENGTH
            )
            events.append(replace(event, output=output))
        elif isinstance(event, Result) and event.request_id in requests:
            events.append(replace(event, rollout=None, error="ValueError: no room"))
        else:
            events.append(event)
    return check(ID, trace.with_events(events))


def test_a_served_call_is_no_refusal(ends: Trace) -> None:
    """Nothing is found where every call got tokens."""
    assert () == _judged(ends).findings


def test_what_a_refused_call_got_is_told(ends: Trace) -> None:
    """The error in its own words, or an answer without tokens."""
    call = _calls(ends)[-1]
    for fields, observed in (
        ({"empty": (call.call_id,)}, "a reply without tokens that ended by length"),
        ({"failed": (call.call_id,)}, "ValueError: no room"),
    ):
        result = _judged(ends, **fields)
        assert (Verdict.FAIL, 1) == (result.verdict, result.found)
        finding = result.findings[0]
        assert ("a call that can be served was refused", "a reply", observed) == (
            finding.title,
            finding.expected,
            finding.observed,
        )
        assert (call.call_id, call.server_id, call.request_id) == (
            finding.where["call"],
            finding.where["server"],
            finding.where["request"],
        )


def test_a_declared_error_of_a_paused_engine_hides_no_other(ends: Trace) -> None:
    """A call to a paused engine may raise where that is declared; a later one may not."""
    first, last = _calls(ends)[0], _calls(ends)[-1]
    assert first is not last
    contract = ends.header.contract
    assert contract.engine is not None
    raising = replace(contract, engine=replace(contract.engine, paused_calls=PausedCalls.RAISE))
    events: list[Event] = []
    for event in ends.events:
        if event is first:
            events.append(Pause(server_id=first.server_id, mode=PauseMode.KEEP))
        events.append(event)
        if event is first:
            events.append(Resume(server_id=first.server_id))
    header = replace(ends.header, contract=raising, engine=raising)
    paused = replace(ends.with_events(events), header=header)
    assert () == _judged(paused, failed=(first.call_id,)).findings
    both = _judged(paused, failed=(first.call_id,), empty=(last.call_id,))
    assert [last.call_id] == [finding.where["call"] for finding in both.findings]


def test_a_call_without_an_answer_hides_no_other(ends: Trace) -> None:
    """engine.answers judges it; a later one that was refused is found."""
    first, last = _calls(ends)[0], _calls(ends)[-1]
    lost = [
        event
        for event in ends.events
        if not (isinstance(event, Reply) and event.call_id == first.call_id)
    ]
    result = _judged(ends.with_events(lost), empty=(last.call_id,))
    assert [last.call_id] == [finding.where["call"] for finding in result.findings]
