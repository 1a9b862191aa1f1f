"""Steps that must agree: all values that differ are counted, the first and the last are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.events.replay import Action, Outcome, Step
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.judging.checks import Verdict
from rollproof.replay.driver import record_replay
from rollproof.verification.traces import judge
from tests.support.replay_verdicts import CHECKS


@pytest.mark.parametrize(
    ("changed", "more"),
    [(1, None), (2, "; 1 more value differ"), (3, "; 2 more values differ")],
)
def test_the_values_that_differ_besides_the_first_are_counted(
    changed: int, more: str | None
) -> None:
    """One is told in full, of the others their number."""
    trace = record_replay(ReplayTrainer, only=["self-replay"])
    replayed = {
        event.name
        for event in trace.events
        if isinstance(event, Step) and event.action is Action.REPLAY and event.same_as
    }
    outcome = next(
        event for event in trace.events if isinstance(event, Outcome) and event.step in replayed
    )
    names = sorted(outcome.gradients)[:changed]
    other = {name: outcome.gradients[name] * 2 + 1 for name in names}
    faulty = replace(outcome, gradients={**outcome.gradients, **other})
    judged = judge(
        trace.with_events([faulty if event is outcome else event for event in trace.events]),
        CHECKS,
    )
    result = judged["replay.self-gradients"]
    assert (Verdict.FAIL, 1) == (result.verdict, result.found), result
    observed = result.findings[0].observed
    if more is None:
        assert "differ" not in observed
    else:
        assert observed.endswith(f"{more}, among them the gradient of {names[-1]}"), observed
