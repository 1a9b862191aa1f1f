"""Requests a second of SGLang's face, beside a bare starlette endpoint that sends the same bytes, in one run.

    python benchmarks/http_face.py [--requests 4000] [--connections 64]

Each call asks for 32 tokens with logprobs and routes of 48 layers, top-8 (80 KB of base64); the coded engine and the recording of
the trace are part of the face's figure. Server and client are processes of their own; give the server a core (``taskset``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

BODY = {
    "input_ids": list(range(10, 31)),
    "sampling_params": {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
    "return_routed_experts": True,
}


def run_face(pipe: Connection) -> None:
    """Serve the face on a free port; tells the port."""
    from rollproof.case import EngineOptions, Model
    from rollproof.fakes.http.backing import ServeOptions
    from rollproof.fakes.http.serving import bound_socket, serve_forever

    model = Model(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8, vocab=150_000)
    options = ServeOptions(flavour="sglang", model=model, engine=EngineOptions(max_batch=256, step=0.0))
    listening = bound_socket()
    pipe.send(listening.getsockname()[1])
    serve_forever("sglang", options, [listening], access_log=False)


def run_bare(pipe: Connection, content: bytes) -> None:
    """Serve the same bytes from an endpoint that reads the body and does nothing else."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from rollproof.fakes.http.serving import bound_socket

    async def answer(request: Request) -> Response:
        json.loads(await request.body())
        return Response(content, media_type="application/json")

    listening = bound_socket()
    pipe.send(listening.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=[Route("/generate", answer, methods=["POST"])]), log_level="warning"))
    asyncio.run(server.serve(sockets=[listening]))


async def load(port: int, requests: int, connections: int) -> tuple[float, bytes]:
    """Requests a second over keep-alive connections, and the last body."""
    body = json.dumps(BODY).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    left = iter(range(requests))
    last = b""

    async def worker() -> None:
        nonlocal last
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for _ in left:
            writer.write(head + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            last = await reader.readexactly(length)
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(connections)))
    return requests / (time.perf_counter() - begun), last


def measured(target: Any, arguments: tuple[Any, ...], options: argparse.Namespace) -> tuple[float, bytes]:
    """Start a server, warm it up, measure, end it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    port = ours.recv()
    for _ in range(200):
        try:
            asyncio.run(load(port, 50, 5))
            break
        except OSError:
            time.sleep(0.1)
    best = max((asyncio.run(load(port, options.requests, options.connections)) for _ in range(3)), key=lambda pair: pair[0])
    process.terminate()
    process.join()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--connections", type=int, default=64)
    options = parser.parse_args()
    face, content = measured(run_face, (), options)
    bare, _ = measured(run_bare, (content,), options)
    print(f"bare starlette and uvicorn  {bare:8.0f} requests/s ({len(content):,} bytes each)")
    print(f"SGLang face                 {face:8.0f} requests/s ({face / bare:.0%} of it)")


if __name__ == "__main__":
    main()
