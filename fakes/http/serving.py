"""Serve fake servers: on ports of this machine, or on the in-memory network of a virtual loop."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from rollproof.core.events.base import Event
from rollproof.core.trace import TraceSink
from rollproof.errors import RollproofError, UsageError
from rollproof.fakes.http.access import Access, Guard
from rollproof.fakes.http.connections import MAX_CONNECTIONS, Connection
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import FakeServer
from rollproof.fakes.http.fault_plan import FaultPlan, plan_summary
from rollproof.fakes.http.gateway import RouterKind, make_router
from rollproof.fakes.http.listening import listening, stopped_by_signal
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.sglang.server import sglang_app
from rollproof.fakes.http.vllm.server import vllm_app
from rollproof.simulation.memory_network import Network

__all__ = [
    "SERVERS",
    "FlushingSink",
    "ServingThread",
    "address_of",
    "bound_socket",
    "routing",
    "serve_forever",
    "serve_in_memory",
    "serving",
]

SERVERS: Mapping[str, tuple[Callable[[EngineBackend], FakeServer], str]] = {
    "sglang": (sglang_app, "sglang"),
    "vllm": (vllm_app, "vllm"),
}
"""Fake servers by name: the application, and the flavour of its engine."""
_FLUSH_SECONDS = 1.0
"""A server that is killed loses the events of at most this time."""
_BACKLOG = 2048
"""Connections that may wait; uvicorn's own number."""
_BATCH = 64
"""Events that are written at once."""
_KEEP_ALIVE_IN_MEMORY = 75
"""Seconds for which an idle connection stays open: longer than any client keeps its own, so that no
client meets a server that hangs up.
"""


