"""Requests a second of the HTTP faces, beside a bare endpoint that sends the same bytes and beside
other mock servers, in one run.

    python benchmarks/http_face.py [--requests 3000] [--connections 64] [--rounds 3]

First table: SGLang's ``/generate`` with 32 tokens, logprobs and routes of 48 layers, top-8 (80 KB
of base64), the coded engine included, with its trace written to a file and without. Beside it a
bare starlette endpoint that reads the body and sends the same bytes: on uvicorn as ``pip install
starlette uvicorn`` installs it (over h11), to which shares refer, and on what the faces run on,
httptools, and uvloop where that is installed. Beside it, too, the least that a face could do: read
the body, draw a reply and send it, without engine, checks, trace and starlette. Second table: chats
of the faces, beside mock servers of the package index where they are installed (``pip install
fakellm llmock xpyd-sim``), told to take no time; vllm-mock has no server, guidellm's wants torch
and transformers, mockllm downloads a tokenizer. Each server is a process of its own, pinned to one
core, and the client to another. Rounds alternate between servers, and the best of each counts;
beside it the processor time of a request, which a busy machine changes less.
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

GENERATE = {
    "input_ids": list(range(10, 18)),
    "sampling_params": {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
    "return_routed_experts": True,
}
CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "w5 w6 w7"}], "max_tokens": 8}

_QUIET = ("--log-level", "warning")
_AT_ONCE = (
    "--host 127.0.0.1 --warmup-requests 0 --prefill-delay-ms 0 --kv-transfer-delay-ms 0"
    " --decode-delay-per-token-ms 0"
)
PEERS: Mapping[str, tuple[str, ...]] = {
    "fakellm": ("-m", "uvicorn", "fakellm.server:app", *_QUIET),
    "llmock": ("-m", "uvicorn", "llmock.main:app", *_QUIET),
    "xpyd_sim": ("-c", "from xpyd_sim.cli import main; main()", "serve", *_AT_ONCE.split()),
}
"""Mock servers by the module that one has where it is installed, and how Python starts them."""


@dataclass(frozen=True)
class Contestant:
    """A server: how it is started (it tells its port, or is given one), and what it is asked."""

    name: str
    path: str
    body: Mapping[str, Any]
    target: Callable[..., None] | None = None
    arguments: tuple[Any, ...] = ()
    command: tuple[str, ...] = ()


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Cores that this process began with: a server's process inherits those of the client, which must
not be pinned while it starts one.
"""


def pinned(*cores: int) -> None:
    """Stay on these cores (none: on all), where the machine has more than one."""
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[core % len(CORES)] for core in cores} or CORES)


def run_face(pipe: Connection, face: str, trace: str | None, *, routes: bool) -> None:
    """Serve a face on a free port; tells the port."""
    from rollproof.core.case import EngineOptions
    from rollproof.fakes.http.engine_backend import Backing, ServeOptions
    from rollproof.fakes.http.serving import bound_socket, serve_forever
    from rollproof.store import TraceWriter

    pinned(0)
    options = ServeOptions(
        flavour=face,
        model=_model(48 if routes else 1),
        engine=EngineOptions(max_batch=256, step=0.0),
    )
    listening = bound_socket()
    pipe.send(listening.getsockname()[1])
    if trace is None:
        serve_forever(face, options, [listening], access_log=False)
        return
    with TraceWriter(Path(trace), Backing.header(options), mode="w") as writer:
        serve_forever(face, options, [listening], sinks=[writer], access_log=False)


