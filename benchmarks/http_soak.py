"""Memory, open files and threads of ``rollproof serve`` under an hour of mixed calls.

    python benchmarks/http_soak.py [--minutes 60] [--rate 50] [--folder DIR]

Goals, for either server: its memory after the last minute is at most 10 MB above that after 5
minutes; it has no more threads than in its first 5 minutes; once the last client has left it has
the open files that it had before the load.

A fake SGLang and a fake vLLM server run as a user starts them, each with a trace file, and share
the calls: token prompts with routes and logprobs, chats, streams that are read and streams whose
client leaves, aborts, samples of a prompt (n > 1), rollouts that are reported with their sample,
and a weight update every half minute. Among them are clients of the bad kind: requests that are
refused, requests of which a part arrives, and clients that read or send a few bytes at a time.
``benchmarks/http_server.py`` measures how fast one kind of call is; this program sends a load that
leaves time. With ``--folder`` the figures of every half minute are kept in soak.tsv. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
SETTLED = 300
"""Seconds after which a server should not grow."""
SHOWN = (0, SETTLED, 1800, 3600)
"""Seconds after which a line is printed."""
REST = 10
"""Seconds after the load in which a server may close what is open."""
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
        reader, writer = await self._open(self._path, content)
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

    async def refused(self) -> None:
        """Send a request that is not answered, of one of the usual kinds."""
        body, length = b"{}", 2
        media, host, path, expected = "application/json", "localhost", self._path, 400
        kind = self._random.randrange(6)
        if kind == 0:
            body, length = b'{"input_ids": [1, ', 18
        elif kind == 1:
            body = orjson.dumps({"input_ids": "w5", "token_ids": {"a": 1}, "stream": 3})
            length = len(body)
        elif kind == 2:
            media = "text/plain"
        elif kind == 3:
            host, expected = "rebound.example", 421
        elif kind == 4:
            path, expected = "/nosuch", 404
        else:
            length, expected = 65 << 20, 413
        reader, writer = await self._open(path, body, length, media=media, host=host)
        first = await reader.read(1 << 16)
        writer.close()
        assert first.startswith(b"HTTP/1.1 %d" % expected), (kind, first)

    async def cut_off(self) -> None:
        """Leave in the middle of a request, or before it."""
        content = orjson.dumps(self._body(self._rid(), 8))
        sent = content[: self._random.randrange(len(content))]
        _, writer = await self._open(self._path, sent, len(content))
        await asyncio.sleep(0.2)
        if self._random.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def slow_sender(self) -> None:
        """Send a request in eight pieces within a second or two."""
        content = orjson.dumps(self._body(self._rid(), 8))
        reader, writer = await self._open(self._path, b"", len(content))
        size = len(content) // 8 + 1
        for start in range(0, len(content), size):
            await asyncio.sleep(self._random.random() / 4)
            writer.write(content[start : start + size])
        first = await reader.read(1000)
        writer.close()
        assert b" 200 " in first[:16], first

    async def slow_reader(self) -> None:
        """Read an answer of some 100 kB a piece at a time, or leave after a part of it."""
        body = self._body(self._rid(), 400, 2)
        reader, writer = await self._open(self._path, orjson.dumps(body))
        stay, size = self._random.random() < 0.7, 0
        while (data := await reader.read(1 << 12)) and (stay or size < 20_000):
            size += len(data)
            await asyncio.sleep(0.02)
        writer.close()
        assert size > 10_000, size

    async def _open(
        self,
        path: str,
        content: bytes,
        length: int | None = None,
        *,
        media: str = "application/json",
        host: str = "localhost",
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request of ``length`` bytes, of which only ``content`` arrives."""
        declared = len(content) if length is None else length
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {media}\r\n"
            f"connection: close\r\ncontent-length: {declared}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 14)
        writer.write(head.encode() + content)
        return reader, writer

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
            *(self.tokens, self.chat, self.stream) * 4,
            *(self.left_stream, self.aborted, self.samples, self.rollout),
            *(self.refused, self.cut_off, self.slow_sender, self.slow_reader),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a process has: bytes of memory, open files and threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files, threads = (len([*Path(f"/proc/{pid}/{name}").iterdir()]) for name in ("fd", "task"))
        return cls(memory=pages * os.sysconf("SC_PAGE_SIZE"), files=files, threads=threads)

    def __str__(self) -> str:
        return f"{self.memory / 1e6:8.1f} MB{self.files:5} files{self.threads:4} threads"


