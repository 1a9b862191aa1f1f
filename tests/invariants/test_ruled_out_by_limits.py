"""What declared limits rule out is not applicable, with the limits as the reason."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.limits import RolloutLimits
from rollproof.fakes.clients.reference_clients import AsSampled, AsSampledTurns, ClientOptions
from rollproof.judging.checks import Verdict
from rollproof.verification.rollouts import run_conformance

_ANSWERS = (
    "stitch.environment-tokens",
    "stitch.mask-environment",
    "lifecycle.cut-turns-not-answered",
)
_BUDGETS, _PARTS = "stitch.budget-used", "lifecycle.partial-off-honoured"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"response": 1}, {*_ANSWERS, _BUDGETS, _PARTS}),
        ({"turn_tokens": 1}, {_PARTS}),
        ({"length": 4}, {_BUDGETS}),
        ({"response": 6}, set()),
    ],
    ids=["response 1", "turn 1", "length 4", "response 6"],
)
def test_small_limits_leave_nothing_unknown(limits: dict[str, Any], expected: set[str]) -> None:
    """A correct stack with small limits has a verdict on every check, and one that its limits rule
    out says so; a size that allows the situation is judged.
    """

    class Limited(AsSampledTurns):
        options = ClientOptions(multi_turn=True, limits=RolloutLimits(**limits))

    report = run_conformance(
        Limited, flavours=("vllm",), only=(*_ANSWERS, _BUDGETS, _PARTS), witness_dir=None
    )
    assert expected == {
        result.id
        for result in report.results
        if result.verdict is Verdict.NOT_APPLICABLE and "declared limits" in result.reason
    }
    assert set() == {
        result.id
        for result in report.results
        if result.verdict not in (Verdict.NOT_APPLICABLE, Verdict.PASS)
    }


@pytest.mark.parametrize("limits", [{"length": 2}, {"context": 2}, {"length": 3}], ids=str)
@pytest.mark.parametrize("multi_turn", [False, True])
def test_room_for_one_token_leaves_nothing_unknown(
    limits: dict[str, Any], multi_turn: bool
) -> None:
    """Under the smallest totals every check has a verdict: cases have prompts that fit."""

    class Limited(AsSampledTurns if multi_turn else AsSampled):  # type: ignore[misc]
        options = ClientOptions(multi_turn=multi_turn, limits=RolloutLimits(**limits))

    report = run_conformance(Limited, flavours=("vllm",), witness_dir=None)
    assert 0 == report.exit_code
    assert [] == [
        (result.id, result.reason)
        for result in report.results
        if result.verdict in (Verdict.UNKNOWN, Verdict.FAIL)
    ]
