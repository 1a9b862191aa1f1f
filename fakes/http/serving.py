"""Serving: an HTTP face on a port of this machine, in the running loop or until a signal."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn

from rollproof.core.trace import TraceSink
from rollproof.errors import UsageError
from rollproof.fakes.http.asgi import Face
from rollproof.fakes.http.at_once import offering
from rollproof.fakes.http.engine_backend import Backing, ServeOptions
from rollproof.fakes.http.fault_plan import FaultPlan, happened
from rollproof.fakes.http.flushing_sink import Kept
from rollproof.fakes.http.gateway import Router, RouterKind
from rollproof.fakes.http.sglang.server import sglang_app
from rollproof.fakes.http.vllm.server import vllm_app

__all__ = ["FACES", "bound_socket", "routing", "serve_forever", "serving"]

_TRIM_THRESHOLD, _KEPT = -1, 256 << 20
"""``M_TRIM_THRESHOLD`` of glibc's malloc.h, and the bytes that may lie idle at the top of the heap."""
_HURRIED = 1024
"""Requests of a connection that are remembered because the next one came before they were answered."""
FACES: Mapping[str, tuple[Callable[[Backing], Face], str]] = {
    "sglang": (sglang_app, "sglang"),
    "vllm": (vllm_app, "vllm"),
}
"""Faces by name: the application, and the flavour of engine that it stands in front of."""


def bound_socket(port: int = 0) -> socket.socket:
    """A socket on loopback (``port`` 0: chosen by the system). Raises ``UsageError`` where the port
    is taken.
    """
    if not 0 <= port <= 65_535:
        raise UsageError(f"--port must be 0 to 65535, not {port}.")
    # asyncio sends small pieces at once on sockets that name their protocol alone; the events of a
    # stream waited 40 ms for each other
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
    except OSError as error:
        found.close()
        raise UsageError(
            f"Port {port} of 127.0.0.1 cannot be had: {error.strerror}. Choose another, or 0 for a"
            " free one."
        ) from error
    return found


@asynccontextmanager
async def serving(
    face: str,
    options: ServeOptions | None = None,
    *,
    sinks: Iterable[TraceSink] = (),
    port: int = 0,
    plan: FaultPlan | None = None,
) -> AsyncIterator[tuple[str, Backing]]:
    """Serve ``face`` in the running loop; gives its address ``http://127.0.0.1:port`` and the
    engine behind it.
    """
    make, flavour = _face(face)
    backing = Backing(options or ServeOptions(flavour=flavour), sinks, plan=plan)
    async with _listening(make(backing), bound_socket(port)) as url:
        yield url, backing


@asynccontextmanager
async def routing(
    face: str,
    options: ServeOptions,
    workers: int,
    kind: RouterKind = RouterKind.GATEWAY,
    *,
    sinks: Iterable[TraceSink] = (),
    plan: FaultPlan | None = None,
) -> AsyncIterator[tuple[str, Mapping[str, Backing]]]:
    """Serve ``workers`` engines and a router before them; gives the router's address, and the
    engines by theirs.
    """
    make, _ = _face(face)
    backings = _together(options, workers, sinks, keep=True, plan=plan)
    async with AsyncExitStack() as stack:
        apps: dict[str, Face] = {}
        by_url: dict[str, Backing] = {}
        for backing in backings:
            app = make(backing)
            url = await stack.enter_async_context(_listening(app, bound_socket()))
            apps[url], by_url[url] = app, backing
        yield (
            await stack.enter_async_context(_listening(Router(apps, kind), bound_socket())),
            by_url,
        )


@asynccontextmanager
async def _listening(app: Face | Router, listening: socket.socket) -> AsyncIterator[str]:
    server = _Server(_config(app, access_log=False))
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn tells it by this flag alone
        await asyncio.sleep(0.005)
    try:
        yield _url(listening)
    finally:
        server.should_exit = True
        await task
        listening.close()


