"""Records what SGLang's own gateway (``pip install sglang-router``) answers before two servers with
SGLang's fake server: ``python -m tests.fakes.http.record_router``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import routing
from tests.fakes.http.recording import FOLDER, Exchange, Server, _free_port

GENERATE = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, "rid": "r1"}


def exchanges(server: Server, urls: list[str]) -> Iterator[Exchange]:
    """One after the other: what is listed, forwarded and refused, then a worker taken away and
    returned.
    """
    send_json = server.send_json
    for path in (
        "/workers",
        "/list_workers",
        "/health",
        "/readiness",
        "/liveness",
        "/nothing",
        "/model_info",
    ):
        yield send_json("GET", path)
    yield send_json("POST", "/generate", GENERATE)
    yield send_json("POST", "/flush_cache")
    for path in ("/abort_request", "/pause_generation", "/add_worker"):
        yield send_json("POST", path, {})
    yield send_json("DELETE", "/workers/00000000-0000-4000-8000-000000000000")
    listed = send_json("GET", "/workers")["response"]["body"]["workers"]
    gone = next(worker for worker in _wait_for_workers(server) if worker["url"] == urls[0])
    assert listed
    yield send_json("DELETE", f"/workers/{gone['id']}")
    time.sleep(1)
    yield send_json("GET", "/workers")
    yield send_json("POST", "/workers", {"url": urls[0]})
    time.sleep(3)
    yield send_json("GET", "/workers")


def _wait_for_workers(server: Server) -> list[dict[str, Any]]:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/workers") as reply:
        workers: list[dict[str, Any]] = json.load(reply)["workers"]
        return workers


async def main() -> None:
    """Serve, start the gateway, send the requests, write the answers."""
    async with routing("sglang", ServeOptions(flavour="sglang"), 2) as (_, backends):
        urls, port = list(backends), _free_port()
        command = [
            sys.executable,
            "-m",
            "sglang_router.launch_router",
            "--worker-urls",
            *urls,
            "--port",
            str(port),
        ]
        command += ["--policy", "round_robin", "--disable-health-check"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        try:
            server = Server(port)
            for _ in range(60):
                await asyncio.sleep(1)
                try:
                    if (await asyncio.to_thread(server.send_json, "GET", "/readiness"))["response"][
                        "status"
                    ] == 200:
                        break
                except OSError:
                    continue
            recorded = await asyncio.to_thread(lambda: list(exchanges(server, urls)))
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
    reported = json.dumps(
        {"server": f"sglang-router {metadata.version('sglang-router')}", "exchanges": recorded},
        indent=1,
    )
    (FOLDER / "router_workers.json").write_text(reported + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