def wait_for(port: int) -> None:
    """Wait until the server answers: it prints its port before that."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.1)
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
) -> list[str]:
    """Send the load, and write every half minute what both servers use. Return what missed."""
    before = {name: Usage.of(pid) for name, pid in pids.items()}
    started = time.monotonic()
    ends = started + options.minutes * 60
    work = [asyncio.create_task(load.run(options.rate / len(loads), ends)) for load in loads]
    shown, settled = list(SHOWN), before
    most = {name: [0, 0] for name in pids}  # threads: in the first minutes, and after them
    with table.open("w") as file:
        file.write("seconds" + "".join(f"\t{n} MB\tfiles\tthreads" for n in pids) + "\n")
        for number in itertools.count():
            await asyncio.sleep(max(0.0, min(ends, started + 30 * number) - time.monotonic()))
            seconds, last = time.monotonic() - started, time.monotonic() >= ends
            used = {name: Usage.of(pid) for name, pid in pids.items()}
            row = [f"{u.memory / 1e6:.1f}\t{u.files}\t{u.threads}" for u in used.values()]
            file.write("\t".join([f"{seconds:.0f}", *row]) + "\n")
            file.flush()
            early = seconds <= SETTLED + 1
            settled = used if early else settled
            for name, usage in used.items():
                most[name][not early] = max(most[name][not early], usage.threads)
            if last or (shown and seconds >= shown[0]):
                shown = shown[1:]
                for load in loads:
                    counts = f"{load.replies:9,} replies {load.errors:4} errors"
                    skipped = f"{load.skipped:6} skipped"
                    usage = f"{load.server:7}{used[load.server]}"
                    print(f"{seconds:6.0f} s  {usage}{counts}{skipped}", flush=True)
            if last:
                break
    await asyncio.gather(*work)
    # what a client did not wait for, such as the end of a stream that it left
    await asyncio.sleep(REST)
    missed = []
    for name, pid in pids.items():
        grown, rest = used[name].memory - settled[name].memory, Usage.of(pid)
        print(
            f"{name}: {grown / 1e6:+.1f} MB after the fifth minute; before the load{before[name]}"
        )
        print(f"{name}: {REST} s after it{rest}")
        if grown > GOAL:
            missed.append(f"the memory of {name} grew by {grown / 1e6:.1f} MB")
        if rest.files > before[name].files:
            missed.append(f"{name} has {rest.files - before[name].files} more open files")
        if most[name][1] > most[name][0] > 0:
            missed.append(f"{name} has {most[name][1] - most[name][0]} more threads")
    missed += [f"{load.errors} errors of {load.server}" for load in loads if load.errors]
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=50.0, help="calls a second, on both servers")
    parser.add_argument("--folder", type=Path, help="for the traces and soak.tsv, kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollproof-soak-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        traces = {name: folder / f"{name}.arrow" for name in ("sglang", "vllm")}
        with serving("sglang", traces["sglang"]) as first, serving("vllm", traces["vllm"]) as other:
            pids = {"sglang": first[0], "vllm": other[0]}
            loads = [Load("sglang", first[1]), Load("vllm", other[1])]
            missed = asyncio.run(soak(pids, loads, options, folder / "soak.tsv"))
        for name, trace in traces.items():
            print(f"{name}: trace of {trace.stat().st_size / 1e6:.0f} MB")
    print(f"goals: {'; '.join(missed) or 'reached'}")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
