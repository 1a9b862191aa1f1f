"""Whose a call is that several requests of a group may have made."""

from __future__ import annotations

from typing import Any

from tests.support.trace_script import TraceScript, finds, passes, unknown

NOT_ATTRIBUTED = "cannot be attributed"


def _twins() -> TraceScript:
    """Two requests with one prompt; their calls are made by a worker that tells no owner."""
    script = TraceScript(partial_off="dropped", case={"partial": False})
    for name in ("r0", "r1"):
        script.submit(name, group="g")
    return script


def _guess(script: TraceScript, prompt: tuple[int, ...] = (1, 2), **fields: Any) -> int:
    return script.call(prompt, candidates=("r1",), **fields)


def test_a_call_whose_reply_was_lost_has_no_known_owner() -> None:
    """It has the sampling parameters of the other request, and no token shows whose it was."""
    for lost in (True, False):
        script = _twins()
        first = _guess(script, sampling={"temperature": 1.0})
        if lost:
            script.fault("lost-reply", "s0", first)
        script.reply(first, (9,) if lost else (), reason="abort", delivered=not lost)
        script.reply(_guess(script), (3, 4), reason="stop").result((3, 4))
        passes("stitch.sampling-params", script, first_calls=1)


def test_a_lost_reply_may_explain_why_another_one_was_thrown_away() -> None:
    """A stack takes the first outcome of two calls, here an error, and calls again."""
    script = _twins()
    lost, other = _guess(script), _guess(script, server="s1")
    script.fault("lost-reply", "s0", lost)
    script.reply(lost, (5, 6), delivered=False).reply(other, (7, 8))
    script.reply(_guess(script), (3, 4), reason="stop").result((3, 4))
    passes("stitch.resume-prompt", script)


def test_a_call_that_continues_its_request_is_its_own() -> None:
    """Nobody else has the tokens that it sends, so that its parameters must be the same."""
    script = _twins()
    script.reply(_guess(script), (3,), reason="abort")
    lost = script.call((1, 2, 3), candidates=("r1",), sampling={"temperature": 1.0})
    script.fault("lost-reply", "s0", lost)
    script.reply(lost, (4,), delivered=False)
    call = script.call((1, 2, 3), candidates=("r1",))
    finds("stitch.sampling-params", script.reply(call, (4,), reason="stop").result((3, 4)))


def test_a_call_from_the_task_of_an_ended_request_may_be_another_ones() -> None:
    """A worker outlives the request that began it, and continues the other one."""
    script = _twins()
    script.reply(script.call((1, 2)), (5,), reason="stop")
    other = script.call((1, 2), candidates=("r1",))
    script.result((5,)).reply(other, (3,), reason="abort")
    script.reply(_guess(script, prompt=(1, 2, 3)), (4,), reason="stop")
    script.result((3, 4), "r1")
    passes("stitch.tokens", script, **{"single-call_samples": 1, "resumed_samples": 1})


def test_a_request_without_a_sample_has_no_calls_of_its_own() -> None:
    """Those that were attributed to it may be the other one's, which has ended without any."""
    script = _twins()
    script.reply(_guess(script, sampling={"temperature": 1.0}), (3,), reason="abort")
    script.reply(_guess(script), (4,), reason="abort")
    script.result(request_id="r1").result()
    unknown("stitch.sampling-params", script, NOT_ATTRIBUTED)


def test_the_death_of_a_call_that_may_be_another_ones_blames_nobody() -> None:
    """The answer that explains the drop may be that to another call."""
    script = _twins()
    call = _guess(script)
    other = script.call((1, 2), "", candidates=("r0", "r1"), server="s1")
    script.fault("death", "s0")
    script.reply(other, (), reason="abort").result()
    unknown("lifecycle.survives-death", script, NOT_ATTRIBUTED)
    assert call


def test_a_hang_is_found_whoever_called() -> None:
    """It needs no calls."""
    script = _twins()
    _guess(script)
    script.result(event={"hung": True, "error": "it waits for a lock"})
    finding = finds("lifecycle.no-hang", script)
    assert "it waits for a lock; which calls are its own is not known" == finding.observed
