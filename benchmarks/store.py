"""Trace stores: speed of writing and reading route bytes, of small events, and the memory that
reading takes.

``python benchmarks/store.py [TOTAL_MIB]`` (default 2048) prints one line a figure. Figures are per
second of processor time, so that a busy machine tells the same.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Reply
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.core.trace import Header, Trace
from rollproof.store import TraceReader, TraceWriter, dump_trace, load_trace
from rollproof.store.columns import validate
from rollproof.store.stream import Stream, open_file

TOKENS, LAYERS, TOP_K = 512, 48, 8
CONTRACT = Contract(
    rows="none",
    resume="client",
    versions="none",
    logprobs="raw",
    abort_surfaces=False,
    kv_policy="recompute",
)  # type: ignore[arg-type]
HEADER = Header(subject="benchmark", contract=CONTRACT)


def replies(total_bytes: int) -> Iterator[Event]:
    """Replies of 512 tokens with 48 layers of top-8 uint8 routes, 196,608 bytes each."""
    routes = np.random.default_rng(0).integers(0, 128, (TOKENS, LAYERS, TOP_K), dtype=np.uint8)
    ids, logprobs = tuple(range(TOKENS)), np.zeros(TOKENS)
    for i in range(total_bytes // routes.nbytes):
        output = EngineOutput(
            token_ids=ids, logprobs=logprobs, routes=routes, finish_reason=FinishReason.LENGTH
        )
        yield Reply(index=i, time=float(i), call_id=i, output=output)


def rss_mb() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def routes_figures(path: Path, megabytes: int) -> None:
    started = time.process_time()
    with TraceWriter(path, HEADER, mode="w") as writer:
        for event in replies(megabytes << 20):
            writer.append(event)
    print(
        f"write: {megabytes / (time.process_time() - started):.0f} MiB/s of routes,"
        f" {path.stat().st_size >> 20} MiB file"
    )
    reader = TraceReader(path)
    before, started, read = rss_mb(), time.process_time(), 0
    for event in reader:
        assert isinstance(event, Reply) and event.output.routes is not None
        read += event.output.routes.nbytes
    print(
        f"read: {read / 2**20 / (time.process_time() - started):.0f} MiB/s of routes; resident size"
        f" grew by {rss_mb() - before:.0f} MiB"
    )
    with open_file(path, "r") as file:
        batches = list(islice(Stream(path, file).batches(), 32))
    started = time.process_time()
    for batch in batches:
        validate(batch)
    spent = time.process_time() - started
    size = sum(batch.nbytes for batch in batches) / len(batches) / 2**20
    print(f"full validation: {spent / len(batches) * 1e6:.0f} us a batch of {size:.1f} MiB")


def small_figures(path: Path, count: int = 50_000) -> None:
    started = time.process_time()
    with TraceWriter(path, HEADER, mode="w") as writer:
        for i in range(count):
            writer.append(Admit(index=i, time=float(i), call_id=i, server_id="s0"))
    wrote, started = time.process_time() - started, time.process_time()
    read = sum(1 for _ in TraceReader(path)) / (time.process_time() - started)
    print(
        f"small events: {count / wrote:.0f}/s written, {read:.0f}/s read,"
        f" {path.stat().st_size / count:.0f} bytes each"
    )


def json_figures(path: Path) -> None:
    trace = Trace(header=HEADER, events=tuple(replies(20 << 20)))
    started = time.process_time()
    dump_trace(trace, path)
    wrote, size, started = (
        time.process_time() - started,
        path.stat().st_size / 2**20,
        time.process_time(),
    )
    load_trace(path)
    print(
        f"JSON: {size / wrote:.0f} MiB/s written, {size / (time.process_time() - started):.0f}"
        " MiB/s read"
    )


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    with tempfile.TemporaryDirectory() as folder:
        routes_figures(Path(folder) / "routes.arrow", megabytes)
        small_figures(Path(folder) / "small.arrow")
        json_figures(Path(folder) / "trace.json")


if __name__ == "__main__":
    main()
