"""AReaL's ``InfBridge``: the client of its inference service, one before each server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks._support.subjects import StackOutput, StackSubject
from rollproof.stacks.areal.conversions import (
    contract_of,
    disk_requests,
    engine_of,
    model_request,
    rollout_of,
)
from rollproof.stacks.areal.upstream import AReaL

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["BridgeSubject"]

_TIMEOUT = 3600.0
"""Limit of a call in seconds. The service's default of 120 is too short for engines of 1 s a token.
"""


class BridgeSubject(StackSubject):
    """One request is one ``agenerate`` of the next bridge in turn. Updates pause and resume through
    the bridges themselves.
    """

    def __init__(self, areal: AReaL) -> None:
        self._areal = areal

    def start(self, fleet: Fleet) -> None:
        """Put a bridge in front of each server."""
        # as in AReaLSubject
        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        self.contract: Contract = contract_of(fleet)
        self._fleet = fleet
        self._http = HttpFleet(fleet)
        backend = self._areal.bridge_backends[engine_of(fleet)]
        with without_certificates():
            self._bridges: list[Any] = [
                self._areal.bridge(
                    backend(),
                    url,
                    self._areal.pause_state(),
                    request_timeout=_TIMEOUT,
                    version=fleet.case.first_version,
                )
                for url in self._http.urls.values()
            ]
        self._turns = count()
        self._update_lock = asyncio.Lock()

    async def rollout(self, request: Request) -> StackOutput:
        """Call ``agenerate``. Raises what it raises."""
        bridge = self._bridges[next(self._turns) % len(self._bridges)]
        response = await bridge.agenerate(model_request(self._areal, self._fleet, request))
        return StackOutput(request=request, output=response)

    async def update_weights(self, version: int | None) -> None:
        """Pause, load, resume, and set the version last, as AReaL's trainer does; one update at a
        time.
        """
        async with self._update_lock:
            self._http.about(version)
            await self._everywhere([bridge.pause() for bridge in self._bridges])
            await self._load(version)
            await self._everywhere([bridge.resume() for bridge in self._bridges])
            # an update without a label leaves the bridges' counters as they are
            if version is not None:
                for bridge in self._bridges:
                    bridge.set_version(version)

    async def _everywhere(self, calls: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run ``calls``, and ignore failures unless all fail
        (``inference_service/controller/controller.py:1419``).
        """
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(errors) == len(calls):
            raise errors[0]

    async def _load(self, version: int | None) -> None:
        """Load on every server, and ignore failures: the gateway of weight updates answers a failed
        transfer with a status (``weight_update/gateway/app.py:683``), which its caller only logs
        (``training_service/controller/controller.py:1012``).
        """
        requests = disk_requests(
            self._areal, self._areal.backends[engine_of(self._fleet)](), version
        )
        for request in requests:
            await asyncio.gather(
                *(bridge._send_request(request) for bridge in self._bridges), return_exceptions=True
            )

    def to_record(self, native: StackOutput) -> Rollout:
        return rollout_of(native.request, native.output, self._fleet.case.model)

    async def stop(self) -> None:
        """Close the bridges."""
        for bridge in self._bridges:
            await bridge.aclose()
