"""Serving: an HTTP face on a port of this machine, in the running loop or until a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from rollproof.errors import UsageError
from rollproof.fakes.http.backing import Backing, ServeOptions
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.sglang import sglang_app
from rollproof.fakes.http.vllm import vllm_app
from rollproof.trace import TraceSink

if TYPE_CHECKING:
    from rollproof.fakes.http.asgi import Face

__all__ = ["FACES", "bound_socket", "serve_forever", "serving"]

FACES: Mapping[str, tuple[Callable[[Backing], Face], str]] = {"sglang": (sglang_app, "sglang"), "vllm": (vllm_app, "vllm")}
"""Faces by name: the application, and the flavour of engine that it stands in front of."""


def bound_socket(port: int = 0) -> socket.socket:
    """A socket on loopback (``port`` 0: chosen by the system). Raises ``UsageError`` where the port is taken."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"--port must be 0 to 65535, not {port}.")
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
    except OSError as error:
        found.close()
        raise UsageError(f"Port {port} of 127.0.0.1 cannot be had: {error.strerror}. Choose another, or 0 for a free one.") from error
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
    """Serve ``face`` in the running loop; gives its address ``http://127.0.0.1:port`` and the engine behind it."""
    make, flavour = _face(face)
    backing = Backing(options or ServeOptions(flavour=flavour), sinks, plan=plan)
    listening = bound_socket(port)
    server = uvicorn.Server(_config(make(backing), access_log=False))
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn tells it by this flag alone
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", backing
    finally:
        server.should_exit = True
        await task
        listening.close()


def serve_forever(
    face: str,
    options: ServeOptions,
    listening: socket.socket,
    *,
    sinks: Iterable[TraceSink] = (),
    access_log: bool = True,
    plan: FaultPlan | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; requests in flight are given a moment to end."""
    make, _ = _face(face)

    async def run() -> None:
        backing = Backing(options, sinks, keep=False, plan=plan)
        await uvicorn.Server(_config(make(backing), access_log=access_log)).serve(sockets=[listening])

    asyncio.run(run())


def _face(name: str) -> tuple[Any, str]:
    if name not in FACES:
        raise UsageError(f"No face is named {name!r}; choose one of {list(FACES)}.")
    return FACES[name]


def _config(app: Face, *, access_log: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app, access_log=access_log, log_level="info" if access_log else "warning", timeout_graceful_shutdown=3, lifespan="off"
    )
