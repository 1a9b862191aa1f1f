"""Runs uvicorn inside a program that has an end of its own to come to."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn

__all__ = ["listening", "stopped_by_signal"]


class _Server(uvicorn.Server):
    """A server that leaves signals alone: uvicorn raises them again when it is done, which would
    end the process before its trace is written.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(
    config: uvicorn.Config, sockets: Sequence[socket.socket]
) -> AsyncIterator[uvicorn.Server]:
    """Serve on bound sockets while the context is open; it opens when requests are answered."""
    server = _Server(config)
    serve = asyncio.create_task(server.serve(sockets=list(sockets)))
    # uvicorn has no event for this, only the flag
    while not server.started:
        if serve.done():
            serve.result()
        await asyncio.sleep(0.005)
    try:
        yield server
    finally:
        server.should_exit = True
        await serve


def stopped_by_signal() -> asyncio.Event:
    """Return an event of the running loop that SIGINT and SIGTERM set, in place of ending it."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # not possible outside of a main thread, nor on Windows
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, stopping.set)
    return stopping
