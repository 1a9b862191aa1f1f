"""Memory of ``rollproof serve`` under an hour of mixed calls.

    python benchmarks/http_soak.py [--minutes 60] [--rate 50]

Goal: the memory of either server after the last minute is at most 10 MB above that after 5 minutes.

A fake SGLang and a fake vLLM server run as a user starts them, each with a trace file, and share
the calls: token prompts with routes and logprobs, chats, streams that are read and streams whose
client leaves, aborts, samples of a prompt (n > 1), rollouts that are reported with their sample,
and a weight update every half minute. ``benchmarks/http_server.py`` measures how fast one kind of
call is; this program sends a load that leaves time, and looks at memory alone. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from rollproof import Request, Rollout
from rollproof.fakes.http.client import HttpClient
from rollproof.fakes.http.trace_client import Teller

GOAL = 10e6
"""Bytes by which a server may grow after its fifth minute."""
MAX_CALLS = 200
"""Calls in flight on one server; a busy machine gets no more of them."""
SHOWN = (0, 300, 1800, 3600)
"""Seconds after which a line is printed."""
CONTRACT = """
rows = "none"
resume = "client"
abort_surfaces = false
versions = "none"
logprobs = "none"
kv_policy = "keep"
"""
"""What the client promises of its samples: their tokens alone."""


class Load:
    """Calls of one server. A call of ``KINDS`` returns once its reply has arrived."""

    def __init__(self, server: str, port: int) -> None:
        self.server, self._port = server, port
        self._http = HttpClient(port)
        self._teller = Teller(f"http://127.0.0.1:{port}")
        self._random = random.Random(server)
        self._ids = itertools.count()
        self._path = "/generate" if server == "sglang" else "/inference/v1/generate"
        self.replies, self.errors, self.skipped = 0, 0, 0

    def _body(self, rid: str, tokens: int, samples: int = 1, *, stream: bool = False) -> Any:
        prompt = [self._random.randrange(3, 500) for _ in range(self._random.randrange(4, 64))]
        sampling = {"temperature": 1.0, "ignore_eos": True, "n": samples}
        if self.server == "sglang":
            return {
                "rid": rid,
                "input_ids": prompt,
                "sampling_params": {**sampling, "max_new_tokens": tokens},
                "return_logprob": True,
                "return_routed_experts": True,
                "stream": stream,
            }
        return {
            "request_id": rid,
            "model": "tiny",
            "token_ids": prompt,
            "sampling_params": {**sampling, "max_tokens": tokens, "logprobs": 0},
            "stream": stream,
        }

    async def _post(self, path: str, body: Any = None, **headers: str) -> Any:
        reply = await self._http.request("POST", path, body, headers)
        if reply.status != 200:
            raise ValueError(f"{path} answered {reply.status}: {reply.body[:200]!r}")
        return reply

    def _rid(self) -> str:
        return f"r{next(self._ids)}"

    async def tokens(self) -> None:
        await self._post(self._path, self._body(self._rid(), 32))

    async def samples(self) -> None:
        await self._post(self._path, self._body(self._rid(), 16, 3))

    async def chat(self) -> None:
        words = " ".join(f"w{self._random.randrange(3, 500)}" for _ in range(12))
        messages = [{"role": "user", "content": words}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 16, "logprobs": True}
        await self._post("/v1/chat/completions", body)

    async def stream(self) -> None:
        reply = await self._post(self._path, self._body(self._rid(), 24, stream=True))
        assert reply.events(), "a stream without events"

    async def left_stream(self) -> None:
        content = orjson.dumps(self._body(self._rid(), 400, stream=True))
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + content)
        first = await reader.read(1000)
        writer.close()
        assert b" 200 " in first[:16], first

    async def aborted(self) -> None:
        rid = self._rid()
        call = asyncio.create_task(self._post(self._path, self._body(rid, 2_000)))
        await asyncio.sleep(0.05)
        if self.server == "sglang":
            await self._post("/abort_request", {"rid": rid})
        else:
            known = f"generate-tokens-{rid}"  # as the engine names the call
            await self._post("/inference/v1/abort_requests", {"request_ids": [known]})
        await call

    async def rollout(self) -> None:
        rid = self._rid()
        body = self._body(rid, 32)
        prompt = tuple(body["input_ids" if self.server == "sglang" else "token_ids"])
        request = Request(request_id=rid, prompt_ids=prompt, max_tokens=32)
        await asyncio.to_thread(self._teller.submit, request)
        reply = (await self._post(self._path, body, **self._teller.headers(rid))).json()
        ids = reply["output_ids"] if "output_ids" in reply else reply["choices"][0]["token_ids"]
        sample = Rollout(
            request_id=rid, prompt_ids=prompt, response_ids=tuple(ids), finish_reason="length"
        )
        await asyncio.to_thread(self._teller.result, sample)

    async def update(self, version: int) -> None:
        """Pause the server, load the next weights and let it go on."""
        if self.server == "sglang":
            await self._post("/pause_generation", {"mode": "retract"})
            path = {"model_path": f"/weights/{version}", "weight_version": f"w{version}"}
            await self._post("/update_weights_from_disk", path)
            await self._post("/continue_generation", {})
        else:
            await self._post("/pause?mode=keep")
            await self._post("/collective_rpc", {"method": "reload_weights"})
            await self._post("/resume")

    async def count(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run a call, and print the first errors."""
        try:
            await call()
            self.replies += 1
        except Exception as error:  # noqa: BLE001 - counted, and the soak goes on
            self.errors += 1
            if self.errors <= 5:
                print(f"  {self.server}: {call.__name__}: {type(error).__name__}: {error}")

    async def run(self, rate: float, ends: float) -> None:
        """Start ``rate`` calls a second until ``ends``, whatever the server takes for them."""
        kinds = (
            *(self.tokens, self.chat, self.stream) * 3,
            *(self.left_stream, self.aborted, self.samples, self.rollout),
        )
        running: set[asyncio.Task[None]] = set()
        started, update_at, version = time.monotonic(), time.monotonic() + 30, 0
        for number in itertools.count():
            due = started + number / rate
            if due > ends:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(running) >= MAX_CALLS:
                self.skipped += 1
                continue
            task = asyncio.create_task(self.count(self._random.choice(kinds)))
            running.add(task)
            task.add_done_callback(running.discard)
            if due > update_at:
                update_at, version = update_at + 30, version + 1
                newest = version
                await self.count(lambda newest=newest: self.update(newest))
        await asyncio.gather(*running)


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for(port: int) -> None:
    """Wait until the server takes connections: it prints its port before that."""
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"no server on port {port}")


