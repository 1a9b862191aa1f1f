"""Calls of an engine: those that end by length, and those that are sent to a paused one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.engine_contract import PausedCalls, PauseMode, Refusal
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Chunk,
    Fault,
    Pause,
    Reply,
    Result,
    Resume,
)
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import fake_target
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.verification.engines import run_experiments
from tests.support.trace_script import check


@pytest.fixture(scope="module")
def engine() -> Trace:
    """The trace of an engine, of which tests use the header."""
    return run_experiments(fake_target("vllm"), only=["plain"]).traces[0]


def _judged(engine: Trace, check_id: str, *events: Event, **terms: Any) -> CheckResult:
    contract = engine.header.contract
    assert contract.engine is not None
    contract = replace(contract, engine=replace(contract.engine, **terms))
    header = replace(engine.header, contract=contract, engine=contract)
    return check(check_id, replace(engine, header=header).with_events(events))


def _call(number: int = 1, budget: int | None = 8, prompt: int = 5) -> Call:
    return Call(
        call_id=number,
        request_id=f"r{number}",
        server_id="e0",
        prompt_ids=tuple(range(10, 10 + prompt)),
        max_tokens=budget,
    )


def _reply(number: int = 1, tokens: int = 3, reason: str = "length") -> Reply:
    output = EngineOutput(
        token_ids=tuple(range(30, 30 + tokens)),
        logprobs=None,
        routes=None,
        finish_reason=FinishReason(reason),
    )
    return Reply(call_id=number, output=output)


@pytest.mark.parametrize(
    ("spare", "budget", "length"),
    [(None, None, 14), (None, 10, 10), (None, 16, 14), (2, None, 13), (2, 13, 13), (2, 16, 13)],
)
def test_a_call_ends_by_length_at_its_budget_or_at_the_end_of_the_context(
    engine: Trace, spare: int | None, budget: int | None, length: int
) -> None:
    """Of 20 places a prompt takes five; an engine that declares nothing may leave one free."""
    terms = {"max_length": 20, "spare_positions": spare, "excess_budget": Refusal.IGNORED}
    for tokens, reason, early in (
        (length, "length", False),
        (length - 1, "length", True),
        (length - 1, "stop", False),
        (length - 1, "abort", False),
    ):
        events = _call(budget=budget), _reply(tokens=tokens, reason=reason)
        result = _judged(engine, "engine.answers", *events, **terms)
        assert {"calls": 1} == dict(result.exercised)
        if not early:
            assert Verdict.PASS is result.verdict, result
            continue
        (finding,) = result.findings
        assert (
            "a call ended by length before it had the length",
            f"{length} tokens, or another finish reason",
            f"{length - 1} tokens after a prompt of 5; the engine takes 20 in total",
        ) == (finding.title, finding.expected, finding.observed)
        assert {"call": 1, "server": "e0", "request": "r1"} == dict(finding.where)


def test_a_call_that_cannot_be_served_has_no_length(engine: Trace) -> None:
    """engine.refusals judges what it got."""
    events = _call(budget=16), _reply(tokens=0)
    terms = {"max_length": 20, "spare_positions": 0, "excess_budget": Refusal.EMPTY}
    assert Verdict.PASS is _judged(engine, "engine.answers", *events, **terms).verdict


@pytest.mark.parametrize("replies", [0, 1, 2, 3])
def test_a_call_has_one_reply(engine: Trace, replies: int) -> None:
    """None and two are findings, of each call of its own."""
    events = [_call(1), _reply(1, 8), _call(2), *[_reply(2, 8)] * replies]
    result = _judged(engine, "engine.answers", *events)
    assert {"calls": 2} == dict(result.exercised)
    expected = {
        0: [(2, "a call was not answered")],
        1: [],
    }.get(replies, [(2, "a call was answered more than once")])
    assert expected == [(finding.where["call"], finding.title) for finding in result.findings]
    for finding in result.findings:
        assert f"{replies} replies to call 2 (5 prompt tokens, budget 8)" == finding.observed


@pytest.mark.parametrize("hung", [False, True])
def test_a_call_that_was_refused_needs_no_reply(engine: Trace, hung: bool) -> None:
    """The last call of a request that got an error; one that hung was not answered."""
    events = [_call(1), replace(_call(2), request_id="r1")]
    result = _judged(
        engine,
        "engine.answers",
        *events,
        _reply(1, 8),
        Result(request_id="r1", rollout=None, error="ValueError: no room", hung=hung),
    )
    assert [2] * hung == [finding.where["call"] for finding in result.findings]
    assert {"calls": 1 + hung} == dict(result.exercised)


@pytest.mark.parametrize(("what", "found"), [("broken-off", True), ("killed", False)])
def test_an_experiment_that_broke_off_is_a_finding(engine: Trace, what: str, found: bool) -> None:
    """In the words of the error; another fault is none of the engine's."""
    fault = Fault(what=what, server_id="e0", detail="RuntimeError: dead")
    result = _judged(engine, "engine.answers", _call(), _reply(tokens=8), fault)
    titles = ["an experiment could not be completed"] * found
    assert titles == [finding.title for finding in result.findings]
    for finding in result.findings:
        assert "RuntimeError: dead" == finding.observed
        assert {"server": "e0", "index": 2} == dict(finding.where)


