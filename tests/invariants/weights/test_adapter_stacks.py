"""Correct stacks whose updates bring adapters are clean, however they name them."""

from __future__ import annotations

from itertools import chain

import pytest

from rollproof.core.case import ActionKind, Case
from rollproof.fakes.clients.adapter_clients import AsSampledAdapters
from rollproof.judging.checks import Verdict
from rollproof.verification.contract_probe import probe
from rollproof.verification.rollouts import cases_for
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import corner_families
from rollproof.verification.traces import judge
from tests.support.adapter_stacks import NamedByVersion, UnloadedFirst

_STACKS = (AsSampledAdapters, NamedByVersion, UnloadedFirst)
_CHECKS = ("weights.adapter-loaded", "weights.adapter-current", "weights.adapter-applied")


def _cases(stack: type[AsSampledAdapters], flavour: str) -> list[Case]:
    ((_, contract, model),) = probe(stack, [flavour])
    families = dict(corner_families(flavour, contract, model=model))
    sample = cases_for(stack, profile="pr", seed=0, flavours=[flavour], thin=40)
    return [*chain(families["adapter updates"], sample)]


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "vllm-gated"])
@pytest.mark.parametrize("stack", _STACKS)
def test_correct_stacks_are_clean(stack: type[AsSampledAdapters], flavour: str) -> None:
    """No check fails, and those of adapters are exercised."""
    passed: set[str] = set()
    for case in _cases(stack, flavour):
        judgement = judge(run_case(stack, case))
        assert () == judgement.failed, case
        passed |= {
            result.id for result in judgement.results if result.verdict is Verdict.PASS
        }.intersection(_CHECKS)
    assert set(_CHECKS) == passed


def test_the_cases_have_merges_and_evictions() -> None:
    """A stack with adapters meets evictions and merges in place of what rollproof itself would load
    or label.
    """
    kinds = {action.do for case in _cases(AsSampledAdapters, "vllm") for action in case.actions}
    assert {ActionKind.SYNC_MERGED, ActionKind.EVICT_ADAPTERS} <= kinds
    assert set() == kinds & {ActionKind.SKEW, ActionKind.LAG, ActionKind.RELABEL}
