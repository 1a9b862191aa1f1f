"""Rollouts in parts: a prefill and a decode server behind one call, and turns as samples of their
own. Correct stacks of both kinds are left alone, and faulty ones are found.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.events.rollout import Result
from rollproof.judging.checks import Verdict
from rollproof.judging.turn_samples import TURN_SAMPLES
from rollproof.verification.contract_probe import probe
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import corner_families, random_cases
from rollproof.verification.traces import judge
from tests.support import split_stacks
from tests.support.split_stacks import CORRECT, FAULTY

_OF_ANSWERS = {
    "lifecycle.cut-turns-not-answered",
    "stitch.environment-tokens",
    "stitch.mask-environment",
    "stitch.turn-budget",
}


@pytest.mark.parametrize("stack", CORRECT, ids=lambda stack: stack.__name__)
def test_rollouts_in_parts_are_left_alone(stack: Any) -> None:
    """No finding and nothing unknown. Only a sample of one turn rules checks out: those of the
    environment's answers, which are in no sample, and the reason says so.
    """
    report = run_conformance(stack, profile="pr", witness_dir=None)
    assert [] == [
        (result.id, result.verdict, result.reason)
        for result in report.results
        if result.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    ]
    ruled_out = {result.id for result in report.results if result.reason == TURN_SAMPLES}
    assert (_OF_ANSWERS if issubclass(stack, split_stacks.LastTurn) else set()) == ruled_out


def test_the_only_server_of_a_role_may_be_gone_for_good() -> None:
    """No decode server is left, and the requests wait for it until the deadline."""
    stack = split_stacks.OneDecodeServer
    ((flavour, contract, model),) = probe(stack, stack.flavours)
    deaths = list(dict(corner_families(flavour, contract, model=model))["deaths"])
    hung = run_case(stack, deaths[-1])
    assert any(isinstance(event, Result) and event.hung for event in hung.events)
    assert () == judge(hung).failed


@pytest.mark.parametrize("stack", FAULTY, ids=lambda stack: stack.__name__)
def test_faults_of_rollouts_in_parts_are_found(stack: Any) -> None:
    """The check of the fault fails."""
    ((flavour, contract, model),) = probe(stack, stack.flavours)
    corners = [
        case
        for _, cases in corner_families(flavour, contract, model=model)
        for case in list(cases)[:4]
    ]
    drawn = random_cases(3, 40, flavour=flavour, contract=contract, model=model)
    report = run_conformance(stack, cases=[*corners, *drawn], witness_dir=None)
    failed = {result.id for result in report.results if result.verdict is Verdict.FAIL}
    assert FAULTY[stack] in failed
