"""Replies a second of the fake HTTP servers on one core, next to other mock servers.

    python benchmarks/http_server.py [--requests 1000] [--connections 64] [--rounds 4]
    python benchmarks/http_server.py --soak 300

Goals: at least 1,000 replies of SGLang's ``/generate`` a second, each with 32 tokens, logprobs and
routes of 48 layers, top-8 (80 kB of base64), with the trace written to a file; chats not slower
than the fastest of the mock servers of the package index (``pip install fakellm llmock xpyd-sim``,
configured to take no time); and memory that does not grow. vllm-mock has no server, guidellm's
requires torch and transformers, mockllm downloads a tokenizer.

Each server is a process of its own, pinned to one core, and the client to another. Rounds alternate
between servers, and the best of each counts; the processor time of a request changes less on a busy
machine. A bare Starlette endpoint that sends as many bytes shows what uvicorn and Starlette take.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

GOAL = 1_000
"""Replies of ``/generate`` a second."""
GENERATE = {
    "input_ids": list(range(10, 18)),
    "sampling_params": {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
    "return_routed_experts": True,
}
CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "w5 w6 w7"}], "max_tokens": 8}

_QUIET = ("--log-level", "warning")
_NO_DELAYS = (
    "--host 127.0.0.1 --warmup-requests 0 --prefill-delay-ms 0 --kv-transfer-delay-ms 0"
    " --decode-delay-per-token-ms 0"
)
PEERS: Mapping[str, tuple[str, ...]] = {
    "fakellm": ("-m", "uvicorn", "fakellm.server:app", *_QUIET),
    "llmock": ("-m", "uvicorn", "llmock.main:app", *_QUIET),
    "xpyd_sim": ("-c", "from xpyd_sim.cli import main; main()", "serve", *_NO_DELAYS.split()),
}
"""Mock servers by module, and how Python starts them."""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Cores that this process may use: a server inherits those of the client, which is only pinned
while it sends requests.
"""


@dataclass(frozen=True)
class Contestant:
    """A server and its request. It is started by ``target``, which sends its port through a pipe,
    or by ``command``, which is given a port.
    """

    name: str
    path: str
    body: Mapping[str, Any]
    target: Callable[..., None] | None = None
    arguments: tuple[Any, ...] = ()
    command: tuple[str, ...] = ()


def pin(*cores: int) -> None:
    """Stay on these cores (none: on all), if the machine has more than one."""
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[core % len(CORES)] for core in cores} or CORES)


def run_fake(pipe: Connection, server: str, trace: str | None, layers: int) -> None:
    """Serve a fake server on a free port."""
    from rollproof.core.case import EngineOptions, Model
    from rollproof.fakes.http.engine_backend import EngineBackend
    from rollproof.fakes.http.serve_options import ServeOptions
    from rollproof.fakes.http.serving import bound_socket, serve_forever
    from rollproof.store import TraceWriter

    pin(0)
    model = Model(
        num_layers=layers, moe_layers=tuple(range(layers)), num_experts=128, top_k=8, vocab=150_000
    )
    engine = EngineOptions(max_batch=256, step=0.0)
    options = ServeOptions(flavour=server, model=model, engine=engine)
    bound = bound_socket()
    pipe.send(bound.getsockname()[1])
    if trace is None:
        serve_forever(server, options, [bound], access_log=False)
        return
    # as `rollproof serve` writes it
    with TraceWriter(Path(trace), EngineBackend.header(options), mode="w", trusted=True) as writer:
        serve_forever(server, options, [bound], sinks=[writer], access_log=False)


