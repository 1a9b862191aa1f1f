"""How long ``rollproof serve`` keeps other clients waiting for one that asks too much.

    python benchmarks/http_stalls.py [--python ANOTHER/bin/python]

Three clients, each on a server of its own: one that sends 200,000 prompts in one request, 900 that
send a byte of a request every two seconds, and one whose headers have 91 MB. Meanwhile ``/health``
is asked for twenty times a second. The figures are the longest answer of ``/health``, what became
of the clients, and by how much the server grew. With ``--python`` the server is that of another
installation, such as an older release. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROMPTS = 200_000
SLOW = 900
SLOW_SECONDS = 40
HEADERS = 91_000_000
LIMIT = 120.0
"""Seconds for which an answer is waited for."""
_HEAD = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def many_prompts(port: int) -> str:
    """Send one request with very many prompts, and say how it was answered."""
    body = json.dumps(
        {"input_ids": [[5, 6, 7]] * PROMPTS, "sampling_params": {"max_new_tokens": 1}}
    ).encode()
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{_HEAD}content-length: {len(body)}\r\n\r\n".encode() + body)
    line = await reader.readline()
    await reader.readuntil(b"\r\n\r\n")
    first = await reader.read(200)
    writer.close()
    said = re.search(rb"takes at most [\w ,]+ in one request", first)
    text = f": {said[0].decode()}" if said else ""
    return f"answered {line.split()[1].decode()}{text} after {time.monotonic() - begun:.1f} s"


async def slow_connections(port: int) -> str:
    """Send requests a byte every two seconds, and count who is still connected."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SLOW)]
    text = f"{_HEAD}content-length: 9999\r\n\r\n".encode()
    ends = time.monotonic() + SLOW_SECONDS
    place = 0
    while time.monotonic() < ends:
        for _, writer in opened:
            with suppress(OSError):
                writer.write(text[place : place + 1])
        place += 1
        await asyncio.sleep(2)
    held = sum(not reader.at_eof() and not writer.is_closing() for reader, writer in opened)
    for _, writer in opened:
        writer.transport.abort()
    return f"{held} of {SLOW} are still connected after {SLOW_SECONDS} s"


async def large_headers(port: int) -> str:
    """Send headers without end, and say how much was taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_HEAD.encode())
    line = b"x-filler: " + b"a" * 8000 + b"\r\n"
    sent = 0
    with suppress(OSError):
        while sent < HEADERS and not reader.at_eof():
            writer.write(line)
            await writer.drain()
            sent += len(line)
    answer = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            answer = await reader.readline()
    writer.transport.abort()
    status = answer.split()[1].decode() if len(answer.split()) > 1 else "nothing"
    return f"{sent / 1e6:.1f} MB of headers were sent, answered with {status}"


async def _watched(port: int, client: Callable[[int], Awaitable[str]]) -> tuple[str, float]:
    """Run a client; return what it says, and the longest answer of ``/health`` meanwhile."""
    longest = 0.0

    async def ask() -> None:
        nonlocal longest
        while True:
            begun = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            await reader.read()
            writer.close()
            longest = max(longest, time.monotonic() - begun)
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.5)
    longest = 0.0
    try:
        async with asyncio.timeout(LIMIT):
            said = await client(port)
    except TimeoutError:
        said = f"was not answered in {LIMIT:.0f} s"
    await asyncio.sleep(0.5)
    asking.cancel()
    return said, longest


@contextmanager
def _serving(python: str) -> Iterator[tuple[int, int]]:
    """Run a server, and give its process id and port."""
    command = [python, "-m", "rollproof", "serve", "--as", "sglang", "--quiet"]
    with subprocess.Popen(  # noqa: S603 - the interpreter that the user named
        command, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r":(\d+)$", line.strip())
        if found is None:
            raise RuntimeError(f"the server did not start: {line}")
        for _ in range(300):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/health", timeout=10).close()
                break
            time.sleep(0.1)
        try:
            yield process.pid, int(found[1])
        finally:
            process.kill()


def _memory(pid: int) -> float:
    """Return the MB that a process has taken at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) * 1024 / 1e6 if peak else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="runs the server")
    options = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for client in (many_prompts, slow_connections, large_headers):
        with _serving(options.python) as (pid, port):
            before = _memory(pid)
            said, longest = asyncio.run(_watched(port, client))
            grown = _memory(pid) - before
        name = client.__name__.replace("_", " ")
        print(f"{name}: {said}; /health took {longest:.2f} s at most; +{grown:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
