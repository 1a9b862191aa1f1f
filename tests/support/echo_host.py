"""A host without an engine, for tests of the process that holds one: it echoes, counts, refuses,
dies, hangs and makes shared memory.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from rollproof.engines.host.host_server import Host, run_host


class EchoHost(Host):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        print("loading the weights", flush=True)  # noqa: T201 - what a log holds
        if options.get("start") == "die":
            raise SystemExit(3)
        if options.get("start") == "refuse":
            raise ValueError("no such model")
        if options.get("start") == "orphan":
            Path(f"/dev/shm/echo_{os.getpid()}").write_bytes(b"of a child that died")  # noqa: S108 - where Linux keeps shared memory
            raise ValueError("a child died")
        if options.get("start") == "hang":
            time.sleep(600)
        if options.get("start") == "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
            self.sockets = [socket.socket() for _ in range(16)]
        if options.get("start") == "ports":
            taken = socket.create_server(("127.0.0.1", 0))
            socket.create_server(taken.getsockname())
        if options.get("start") == "full":
            with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
                full.write("x")

    async def do_echo(self, text: str) -> str:
        return text

    async def do_count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    async def do_refuse(self) -> None:
        raise KeyError("unknown handle")

    async def do_hang(self) -> None:
        await asyncio.sleep(600)

    async def do_die(self) -> None:
        print("the scheduler hit an exception", flush=True)  # noqa: T201 - what a log holds
        os.kill(os.getpid(), signal.SIGKILL)

    async def do_child(self) -> int:
        """Start a process that outlives its parent unless somebody ends it."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid  # noqa: ASYNC220 - a start takes no time worth a thread

    async def do_share(self) -> str:
        """Make shared memory that nobody tracks, as a killed process leaves it."""
        from multiprocessing import resource_tracker

        memory = shared_memory.SharedMemory(create=True, size=64)
        resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
        self.kept = memory
        return f"/dev/shm/{memory.name}"  # noqa: S108 - shared memory, no temporary file


if __name__ == "__main__":
    run_host(EchoHost)
