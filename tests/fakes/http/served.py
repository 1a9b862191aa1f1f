"""Fake servers for tests: in a thread of their own, on real loopback, for as long as a
test module needs them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import httpx

from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import serving

__all__ = ["Served", "served"]


class Served:
    """A running server: ``client`` calls it, ``do`` runs something in its loop."""

    def __init__(self, url: str, backend: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.backend, self._loop = url, backend, loop
        self.client = httpx.Client(base_url=url, timeout=30)

    def do(self, action: Callable[[], Any]) -> Any:
        """What ``what()`` gives, called in the server's thread."""

        async def call() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)


@contextmanager
def served(
    server_kind: str, options: ServeOptions | None = None, *, plan: FaultPlan | None = None
) -> Iterator[Served]:
    """One server."""
    with running(lambda: serving(server_kind, options, plan=plan)) as server:
        yield server


@contextmanager
def running(
    make: Callable[[], AbstractAsyncContextManager[tuple[str, EngineBackend | Any]]],
) -> Iterator[Served]:
    """Whatever ``make`` makes, in a thread of its own."""
    ready: list[Served | BaseException] = []
    started, end = threading.Event(), threading.Event()

    async def main() -> None:
        try:
            async with make() as (url, backend):
                ready.append(Served(url, backend, asyncio.get_running_loop()))
                started.set()
                await asyncio.to_thread(end.wait)
        except BaseException as error:
            ready.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    started.wait(60)
    server = ready[0]
    if not isinstance(server, Served):
        raise server
    try:
        yield server
    finally:
        server.client.close()
        end.set()
        thread.join(30)
