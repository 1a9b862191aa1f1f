"""What ``rollproof proxy`` costs beside a plain reverse proxy of starlette and httpx.

A fixed server answers calls of SGLang's form in no time (2,000 prompt tokens, 200 sampled ones with
logprobs and routes of 48 layers, or a stream of 50 events); the same client calls it through the
plain proxy and through rollproof's, each a process of its own, in turns. The goals: at most 1 ms
and 10 % of the throughput. On a busy machine the processor time of a call says more than its
duration; that of rollproof's proxy has a thread in it that reads the replies and writes the trace.

Run: python benchmarks/proxy.py [SECONDS]
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROUNDS = 4
CONCURRENT = 16


def reply_body() -> bytes:
    import numpy as np

    routes = np.arange(2199 * 48 * 8, dtype="<i4") % 128
    ids = list(range(200))
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": 200},
        "weight_version": "1",
        "completion_tokens": 200,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


def small_body() -> bytes:
    ids = list(range(200))
    meta = {
        "finish_reason": {"type": "length", "length": 200},
        "completion_tokens": 200,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


def stream_events() -> list[bytes]:
    def event(count: int) -> bytes:
        reason = {"type": "length", "length": 50} if count == 50 else None
        meta = {"finish_reason": reason, "completion_tokens": count}
        reply = {"output_ids": list(range(count)), "meta_info": meta}
        return b"data: " + json.dumps(reply).encode() + b"\n\n"

    return [*(event(count) for count in range(1, 51)), b"data: [DONE]\n\n"]


def serve_upstream(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    whole, small, events = reply_body(), small_body(), stream_events()

    async def generate(request: Request) -> Response:
        body = await request.body()
        if b'"stream"' in body[:40]:

            async def stream() -> AsyncIterator[bytes]:
                for event in events:
                    yield event

            return StreamingResponse(stream(), media_type="text/event-stream")
        chosen = whole if b'"return_routed_experts"' in body[:60] else small
        return Response(chosen, media_type="application/json")

    async def models(_request: Request) -> Response:
        return Response('{"data": [{"owned_by": "sglang"}]}', media_type="application/json")

    app = Starlette(
        routes=[Route("/generate", generate, methods=["POST"]), Route("/v1/models", models)]
    )
    uvicorn.run(app, port=port, log_level="critical")


def serve_plain_proxy(port: int, to: str) -> None:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=to, limits=limits, timeout=600, trust_env=False)

    async def forward(request: Request) -> Response:
        body = await request.body()
        upstream = client.build_request(
            request.method, request.url.path, headers=request.headers.raw, content=body
        )
        reply = await client.send(upstream, stream=True)
        return StreamingResponse(
            reply.aiter_raw(),
            status_code=reply.status_code,
            headers=dict(reply.headers),
            background=BackgroundTask(reply.aclose),
        )

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])
    uvicorn.run(app, port=port, log_level="critical")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"nothing listens on port {port}")


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def call(reader: Any, writer: Any, request: bytes) -> None:
    """Make one call over a connection that stays open, and read the whole reply."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if b"content-length: " in head.lower():
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        return
    while True:
        size = int(await reader.readline(), 16)
        await reader.readexactly(size + 2)
        if not size:
            return


async def load(port: int, body: bytes, seconds: float, concurrent: int) -> list[float]:
    """Return how long each call took, in seconds."""
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    end = time.perf_counter() + seconds
    took: list[float] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        while (began := time.perf_counter()) < end:
            await call(reader, writer, request)
            took.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(one() for _ in range(concurrent)))
    return took


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "upstream":
        serve_upstream(int(sys.argv[2]))
        return
    if len(sys.argv) > 3 and sys.argv[1] == "plain":
        serve_plain_proxy(int(sys.argv[2]), sys.argv[3])
        return
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    prompt = list(range(2000))
    sampling = {"max_new_tokens": 200, "temperature": 1.0}
    bodies = {
        "reply of 200 tokens": {"x": 1},
        "with routes (4.5 MB)": {"return_routed_experts": True},
        "stream of 50 events": {"stream": True},
    }
    ports = {name: free_port() for name in ("upstream", "plain", "rollproof")}
    to = f"http://127.0.0.1:{ports['upstream']}"
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        me = [sys.executable, __file__]
        commands = [
            [*me, "upstream", str(ports["upstream"])],
            [*me, "plain", str(ports["plain"]), to],
            [
                *(sys.executable, "-m", "rollproof", "proxy", "--to", to),
                *("--trace", f"{folder}/trace", "--port", str(ports["rollproof"])),
            ],
        ]
        pids = {}
        for command, (name, port) in zip(commands, ports.items(), strict=True):
            process = subprocess.Popen(command)  # noqa: S603 - our own programs
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pids[name] = process.pid
            wait_for(port)
        print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for name, options in bodies.items():
            body = json.dumps(
                {
                    **options,
                    "input_ids": prompt,
                    "sampling_params": sampling,
                    "return_logprob": True,
                }
            ).encode()
            print(f"\n{name}")
            for concurrent in (1, CONCURRENT):
                medians: dict[str, list[float]] = {"plain": [], "rollproof": []}
                rates: dict[str, list[float]] = {"plain": [], "rollproof": []}
                spent: dict[str, list[float]] = {"plain": [], "rollproof": []}
                # in turns, since the machine may be busy with other things for a while
                for _ in range(ROUNDS):
                    for proxy in medians:
                        before = processor_seconds(pids[proxy])
                        took = asyncio.run(load(ports[proxy], body, seconds, concurrent))
                        medians[proxy].append(statistics.median(took))
                        rates[proxy].append(len(took) / seconds)
                        spent[proxy].append((processor_seconds(pids[proxy]) - before) / len(took))
                plain, own = (statistics.median(medians[proxy]) for proxy in medians)
                plain_rate, own_rate = (statistics.median(rates[proxy]) for proxy in rates)
                print(
                    f"  {concurrent:2} at once: median {plain * 1e3:.2f} ms plain,"
                    f" {own * 1e3:.2f} ms rollproof ({(own - plain) * 1e3:+.2f} ms);"
                    f" {plain_rate:.0f} and {own_rate:.0f} calls/s"
                    f" ({(own_rate / plain_rate - 1) * 100:+.0f} %); processor"
                    f" {statistics.median(spent['plain']) * 1e3:.2f} and"
                    f" {statistics.median(spent['rollproof']) * 1e3:.2f} ms a call"
                )


if __name__ == "__main__":
    main()