_CAPABILITIES: dict[str, dict[str, Any]] = {
    "no pause modes": {"pause_modes": (), "recomputing": ()},
    "no streaming": {"stream_modes": ("final",)},
    "cannot be aborted": {"aborts": False},
    "no logprobs": {},
}


@pytest.mark.parametrize(
    ("check_id", "needs"),
    [
        ("stitch.budget-total", ()),
        ("lifecycle.ends-once", ()),
        ("routes.immutable", ("no logprobs",)),
        ("versions.engine-tags", ("no logprobs",)),
        ("weights.served-after-update", ("no logprobs",)),
        ("weights.no-admission-while-paused", ("no pause modes",)),
        ("weights.no-token-while-paused", ("no pause modes", "no streaming")),
        ("lifecycle.abort-hits-target", ("cannot be aborted",)),
        ("lifecycle.abort-keeps-tokens", ("cannot be aborted", "no streaming")),
    ],
)
def test_shared_checks_need_what_an_engine_offers(
    engine: Trace, check_id: str, needs: tuple[str, ...]
) -> None:
    """Each lack alone rules them out, and says so; the engine that has all is judged."""
    contract = engine.header.engine
    assert contract is not None and contract.engine is not None
    made = default_registry()[check_id]
    assert "engines" in made.also
    assert made.inapplicable(contract) is None
    for lack, terms in _CAPABILITIES.items():
        changed = replace(contract, engine=replace(contract.engine, **terms))
        if lack == "no logprobs":
            changed = replace(changed, logprobs="none", missing_logprobs="never")
        reason = made.inapplicable(changed)
        assert (lack in needs) == (reason is not None and lack in reason), (lack, reason)


_NOT_DECLARED = "a call sent to a paused engine is not treated as declared"
_FORGOTTEN = "the abort of a call that waited for the end of a pause was forgotten"
_AS_DECLARED = {
    PausedCalls.PARK: "it waits for the resume (paused_calls='park')",
    PausedCalls.REJECT: "an abort without tokens (paused_calls='reject')",
    PausedCalls.RAISE: "an error (paused_calls='raise')",
}


def _paused(
    engine: Trace, declared: PausedCalls, *answer: Event, aborted: bool = False
) -> CheckResult:
    """The verdict on a call that is sent during a pause, and answered after it."""
    abort = [Abort(server_id="e0", wanted="r1", call_ids=(1,))] * aborted
    pause, resume = Pause(server_id="e0", mode=PauseMode.KEEP), Resume(server_id="e0")
    events = (pause, _call(), *abort, resume, *answer)
    return _judged(engine, "engine.paused-calls", *events, paused_calls=declared)


