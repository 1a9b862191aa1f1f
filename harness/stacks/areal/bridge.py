"""AReaL's ``InfBridge``: the client of its inference service, one before each server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks.areal.areal_settings import (
    contract_of,
    disk_requests,
    engine_of,
    model_request,
    rollout_of,
)
from rollproof.stacks.areal.inference_engine import Answer
from rollproof.stacks.areal.upstream import AReaL

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["BridgeSubject"]

_PATIENCE = 3600.0
"""Seconds that a call may take: the service's default of 120 is less than a step of 1 s a token
leaves room for.
"""


class BridgeSubject:
    """One request is one ``agenerate`` of the bridge whose turn it is. Updates pause and resume
    through the bridges themselves.
    """

    contract: Contract

    def __init__(self, areal: AReaL) -> None:
        self._areal = areal

    def start(self, fleet: Fleet) -> None:
        """A bridge before each server."""
        from rollproof.stacks._support.http_fleet import HttpFleet

        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        self.contract = contract_of(fleet)
        self._fleet = fleet
        self._http = HttpFleet(fleet)
        backend = self._areal.bridge_backends[engine_of(fleet)]
        with without_certificates():
            self._bridges: list[Any] = [
                self._areal.bridge(
                    backend(),
                    url,
                    self._areal.pause_state(),
                    request_timeout=_PATIENCE,
                    version=fleet.case.first_version,
                )
                for url in self._http.urls.values()
            ]
        self._turns = count()
        self._trainer = asyncio.Lock()

    async def rollout(self, request: Request) -> Answer:
        """Raises what ``agenerate`` raises."""
        bridge = self._bridges[next(self._turns) % len(self._bridges)]
        return Answer(
            request=request,
            response=await bridge.agenerate(model_request(self._areal, self._fleet, request)),
        )

    async def update_weights(self, version: int | None) -> None:
        """Pause, load, resume, and the version last, as AReaL's trainer has it done; one update at
        a time.
        """
        async with self._trainer:
            self._http.about(version)
            await self._everywhere([bridge.pause() for bridge in self._bridges])
            await self._load(version)
            await self._everywhere([bridge.resume() for bridge in self._bridges])
            if version is not None:
                for bridge in self._bridges:
                    bridge.set_version(version)

    async def _everywhere(self, calls: Sequence[Coroutine[Any, Any, None]]) -> None:
        """What fails is passed over unless all fail
        (``inference_service/controller/controller.py:1419``).
        """
        failed = [
            one
            for one in await asyncio.gather(*calls, return_exceptions=True)
            if isinstance(one, Exception)
        ]
        if len(failed) == len(calls):
            raise failed[0]

    async def _load(self, version: int | None) -> None:
        """The gateway of weight updates answers a transfer that broke with a status, which its
        caller logs and passes over.

        ``weight_update/gateway/app.py:683`` and ``training_service/controller/controller.py:1012``.
        """
        requests = disk_requests(
            self._areal, self._areal.backends[engine_of(self._fleet)](), version
        )
        for request in requests:
            await asyncio.gather(
                *(bridge._send_request(request) for bridge in self._bridges), return_exceptions=True
            )

    def to_record(self, native: Answer) -> Rollout:
        return rollout_of(native.request, native.response, self._fleet.case.model)

    async def stop(self) -> None:
        """Close the bridges."""
        for bridge in self._bridges:
            await bridge.aclose()
