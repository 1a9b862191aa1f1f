"""SituationCounter: what a trace exercised, situation by situation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Fault, Unrecorded
from rollproof.core.records import Span
from rollproof.core.trace import Trace
from rollproof.judging.situations import SituationCounter
from tests.support.trace_script import TraceScript


def _counts(trace: Trace) -> dict[str, int]:
    scenarios = SituationCounter()
    for event in trace:
        scenarios.event(event)
    return scenarios.counts


def _teller(*servers: str) -> TraceScript:
    script = TraceScript()
    for server in servers or ("s0",):
        script.weights(0, server)
    script.submit()
    return script


def _aborted(tokens: tuple[int, ...], *, admitted: bool = True) -> TraceScript:
    script = _teller()
    call = script.call((1, 2)) if admitted else script.send()
    return script.reply(call, tokens, reason="abort")  # type: ignore[return-value]


def _two_versions() -> TraceScript:
    script = _aborted((3,))
    script.weights(1)
    call = script.call((1, 2, 3))
    return script.reply(call, (4,), version=1, reason="abort")  # type: ignore[return-value]


def _three_versions() -> TraceScript:
    script = _two_versions()
    script.weights(2)
    call = script.call((1, 2, 3, 4))
    return script.reply(call, (5, 6), version=2).result((3, 4, 5, 6))  # type: ignore[return-value]


def _empty_aborts(*before: int, count: int) -> TraceScript:
    """Aborts without a token, after words of the environment if there are any."""
    script = _ended("stop", (3,))
    if before:
        script.observe(*before)
    for _ in range(count):
        script.reply(script.call((1, 2, 3, *before)), (), reason="abort")
    return script


def _in_single_call() -> TraceScript:
    script = _teller()
    call = script.call((1, 2))
    script.pause(PauseMode.RETRACT, progress={call: 1}).weights(1).resume()
    spans = (Span(start=0, end=1, version=0), Span(start=1, end=2, version=1))
    return script.admit(call).reply(call, (3, 4), true_tokens=spans)  # type: ignore[return-value]


def _preempted() -> TraceScript:
    script = _teller()
    call = script.call((1, 2))
    return script.admit(call)


def _cached() -> TraceScript:
    script = _teller()
    call = script.call((1, 2))
    return script.reply(call, (3, 4, 5, 6), prompt_len=2, output={("cached_tokens"): 1})  # type: ignore[return-value]


def _ended(reason: str, tokens: tuple[int, ...]) -> TraceScript:
    script = _teller()
    call = script.call((1, 2))
    return script.reply(call, tokens, reason=reason)  # type: ignore[return-value]


def _out_of_step() -> TraceScript:
    script = _teller("s0", "s1")
    script.weights(1, "s1")
    script.call((1, 2))
    return script


def _dead() -> TraceScript:
    script = _teller()
    script.call((1, 2))
    return script.fault("death", "s0").fault("revive", "s0")


def _faults(*whats: str) -> TraceScript:
    script = _teller()
    for what in whats:
        script.fault(what, call_id=1)
    return script


def _idle(**update: object) -> TraceScript:
    script = TraceScript()
    script.weights(0).weights(**{"version": 1, **update})  # type: ignore[arg-type]
    return script


def _running() -> TraceScript:
    script = _teller()
    script.call((1, 2))
    return script.weights(1)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("tell", "name", "count"),
    [
        (lambda: _aborted((3,)), "aborts mid-decode", 1),
        (lambda: _aborted(()), "aborts before the first token", 1),
        (lambda: _aborted((), admitted=False), "aborts while queued", 1),
        (lambda: _aborted((3,), admitted=False), "aborts mid-decode", 1),
        (lambda: _aborted((3, 4, 5, 6)), "aborts on the last token", 1),
        (lambda: _aborted(()), "zero-token segments", 1),
        (
            lambda: _empty_aborts(count=3),
            "requests aborted three times in a row without a token",
            1,
        ),
        (lambda: _empty_aborts(9, count=2), "aborts before the first token of a later turn", 2),
        (lambda: _teller().abort(wanted="gone"), "aborts of nothing in flight", 1),
        (_two_versions, "resumes", 1),
        (_two_versions, "resumes across a weight version", 1),
        (_three_versions, "rollouts across two or more updates", 1),
        (_three_versions, "requests aborted twice or more", 1),
        (_in_single_call, "calls across a weight version", 1),
        (_in_single_call, "calls frozen by a pause", 1),
        (_in_single_call, "prefills again after a pause", 1),
        (_in_single_call, "pauses, mode retract", 1),
        (_preempted, "preemptions", 1),
        (_cached, "prefix-cache hits", 1),
        (_cached, "route rows", 5),
        (_cached, "tokens sampled", 4),
        (lambda: _ended("stop", (3,)), "ends of sequence before the budget", 1),
        (lambda: _ended("stop", (3, 4, 5, 6)), "ends of sequence on the last token", 1),
        (lambda: _ended("length", (3, 4, 5, 6)), "budgets exhausted", 1),
        (lambda: _ended("completed", (3,)), "natural ends", 1),
        (_running, "weight updates while calls ran", 1),
        (lambda: _teller().weights(1), "weight updates between calls", 1),
        (_idle, "weight updates while idle", 1),
        (lambda: _idle(label=None), "weight updates without a label", 1),
        (lambda: _idle(identity=True), "identity updates", 1),
        (lambda: _idle(loaded=False), "labels published without weights", 1),
        (lambda: _teller().fault("update-failure", "s0"), "broken weight transfers", 1),
        (lambda: _teller().fault("update-failure"), "failed weight updates", 1),
        (lambda: _teller().fault("update-hung"), "weight updates that hung", 1),
        (_out_of_step, "calls while replicas were out of step", 1),
        (_dead, "server deaths", 1),
        (_dead, "server revivals", 1),
        (_dead, "calls lost with their server", 1),
        (lambda: _faults("lost-reply", "late-reply", "late-reply"), "late replies", 2),
        (lambda: _faults("duplicate-reply", "reject"), "rejected calls", 1),
        (lambda: _faults("solar-flare"), "solar-flare", 1),
        (lambda: _teller().submit("r1", (7,)), "requests in parallel with others", 1),
        (lambda: _teller().observe(9).result((9,)), "multi-turn rollouts", 1),
        (lambda: _teller().result(), "requests dropped", 1),
        (lambda: _teller().result(event={"error": "E"}), "requests that ended with an error", 1),
        (lambda: _teller().result(event={"hung": True}), "requests that hung", 1),
    ],
)
def test_a_situation_is_counted(tell: Callable[[], TraceScript], name: str, count: int) -> None:
    """Each situation by the trace that shows it."""
    assert count == _counts(tell().trace()).get(name), _counts(tell().trace())


def test_aborts_without_a_token_are_in_a_row_until_a_token_comes() -> None:
    """Two of them, a token and another two are no three, and with a token the turn has begun."""
    script = _empty_aborts(9, count=2)
    script.reply(script.call((1, 2, 3, 9)), (4,), reason="abort")
    for _ in range(2):
        script.reply(script.call((1, 2, 3, 9, 4)), (), reason="abort")
    counts = _counts(script.trace())
    assert 4 == counts["zero-token segments"]
    assert 2 == counts["aborts before the first token of a later turn"]
    assert "requests aborted three times in a row without a token" not in counts


def test_weights_that_a_server_starts_with_are_no_update() -> None:
    """Counting them would make every run look as if it had met updates."""
    assert {} == _counts(TraceScript().weights(0).weights(0, "s1").trace())


def test_replicas_are_in_step_again_after_the_update_has_reached_all() -> None:
    """Only calls in between are counted."""
    script = _out_of_step()
    script.weights(1)
    script.call((1, 2))
    assert 1 == _counts(script.trace())["calls while replicas were out of step"]


def test_a_call_that_was_given_up_keeps_no_server_busy() -> None:
    """It has no reply; its request's end is its end."""
    script = _teller()
    script.call((1, 2))
    script.result((3,)).weights(1)
    counts = _counts(script.trace())
    assert (1, None) == (
        counts["weight updates while idle"],
        counts.get("weight updates while calls ran"),
    )


def test_names_are_sorted_and_what_never_occurred_is_left_out() -> None:
    """The table of a report is stable, and short."""
    counts = _counts(_three_versions().trace())
    assert list(counts) == sorted(counts)
    assert all(counts.values())


def test_events_that_refer_to_nothing_known_are_ignored() -> None:
    """A trace that began late."""
    script = TraceScript()
    script.admit(7).reply(7, (3,)).observe(5).result((3,))
    assert {} == _counts(script.trace())


def test_a_stream_that_may_have_broken_is_counted_in_words() -> None:
    """By what it means, not by the name of the event."""
    story = _teller()
    story.reply(story.call((1, 2)), (3,)).add(
        Fault(what="broken-stream", server_id="s0", call_id=1)
    )
    assert 1 == _counts(story.trace())["streams that may not have been read to their end"]


def test_events_that_were_not_recorded_are_summed() -> None:
    """The report says how much of a recording is missing, over all its gaps."""
    script = _teller()
    script.add(Unrecorded(reason="the queue was full", count=40))
    script.add(Unrecorded(reason="its reply was no JSON", request_id="r0"))
    assert _counts(script.trace())["events that were not recorded"] == 41
