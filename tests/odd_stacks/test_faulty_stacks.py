"""Faults that real stacks could have, each in a stack that was written against the pages of docs/
alone: the check whose promise it breaks names it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import rollproof
from rollproof.judging.report import Report
from rollproof.verification.rollouts import cases_for, run_conformance
from tests.odd_stacks import (
    faulty_batches,
    faulty_callers,
    faulty_conversations,
    faulty_samples,
    faulty_updates,
)
from tests.odd_stacks.bases import convo, pool, thin

ROLLOUTS = {
    faulty_callers.ResumeTakesCallersNumber: "stitch.budget-granted",
    faulty_callers.LastTokenOfAnAbortDropped: "stitch.resume-prompt",
    faulty_callers.ResumeWindow: "stitch.resume-prompt",
    faulty_callers.CheckpointsOfFour: "lifecycle.survives-death",
    faulty_callers.TemperatureRises: "stitch.sampling-params",
    faulty_callers.TimeoutLeavesTheCall: "lifecycle.no-orphan-calls",
    faulty_callers.FirstSiblingEndsAll: "lifecycle.end-spares-others",
    faulty_callers.WarmsCacheAfterEnd: "lifecycle.no-call-after-end",
    faulty_callers.AtLeastOneMore: "stitch.budget-granted",
    faulty_callers.LengthOfResponseOnly: "stitch.budget-granted",
    faulty_callers.EmptyAbortResets: "stitch.resume-prompt",
    faulty_callers.DroppedByADeadServer: "lifecycle.survives-death",
    faulty_updates.BusyServersLater: "weights.update-loads",
    faulty_updates.TransferTimesOut: "weights.update-loads",
    faulty_updates.OnlyTheFirstIsPaused: "weights.no-stale-cache",
    faulty_updates.UnlabelledTwiceIsOnce: "weights.update-loads",
    faulty_updates.StaleWhenDelivered: "weights.staleness-bound",
    faulty_samples.EndsStripped: "stitch.tokens",
    faulty_samples.BoundaryRowAgain: "routes.provenance",
    faulty_samples.AsksFromOneTooLate: "routes.rows",
    faulty_samples.PromptRowsByLength: "routes.isolation",
    faulty_samples.LatestPrefillPromised: "routes.provenance",
    faulty_samples.SpansFromTheCall: "versions.spans-cover",
    faulty_samples.AsCompleted: "stitch.tokens",
    faulty_samples.MeanForMissing: "stitch.logprobs-missing",
    faulty_conversations.AnswerRowsBlanked: "routes.captured",
    faulty_conversations.ResumedTurnIsTheLast: "lifecycle.ended-turns-answered",
    faulty_conversations.CutTurnsAnswered: "lifecycle.cut-turns-not-answered",
    faulty_conversations.ReasonOfTheFirstTurn: "stitch.finish-reason",
    faulty_conversations.LastAnswerTokenTrained: "stitch.mask-environment",
    faulty_conversations.FirstTokenOfLaterTurns: "stitch.mask",
    faulty_conversations.OneTurnCounter: "lifecycle.ended-turns-answered",
    faulty_conversations.MasksTheNewWeights: "stitch.mask",
}
# The others show in every third case of the profile; these need a rare schedule.
STEPS = {
    faulty_callers.CheckpointsOfFour: 1,
    faulty_callers.DroppedByADeadServer: 1,
    faulty_callers.FirstSiblingEndsAll: 1,
    faulty_callers.TimeoutLeavesTheCall: 1,
    faulty_conversations.OneTurnCounter: 1,
    faulty_updates.BusyServersLater: 1,
    faulty_updates.UnlabelledTwiceIsOnce: 1,
    faulty_updates.StaleWhenDelivered: 1,
}
BATCHES = {
    faulty_batches.AttentionFromPadId: "batch.tokens",
    faulty_batches.MaskFromTheRight: "batch.loss-mask",
    faulty_batches.LogprobsClamped: "batch.logprobs",
    faulty_batches.ZippedToTheShortest: "batch.refuses",
}
LAYOUTS = {
    faulty_batches.ZigzagBackPieceFirst: "layout.context",
    faulty_batches.PaddingInFront: "layout.packing",
    faulty_batches.MergeKeepsPadding: "layout.context-merge",
    faulty_batches.ColumnMinusFirst: "layout.layer-map",
    faulty_batches.MicrobatchOverfull: "layout.microbatches",
}
REPLAY = {
    "QueuePoppedAgain": "replay.recompute",
    "MinusOneIsExpertZero": "replay.free-rows",
    "WeightsOfTheNativeChoice": "replay.reference",
    "TargetsCachedByRequest": "replay.forward",
    "IdsClamped": "replay.targets",
    "ResponsesOnly": "replay.forward",
    "OffsetsOfPayloadRows": "replay.forward",
}


def _failed(report: Report) -> list[str]:
    return [result.id for result in report.failed]


def _name(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(("stack", "check"), ROLLOUTS.items(), ids=_name)
def test_a_fault_of_rollouts_is_named(stack: Any, check: str) -> None:
    """The stack without it is among the correct ones of test_odd_stacks."""
    cases = islice(cases_for(stack, profile="pr", seed=0), 0, None, STEPS.get(stack, 3))
    assert check in _failed(run_conformance(stack, cases=cases, canary=False))


@pytest.mark.parametrize(("batches", "check"), BATCHES.items(), ids=_name)
def test_a_fault_of_batches_is_named(batches: Any, check: str) -> None:
    """Samples and their places in the batch."""
    assert check in _failed(rollproof.judge_batches(batches))


@pytest.mark.parametrize(("layouts", "check"), LAYOUTS.items(), ids=_name)
def test_a_fault_of_layouts_is_named(layouts: Any, check: str) -> None:
    """Rows and their places on the ranks."""
    assert check in _failed(rollproof.judge_layouts(layouts))


@pytest.mark.parametrize(("trainer", "check"), REPLAY.items())
def test_a_fault_of_replay_is_named(trainer: str, check: str) -> None:
    """Targets and the rows that execute them."""
    pytest.importorskip("torch")
    from tests.odd_stacks import faulty_replay

    assert check in _failed(rollproof.judge_replay(getattr(faulty_replay, trainer)))


def test_the_faults_are_in_stacks_that_are_correct_without_them() -> None:
    """A fault in a stack that is blamed anyway would show nothing."""
    bases = {base for stack in ROLLOUTS for base in stack.__mro__[1:-1]}
    assert {convo.Convo, pool.Pool, thin.Thin} <= bases
    assert all(base.__module__.startswith("tests.odd_stacks.bases") for base in bases)
