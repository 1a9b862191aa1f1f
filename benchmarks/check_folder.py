"""How fast ``rollproof check`` judges a production trace, and whether it finds what is wrong in it.

    python benchmarks/check_folder.py [--tokens 10000000] [--jobs 2] [--folder DIR]

Writes a folder of traces: samples of 256 prompt and 1,024 response tokens with routes of 48 layers,
top-8 of 128 experts (uint8), every fourth resumed after an abort, weights updated now and then. In
seven samples one thing each is wrong. Then ``rollproof check`` judges the folder. The run fails
unless each of the seven is found, by the check that is expected, and nothing else is.

Prints sampled tokens per second of wall clock, per second of processor time, and the peak memory of
a worker process. 10^7 tokens take 8 GB of disk, 10^8 take 80 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Call, Reply, Result, Submit, Weights
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout, Span
from rollproof.core.trace import Header, Recorder
from rollproof.store import TraceWriter

LAYERS, TOP_K, EXPERTS = 48, 8, 128
PROMPT, RESPONSE = 256, 1024
PER_FILE = 256
"""Samples of a file: about 0.2 GB."""
CONTRACT = Contract(
    rows="T-1",
    resume="client",
    versions="min-max",
    logprobs="raw",
    abort_surfaces=False,
    kv_policy="recompute",
    layer_axis="all",
    num_layers=LAYERS,
    moe_layers=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=TOP_K,
    filler="none",
    dtype="uint8",
    provenance="as-sampled",
)  # type: ignore[arg-type]  # strings are taken, too
FAULTS = {
    "token": "stitch.tokens",
    "logprob": "stitch.logprobs-paired",
    "logprobs-short": "stitch.logprobs-length",
    "finish": "stitch.finish-reason",
    "row": "routes.content",
    "rows-appended": "routes.rows",
    "version": "versions.published",
}
"""What is wrong in one sample each, and the check that is to find it."""


class Samples:
    """Makes the events of samples, one after the other."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        order = np.argsort(self._random.random((1 << 14, EXPERTS), dtype=np.float32), axis=1)
        self._draws = order[:, :TOP_K].astype(np.uint8).view(np.uint64).reshape(-1)
        self._calls = 0

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(1000, 150_000, count).tolist())

    def _rows(self, count: int) -> np.ndarray:
        picks = self._random.integers(0, len(self._draws), (count, LAYERS), dtype=np.int32)
        return self._draws[picks].view(np.uint8).reshape(count, LAYERS, TOP_K)

    def sample(self, name: str, version: int, *, resumed: bool, fault: str) -> Iterator[Event]:
        """Yield the events of one request."""
        prompt, known = self._ids(PROMPT), ()
        yield Submit(request=Request(request_id=name, prompt_ids=prompt, max_tokens=RESPONSE))
        parts, logprobs, appended = [], [], []
        shares = (RESPONSE // 3, RESPONSE - RESPONSE // 3) if resumed else (RESPONSE,)
        for number, share in enumerate(shares):
            last = number == len(shares) - 1
            self._calls += 1
            sent, left = prompt + known, RESPONSE - len(known)
            yield Call(
                call_id=self._calls,
                request_id=name,
                server_id="s0",
                prompt_ids=sent,
                max_tokens=left,
            )
            yield Admit(call_id=self._calls, server_id="s0")
            ids, values = self._ids(share), -self._random.random(share)
            rows = self._rows(len(sent) + share - 1)
            yield Reply(
                call_id=self._calls,
                output=EngineOutput(
                    token_ids=ids,
                    logprobs=values,
                    routes=rows,
                    finish_reason=FinishReason.LENGTH if last else FinishReason.ABORT,
                    spans=(Span(start=0, end=share, version=version),),
                ),
            )
            parts.append(rows[sum(map(len, parts)) :])
            appended.append(rows)
            logprobs.append(values)
            known += ids
        rollout = Rollout(
            request_id=name,
            prompt_ids=prompt,
            response_ids=known,
            finish_reason=FinishReason.LENGTH,
            logprobs=np.concatenate(logprobs),
            routes=np.concatenate(parts),
            min_version=version,
            max_version=version,
        )
        yield Result(request_id=name, rollout=_spoilt(rollout, appended, fault))


def _spoilt(rollout: Rollout, appended: list[np.ndarray], fault: str) -> Rollout:
    """Return the sample with one thing wrong."""
    assert rollout.logprobs is not None and rollout.routes is not None
    changes: dict[str, Any] = {}
    if fault == "token":
        ids = rollout.response_ids
        changes["response_ids"] = (*ids[:500], ids[500] + 1, *ids[501:])
    elif fault == "logprob":
        changes["logprobs"] = rollout.logprobs.copy()
        changes["logprobs"][700] -= 0.25
    elif fault == "logprobs-short":
        changes["logprobs"] = rollout.logprobs[-600:]
    elif fault == "finish":
        changes["finish_reason"] = FinishReason.STOP
    elif fault == "row":
        changes["routes"] = rollout.routes.copy()
        changes["routes"][300, 17] = np.roll(rollout.routes[301, 17], 1)
    elif fault == "rows-appended":
        changes["routes"] = np.concatenate(appended)
    elif fault == "version":
        changes["max_version"] = (rollout.max_version or 0) + 1
    return replace(rollout, **changes)


def write(folder: Path, tokens: int) -> dict[str, str]:
    """Write the traces; returns the fault of each request that has one."""
    samples = max(len(FAULTS) * 4, tokens // RESPONSE)
    # resumed samples, spread over the whole folder
    places = {
        (samples * (2 * number + 1) // (2 * len(FAULTS))) // 4 * 4: fault
        for number, fault in enumerate(FAULTS)
    }
    planted = {}
    for first in range(0, samples, PER_FILE):
        header = Header(subject="production", contract=CONTRACT)
        path = folder / f"run.{first // PER_FILE:04}.arrow"
        source = Samples(first)
        with TraceWriter(path, header, trusted=True) as writer:
            recorder = Recorder(time.time, [writer], keep=False)
            for place in range(first, min(first + PER_FILE, samples)):
                version = place // 64
                if place % 64 == 0:
                    recorder.record(Weights(server_id="s0", version=version, label=version))
                name, fault = f"request-{place}", places.get(place, "")
                if fault:
                    planted[name] = fault
                for event in source.sample(name, version, resumed=place % 4 == 0, fault=fault):
                    recorder.record(event)
    return planted


def judge(folder: Path, jobs: int) -> tuple[dict[str, Any], float, float, int]:
    """Return the report of ``rollproof check``, its seconds by the wall and of processors, and the
    peak memory of a process in MB.
    """
    report = folder / "report"
    command = [sys.executable, "-c", "from rollproof.cli import main; main()"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(  # noqa: S603 - rollproof itself
        [*command, "check", str(folder), "-j", str(jobs), "--json", str(report)],
        stdout=subprocess.DEVNULL,
        check=False,
    )
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    data: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return data, wall, spent, after.ru_maxrss // 1024


def compare(report: dict[str, Any], planted: dict[str, str]) -> None:
    """Raise ``SystemExit`` unless exactly the planted faults were found."""
    found: dict[str, set[str]] = {}
    for check in report["checks"]:
        for finding in check["findings"]:
            found.setdefault(finding["where"].get("request", "?"), set()).add(check["id"])
        if check["found"] > len(check["findings"]):
            raise SystemExit(f"{check['id']} found {check['found']}, more than were planted")
    for request, fault in planted.items():
        if FAULTS[fault] not in found.get(request, ()):
            raise SystemExit(f"{fault} of {request} was not found: {found.get(request)}")
    more = found.keys() - planted.keys()
    if more:
        raise SystemExit(f"found what was not planted: { ({name: found[name] for name in more}) }")
    for request, fault in planted.items():
        print(f"  {fault} in {request}: {', '.join(sorted(found[request]))}")


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the traces are written (and deleted)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        planted = write(folder, options.tokens)
        size = sum(path.stat().st_size for path in folder.iterdir())
        files = sum(1 for _ in folder.iterdir())
        report, wall, spent, peak = judge(folder, options.jobs)
        tokens = report["exercised"]["tokens sampled"]
        print(f"{tokens:,} sampled tokens in {files} files, {size / 1e9:.1f} GB")
        print(
            f"{options.jobs} processes: {tokens / wall:,.0f} tokens/s ({wall:.1f} s);"
            f" {tokens / spent:,.0f} tokens a second of processor time ({spent:.1f} s);"
            f" {peak} MB at most in a process"
        )
        compare(report, planted)
        print(f"all {len(planted)} faults found, nothing else")


if __name__ == "__main__":
    main()
