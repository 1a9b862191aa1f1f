"""The program that runs an engine and answers the caller in lines of JSON.

``rollproof.engines.host.host_client`` is the caller's side. An incoming line is ``{"id", "op",
...arguments}``; the method ``do_OP`` answers it, in a task of its own. Each answer is ``{"id",
"value"}``, the last one has ``"end"``, and an exception of the engine is ``{"id", "error",
"kind"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rollproof.engines.host.host_client import end_session, shared_memory_of
from rollproof.errors import EngineStartError

__all__ = ["Host", "run_host"]

_LINE_LIMIT = 1 << 28
"""Bytes of the longest line, as in ``rollproof.engines.host.host_client``."""
_REMOVALS = 20
"""Attempts to remove the folder: an engine that still starts in another thread may write files
meanwhile.
"""


class Host:
    """Base class of the engines' hosts.

    The operations are methods ``do_NAME``, coroutines or async generators.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    async def serve(self, channel: socket.socket) -> None:
        """Answer until the caller is gone or calls ``stop``."""
        reader, writer = await asyncio.open_connection(sock=channel, limit=_LINE_LIMIT)
        reading = asyncio.create_task(self._read(reader, writer))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def do_stop(self) -> None:
        """End after the pending answers were written."""
        asyncio.get_running_loop().call_later(0.05, self._stopping.set)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line), writer))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, name = message.pop("id"), message.pop("op")

        def reply(**fields: Any) -> None:
            writer.write(_line({"id": number, **fields}))

        try:
            operation = getattr(self, f"do_{name}")(**message)
            if hasattr(operation, "__aiter__"):
                async for item in operation:
                    reply(value=item)
                reply(end=True)
            else:
                reply(value=await operation, end=True)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is its answer to the caller
            reply(error=str(error), kind=type(error).__name__)


def run_host(
    make: Callable[[Mapping[str, Any]], Host],
    run: Callable[[Host, Callable[[], Coroutine[Any, Any, None]]], None] | None = None,
) -> NoReturn:
    """Make the host from the caller's options, report that it is ready, answer, and leave nothing.

    ``make`` may take minutes; if it raises, the caller gets the text. ``run`` gets the host and the
    coroutine function to run, for engines with a loop of their own.
    """
    channel = socket.socket(fileno=int(sys.argv[1]))
    # asyncio closes the other one with its streams, and whether the caller is gone is checked after
    # that
    line = channel.dup()
    try:
        options = json.loads(channel.makefile("rb").readline())
        threading.Thread(target=_watch_start, args=(channel, line), daemon=True).start()
        try:
            host = make(options)
        except EngineStartError as error:
            _refuse(channel, line, str(error), complete=True)
        except Exception as error:  # noqa: BLE001 - the caller must read whatever an engine raises when it starts
            traceback.print_exc()
            _refuse(channel, line, f"{type(error).__name__}: {error}")

        async def serve() -> None:
            await host.serve(channel)

        channel.sendall(_line({"ready": True}))
        if run is None:
            asyncio.run(serve())
        else:
            run(host, serve)
    finally:
        # the caller ended before it sent its options, or its end caused the error
        if _has_ended(line):
            leave(line)
    leave(line)


def leave(line: socket.socket) -> NoReturn:
    """End this process and all that it started; remove their shared memory.

    If the caller is gone, the host's folder is removed, too.
    """
    shared = shared_memory_of(os.getpid())
    end_session(os.getpid())
    for path in shared:
        Path(path).unlink(missing_ok=True)
    if _has_ended(line):  # the caller is gone, and cannot remove it
        folder = Path(os.environ["ROLLPROOF_ENGINE_FOLDER"])
        for _ in range(_REMOVALS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            end_session(os.getpid())
    os._exit(0)


def _has_ended(line: socket.socket) -> bool:
    """Whether the caller has closed its end of the connection, as the system does when it dies."""
    # nothing else is reliable. A process that dies closes its sockets before its children get
    # another parent, so getppid may still name the caller after its end was read here; and if it
    # dies before this program has started, getppid never names it. Unread bytes do not hide the
    # end from poll, as they would from recv
    poll = select.poll()
    poll.register(line, 0)  # ends and errors are always reported
    return bool(poll.poll(0))


def _refuse(
    channel: socket.socket, line: socket.socket, text: str, *, complete: bool = False
) -> NoReturn:
    """Report why there is no host; a ``complete`` text does not need the end of the log."""
    # without a caller, what the engine started must end all the same
    with contextlib.suppress(ConnectionError):
        channel.sendall(_line({"error": text, "complete": complete}))
    leave(line)


def _watch_start(channel: socket.socket, line: socket.socket) -> None:
    """End everything if the caller dies while the engine starts."""
    # nothing else reads from the connection yet
    try:
        if channel.recv(1, socket.MSG_PEEK):
            return
    except BlockingIOError:
        # the engine started before this thread ran, and its loop, which made the socket
        # non-blocking, sees the caller's end itself
        return
    except OSError:
        pass  # the connection broke: as if it had ended
    leave(line)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, default=repr).encode() + b"\n"
