"""Conversations: unusual correct multi-turn stacks are left alone, and faulty ones are found."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.case import ActionKind, Case, Model
from rollproof.core.records import Request
from rollproof.fakes.clients.reference_clients import AsSampledTurns
from rollproof.verification.contract_probe import probe
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.schedules.drawing import Limits, random_cases
from tests.support.conversation_stacks import CORRECT, FAULTY

# Small cases, since what is tested are turns and masks: a few hundred of them cost a second.
FLAVOURS = ("vllm", "sglang")
KINDS = (ActionKind.ABORT, ActionKind.SYNC, ActionKind.LOSE_REPLY, ActionKind.LATE_REPLY)
MET = ("stitch.", "lifecycle.cut-turns", "lifecycle.ended-turns")
LIMITS = Limits(requests=2, prompt=4, response=14, actions=3, servers=2, turns=3, layers=1)


def verdicts(stack: Any, cases: int, *wanted: str) -> list[tuple[str, str]]:
    """The checks of ``stack`` with one of the ``wanted`` verdicts over random conversations, and
    the reasons. A check of situations that such cases need not meet may stay unknown.
    """
    drawn = [
        case
        for flavour, contract, model in probe(stack, FLAVOURS)
        for case in random_cases(
            7,
            cases // len(FLAVOURS),
            flavour=flavour,
            contract=contract,
            model=model,
            kinds=KINDS,
            limits=LIMITS,
        )
    ]
    report = run_conformance(stack, cases=drawn, witness_dir=None)
    return [
        (result.id, result.reason)
        for result in report.results
        if result.verdict in wanted and (result.verdict == "fail" or result.id.startswith(MET))
    ]


@pytest.mark.parametrize("stack", CORRECT, ids=lambda stack: stack.__name__)
def test_unusual_conversations_are_left_alone(stack: Any) -> None:
    """No finding, and no check of conversations without a verdict."""
    assert [] == verdicts(stack, 200, "fail", "unknown")


@pytest.mark.parametrize("stack", FAULTY, ids=lambda stack: stack.__name__)
def test_faulty_conversations_are_found(stack: Any) -> None:
    """The check that says it fails, and no other one."""
    assert [FAULTY[stack]] == [check for check, _ in verdicts(stack, 100, "fail")]


def test_answers_that_share_a_beginning_do_not_swap_twins() -> None:
    """Requests of one prompt whose models and environments begin alike: each call continues its
    own request.
    """
    twins = tuple(
        Request(request_id=name, prompt_ids=(2, 100, 117), max_tokens=budget, group="g", turns=said)
        for name, budget, said in (("r0", 3, ((117,),)), ("r1", 5, ((117, 134, 151),)))
    )
    case = Case(
        flavour="vllm",
        requests=twins,
        arrivals=(19.5, 9.5),
        seed=1684472689,
        model=Model(num_layers=1, moe_layers=(0,), num_experts=2, top_k=2, eos_every=3),
    )
    report = run_conformance(AsSampledTurns, cases=[case], witness_dir=None)
    assert [] == [result.id for result in report.results if result.verdict == "fail"]
