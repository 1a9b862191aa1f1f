"""Stacks that were written against the pages of docs/ alone keep their contracts, however unusual
they are: no check finds anything in them.
"""

from __future__ import annotations

import inspect
from itertools import islice
from typing import Any

import pytest

import rollproof
from rollproof.verification.rollouts import cases_for, run_conformance
from tests.odd_stacks import (
    odd_callers,
    odd_conversations,
    odd_hedges,
    odd_instants,
    odd_masks,
    odd_requests,
    odd_samples,
    odd_stops,
    odd_trajectories,
    odd_updates,
)
from tests.odd_stacks.bases import (
    candidates,
    column_batches,
    control,
    convo,
    indexed,
    padded,
    pool,
    thin,
    whole,
)

BASES = (
    candidates.Candidates,
    control.Control,
    control.CountsUpdates,
    convo.Convo,
    pool.Pool,
    thin.Thin,
    whole.Whole,
)
STACKS = [
    *BASES,
    *(
        stack
        for module in (
            odd_callers,
            odd_conversations,
            odd_hedges,
            odd_instants,
            odd_masks,
            odd_requests,
            odd_samples,
            odd_stops,
            odd_trajectories,
            odd_updates,
        )
        for name, stack in sorted(vars(module).items())
        if inspect.isclass(stack) and stack.__module__ == module.__name__
        if hasattr(stack, "rollout")
    ),
]
# Every eighth case meets each kind of schedule, and takes a third of a second.
_STEP = 8


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.__name__)
def test_an_unusual_stack_is_not_blamed(stack: Any) -> None:
    """Neither a finding nor a hang, on every engine that the stack supports."""
    cases = islice(cases_for(stack, profile="pr", seed=0), 0, None, _STEP)
    report = run_conformance(stack, cases=cases, canary=False)
    assert () == report.failed, [result.findings[:1] for result in report.results]


def test_all_stacks_are_run() -> None:
    """The table finds the classes by what they have: none may drop out unseen."""
    assert 72 == len(STACKS)


@pytest.mark.parametrize("batches", [padded.Padded, padded.Uniform])
def test_an_unusual_batch_is_not_blamed(batches: Any) -> None:
    """Padding on both sides, by a token that samples contain; routes in all samples or in none.
    Every check decides.
    """
    assert 0 == rollproof.judge_batches(batches).exit_code


@pytest.mark.parametrize("stack", [column_batches.MaskedAndSorted, column_batches.Unpadded])
def test_an_unusual_batch_with_further_columns_is_not_blamed(stack: Any) -> None:
    """Masked columns of sorted rows with new names of groups; columns without any padding."""
    assert 0 == rollproof.judge_batches(stack).exit_code


def test_an_unusual_batch_with_sampling_masks_is_not_blamed() -> None:
    """Tokens that the loss leaves out lose their masks, and the ids of the others descend."""
    assert 0 == rollproof.judge_batches(odd_masks.MaskedMasks).exit_code


def test_unusual_layouts_are_not_blamed() -> None:
    """Functions that gather by index lists, and microbatches that change the samples' order."""
    assert 0 == rollproof.judge_layouts(indexed.Indexed).exit_code


@pytest.mark.parametrize("name", ["PackedGeometric", "LogSpace"])
def test_an_unusual_correction_is_not_blamed(name: str) -> None:
    """Packed sequences of 16-bit logprobs; clamped logarithms, and NaN at masked places."""
    pytest.importorskip("torch")
    from tests.odd_stacks.bases import packed_correction

    assert 0 == rollproof.judge_corrections(getattr(packed_correction, name)).exit_code


def test_an_unusual_trainer_is_not_blamed() -> None:
    """Packed lines and sigmoid gates; targets are looked up by microbatch and layer."""
    pytest.importorskip("torch")
    from tests.odd_stacks.bases.packed_trainer import PackedTrainer

    assert 0 == rollproof.judge_replay(PackedTrainer).exit_code
