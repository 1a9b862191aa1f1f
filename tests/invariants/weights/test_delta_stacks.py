"""Correct stacks whose updates bring deltas are clean, however they repair what broke."""

from __future__ import annotations

import pytest

from rollproof.core.records import Version
from rollproof.fakes.clients.delta_clients import AsSampledDeltas
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.judging.checks import Verdict
from rollproof.verification.contract_probe import probe
from rollproof.verification.rollouts import cases_for
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import corner_families
from rollproof.verification.traces import judge
from tests.support.delta_stacks import AnchorsOnly, RepeatsDeltas


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
@pytest.mark.parametrize("stack", [AsSampledDeltas, RepeatsDeltas, AnchorsOnly])
def test_correct_stacks_are_clean(stack: type[AsSampledDeltas], flavour: str) -> None:
    """No check fails; those of deltas and checksums are exercised where the stack sends deltas."""
    passed: set[str] = set()
    ((_, contract, model),) = probe(stack, [flavour])
    families = dict(corner_families(flavour, contract, model=model))
    sample = cases_for(stack, profile="pr", seed=0, flavours=[flavour], thin=40)
    for case in (*families["delta updates"], *sample):
        judgement = judge(run_case(stack, case))
        assert () == judgement.failed, case
        passed |= {result.id for result in judgement.results if result.verdict is Verdict.PASS}
    sends = {"weights.delta-base", "weights.partial-update-unserved"}
    checked = {"weights.checksums-agree", "weights.checksums-can-differ"}
    assert (checked if stack is AnchorsOnly else sends | checked) == passed & (sends | checked)


class _BreaksTwice(AsSampledDeltas):
    """The first delta to a server breaks, and so do the tensors that are to repair it."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._broken: set[str] = set()

    async def load_delta(self, server: FakeEngine, weights: int, base: int, label: Version) -> None:
        first = server.server_id not in self._broken
        self._broken.add(server.server_id)
        server.fail_next_load = first
        try:
            await super().load_delta(server, weights, base, label)
        finally:
            server.fail_next_load = first


def test_a_repair_that_breaks_is_tried_again() -> None:
    """The server serves no call, and gets no delta, before it has all tensors."""
    ((_, contract, model),) = probe(_BreaksTwice, ["vllm"])
    families = dict(corner_families("vllm", contract, model=model))
    for case in families["delta updates"]:
        assert () == judge(run_case(_BreaksTwice, case)).failed, case
