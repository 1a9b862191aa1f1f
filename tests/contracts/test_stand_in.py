"""The client that keeps any contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.contracts.presets import contract_of
from rollproof.contracts.stand_in import StandIn
from rollproof.core.records import Request, Rollout
from rollproof.fakes.engine.fleet import Fleet
from rollproof.judging.checks import Verdict
from rollproof.verification.rollouts import cases_for, run_conformance


@pytest.mark.parametrize("stack", ["prime_rl", "verl"])
def test_its_samples_carry_sampling_masks_if_the_contract_says_so(stack: str) -> None:
    """Together with everything else that the contract declares."""
    declared = replace(contract_of(stack), sampling_masks=True)

    class Subject:
        flavours = ("vllm",)
        contract = declared

        def start(self, fleet: Fleet) -> None:
            self.client = StandIn(fleet, declared)

        async def rollout(self, request: Request) -> Rollout | None:
            return await self.client.generate(request)

        async def update_weights(self, version: int | None) -> None:
            await self.client.update_weights(version)

        def to_record(self, native: Rollout) -> Rollout:
            return native

        def stop(self) -> None:
            pass

    cases = cases_for(Subject, profile="pr", seed=0, thin=60)
    report = run_conformance(Subject, cases=cases, only=["stitch"], canary=False)
    assert () == report.failed
    verdicts = {result.id: result.verdict for result in report.results}
    assert Verdict.PASS == verdicts["stitch.sampling-masks-paired"]