@pytest.mark.parametrize(
    ("declared", "tokens", "reason", "aborted", "title", "observed"),
    [
        ("park", 3, "length", False, "", ""),
        ("park", 0, "length", False, "", ""),
        ("park", 3, "abort", False, "", ""),
        ("park", 0, "abort", False, _NOT_DECLARED, "an abort without tokens"),
        ("park", 0, "abort", True, "", ""),
        ("park", 3, "abort", True, "", ""),
        (
            "park",
            3,
            "length",
            True,
            _FORGOTTEN,
            "3 tokens, sampled after the resume; it ended by length",
        ),
        ("reject", 0, "abort", False, "", ""),
        ("reject", 0, "length", False, _NOT_DECLARED, "a reply of 0 tokens"),
        ("reject", 3, "abort", False, _NOT_DECLARED, "a reply of 3 tokens"),
        ("reject", 3, "length", False, _NOT_DECLARED, "a reply of 3 tokens"),
        ("raise", 3, "length", False, _NOT_DECLARED, "a reply of 3 tokens"),
    ],
)
def test_a_call_to_a_paused_engine_is_answered_as_declared(
    engine: Trace,
    declared: str,
    tokens: int,
    reason: str,
    aborted: bool,
    title: str,
    observed: str,
) -> None:
    """An abort without tokens is a rejection, unless the call itself was aborted; whatever has
    tokens, or ends otherwise, is none.
    """
    reply = _reply(tokens=tokens, reason=reason)
    result = _paused(engine, PausedCalls(declared), reply, aborted=aborted)
    assert {"calls sent to a paused engine": 1} == dict(result.exercised)
    assert [title] * bool(title) == [finding.title for finding in result.findings]
    for finding in result.findings:
        assert observed == finding.observed
        assert {"call": 1, "server": "e0", "request": "r1"} == dict(finding.where)
        if title == _NOT_DECLARED:
            assert _AS_DECLARED[PausedCalls(declared)] == finding.expected


@pytest.mark.parametrize("declared", PausedCalls)
def test_an_error_of_a_paused_engine_needs_a_declaration(
    engine: Trace, declared: PausedCalls
) -> None:
    """The finding has the error in its own words; a call that hung got none."""
    error = Result(request_id="r1", rollout=None, error="RuntimeError: paused")
    result = _paused(engine, declared, error)
    assert {"calls sent to a paused engine": 1} == dict(result.exercised)
    found = [] if declared is PausedCalls.RAISE else ["RuntimeError: paused"]
    assert found == [finding.observed for finding in result.findings]
    assert () == _paused(engine, declared, replace(error, hung=True)).findings


@pytest.mark.parametrize("declared", PausedCalls)
@pytest.mark.parametrize("streamed", [True, False])
def test_tokens_before_the_resume_are_found(
    engine: Trace, declared: PausedCalls, streamed: bool
) -> None:
    """As soon as they show, and once."""
    pause = Pause(server_id="e0", mode=PauseMode.KEEP)
    early = [Chunk(call_id=1, token_ids=(30, 31, 32))] * streamed
    for resumed in (False, True):
        resume = [Resume(server_id="e0")] * resumed
        events = (pause, _call(), *resume, *early, _reply())
        result = _judged(engine, "engine.paused-calls", *events, paused_calls=declared)
        titles = [finding.title for finding in result.findings]
        if resumed:
            assert [_NOT_DECLARED] * (declared is not PausedCalls.PARK) == titles
        else:
            assert [_NOT_DECLARED] == titles
            assert "3 tokens before the resume" == result.findings[0].observed


def test_a_request_that_ends_without_an_error_leaves_its_call_to_the_reply(
    engine: Trace,
) -> None:
    """A caller that gave up gets no error, and the reply comes later."""
    gave_up = Result(request_id="r1", rollout=None)
    result = _paused(engine, PausedCalls.PARK, gave_up, _reply(tokens=0, reason="abort"))
    assert {"calls sent to a paused engine": 1} == dict(result.exercised)
    assert ["an abort without tokens"] == [finding.observed for finding in result.findings]


def test_a_call_sent_before_or_after_the_pause_is_not_judged(engine: Trace) -> None:
    """Whatever it gets."""
    pause, resume = Pause(server_id="e0", mode=PauseMode.KEEP), Resume(server_id="e0")
    empty = _reply(tokens=0, reason="abort")
    for events in ((_call(), pause, _reply(), resume), (pause, resume, _call(), empty)):
        result = _judged(engine, "engine.paused-calls", *events, paused_calls=PausedCalls.PARK)
        assert ({}, ()) == (dict(result.exercised), result.findings)
