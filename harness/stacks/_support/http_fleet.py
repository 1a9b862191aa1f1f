"""HTTP fleet: the engines of a fleet behind the HTTP faces of their servers, and a router before
them, in memory and in virtual time.

For stacks whose rollout code speaks HTTP. Client and server are the real ones (whatever client the
stack brings, uvicorn's own protocol, the faces of ``rollproof.fakes.http``); only the wire between
them is ours (``rollproof.simulation.memory_network``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse
from uvicorn.server import ServerState

from rollproof.core.records import Version
from rollproof.errors import UsageError
from rollproof.fakes.http.engine_backend import Backing, ServeOptions
from rollproof.fakes.http.resets import Cut
from rollproof.fakes.http.serving import FACES
from rollproof.simulation.memory_network import Network
from rollproof.simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["FleetBacking", "HttpFleet"]

_ROUTER = 29_999
_FIRST = 30_000
_ALIVE_FOR = 75
"""Seconds for which an idle connection is kept: longer than any client keeps its own, so that none
meets a server that hangs up.
"""

_LOADING: ContextVar[int | None] = ContextVar("rollproof_loading", default=None)
"""The label of the update that the running task does; a server's tasks inherit it from their
client's.
"""

App: TypeAlias = Any
"""An ASGI application."""


class FleetBacking(Backing):
    """One engine of a fleet, for a face. What a stack loads through HTTP are the weights that the
    fleet's update is about.
    """

    def __init__(self, fleet: Fleet, engine: FakeEngine, **others: Any) -> None:
        case = fleet.case
        options = ServeOptions(
            flavour=case.flavour,
            model=case.model,
            engine=case.engine,
            seed=case.seed,
            max_length=engine.max_length,
            **others,
        )
        super().__init__(options, behind=(engine, fleet.recorder))
        self._of = fleet
        self._given = 0

    def new_id(self) -> str:
        """Counted, so that a case gives one trace."""
        self._given += 1
        return f"{self.engine.server_id}-{self._given}"

    async def load(self, name: str | None, label: Version, *, flush: bool) -> None:
        """Load the weights of the update that runs, and publish its label; ``name`` and ``label``
        are how the stack calls them.
        """
        loading = _LOADING.get()
        version = self._of.weights_of(loading)
        await self.engine.load(version, loading, identity=version == self.engine.version)
        if flush:
            self.engine.reset_prefix_cache()


class HttpFleet:
    """Faces of all servers of ``fleet`` on the running virtual loop. ``face`` is ``vllm`` or
    ``sglang``; default: that of the flavour.

    ``urls`` are the servers' addresses by id, ``router`` that of a router: it keeps a session
    (header ``X-Session-ID`` or ``X-SMG-Routing-Key``) with its server, gives other calls to the
    least loaded one, leaves dead ones out, sends what is no generation to every server, and answers
    with what the last of them said. ``options`` are those of ``ServeOptions``.
    """

    def __init__(self, fleet: Fleet, face: str | None = None, **options: Any) -> None:
        name = face or fleet.case.flavour.partition("-")[0]
        if name not in FACES:
            raise UsageError(
                f"Flavour {fleet.case.flavour!r} has no HTTP face: faces are {list(FACES)}."
            )
        make, _ = FACES[name]
        self._fleet = fleet
        self._sessions: dict[str, str] = {}
        self.backings: Mapping[str, FleetBacking] = {
            server: FleetBacking(fleet, engine, **options)
            for server, engine in fleet.servers.items()
        }
        self._apps: Mapping[str, App] = {
            server: _mortal(make(backing), partial(getattr, backing.engine, "alive"))
            for server, backing in self.backings.items()
        }
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "stacks are judged on the virtual clock"
        loop.network = network = Network(loop)
        self.urls: dict[str, str] = {}
        for port, (server, app) in enumerate(self._apps.items(), _FIRST):
            network.listen(port, partial(_connection, loop, app))
            self.urls[server] = f"http://127.0.0.1:{port}"
        network.listen(_ROUTER, partial(_connection, loop, self._route))
        self.router: str = f"http://127.0.0.1:{_ROUTER}"

    def about(self, label: int | None) -> None:
        """Say which update the running task is about to do: what it loads from now on are the
        weights published under ``label``.
        """
        _LOADING.set(label)

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:
        """The router's application."""
        if scope["path"] == "/finish_session":
            self._sessions.pop(_asked(scope, "session_id"), None)
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        if scope["path"] == "/workers":
            await JSONResponse({"workers": self._workers()})(scope, receive, send)
            return
        if not _generates(scope["path"]):
            await self._everywhere(scope, receive, send)
            return
        server = self._choose(_session(scope))
        try:
            await self._apps[server](scope, receive, send)
        finally:
            self._fleet.balancer.release(server)

    def _workers(self) -> list[dict[str, Any]]:
        """What SGLang's gateway says of the servers that it knows: all of them, and whether each is
        healthy.
        """
        return [
            {"url": url, "is_healthy": self._fleet.servers[server].alive}
            for server, url in self.urls.items()
        ]

    async def _everywhere(self, scope: Any, receive: Any, send: Any) -> None:
        body = await _read(receive)
        living = [name for name, engine in self._fleet.servers.items() if engine.alive]
        for name in living[:-1]:
            await self._apps[name](dict(scope), _again(body), _unheard)
        last = living[-1] if living else next(iter(self._apps))
        await self._apps[last](scope, _again(body), send)

    def _choose(self, session: str | None) -> str:
        dead = [name for name, engine in self._fleet.servers.items() if not engine.alive]
        chosen = self._fleet.balancer.acquire(dead)
        kept = self._sessions.get(session) if session else None
        if kept is not None and kept not in dead and kept != chosen:
            self._fleet.balancer.release(chosen)
            others = [name for name in self._fleet.servers if name != kept]
            chosen = self._fleet.balancer.acquire(others)
        if session:
            self._sessions[session] = chosen
        return chosen