def run_bare(pipe: Connection, size: int) -> None:
    """Serve ``size`` bytes from an endpoint that reads the body and does nothing else."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from rollproof.fakes.http.serving import bound_socket

    content = b"x" * size

    async def answer(request: Request) -> Response:
        await request.json()
        return Response(content, media_type="application/json")

    pin(0)
    bound = bound_socket()
    pipe.send(bound.getsockname()[1])
    paths = ("/generate", "/v1/chat/completions")
    app = Starlette(routes=[Route(path, answer, methods=["POST"]) for path in paths])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    asyncio.run(server.serve(sockets=[bound]))


class LoadConnection(asyncio.BufferedProtocol):
    """A keep-alive connection that sends requests as long as ``remaining`` has any.

    It reads no more of a reply than its status and length: streams of asyncio take as long for
    80 kB as a bare endpoint, and would measure the client.
    """

    def __init__(self, request: bytes, remaining: Iterator[int]) -> None:
        self._request, self._remaining = request, remaining
        self._buffer, self._size, self._head, self._length = bytearray(1 << 18), 0, 0, 0
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._next()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._size :]

    def buffer_updated(self, nbytes: int) -> None:
        self._size += nbytes
        if not self._head:
            self._head = self._buffer.find(b"\r\n\r\n", 0, self._size) + 4
            if self._head == 3:
                self._head = 0
                return
            head = self._buffer[: self._head].lower()
            length = re.search(rb"content-length: (\d+)", head)
            if b" 200 " not in head[:16] or length is None:
                self.done.set_exception(ValueError(f"the answer begins with {bytes(head[:80])!r}"))
                self._transport.close()
                return
            self._length = int(length[1])
        if self._size == self._head + self._length:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))

    def _next(self) -> None:
        if next(self._remaining, None) is None:
            self.done.set_result(bytes(self._buffer[self._head : self._size]))
            self._transport.close()
            return
        self._size = self._head = 0
        self._transport.write(self._request)


async def send_load(
    port: int, contestant: Contestant, requests: int, connections: int
) -> tuple[float, int]:
    """Return the replies a second over keep-alive connections, and the bytes of a reply."""
    body = json.dumps(contestant.body).encode()
    head = (
        f"POST {contestant.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    remaining = iter(range(requests))
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    opened = [
        await loop.create_connection(
            lambda: LoadConnection(head + body, remaining), "127.0.0.1", port
        )
        for _ in range(connections)
    ]
    replies = await asyncio.gather(*(connection.done for _, connection in opened))
    return requests / (time.perf_counter() - started), max(map(len, replies))


def measure_load(
    port: int, contestant: Contestant, requests: int, connections: int
) -> tuple[float, int]:
    """Send the load from the second core."""
    pin(1)
    return asyncio.run(send_load(port, contestant, requests, connections))


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class RunningServer:
    """A contestant's process."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.rate, self.size, self.seconds = 0.0, 0, float("inf")
        pin()
        if contestant.target is not None:
            ours, theirs = multiprocessing.Pipe()
            self.process: Any = multiprocessing.get_context("spawn").Process(
                target=contestant.target, args=(theirs, *contestant.arguments), daemon=True
            )
            self.process.start()
            theirs.close()  # or a server that fails to start would be waited for
            self.port = ours.recv()
        else:
            from rollproof.fakes.http.serving import bound_socket

            with bound_socket() as free:
                self.port = free.getsockname()[1]
            taskset = ("taskset", "-c", str(CORES[0])) if CORES else ()
            command = [*taskset, sys.executable, *contestant.command, "--port", str(self.port)]
            self.process = subprocess.Popen(  # noqa: S603 - a server that the user has installed
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        for _ in range(300):
            try:
                measure_load(self.port, contestant, 50, 5)
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise TimeoutError(f"{contestant.name} did not start")

    def round(self, requests: int, connections: int) -> None:
        """Send one load, and keep the best figures."""
        before = processor_seconds(self.process.pid)
        rate, self.size = measure_load(self.port, self.contestant, requests, connections)
        self.rate = max(self.rate, rate)
        used = processor_seconds(self.process.pid) - before
        self.seconds = min(self.seconds, used / requests)

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        (self.process.join if hasattr(self.process, "join") else self.process.wait)()


def race(contestants: list[Contestant], options: argparse.Namespace) -> list[RunningServer]:
    """Run all servers at once and send them loads in turns: what slows the machine slows all."""
    servers = []
    for contestant in contestants:
        try:
            servers.append(RunningServer(contestant))
        except TimeoutError as error:
            print(f"  {error}")
    try:
        for _ in range(options.rounds):
            for server in servers:
                server.round(options.requests, options.connections)
    finally:
        for server in servers:
            server.stop()
    return servers


def print_table(title: str, servers: list[RunningServer]) -> None:
    print(f"{title:52} replies/s  processor time    bytes")
    for server in servers:
        print(
            f"  {server.contestant.name:50} {server.rate:9.0f} {server.seconds * 1e6:9.0f} us"
            f" {server.size:11,}"
        )


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Print both tables."""
    bare = Contestant("bare Starlette endpoint", "/generate", GENERATE, run_bare, (81_900,))
    generate = race(
        [
            generate_on("with the trace written", str(folder / "generate.arrow")),
            generate_on("without a trace file", None),
            bare,
        ],
        options,
    )
    print_table("/generate: 32 tokens, logprobs, routes of 48 layers", generate)
    verdict = "reached" if generate[0].rate >= GOAL else "not reached"
    print(f"  goal: {GOAL:,} replies/s on one core with the trace written: {verdict}")
    path = "/v1/chat/completions"
    chats = [
        Contestant("bare Starlette endpoint", path, CHAT, run_bare, (700,)),
        chat_on("sglang", str(folder / "sglang.arrow")),
        chat_on("vllm", str(folder / "vllm.arrow")),
    ]
    for name, command in PEERS.items():
        if importlib.util.find_spec(name) is None:
            print(f"  {name} is not installed")
        else:
            chats.append(Contestant(name, path, CHAT, command=command))
    print_table("/v1/chat/completions: 8 tokens", race(chats, options))


def soak(folder: Path, options: argparse.Namespace) -> None:
    """Print the memory of a server under load, every tenth of the time."""
    server = RunningServer(generate_on("soak", str(folder / "soak.arrow")))
    replies, started = 0, time.monotonic()
    try:
        for tenth in range(11):
            while time.monotonic() < started + options.soak * tenth / 10:
                server.round(options.requests, options.connections)
                replies += options.requests
            megabytes = resident_bytes(server.process.pid) / 1e6
            print(f"{time.monotonic() - started:7.0f} s {replies:10,} replies {megabytes:8.0f} MB")
    finally:
        server.stop()


def generate_on(name: str, trace: str | None) -> Contestant:
    return Contestant(
        f"fake SGLang server, {name}", "/generate", GENERATE, run_fake, ("sglang", trace, 48)
    )


def chat_on(server: str, trace: str) -> Contestant:
    return Contestant(
        f"fake {server} server, with the trace written",
        "/v1/chat/completions",
        CHAT,
        run_fake,
        (server, trace, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollproof-bench-") as folder:
        (soak if options.soak else compare)(Path(folder), options)


if __name__ == "__main__":
    main()