def run_least(pipe: Connection) -> None:
    """Serve what a face cannot do without: the body is read, a reply drawn and written. No engine,
    nothing is checked or recorded.
    """
    import uvicorn

    from rollproof.fakes.coded.policy import CodedPolicy
    from rollproof.fakes.http.request_body import dumped, text_of
    from rollproof.fakes.http.routes_encoding import as_int32
    from rollproof.fakes.http.serving import _fast_loop, _rare_collections, bound_socket

    policy = CodedPolicy.from_model(_model(48), 0)

    async def answer(_: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        state, tokens = policy.start_state(ids), []
        for _ in range(count):
            tokens.append(policy.next_token(0, state))
            state = policy.extend(state, tokens[-1])
        whole = [*ids, *tokens]
        pairs = [
            (logprob, token, None)
            for logprob, token in zip(
                policy.logprobs(0, whole, len(ids)).tolist(), tokens, strict=True
            )
        ]
        text = dumped(
            {
                "text": text_of(tokens),
                "output_ids": tokens,
                "meta_info": {"output_token_logprobs": pairs},
            }
        )
        content = b"".join(
            (text[:-2], b',"routed_experts":"', as_int32(policy.routes(0, whole[:-1])), b'"}}')
        )
        headers = [
            (b"content-length", b"%d" % len(content)),
            (b"content-type", b"application/json"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    pinned(0)
    listening = bound_socket()
    pipe.send(listening.getsockname()[1])
    server = uvicorn.Server(
        uvicorn.Config(
            answer, log_level="warning", access_log=False, lifespan="off", proxy_headers=False
        )
    )
    with _rare_collections(), asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(server.serve(sockets=[listening]))


def _model(layers: int) -> Any:
    from rollproof.core.case import Model

    return Model(
        num_layers=layers, moe_layers=tuple(range(layers)), num_experts=128, top_k=8, vocab=150_000
    )


def run_plain(pipe: Connection, content: bytes) -> None:
    """``run_bare`` where uvicorn was installed without extras: over h11, on the loop of asyncio."""
    sys.modules |= dict.fromkeys(
        ("httptools", "uvloop"), cast("Any", None)
    )  # importing them now fails, as if they were not there
    run_bare(pipe, content)


def run_bare(pipe: Connection, content: bytes) -> None:
    """Serve the same bytes from an endpoint that reads the body and does nothing else."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from rollproof.fakes.http.serving import _fast_loop, bound_socket

    async def answer(request: Request) -> Response:
        json.loads(await request.body())
        return Response(content, media_type="application/json")

    pinned(0)
    listening = bound_socket()
    pipe.send(listening.getsockname()[1])
    routes = [
        Route(path, answer, methods=["POST"]) for path in ("/generate", "/v1/chat/completions")
    ]
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), log_level="warning", access_log=False)
    )
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(server.serve(sockets=[listening]))


class Asking(asyncio.BufferedProtocol):
    """A keep-alive connection that asks for as long as ``left`` has requests; it looks at no more
    than a reply's status and length.

    Streams of asyncio cost as much for 80 KB as the bare endpoint, which would then be measured by
    its client.
    """

    def __init__(self, request: bytes, left: Iterator[int]) -> None:
        self._request, self._left = request, left
        self._buffer, self._have, self._head, self._length = bytearray(1 << 18), 0, 0, 0
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._next()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self._have += nbytes
        if not self._head:
            self._head = self._buffer.find(b"\r\n\r\n", 0, self._have) + 4
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
        if self._have == self._head + self._length:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server hung up"))

    def _next(self) -> None:
        if next(self._left, None) is None:
            self.done.set_result(bytes(self._buffer[self._head : self._have]))
            self._transport.close()
            return
        self._have = self._head = 0
        self._transport.write(self._request)


async def load(port: int, one: Contestant, requests: int, connections: int) -> tuple[float, bytes]:
    """Requests a second over keep-alive connections, and the last body."""
    body = json.dumps(one.body).encode()
    head = (
        f"POST {one.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
        f" {len(body)}\r\n\r\n".encode()
    )
    left = iter(range(requests))
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    made = [
        await loop.create_connection(lambda: Asking(head + body, left), "127.0.0.1", port)
        for _ in range(connections)
    ]
    bodies = await asyncio.gather(*(asking.done for _, asking in made))
    return requests / (time.perf_counter() - begun), max(bodies, key=len)


def asked(port: int, one: Contestant, requests: int, connections: int) -> tuple[float, bytes]:
    """``load`` from the second core."""
    from rollproof.fakes.http.serving import _fast_loop

    pinned(1)
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(load(port, one, requests, connections))


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process' threads have used, where the system tells."""
    return (
        sum(
            int(told.read_text().split()[0])
            for told in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        / 1e9
    )


class Running:
    """A contestant's server."""

    def __init__(self, one: Contestant) -> None:
        self.one = one
        self.best, self.content, self.cpu = 0.0, b"", float("inf")
        pinned()
        if one.target is not None:
            ours, theirs = multiprocessing.Pipe()
            self.process: Any = multiprocessing.get_context("spawn").Process(
                target=one.target, args=(theirs, *one.arguments), daemon=True
            )
            self.process.start()
            self.port = ours.recv()
        else:
            from rollproof.fakes.http.serving import bound_socket

            with bound_socket() as free:
                self.port = free.getsockname()[1]
            taskset = ("taskset", "-c", str(CORES[0])) if CORES else ()
            command = [*taskset, sys.executable, *one.command, "--port", str(self.port)]
            self.process = subprocess.Popen(  # noqa: S603 - a server that whoever runs this has installed
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        for _ in range(300):
            try:
                asked(self.port, one, 50, 5)
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise TimeoutError(f"{one.name} did not start")

    def round(self, requests: int, connections: int) -> None:
        before = processor_time(self.process.pid)
        rate, self.content = asked(self.port, self.one, requests, connections)
        self.best = max(self.best, rate)
        self.cpu = min(self.cpu, (processor_time(self.process.pid) - before) / requests)

    def stop(self) -> None:
        self.process.terminate()
        (self.process.join if hasattr(self.process, "join") else self.process.wait)()


def race(contestants: list[Contestant], options: argparse.Namespace) -> list[Running]:
    """All servers at once, asked in turns, so that whatever slows the machine slows them alike."""
    running = []
    for one in contestants:
        try:
            running.append(Running(one))
        except TimeoutError as error:
            print(f"  {error}")
    try:
        for _ in range(options.rounds):
            for one in running:
                one.round(options.requests, options.connections)
    finally:
        for one in running:
            one.stop()
    return running


def table(title: str, running: list[Running]) -> None:
    """One line a server; shares are of the first."""
    first = running[0]
    print(f"{title:50} requests/s        processor time    bytes")
    for one in running:
        rate, cpu = one.best / first.best, first.cpu / one.cpu if one.cpu else float("nan")
        print(
            f"  {one.one.name:46} {one.best:9.0f} {rate:5.0%}  {one.cpu * 1e6:8.0f} us {cpu:5.0%} "
            f" {len(one.content):8,}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollproof-bench-") as folder:
        trace = str(Path(folder) / "served.arrow")
        sample = Running(_face("sample", None))
        sample.round(10, 1)
        sample.stop()
        bare = [
            Contestant(
                "bare starlette endpoint, plain uvicorn",
                "/generate",
                GENERATE,
                run_plain,
                (sample.content,),
            ),
            Contestant(
                "bare starlette endpoint, the faces' uvicorn",
                "/generate",
                GENERATE,
                run_bare,
                (sample.content,),
            ),
        ]
        least = Contestant("a reply drawn and sent, no engine", "/generate", GENERATE, run_least)
        faces = [
            _face("SGLang face, trace written to a file", trace),
            _face("SGLang face, no trace file", None),
        ]
        running = race([*bare, *faces, least], options)
        table("/generate: 32 tokens, logprobs, routes of 48 layers", running)
        chats = [
            Contestant(
                "bare starlette endpoint, plain uvicorn",
                "/v1/chat/completions",
                CHAT,
                run_plain,
                (b"x" * 700,),
            ),
            Contestant(
                "bare starlette endpoint, the faces' uvicorn",
                "/v1/chat/completions",
                CHAT,
                run_bare,
                (b"x" * 700,),
            ),
            _chat("SGLang face", "sglang", str(Path(folder) / "a.arrow")),
            _chat("vLLM face", "vllm", str(Path(folder) / "b.arrow")),
        ]
        for name, command in PEERS.items():
            if importlib.util.find_spec(name) is None:
                print(f"  {name} is not installed")
            else:
                chats.append(Contestant(name, "/v1/chat/completions", CHAT, command=command))
        running = race(chats, options)
        table("/v1/chat/completions: 8 tokens", running)


def _run_generate(pipe: Connection, trace: str | None) -> None:
    run_face(pipe, "sglang", trace, routes=True)


def _run_chat(pipe: Connection, face: str, trace: str) -> None:
    run_face(pipe, face, trace, routes=False)


def _face(name: str, trace: str | None) -> Contestant:
    return Contestant(name, "/generate", GENERATE, _run_generate, (trace,))


def _chat(name: str, face: str, trace: str) -> Contestant:
    return Contestant(
        f"{name}, trace written to a file", "/v1/chat/completions", CHAT, _run_chat, (face, trace)
    )


if __name__ == "__main__":
    main()
