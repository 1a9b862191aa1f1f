"""Run an engine in a process of its own, talk to it in lines of JSON, and end it without remains.

Engines start processes of their own, change signal handlers and limits of the process that they
live in, and end it if one of their children dies (SGLang: ``kill_process_tree(os.getpid())``). So
an engine never lives in the caller's process, but in a *host*. The host answers over a socket,
writes its log to a file, and has a folder for temporary files, which is removed with it. It ends
itself when its caller is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from rollproof.errors import EngineDied, EngineHung, EngineRefused, EngineStartError

__all__ = ["EngineProcess", "end_session", "shared_memory_of"]

_LINE_LIMIT = 1 << 28
"""Bytes of the longest line: the routes of a long sequence are one line."""
_ERROR = re.compile(r"\b\w*(Error|Exception): .*")
"""How a traceback in a log ends, whatever else is on the line before it."""
_SHARED = "/dev/shm/"  # noqa: S108 - where Linux keeps shared memory, not a place for temporary files
_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "Too many open files": (
            "Files, sockets and pipes are counted together: raise the limit (`ulimit -n`), or end"
            " the processes that have them open."
        ),
        "No space left on device": (
            "Shared memory (`df -h /dev/shm`; of a container: `--shm-size`) or the folder of"
            " temporary files (TMPDIR) is full."
        ),
        "exit code: -7": (
            "A SIGBUS: shared memory is full (`df -h /dev/shm`; of a container: `--shm-size`)."
        ),
        "Address already in use": (
            "A port that the engine chose is in use, or none is left (`ss -s`): end the processes"
            " that use them, or try again."
        ),
        "Cannot assign requested address": (
            "No port is left (`ss -s`), or this machine has no loopback interface."
        ),
        "is longer than 107 characters": (
            "The path of a socket has no more bytes: set TMPDIR to a shorter folder, such as /tmp."
        ),
        "Cannot allocate memory": (
            "The machine, or the limit of this container, has too little memory left for the"
            " engine."
        ),
    }
)
"""Advice on exhausted resources, by the text of their errors."""


class EngineProcess:
    """A running host. Make one with ``start``; ``stop`` it, or ``kill`` it without an event loop.

    Use it from one event loop. Every method that waits raises ``EngineDied`` if the host has ended,
    with the last lines of its log, and ``EngineHung`` if it does not answer within the deadline.
    """

    fatal: tuple[str, ...] = ()
    """Names of exceptions that mean that the engine is dead although its host still runs."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], channel: socket.socket, folder: Path
    ) -> None:
        self.name = name
        self._process, self._channel, self._folder = process, channel, folder
        self._waiting: dict[int, asyncio.Queue[Mapping[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._shared: set[str] = set()
        self._shared_before = _shared_names()
        self._ended = False
        self._last_lines = ""
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        atexit.register(self.kill)

    @classmethod
    async def start(
        cls,
        module: str,
        options: Mapping[str, Any],
        *,
        name: str,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        deadline: float = 300.0,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """Run ``python -m module``, and wait until it reports that its engine is ready.

        Args:
            module: the program of the host.
            options: the host's first line of input.
            name: name of the engine, for messages.
            environment: environment variables to add.
            python: the interpreter.
            deadline: seconds that the start may take.
            progress: called every few seconds with the duration and the log's last line.

        Raises ``EngineStartError`` if the host dies, refuses, or hangs; nothing is left then.
        """
        folder = _own_folder(name)
        try:
            process, channel = _spawn([python, "-m", module], folder, environment or {})
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineStartError(
                f"{name} cannot be started: {python!r} does not run ({error})."
                f" {_advice(str(error))}".rstrip()
            ) from error
        host = cls(name, process, channel, folder)
        try:
            await host._open(options, deadline, progress)
        except BaseException:  # also a cancellation and Ctrl-C: nothing may be left running
            host.kill()
            raise
        return host

    @property
    def pid(self) -> int:
        """Process id of the host, and of the session that it leads."""
        return self._process.pid

    @property
    def folder(self) -> Path:
        """The host's folder with its log and its temporary files. It is removed with the host."""
        return self._folder

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines of the log that are not empty."""
        try:
            text = (self._folder / "log").read_bytes()[-200_000:].decode(errors="replace")
        except OSError:
            return "(no log)"
        written = [line[:400] for line in text.splitlines() if line.strip()]
        return "\n".join(written[-lines:]) or "(an empty log)"

    async def call(
        self, operation: str, *, deadline: float | None = 120.0, **arguments: Any
    ) -> Any:
        """Call an operation and return its last answer.

        Raises ``EngineRefused`` if the engine answers with an error.
        """
        answers = [
            answer async for answer in self.stream(operation, deadline=deadline, **arguments)
        ]
        return answers[-1] if answers else None

    async def stream(
        self, operation: str, *, deadline: float | None = 120.0, **arguments: Any
    ) -> AsyncIterator[Any]:
        """Call an operation and yield its answers as they come.

        ``deadline`` limits the seconds between two of them.
        """
        if self._task is None or self._task.done() or self._writer is None:
            raise self._died()
        number = next(self._ids)
        answers = self._waiting[number] = asyncio.Queue()
        try:
            self._writer.write(_line({"id": number, "op": operation, **arguments}))
            while True:
                try:
                    # wait_for may lose a cancellation that comes along with the answer
                    async with asyncio.timeout(deadline):
                        message = await answers.get()
                except TimeoutError:
                    raise EngineHung(
                        f"{self.name} did not answer {operation!r} within {deadline:g} s; process"
                        f" {self.pid} still runs. {self._tail()}"
                    ) from None
                if "died" in message:
                    raise self._died()
                if message.get("kind") in self.fatal:
                    raise EngineDied(
                        f"{self.name} is dead ({message['error']}): what it was working on is lost."
                        f" {self._tail()}"
                    )
                if "error" in message:
                    raise EngineRefused(
                        f"{self.name} refused {operation!r}: {message['error']}",
                        kind=message.get("kind", ""),
                    )
                if "value" in message:
                    yield message["value"]
                if message.get("end"):
                    return
        finally:
            self._waiting.pop(number, None)

    async def stop(self, grace: float = 10.0) -> None:
        """Ask the host to end, give it ``grace`` seconds, and remove what is left.

        It may be called twice.
        """
        if not self._ended and self._process.poll() is None and self._writer is not None:
            with contextlib.suppress(EngineDied, EngineHung, EngineRefused, OSError):
                await self.call("stop", deadline=grace)
            for _ in range(int(grace / 0.05)):
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
        self.kill()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    def kill(self) -> None:
        """Kill the host and everything that it started; remove its shared memory and its folder."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self.kill)
        self._shared |= shared_memory_of(self.pid)
        end_session(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for path in self._shared | self._orphans():
            Path(path).unlink(missing_ok=True)
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # its loop may be closed already
                self._writer.close()
        self._channel.close()
        self._last_lines = self._log_with_causes()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _orphans(self) -> set[str]:
        """Return shared memory named after the engine that no process uses."""
        # of a child that died before it was seen: it came since the start of the host
        new = {
            f"{_SHARED}{name}"
            for name in _shared_names() - self._shared_before
            if name.startswith(self.name)
        }
        if not new:
            return new
        return new - {
            path
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit()
            for path in _shared_paths(int(entry.name))
        }

    async def _open(
        self, options: Mapping[str, Any], deadline: float, progress: Callable[[str], None] | None
    ) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=_LINE_LIMIT)
        self._writer.write(_line(options))
        began = time.monotonic()
        first = asyncio.ensure_future(reader.readline())
        try:
            while not first.done():
                waited = time.monotonic() - began
                if waited > deadline:
                    raise EngineStartError(
                        f"{self.name} was not ready after {deadline:g} s. Its start hangs, or needs"
                        f" longer. {self._tail()}"
                    )
                if progress is not None:
                    progress(f"{self.name} is starting, {waited:.0f} s: {self.log_tail(1)[:120]}")
                await asyncio.wait([first], timeout=min(5.0, deadline - waited + 0.01))
            line = first.result()
        except ConnectionError:
            line = b""
        finally:
            first.cancel()
        # a host that was killed may have written half of a line
        message = json.loads(line) if line.endswith(b"\n") else {}
        if "error" in message:
            text = f"{self.name} cannot be started: {message['error']}"
            raise EngineStartError(text if message.get("complete") else f"{text}\n{self._tail()}")
        if not message.get("ready"):
            raise EngineStartError(
                f"{self.name} died while it started ({self._exit()}). {self._tail()}"
            )
        self._shared |= shared_memory_of(self.pid)
        self._task = asyncio.create_task(self._read(reader), name=f"answers of {self.name}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver every answer to its caller, and tell all callers when the host has ended."""
        try:
            while line := await reader.readline():
                message = json.loads(line)
                answers = self._waiting.get(message["id"])
                if answers is not None:
                    answers.put_nowait(message)
        except (ConnectionError, ValueError):
            pass  # the host died in the middle of a line
        finally:
            for answers in self._waiting.values():
                answers.put_nowait({"died": True})

    def _died(self) -> EngineDied:
        return EngineDied(
            f"{self.name} is gone ({self._exit()}): what it was working on is lost. {self._tail()}"
        )

    def _exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "its process still runs but closed the connection"

    def _tail(self) -> str:
        log = self._last_lines or self._log_with_causes()
        advice = _advice(log)
        return f"The end of its log:\n{log}" + (f"\n{advice}" if advice else "")

    def _log_with_causes(self) -> str:
        """Return the last lines of the log, after the errors that are further up in it."""
        # an engine's parts fail one after the other, the cause first
        tail = self.log_tail()
        lines = [
            line
            for line in self.log_tail(4000).splitlines()
            if _ERROR.search(line) and line not in tail
        ]
        causes = list(dict.fromkeys(_ERROR.search(line)[0] for line in lines))[:6]  # type: ignore[index]  # each of them matched
        return "\n".join(["errors further up:", *causes, "...", tail]) if causes else tail


def _own_folder(name: str) -> Path:
    """Make a folder for a host's log and temporary files. Raises ``EngineStartError``."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"rollproof-{name}-"))
        (folder / "tmp").mkdir()
    except OSError as error:
        raise EngineStartError(
            f"{name} cannot be started: no temporary folder can be made ({error})."
            f" {_advice(str(error))}".rstrip()
        ) from error
    return folder


def _spawn(
    command: list[str], folder: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a host in a session of its own; return the process, and our end of the connection."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, (folder / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own module, in an interpreter that the caller names
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **environment,
                    "TMPDIR": str(folder / "tmp"),
                    "ROLLPROOF_ENGINE_FOLDER": str(folder),
                },
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def _advice(text: str) -> str:
    """Return advice on the exhausted resources that a log or an error names."""
    return " ".join(advice for error, advice in _ADVICE.items() if error in text)


def end_session(leader: int, patience: float = 5.0) -> None:
    """Kill and await every process of the session that ``leader`` leads, except the caller."""
    # multiprocessing's resource tracker ends last, and by itself: it removes the shared memory of
    # the processes that were killed
    end = time.monotonic() + patience
    while members := _members(leader):
        trackers = {pid for pid in members if _is_tracker(pid)}
        late = time.monotonic() > end
        for pid in members if late else members - trackers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if late and time.monotonic() > end + patience:
            return
        time.sleep(0.02)


def shared_memory_of(leader: int) -> set[str]:
    """Return paths of the shared memory that only processes of a session have mapped or open."""
    members = _members(leader, also_self=True)
    paths = {path for pid in members for path in _shared_paths(pid)}
    if not paths:
        return paths
    others = {
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    } - members
    return paths - {path for pid in others for path in _shared_paths(pid)}


def _members(leader: int, *, also_self: bool = False) -> set[int]:
    """Return the live processes of a session."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            # of a zombie nothing is left but its entry
            if int(session) == leader and state not in "ZX":
                found.add(int(entry.parent.name))
    return found if also_self else found - {os.getpid()}


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _shared_names() -> set[str]:
    folder = Path(_SHARED)
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _shared_paths(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.partition(_SHARED)
            if path[1] and not line.endswith("(deleted)"):
                found.add(_SHARED + path[2])
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith(_SHARED) and not target.endswith("(deleted)"):
                    found.add(target)
    return found


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
