"""Samples of one prompt whose calls share a handle: an abort of one ends its siblings' calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.case import ActionKind
from rollproof.core.contract import Contract
from rollproof.core.records import EngineOutput
from rollproof.fakes.clients.reference_clients import AsSampled, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.judging.checks import Verdict
from rollproof.verification.rollouts import run_conformance

_CHECK = "lifecycle.abort-hits-target"
_GROUP = tuple(request(f"r{i}", (2, 3, 4), group="g0") for i in range(3))
_PATIENCE = 2.5


class _StopsSlowCalls(AsSampled):
    """Aborts a call of the first sample that takes long, by its handle, and resumes it."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        running = asyncio.ensure_future(super().call(server_id, sample, sent, budget))
        handle = self.handle(sample)
        if sample.request.request_id == "r0":
            await asyncio.wait([running], timeout=_PATIENCE)
            if not running.done():
                await self.fleet.servers[server_id].abort(handle)
        return await running

    def handle(self, sample: PartialSample) -> str:
        return f"{sample.request.request_id}#{len(sample.response)}#"


class _SharesAHandle(_StopsSlowCalls):
    """Names its calls by the group, so that the siblings' calls end too."""

    def handle(self, sample: PartialSample) -> str:
        return sample.request.group or super().handle(sample)


class _LivesTogether(_SharesAHandle):
    """Does so, and says so."""

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), group_aborts=True)


class _ForgetsASibling(_LivesTogether):
    """Takes the end of a sibling's call for the end of its sample."""

    def resumes(self, sample: PartialSample) -> bool:
        return sample.request.request_id != "r1"

    def aborts_surface(self, fleet: Fleet) -> bool:
        return True

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), abort_surfaces=False)


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (_StopsSlowCalls, set()),
        (_LivesTogether, set()),
        (_SharesAHandle, {_CHECK}),
        (_ForgetsASibling, {"lifecycle.aborts-do-not-surface"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_abort_by_a_shared_handle_is_found(stack: Any, expected: set[str]) -> None:
    """Handles of their own pass, and a shared one if the contract says that siblings live together;
    what becomes of the siblings then is judged.
    """
    cases = [
        case(requests=_GROUP),
        case(act(ActionKind.SYNC, 3), requests=_GROUP, servers=2),
        case(act(ActionKind.ABORT, 1), requests=_GROUP),
    ]
    report = run_conformance(stack, cases=cases, witness_dir=None)
    assert expected == {result.id for result in report.results if result.verdict is Verdict.FAIL}
    verdict = next(result.verdict for result in report.results if result.id == _CHECK)
    assert Verdict.UNKNOWN != verdict
