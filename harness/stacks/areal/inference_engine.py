"""AReaL's ``RemoteInfEngine.agenerate``, the client that its trainers roll out with, as a
subject.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.subjects import StackOutput, StackSubject
from rollproof.stacks.areal.conversions import (
    contract_of,
    disk_requests,
    engine_of,
    model_request,
    returns_routes,
    rollout_of,
)
from rollproof.stacks.areal.upstream import AReaL

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["AReaLSubject"]


class _Executor:
    """AReaL's ``WorkflowExecutor``, which runs episodes in threads of its own, as far as
    ``agenerate`` calls it.
    """

    paused = False

    def is_paused(self) -> bool:
        return self.paused


class AReaLSubject(StackSubject):
    """One request is one ``agenerate``.

    AReaL runs the calls of a weight update in a loop, a thread and a process of their own, where no
    virtual time passes. Here its backend makes the same requests and its ``arequest_with_retry``
    sends them, in the order of its trainer, which does one update at a time: rollouts paused,
    servers paused (which aborts what runs), weights loaded, servers resumed, the version set,
    rollouts resumed (``trainer/rl_trainer.py:754``, ``engine/fsdp_engine.py:1665``).
    """

    def __init__(self, areal: AReaL) -> None:
        self._areal = areal

    def start(self, fleet: Fleet) -> None:
        """Make the servers, and an engine that knows their addresses, without its health polls and
        its executor.
        """
        # AReaL's pause ends what runs; its client resumes it
        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        self.contract: Contract = contract_of(fleet)
        self._fleet = fleet
        self._http = HttpFleet(fleet)
        backend = self._areal.backends[engine_of(fleet)]()
        config = self._areal.config(
            backend=f"{engine_of(fleet)}:d1", return_routed_experts=returns_routes(fleet)
        )
        self._executor = _Executor()
        self._update_lock = asyncio.Lock()
        self._engine = self._areal.engine(config, backend)
        # `initialize` would poll their health and start the executor
        self._engine.addresses = [url.removeprefix("http://") for url in self._http.urls.values()]
        self._engine._workflow_executor = self._executor
        self._engine._initialized = True
        self._engine.set_version(fleet.case.first_version)

    async def rollout(self, request: Request) -> StackOutput:
        """Call ``agenerate``. Raises what it raises."""
        response = await self._engine.agenerate(model_request(self._areal, self._fleet, request))
        return StackOutput(request=request, output=response)

    async def update_weights(self, version: int | None) -> None:
        """Update in the order of AReaL's trainer. Raises what a server reports; nothing is undone
        then, as in AReaL.
        """
        async with self._update_lock:
            self._http.about(version)
            backend = self._engine.backend
            self._executor.paused = True
            await self._everywhere(backend.get_pause_request())
            for request in disk_requests(self._areal, backend, version):
                await self._everywhere(request)
            await self._everywhere(backend.get_resume_request())
            if version is not None:
                self._engine.set_version(version)
            self._executor.paused = False

    def to_record(self, native: StackOutput) -> Rollout:
        return rollout_of(native.request, native.output, self._fleet.case.model)

    async def _everywhere(self, request: Any) -> None:
        calls = (
            self._areal.request(
                addr=address,
                endpoint=request.endpoint,
                payload=request.payload,
                method=request.method,
                max_retries=self._engine.config.request_retries,
                timeout=self._engine.config.request_timeout,
            )
            for address in self._engine.addresses
        )
        await asyncio.gather(*calls)
