"""Verdicts on replay trainers that tests make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollproof.core.contract import Contract
from rollproof.core.trainer_contract import terms_of
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult
from rollproof.replay.driver import record_replay
from rollproof.verification.traces import judge

__all__ = ["CHECKS", "declaring", "results"]

CHECKS = default_registry().select(["replay"])


def results(made: type[ReplayTrainer], *episodes: str) -> dict[str, CheckResult]:
    """The verdicts on a trainer, by check without the family."""
    judged = judge(record_replay(made, only=episodes), CHECKS)
    return {result.id.removeprefix("replay."): result for result in judged.results}


def declaring(made: type[ReplayTrainer], **terms: Any) -> Contract:
    """The trainer's contract with other terms."""
    return replace(made.contract, replay=replace(terms_of(made.contract), **terms))
