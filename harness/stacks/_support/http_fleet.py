"""The engines of a fleet behind fake SGLang or vLLM servers, and a router before them, in memory
and in virtual time.

For stacks that speak HTTP to their engines. Client and server are the real ones (the stack's own
client, uvicorn's protocol, the servers of ``rollproof.fakes.http``); only the wire between them is
in memory (``rollproof.simulation.memory_network``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollproof.core.records import Version
from rollproof.errors import UsageError
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.gateway import SessionRouter, Worker
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import SERVERS, serve_in_memory
from rollproof.simulation.memory_network import Network
from rollproof.simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet
    from rollproof.fakes.http.fake_server import FakeServer

__all__ = ["FleetBackend", "HttpFleet"]

_ROUTER_PORT = 29_999
_FIRST_PORT = 30_000
_UPDATE_LABEL: ContextVar[int | None] = ContextVar("rollproof_update_label", default=None)
"""The label of the weight update that the running task does; a server's tasks inherit it from their
client's.
"""


class FleetBackend(EngineBackend):
    """One engine of a fleet. What a stack loads through HTTP are the weights of the fleet's current
    update.
    """

    def __init__(self, fleet: Fleet, engine: FakeEngine, **fields: Any) -> None:
        case = fleet.case
        options = ServeOptions(
            flavour=case.flavour,
            model=case.model,
            engine=case.engine,
            seed=case.seed,
            max_length=engine.max_length,
            **fields,
        )
        super().__init__(options, existing=(engine, fleet.recorder))
        self._fleet = fleet
        self._ids = 0

    def new_id(self) -> str:
        # counted and not random, so that a case gives one trace
        self._ids += 1
        return f"{self.engine.server_id}-{self._ids}"

    async def load(self, name: str | None, label: Version, *, flush: bool) -> None:
        # `name` and `label` are the stack's own names of the weights
        update = _UPDATE_LABEL.get()
        version = self._fleet.weights_of(update)
        await self.engine.load(version, update, identity=version == self.engine.version)
        if flush:
            self.engine.reset_prefix_cache()


class HttpFleet:
    """Fake servers for all engines of a fleet, on the running virtual loop.

    Args:
        fleet: the fleet.
        server: ``vllm`` or ``sglang``; by default that of the flavour.
        options: fields of ``ServeOptions``.

    Attributes:
        urls: the servers' addresses by id.
        router: the address of the router, see ``FleetRouter``.
    """

    def __init__(self, fleet: Fleet, server: str | None = None, **options: Any) -> None:
        name = server or fleet.case.flavour.partition("-")[0]
        if name not in SERVERS:
            raise UsageError(
                f"Flavour {fleet.case.flavour!r} has no fake HTTP server: there are"
                f" {list(SERVERS)}."
            )
        make_app, _ = SERVERS[name]
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "stacks are judged on the virtual clock"
        ports = {server_id: _FIRST_PORT + number for number, server_id in enumerate(fleet.servers)}
        apps = {
            server_id: make_app(FleetBackend(fleet, engine, **options))
            for server_id, engine in fleet.servers.items()
        }
        self.urls: dict[str, str] = {
            server_id: f"http://127.0.0.1:{port}" for server_id, port in ports.items()
        }
        self.router: str = f"http://127.0.0.1:{_ROUTER_PORT}"
        router = FleetRouter(fleet, {url: apps[server_id] for server_id, url in self.urls.items()})
        loop.network = Network(loop)
        serve_in_memory(
            loop.network,
            {_ROUTER_PORT: router, **{ports[server_id]: app for server_id, app in apps.items()}},
        )

    def about(self, label: int | None) -> None:
        """Declare which update the running task is about to do: what it loads from now on are the
        weights published under ``label``.
        """
        _UPDATE_LABEL.set(label)


class FleetRouter(SessionRouter):
    """A router that counts calls with the fleet's balancer, and sends what does not sample to every
    server.
    """

    def __init__(self, fleet: Fleet, servers: Mapping[str, FakeServer]) -> None:
        super().__init__(
            servers,
            [
                Route("/finish_session", self._finish_session, methods=["GET", "POST"]),
                Route("/workers", self._list_workers, methods=["GET", "POST"]),
            ],
        )
        self._balancer = fleet.balancer
        self._ids = dict(zip(servers, fleet.servers, strict=True))

    async def other(self, scope: Scope, receive: Receive, send: Send) -> None:
        samples = scope["path"].endswith(("/generate", "/completions"))
        await (self.forward if samples else self.broadcast)(scope, receive, send)

    def living(self) -> list[Worker]:
        # without any, a dead one has to break the connection: a stack must not be answered
        return super().living() or list(self.workers.values())

    def candidates(self) -> list[Worker]:
        # who has left gets no new calls, not those of its sessions either, but still updates
        living, left = self.living(), self._balancer.left
        return [worker for worker in living if self._ids[worker.url] not in left] or living

    def rank(self, worker: Worker) -> tuple[int, ...]:
        return (self._balancer.load[self._ids[worker.url]],)

    def begin(self, worker: Worker) -> None:
        self._balancer.count(self._ids[worker.url])

    def end(self, worker: Worker) -> None:
        self._balancer.release(self._ids[worker.url])

    async def _finish_session(self, request: Request) -> Response:
        self.end_session(request.query_params.get("session_id", ""))
        return JSONResponse({"status": "ok"})

    async def _list_workers(self, _request: Request) -> Response:
        workers = [
            {"url": worker.url, "is_healthy": worker.app.alive} for worker in self.workers.values()
        ]
        return JSONResponse({"workers": workers})
