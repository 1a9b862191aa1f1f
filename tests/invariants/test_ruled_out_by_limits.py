"""What declared limits rule out is not applicable, with the limits as the reason."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.limits import RolloutLimits
from rollproof.fakes.clients.reference_clients import AsSampledTurns, ClientOptions
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