class _Cut(BaseException):
    """The connection is to break."""


def _mortal(app: App, alive: Callable[[], bool]) -> App:
    """``app``, which says nothing any more where its engine has died or its reply is lost."""

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        async def heard(message: Any) -> None:
            if message is Cut.message or not alive():
                raise _Cut
            await send(message)

        await app(
            {**scope, "extensions": {**scope.get("extensions", {}), "rollproof.cut": {}}},
            receive,
            heard,
        )

    return answered


def _connection(loop: asyncio.AbstractEventLoop, app: App) -> asyncio.Protocol:
    """Uvicorn's protocol for one connection to ``app``."""
    config = _config()
    protocol: Any = config.http_protocol_class(
        config=config, server_state=ServerState(), app_state={}, _loop=loop
    )

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except (
            _Cut,
            asyncio.CancelledError,
        ):  # cancelled: the case is over, and nobody is there to read uvicorn's complaint
            protocol.transport.abort()
            await asyncio.sleep(
                0
            )  # until the protocol knows: it answers for an application that ends without having answered

    protocol.app = answered
    return protocol  # type: ignore[no-any-return]  # uvicorn has two of them


@lru_cache(maxsize=1)
def _config() -> Any:
    """Read-only, and made once."""
    config = uvicorn.Config(
        _nothing,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        date_header=False,
        timeout_keep_alive=_ALIVE_FOR,
    )
    config.load()
    return config


async def _nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """The application that every connection replaces by its own."""


def _generates(path: str) -> bool:
    """Whether a request at ``path`` asks for tokens."""
    return path.endswith(("/generate", "/completions"))


def _session(scope: Any) -> str | None:
    """The session that a request names, if any."""
    named = [
        value.decode()
        for name, value in scope["headers"]
        if name in (b"x-session-id", b"x-smg-routing-key")
    ]
    return named[0] if named else None


def _asked(scope: Any, name: str) -> str:
    """A parameter of the query, or nothing."""
    return str(QueryParams(scope["query_string"]).get(name, ""))


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _unheard(_message: Any) -> None:
    """What all servers but the last say is not passed on."""