@contextmanager
def serving(server: str, trace: Path) -> Iterator[tuple[int, int]]:
    """Run ``rollproof serve`` and give its process id and port. Ctrl-C must end it with 0."""
    contract = trace.with_suffix(".toml")
    contract.write_text(CONTRACT)
    options = ("--as", server, "--trace", str(trace), "--contract", str(contract), "--quiet")
    with subprocess.Popen(  # noqa: S603 - this Python, and options from above
        [sys.executable, "-m", "rollproof", "serve", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            port = re.search(r":(\d+)$", line.strip())
            if port is None:
                raise RuntimeError(f"{server} did not start: {line}")
            wait_for(int(port[1]))
            yield process.pid, int(port[1])
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
            print(f"{server} ended with {code}")


async def soak(
    pids: dict[str, int], loads: list[Load], options: argparse.Namespace, table: Path
) -> dict[str, float]:
    """Send the load and write the memory of both servers every ten seconds. Return by how much each
    grew after its fifth minute.
    """
    started = time.monotonic()
    ends = started + options.minutes * 60
    work = [asyncio.create_task(load.run(options.rate / len(loads), ends)) for load in loads]
    shown, settled = list(SHOWN), dict.fromkeys(pids, 0)
    with table.open("w") as file:
        for number in itertools.count():
            await asyncio.sleep(max(0.0, started + 10 * number - time.monotonic()))
            seconds, last = time.monotonic() - started, time.monotonic() >= ends
            sizes = {name: resident_bytes(pid) for name, pid in pids.items()}
            file.write("\t".join([f"{seconds:.0f}", *map(str, sizes.values())]) + "\n")
            file.flush()
            if seconds <= 300:
                settled = sizes
            if last or (shown and seconds >= shown[0]):
                shown = shown[1:]
                for load in loads:
                    counts = f"{load.replies:9,} replies {load.errors:4} errors"
                    memory = f"{load.server:7}{sizes[load.server] / 1e6:8.1f} MB"
                    print(f"{seconds:6.0f} s  {memory}{counts}{load.skipped:6} skipped", flush=True)
            if last:
                break
    await asyncio.gather(*work)
    return {name: sizes[name] - settled[name] for name in pids}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=50.0, help="calls a second, on both servers")
    parser.add_argument("--folder", type=Path, help="for the traces and memory.tsv, kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollproof-soak-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        traces = {name: folder / f"{name}.arrow" for name in ("sglang", "vllm")}
        with serving("sglang", traces["sglang"]) as first, serving("vllm", traces["vllm"]) as other:
            pids = {"sglang": first[0], "vllm": other[0]}
            loads = [Load("sglang", first[1]), Load("vllm", other[1])]
            grown = asyncio.run(soak(pids, loads, options, folder / "memory.tsv"))
        for name, trace in traces.items():
            print(f"{name}: {grown[name] / 1e6:+.1f} MB after the fifth minute", end="")
            print(f", trace of {trace.stat().st_size / 1e6:.0f} MB")
    reached = max(grown.values()) <= GOAL and not any(load.errors for load in loads)
    verdict = "reached" if reached else "not reached"
    print(f"goal: at most {GOAL / 1e6:.0f} MB more, no errors: {verdict}")
    return not reached


if __name__ == "__main__":
    raise SystemExit(main())