def serve_forever(
    face: str,
    options: ServeOptions,
    listening: Sequence[socket.socket],
    *,
    sinks: Iterable[TraceSink] = (),
    access_log: bool = True,
    plan: FaultPlan | None = None,
    kind: RouterKind = RouterKind.GATEWAY,
) -> list[str]:
    """Serve until SIGINT or SIGTERM; requests in flight are given a moment to end. Of several
    sockets the first is the router's.

    Sinks that can flush do so every second. One that fails ends the server, and what it raised is
    raised here. Returns what became of the ``plan``, a line for each fault and action.
    """
    make, _ = _face(face)
    sockets = listening[1:] or listening

    async def run() -> list[str]:
        stopping: list[Callable[[], None]] = []
        kept = [Kept(sink, lambda: stopping[0]()) for sink in sinks]
        backings = _together(options, len(sockets), kept, keep=False, plan=plan)
        apps: list[tuple[Face | Router, socket.socket]] = [
            (make(one), sock) for one, sock in zip(backings, sockets, strict=True)
        ]
        if len(sockets) > 1:
            apps.insert(
                0,
                (
                    Router({_url(sock): app for app, sock in apps if isinstance(app, Face)}, kind),
                    listening[0],
                ),
            )
        servers = [(_Server(_config(app, access_log=access_log)), sock) for app, sock in apps]
        loop = asyncio.get_running_loop()
        ending: list[asyncio.Task[Any]] = []

        def stop() -> None:
            for server, _ in servers:
                server.should_exit = True
            # streams end, and whoever waits is answered
            ending.extend(loop.create_task(backing.engine.abort("*")) for backing in backings)

        stopping.append(stop)
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(
                NotImplementedError, ValueError, RuntimeError
            ):  # elsewhere than in a main thread, or on Windows
                loop.add_signal_handler(number, stop)
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in servers))
        for one in kept:
            one.end()
        waiting = () if backings[0].hooks is None else backings[0].hooks.waiting
        return (
            []
            if plan is None
            else list(happened(plan, (backing.faults for backing in backings), waiting))
        )

    _keep_memory()
    with _rare_collections(), asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(run())


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again when it is done, which ends a process before
    its trace is written.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


@contextmanager
def _rare_collections() -> Iterator[None]:
    """What a call leaves behind has no cycles: looking for some at every few hundred objects is a
    tenth of a request's time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _keep_memory() -> None:
    """Have glibc, where it is that, keep what it freed: it gives the top of the heap back after a
    large reply, and takes it anew, page by page, for the next, which is a tenth of a request's
    time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop of uvloop, where it is installed."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _together(
    options: ServeOptions,
    count: int,
    sinks: Iterable[TraceSink],
    *,
    keep: bool,
    plan: FaultPlan | None,
) -> list[Backing]:
    """Engines that share a trace."""
    first = Backing(options, sinks, keep=keep, plan=plan)
    return [
        first,
        *(Backing(options, plan=plan, beside=first, server_id=f"s{i}") for i in range(1, count)),
    ]


def _url(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def _face(name: str) -> tuple[Any, str]:
    if name not in FACES:
        raise UsageError(f"No face is named {name!r}; choose one of {list(FACES)}.")
    return FACES[name]


def _config(app: Face | Router, *, access_log: bool) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        access_log=access_log,
        log_level="info" if access_log else "warning",
        timeout_graceful_shutdown=3,
        lifespan="off",
        proxy_headers=False,
    )
    config.load()
    config.http_protocol_class = _noticing(config.http_protocol_class)
    config.loaded_app = offering(config.loaded_app, config.http_protocol_class)
    return config


def _noticing(protocol: Any) -> Any:
    """``protocol``, which tells where a client closed a connection, and may not have read its last
    answer.

    One that leaves bytes unread resets the connection. Of a stream a client's library may have read
    more than the client was told before it left; one that has all of it keeps the connection for
    its next request.
    """

    class Noticing(protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._hurried: deque[Any] = deque(maxlen=_HURRIED)

        def on_headers_complete(self) -> None:
            """A request came, over httptools: after all answers were read, or before, of which
            uvicorn forgets the requests.
            """
            if self.cycle is not None and not self.cycle.response_complete:
                self._hurried.append(self.cycle)
            else:
                self._hurried.clear()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            for cycle in (*self._hurried, self.cycle):
                asked = getattr(cycle, "asked", None)
                if (
                    asked is not None
                    and cycle.response_complete
                    and (exc is not None or asked.streamed)
                ):
                    asked.tell_broken()
            super().connection_lost(exc)
            for cycle in self._hurried:
                cycle.disconnected = not cycle.response_complete
                cycle.message_event.set()

    return Noticing
