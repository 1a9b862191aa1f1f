"""The work of judging grows with the number of calls, not with its square."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollproof.core.events.rollout import Reply
from rollproof.judging.attempt import Attempt
from rollproof.verification.traces import judge
from tests.support.trace_script import TraceScript


def _begun() -> TraceScript:
    story = TraceScript()
    story.submit(max_tokens=2)
    return story


def _ended(story: TraceScript) -> TraceScript:
    story.result(prompt=(1, 2), response=(5, 6), logprobs=(-0.5, -0.51))
    return story


def _polls(count: int) -> TraceScript:
    """A paused engine refuses each call but the last."""
    story = _begun()
    for _ in range(count):
        story.reply(story.call((1, 2), max_tokens=2), (), "abort")
    story.reply(story.call((1, 2), max_tokens=2), (5, 6))
    return _ended(story)


def _copies(count: int) -> TraceScript:
    """All calls run at once."""
    story = _begun()
    for call in [story.call((1, 2), max_tokens=2) for _ in range(count)]:
        story.reply(call, (5, 6))
    return _ended(story)


def _overlapping(count: int) -> TraceScript:
    """Each call is answered when the next one has been made."""
    story = _begun()
    calls = [story.call((1, 2), max_tokens=2)]
    for _ in range(count):
        calls.append(story.call((1, 2), max_tokens=2))
        story.reply(calls[-2], (5, 6))
    story.reply(calls[-1], (5, 6))
    return _ended(story)


def _lost(count: int) -> TraceScript:
    """The replies to all calls but the last are lost."""
    story = _begun()
    for _ in range(count):
        call = story.call((1, 2), max_tokens=2)
        story.fault("lost-reply", "s0", call)
        story.reply(call, (5, 6), delivered=False)
    story.reply(story.call((1, 2), max_tokens=2), (5, 6))
    return _ended(story)


@pytest.mark.parametrize("story", [_polls, _copies, _overlapping, _lost])
def test_twice_the_calls_are_about_twice_the_work(
    story: Callable[[int], TraceScript], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted as reads of the reply to a call: of a square there would be four times as
    many.
    """
    reads = 0
    received, ends = Attempt.received.fget, Attempt.ends.fget  # type: ignore[attr-defined]

    def counted_received(attempt: Attempt) -> Reply | None:
        nonlocal reads
        reads += 1
        result: Reply | None = received(attempt)
        return result

    def counted_ends(attempt: Attempt) -> list[int]:
        nonlocal reads
        reads += 1
        result: list[int] = ends(attempt)
        return result

    monkeypatch.setattr(Attempt, "received", property(counted_received))
    monkeypatch.setattr(Attempt, "ends", property(counted_ends))
    counts = []
    for size in (60, 120):
        reads = 0
        judge(story(size).trace())
        counts.append(reads)
    assert counts[1] < 2.5 * counts[0]
