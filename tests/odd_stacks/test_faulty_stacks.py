"""Faults that real stacks could have, each in a stack that was written against the pages of docs/
alone: the check whose promise it breaks names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import rollproof
from rollproof.core.case import Case
from rollproof.core.engine_contract import PauseMode
from rollproof.judging.report import Report
from rollproof.verification.contract_probe import probe
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.schedules import (
    corner_families,
    profile_named,
    random_cases,
    scope_families,
)
from tests.odd_stacks import (
    faulty_batches,
    faulty_callers,
    faulty_conversations,
    faulty_ends,
    faulty_samples,
    faulty_updates,
)
from tests.odd_stacks.bases import convo, pool, thin
from tests.odd_stacks.test_odd_stacks import STACKS

DRAWN = "drawn cases"
"""The first drawn cases, for a fault that needs what no family of cases forces."""
_MOST_DRAWN = 40
ROLLOUTS = {
    faulty_callers.ResumeTakesCallersNumber: ("stitch.budget-granted", "budget as a limit"),
    faulty_callers.LastTokenOfAnAbortDropped: ("stitch.resume-prompt", "many aborts"),
    faulty_callers.ResumeWindow: ("stitch.resume-prompt", "many aborts"),
    faulty_callers.CheckpointsOfFour: ("lifecycle.survives-death", DRAWN),
    faulty_callers.TemperatureRises: ("stitch.sampling-params", "sampling parameters"),
    faulty_callers.TimeoutLeavesTheCall: ("lifecycle.no-orphan-calls", "many requests"),
    faulty_callers.FirstSiblingEndsAll: ("lifecycle.end-spares-others", DRAWN),
    faulty_callers.WarmsCacheAfterEnd: ("lifecycle.no-call-after-end", "deaths"),
    faulty_callers.AtLeastOneMore: ("stitch.budget-granted", "budget as a limit"),
    faulty_callers.LengthOfResponseOnly: ("stitch.budget-granted", "declared limits"),
    faulty_callers.EmptyAbortResets: ("stitch.resume-prompt", "many aborts"),
    faulty_callers.DroppedByADeadServer: ("lifecycle.survives-death", "deaths"),
    faulty_callers.PromptWindow: ("stitch.resume-prompt", "long samples"),
    faulty_ends.FourthPortionIsTheLast: ("stitch.finish-length", "long samples"),
    faulty_ends.LaterMembersAreShort: ("stitch.finish-length", "groups"),
    faulty_ends.ShortUnderLoad: ("stitch.finish-length", "many requests"),
    faulty_ends.DefaultOfTheServer: ("stitch.finish-length", "long samples"),
    faulty_ends.LastAbortIsPassedOn: ("lifecycle.aborts-do-not-surface", "budget as a limit"),
    faulty_ends.StaysWithItsServer: ("lifecycle.no-hang", "deaths"),
    faulty_ends.FullIsCut: ("stitch.finish-reason", "cut turns"),
    faulty_updates.OnlyTheFirstClears: ("weights.no-stale-cache", "updates in a row"),
    faulty_updates.OnlyBusyServersAreCleared: ("weights.no-stale-cache", "updates in a row"),
    faulty_updates.BusyServersLater: ("weights.update-loads", "missed update"),
    faulty_updates.TransferTimesOut: ("weights.update-loads", "slow updates"),
    faulty_updates.OnlyTheFirstIsPaused: ("weights.no-stale-cache", "slow updates"),
    faulty_updates.UnlabelledTwiceIsOnce: ("weights.update-loads", "unlabelled updates"),
    faulty_updates.RetryLeftBehind: ("weights.one-load-per-version", "slow updates"),
    faulty_updates.OneUpdateDrops: ("lifecycle.drops-only-as-declared", "slow updates"),
    faulty_updates.OneUpdateSamplesAnew: ("stitch.resume-prompt", "slow updates"),
    faulty_updates.StaleWhenDelivered: ("weights.staleness-bound", "slow updates"),
    faulty_samples.LogprobsOfTheOther: ("stitch.logprobs-paired", "many aborts"),
    faulty_samples.EndsStripped: ("stitch.tokens", "end token inside"),
    faulty_samples.BoundaryRowAgain: ("routes.provenance", "a later first version"),
    faulty_samples.AsksFromOneTooLate: ("routes.rows", "a later first version"),
    faulty_samples.PromptRowsByLength: ("routes.isolation", "deaths"),
    faulty_samples.LatestPrefillPromised: ("routes.provenance", "a later first version"),
    faulty_samples.SpansFromTheCall: ("versions.spans-cover", "a later first version"),
    faulty_samples.NewestIsThatOfTheEnd: ("versions.min-max", "balancing"),
    faulty_samples.AsCompleted: ("stitch.tokens", DRAWN),
    faulty_samples.MeanForMissing: ("stitch.logprobs-missing", "replies with gaps"),
    faulty_conversations.AnswerRowsBlanked: ("routes.captured", "cut turns"),
    faulty_conversations.ResumedTurnIsTheLast: (
        "lifecycle.ended-turns-answered",
        "end token inside",
    ),
    faulty_conversations.CutTurnsAnswered: ("lifecycle.cut-turns-not-answered", "declared limits"),
    faulty_conversations.ReasonOfTheFirstTurn: ("stitch.finish-reason", "long turns"),
    faulty_conversations.FullIsCut: ("stitch.finish-reason", DRAWN),
    faulty_conversations.LastAnswerTokenTrained: ("stitch.mask-environment", "cut turns"),
    faulty_conversations.FirstTokenOfLaterTurns: ("stitch.mask", "cut turns"),
    faulty_conversations.OneTurnCounter: ("lifecycle.ended-turns-answered", DRAWN),
    faulty_conversations.MasksTheNewWeights: ("stitch.mask", "a later first version"),
}
"""Each stack with the check that names its fault, and the family of cases that shows it: cases that
are added elsewhere change neither.
"""
BATCHES = {
    faulty_batches.AttentionFromPadId: "batch.tokens",
    faulty_batches.MaskFromPadId: "batch.loss-mask",
    faulty_batches.MaskFromTheRight: "batch.loss-mask",
    faulty_batches.LogprobsClamped: "batch.logprobs",
    faulty_batches.ZippedToTheShortest: "batch.refuses",
    faulty_batches.SurplusRowsSpill: "batch.refuses",
}
LAYOUTS = {
    faulty_batches.ZigzagBackPieceFirst: "layout.context",
    faulty_batches.PaddingInFront: "layout.packing",
    faulty_batches.MergeKeepsPadding: "layout.context-merge",
    faulty_batches.ColumnMinusFirst: "layout.layer-map",
    faulty_batches.MicrobatchOverfull: "layout.microbatches",
    faulty_batches.LongSampleInNoMicrobatch: "layout.microbatches",
    faulty_batches.IdsInASignedByte: "layout.expert-ids",
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


def _cases(stack: Any, family: str) -> Iterator[Case]:
    """The cases of the profile ``pr`` that are of one family, within the stack's contract."""
    for flavour, contract, model in probe(stack, None):
        options: dict[str, Any] = {"model": model, "seed": 0}
        families = {
            **dict(scope_families(flavour, contract, scope=profile_named("pr").scope, **options)),
            **dict(corner_families(flavour, contract, **options)),
            DRAWN: random_cases(0, _MOST_DRAWN, flavour=flavour, contract=contract, model=model),
        }
        for case in families[family]:
            # as in a run: the contract says what becomes of KV at an update
            if case.pause_mode is not PauseMode.IN_PLACE:
                yield replace(case, clear_cache=True)


@pytest.mark.parametrize(
    ("stack", "check", "family"), [(stack, *shown) for stack, shown in ROLLOUTS.items()], ids=_name
)
def test_a_fault_of_rollouts_is_named(stack: Any, check: str, family: str) -> None:
    """The stack without it is among the correct ones of test_odd_stacks."""
    assert check in _failed(run_conformance(stack, cases=_cases(stack, family), canary=False))


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
    """A fault in a stack that is blamed anyway would show nothing: each base is run without one."""
    bases = {base for stack in ROLLOUTS for base in stack.__mro__[1:-1]}
    assert {convo.Convo, pool.Pool, thin.Thin} <= bases
    assert set() == bases - set(STACKS)
