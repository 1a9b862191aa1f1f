"""What the budget of several turns counts: each reading passes, unless a limit is declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.contract import Contract
from rollproof.core.limits import RolloutLimits
from rollproof.fakes.clients.reference_clients import AsSampledTurns, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import ENDING, case, request
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge


class _CountsSampled(AsSampledTurns):
    """Counts what the model sampled in all turns."""

    def spent(self, sample: PartialSample) -> int:
        return sum(self.loss_mask(sample).tolist())  # type: ignore[union-attr]

    def next_budget(self, sample: PartialSample) -> int | None:
        budget = sample.request.budget
        return None if budget is None else budget - self.spent(sample)

    def next_turn(self, sample: PartialSample) -> bool:
        turns = sample.request.turns
        if sample.turn >= len(turns) or self.next_budget(sample) == 0:
            return False
        answer = turns[sample.turn]
        sample.turn += 1
        sample.turn_sampled = 0
        self.observe(sample, answer)
        return True


class _CountsTurns(_CountsSampled):
    """Counts what the model sampled in this turn."""

    def spent(self, sample: PartialSample) -> int:
        return sample.turn_sampled


_CASES = [
    case(model=ENDING, requests=(request(max_tokens=budget, turns=((21, 22), (23,))),), seed=seed)
    for budget in (4, 6, 9)
    for seed in range(6)
]


@pytest.mark.parametrize("factory", [AsSampledTurns, _CountsSampled, _CountsTurns])
def test_each_reading_of_a_budget_passes(factory: type[AsSampledTurns]) -> None:
    """The whole response, all sampled tokens, and those of a turn: frameworks do each."""
    assert set() == {name for each in _CASES for name in judge(run_case(factory, each)).failed}


@pytest.mark.parametrize("factory", [_CountsSampled, _CountsTurns])
def test_a_declared_limit_counts_the_environment(factory: type[AsSampledTurns]) -> None:
    """``RolloutLimits.response`` says what it counts, and is exceeded under both other readings."""
    limits = RolloutLimits(response=6)

    class Declared(factory):  # type: ignore[misc, valid-type]
        def declared(self, fleet: Fleet) -> Contract:
            return replace(super().declared(fleet), limits=limits)

    limited = [
        replace(each, requests=tuple(replace(one, limit=6) for one in each.requests))
        for each in _CASES
    ]
    failed = {name for each in limited for name in judge(run_case(Declared, each)).failed}
    assert "stitch.limits-kept" in failed
