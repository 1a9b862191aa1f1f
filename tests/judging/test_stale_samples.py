"""What a stack threw away to keep its bound on staleness is no part of the sample."""

from __future__ import annotations

import pytest

from rollproof.core.events.rollout import Update, UpdatePhase
from tests.support.scripted_rollouts import blamed
from tests.support.trace_script import TraceScript, check

CALLS = {"stitch.resume-prompt", "stitch.no-call-after-end", "stitch.tokens"}
DROPS = "lifecycle.drops-only-as-declared"


def _sampled_anew(
    updates: int, *, bound: int | None = 1, sent: tuple[int, ...] = (1, 2)
) -> TraceScript:
    """A sample of weights 0 that ended by itself, and a call after ``updates`` updates."""
    script = TraceScript(max_staleness=bound).weights(0).submit(max_tokens=4)
    script.reply(script.call((1, 2)), (3, 4), reason="stop")
    for version in range(1, updates + 1):
        script.pause().weights(version, flushed=True).resume()
    call = script.call(sent)
    script.reply(call, (5, 6), version=updates, reason="stop")
    return script.result((5, 6))


@pytest.mark.parametrize(
    ("updates", "bound", "blame"),
    [
        (2, 1, set()),
        (1, 0, set()),
        # as old as allowed
        (1, 1, {"stitch.no-call-after-end"}),
        (2, None, {"stitch.no-call-after-end"}),
    ],
)
def test_a_sample_that_is_too_old_may_be_sampled_anew(
    updates: int, bound: int | None, blame: set[str]
) -> None:
    """Its calls lost; without a bound, or within it, nothing excuses that."""
    assert blame == CALLS & blamed(_sampled_anew(updates, bound=bound))


def test_a_part_of_it_may_not() -> None:
    """What is kept is the oldest part."""
    assert CALLS & blamed(_sampled_anew(2, sent=(1, 2, 3)))


def test_an_update_counts_from_its_request() -> None:
    """The stack knows of the weights before a server has them; equal weights under a new label are
    new ones to it.
    """
    script = TraceScript(max_staleness=1).weights(0).submit(max_tokens=4)
    script.reply(script.call((1, 2)), (3, 4), reason="length")
    for label in (1, 2):
        script.add(Update(version=1, label=label, phase=UpdatePhase.ASKED))
    assert not check(DROPS, script.result()).found


@pytest.mark.parametrize(("updates", "found"), [(1, True), (2, False)])
def test_a_sample_that_is_too_old_may_be_dropped(updates: int, found: bool) -> None:
    """A bound that nothing exceeded explains no drop."""
    script = TraceScript(max_staleness=1).weights(0).submit(max_tokens=4)
    script.reply(script.call((1, 2)), (3, 4), reason="length")
    for version in range(1, updates + 1):
        script.pause().weights(version, flushed=True).resume()
    assert found == (check(DROPS, script.result()).found > 0)


def test_a_copy_of_a_running_call_begins_nothing() -> None:
    """A call that is still on its way has not been thrown away."""
    script = TraceScript(max_staleness=0).weights(0).submit(max_tokens=2)
    first = script.call((1, 2))
    script.weights(1, "s1")
    second = script.call((1, 2), server="s1")
    script.reply(first, (3, 4), reason="length")
    script.reply(second, (5, 6), version=1, reason="length")
    assert "stitch.tokens" not in blamed(script.result((3, 4)))