def bound_socket(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on ``port`` of ``host`` (0: any free one). Who connects waits
    until it is served.

    Raises:
        UsageError: the port is in use, or the host is none of this machine.
    """
    if not 0 <= port <= 65_535:
        raise UsageError(f"--port must be 0 to 65535, not {port}.")
    # asyncio sets TCP_NODELAY only on sockets that name their protocol; without it the events of a
    # stream wait 40 ms for each other
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # or a server that is started again could not bind while old connections are in TIME_WAIT
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                f"Cannot listen on {host}, port {port}: {error.strerror or error}."
            ) from error
        raise UsageError(
            f"Port {port} on {host} is in use ({error.strerror}): choose another, or 0 for a"
            " free one."
        ) from error
    return bound


@asynccontextmanager
async def serving(
    server: str,
    options: ServeOptions | None = None,
    *,
    sinks: Iterable[TraceSink] = (),
    port: int = 0,
    plan: FaultPlan | None = None,
) -> AsyncIterator[tuple[str, EngineBackend]]:
    """Serve one fake server in the running loop; yields its address and its engine.

    Args:
        server: a key of ``SERVERS``.
        options: what the server is; by default a small model of its newest release.
        sinks: take every event of the trace as it is recorded.
        port: the port; 0 for a free one.
        plan: what goes wrong.
    """
    make_app, flavour = _server(server)
    backend = EngineBackend(options or ServeOptions(flavour=flavour), sinks, plan=plan)
    with bound_socket(port) as bound:
        async with _listening([(bound, make_app(backend))]):
            yield address_of(bound), backend


@asynccontextmanager
async def routing(
    server: str,
    options: ServeOptions,
    workers: int,
    kind: RouterKind = RouterKind.GATEWAY,
    *,
    sinks: Iterable[TraceSink] = (),
    plan: FaultPlan | None = None,
) -> AsyncIterator[tuple[str, Mapping[str, EngineBackend]]]:
    """Serve ``workers`` fake servers and a router before them; yields the router's address, and the
    engines by the addresses of their servers.
    """
    backends = _sharing_a_trace(options, workers, sinks, keep=True, plan=plan)
    sockets = [bound_socket() for _ in range(workers + 1)]
    try:
        async with _listening(_with_router(server, backends, sockets, kind)):
            yield (
                address_of(sockets[0]),
                dict(zip(map(address_of, sockets[1:]), backends, strict=True)),
            )
    finally:
        for bound in sockets:
            bound.close()


def serve_forever(
    server: str,
    options: ServeOptions,
    sockets: Sequence[socket.socket],
    *,
    sinks: Iterable[TraceSink] = (),
    access: Access | None = None,
    access_log: bool = True,
    plan: FaultPlan | None = None,
    kind: RouterKind = RouterKind.GATEWAY,
) -> list[str]:
    """Serve until SIGINT or SIGTERM; requests in flight are aborted and answered.

    Args:
        server: a key of ``SERVERS``.
        options: what each server is.
        sockets: one for a single server; of several the first is the router's.
        sinks: take every event; they are flushed every second if they can be.
        access: whom to serve; by default programs of this machine.
        access_log: log each request.
        plan: what goes wrong.
        kind: the router to emulate.

    Returns:
        What became of the plan: a line for each fault and action.

    Raises:
        RollproofError: a sink failed; the server has stopped for that.
    """

    async def run() -> list[str]:
        return await _serve_until(
            stopped_by_signal(),
            server,
            options,
            sockets,
            sinks,
            access=access,
            access_log=access_log,
            plan=plan,
            kind=kind,
            ready=freeze,
        )

    def freeze(_backends: object) -> None:
        # What is there now stays to the end: the collector need not look at it at every few
        # requests. vLLM and SGLang start their servers in the same way.
        gc.collect()
        gc.freeze()

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(run())
    finally:
        gc.unfreeze()


class ServingThread:
    """Fake servers in a thread of this process, until ``stop``; arguments as in ``serve_forever``.

    Attributes:
        urls: the addresses: of several the first is the router's.

    Raises:
        UsageError: the server does not exist.
    """

    def __init__(
        self,
        server: str,
        options: ServeOptions,
        sockets: Sequence[socket.socket],
        *,
        sinks: Iterable[TraceSink] = (),
        plan: FaultPlan | None = None,
        kind: RouterKind = RouterKind.GATEWAY,
    ) -> None:
        _server(server)
        self.urls: Sequence[str] = [address_of(bound) for bound in sockets]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._backends: Sequence[EngineBackend] = ()
        self._summary: list[str] = []
        self._error: BaseException | None = None
        ready = threading.Event()

        async def run() -> list[str]:
            self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()

            def answers(backends: Sequence[EngineBackend]) -> None:
                self._backends = backends
                ready.set()

            return await _serve_until(
                self._stopping,
                server,
                options,
                sockets,
                sinks,
                plan=plan,
                kind=kind,
                ready=answers,
            )

        def serve() -> None:
            try:
                with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                    self._summary = runner.run(run())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that stops it
                self._error = error
            finally:
                ready.set()

        # a daemon: a program that ends without stopping it must not hang
        self._thread = threading.Thread(target=serve, name="rollproof-servers", daemon=True)
        self._thread.start()
        ready.wait()
        if self._error is not None:
            raise self._error

    def update_weights(self, name: str) -> None:
        """Bring the weights ``name`` to every server, as ``EngineBackend.update_weights`` does.

        Raises:
            UsageError: the servers have ended.
        """
        if self._loop is None or not self._thread.is_alive():
            raise UsageError("The servers have ended: their weights cannot be updated.")
        update = self._backends[0].update_weights(name)
        asyncio.run_coroutine_threadsafe(update, self._loop).result()

    def stop(self) -> list[str]:
        """Abort what runs, end the servers, and return what became of the plan.

        Raises:
            RollproofError: a sink failed.
        """
        if self._loop is not None and self._stopping is not None:
            # the loop may have ended meanwhile
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._summary


async def _serve_until(
    stopping: asyncio.Event,
    server: str,
    options: ServeOptions,
    sockets: Sequence[socket.socket],
    sinks: Iterable[TraceSink],
    *,
    access: Access | None = None,
    access_log: bool = False,
    plan: FaultPlan | None,
    kind: RouterKind,
    ready: Callable[[Sequence[EngineBackend]], None],
) -> list[str]:
    """Serve until ``stopping`` is set; ``ready`` is called with the engines when they answer."""
    # a failed sink stops the server as a signal does
    flushing = [FlushingSink(sink, stopping.set) for sink in sinks]
    count = max(1, len(sockets) - 1)
    backends = _sharing_a_trace(options, count, flushing, keep=False, plan=plan)
    served = _with_router(server, backends, sockets, kind)
    async with _listening(served, access=access, access_log=access_log):
        ready(backends)
        await stopping.wait()
        # Streams end and waiting clients are answered before uvicorn closes their connections.
        for backend in backends:
            if backend.engine.in_flight:
                await backend.engine.abort("*")
    for sink in flushing:
        sink.close()
    if plan is None:
        return []
    attribution = backends[0].attribution
    waiting = () if attribution is None else attribution.waiting
    return list(plan_summary(plan, (backend.faults for backend in backends), waiting))


def serve_in_memory(network: Network, apps: Mapping[int, ASGIApp]) -> None:
    """Serve applications by port on ``network``, in the running loop."""
    config = uvicorn.Config(
        _ByPort(apps),
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_IN_MEMORY,
    )
    config.load()
    # one config for all ports, so that it is loaded once
    state = ServerState()
    for port in apps:
        network.listen(port, lambda: Connection(config, state, {}))


class FlushingSink:
    """Hands events on to ``sink`` in batches, and flushes it every second while there are new ones.

    Where the sink fails (a full disk), ``on_failure`` is called, no more events are taken, and
    ``close`` raises what it failed with.
    """

    def __init__(self, sink: TraceSink, on_failure: Callable[[], None]) -> None:
        self._sink = sink
        self._on_failure = on_failure
        self._error: RollproofError | None = None
        self._flush_sink: Callable[[], Any] = getattr(sink, "flush", lambda: None)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[Event] = []

    def append(self, event: Event) -> None:
        """Take one event."""
        self._waiting.append(event)
        # between two steps of other requests the code and the data of the writer have left the
        # processor's caches: events written one by one take half as long again
        if len(self._waiting) >= _BATCH:
            self._hand_on()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._flush)

    def close(self) -> None:
        """Hand on what waits. Raise what the sink failed with, if it did."""
        if self._timer is not None:
            self._timer.cancel()
        self._hand_on()
        if self._error is not None:
            raise self._error

    def _flush(self) -> None:
        self._timer = None
        self._hand_on(flush=True)

    def _hand_on(self, *, flush: bool = False) -> None:
        events, self._waiting = self._waiting, []
        if self._error is not None:
            return
        try:
            for event in events:
                self._sink.append(event)
            if flush:
                self._flush_sink()
        except RollproofError as error:
            self._error = error
            self._on_failure()


class _ByPort:
    """An ASGI application for several sockets of one server: it forwards by the port."""

    def __init__(self, apps: Mapping[int, ASGIApp]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps[scope["server"][1]](scope, receive, send)


@asynccontextmanager
async def _listening(
    apps: Sequence[tuple[socket.socket, ASGIApp]],
    *,
    access: Access | None = None,
    access_log: bool = False,
) -> AsyncIterator[None]:
    """Serve each application on its socket to whoever has access."""
    by_port = {bound.getsockname()[1]: app for bound, app in apps}
    config = uvicorn.Config(
        Guard(_ByPort(by_port) if len(apps) > 1 else apps[0][1], access or Access()),
        http=Connection,
        access_log=access_log,
        log_level="info" if access_log else "warning",
        timeout_graceful_shutdown=3,  # a client that does not read must not hold up the end
        lifespan="off",
        ws="none",
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
    )
    async with listening(config, [bound for bound, _ in apps]) as server:
        clock = asyncio.create_task(_count_seconds(server.server_state))
        try:
            yield
        finally:
            clock.cancel()


async def _count_seconds(state: ServerState) -> None:
    """Tell every connection that a second has passed."""
    while True:
        await asyncio.sleep(1)
        for connection in list(state.connections):
            if isinstance(connection, Connection):
                connection.second_passed()


def _with_router(
    server: str,
    backends: Sequence[EngineBackend],
    sockets: Sequence[socket.socket],
    kind: RouterKind,
) -> list[tuple[socket.socket, ASGIApp]]:
    """Return each socket with its application; one more socket than engines is a router's."""
    make_app, _ = _server(server)
    servers = [make_app(backend) for backend in backends]
    if len(sockets) == len(servers):
        return list(zip(sockets, servers, strict=True))
    by_url = {address_of(bound): app for bound, app in zip(sockets[1:], servers, strict=True)}
    return [(sockets[0], make_router(kind, by_url)), *zip(sockets[1:], servers, strict=True)]


def _sharing_a_trace(
    options: ServeOptions,
    count: int,
    sinks: Iterable[TraceSink],
    *,
    keep: bool,
    plan: FaultPlan | None,
) -> list[EngineBackend]:
    first = EngineBackend(options, sinks, keep=keep, plan=plan)
    others = (
        EngineBackend(options, plan=plan, first=first, server_id=f"s{number}")
        for number in range(1, count)
    )
    return [first, *others]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop of uvloop if it is installed: uvicorn's own choice, too."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def address_of(bound: socket.socket) -> str:
    """Return the address at which clients reach a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _server(name: str) -> tuple[Callable[[EngineBackend], FakeServer], str]:
    if name not in SERVERS:
        raise UsageError(f"There is no fake server {name!r}; choose one of {list(SERVERS)}.")
    return SERVERS[name]
