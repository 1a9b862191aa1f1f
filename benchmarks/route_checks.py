"""How fast the route checks read routed_experts, and whether memory stays flat.

    python benchmarks/route_checks.py [--requests 500] [--tokens 2000] [--segments 3]

Judges a streamed trace of resumed samples (48 layers, top-8 of 128 experts, uint8) and prints
megabytes of *delivered* routes per CPU second of judging; the replies of the segments, which are
read too, are not counted. Making the events is not timed; the best of three runs counts. Memory is
the peak after a tenth of the requests and after all of them.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Call, Reply, Result, Submit, Weights
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout, Span
from rollproof.core.trace import Header
from rollproof.invariants.routes import CHECKS
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judge, Tally
from rollproof.judging.registry import Registry

LAYERS, TOP_K, EXPERTS = 48, 8, 128
CONTRACT = Contract(
    rows=Rows.FORWARDED,
    resume=ResumeBy.CLIENT,
    versions=Versions.MIN_MAX,
    logprobs=Logprobs.RAW,
    abort_surfaces=False,
    kv_policy=KvPolicy.RECOMPUTE,
    layer_axis=LayerAxis.ALL,
    num_layers=LAYERS,
    moe_layers=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=TOP_K,
    filler=Filler.NONE,
    dtype="uint8",
    provenance=Provenance.AS_SAMPLED,
)


class Stream:
    """Events of ``requests`` resumed samples, made one request at a time."""

    def __init__(self, requests: int, tokens: int, segments: int) -> None:
        self._requests, self._tokens, self._segments = requests, tokens, segments
        self._random = np.random.default_rng(0)
        draws = np.argsort(self._random.random((1 << 14, EXPERTS), dtype=np.float32), axis=1)[
            :, :TOP_K
        ].astype(np.uint8)
        self._draws = np.ascontiguousarray(draws).view(np.uint64).reshape(-1)
        self._index = 0

    def _rows(self, count: int) -> np.ndarray:
        picks = self._random.integers(0, len(self._draws), (count, LAYERS))
        return self._draws[picks].view(np.uint8).reshape(count, LAYERS, TOP_K)

    def __iter__(self) -> Iterator[Event]:
        yield Weights(server_id="s0", version=0, label=0)
        for number in range(self._requests):
            yield from self._request(number)

    def _request(self, number: int) -> Iterator[Event]:
        name, share = f"r{number}", self._tokens // (self._segments + 1)
        prompt = tuple(
            int(i) for i in self._random.integers(0, 1000, self._tokens - share * self._segments)
        )
        yield Submit(
            request=Request(request_id=name, prompt_ids=prompt, max_tokens=share * self._segments)
        )
        known = prompt
        parts: list[np.ndarray] = []
        for segment in range(self._segments):
            call, last = number * self._segments + segment, segment == self._segments - 1
            yield Call(
                call_id=call,
                request_id=name,
                server_id="s0",
                prompt_ids=known,
                max_tokens=self._tokens,
            )
            yield Admit(call_id=call, server_id="s0")
            tokens = tuple(int(i) for i in self._random.integers(0, 1000, share))
            rows = self._rows(len(known) + share - 1)
            span = (Span(start=0, end=share, version=0),)
            output = EngineOutput(
                token_ids=tokens,
                logprobs=np.full(share, -0.5),
                routes=rows,
                finish_reason=FinishReason.LENGTH if last else FinishReason.ABORT,
            )
            yield Reply(
                call_id=call,
                output=output,
                true_tokens=span,
                true_rows=(Span(start=0, end=len(rows), version=0),),
            )
            parts.append(rows[sum(len(part) for part in parts) :])
            known += tokens
        rollout = Rollout(
            request_id=name,
            prompt_ids=prompt,
            response_ids=known[len(prompt) :],
            finish_reason=FinishReason.LENGTH,
            routes=np.concatenate(parts),
        )
        yield Result(request_id=name, rollout=rollout)


def run(
    stream: Stream, requests: int, registry: Registry
) -> tuple[float, int, list[float], list[str]]:
    """Seconds of judging, delivered bytes, peak memory in MB after a tenth and after all, and ids
    of checks that failed.
    """
    tally = Tally(registry)
    judge = Judge(Header(subject="benchmark", contract=CONTRACT), tally)
    seconds, delivered, ended, peaks = 0.0, 0, 0, []
    for index, event in enumerate(stream):
        object.__setattr__(event, "index", index)
        start = time.process_time()
        judge.feed(event)
        seconds += time.process_time() - start
        if (
            isinstance(event, Result)
            and event.rollout is not None
            and event.rollout.routes is not None
        ):
            delivered += event.rollout.routes.nbytes
            ended += 1
            if ended in (max(1, requests // 10), requests):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    start = time.process_time()
    judge.finish()
    seconds += time.process_time() - start
    return (
        seconds,
        delivered,
        peaks,
        [result.id for result in tally.judgement().results if result.verdict is Verdict.FAIL],
    )


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--segments", type=int, default=3)
    options = parser.parse_args()

    def stream() -> Stream:
        return Stream(options.requests, options.tokens, options.segments)

    base, *_ = run(stream(), options.requests, Registry(()))
    seconds, delivered, peaks, failed = min(
        run(stream(), options.requests, Registry(CHECKS)) for _ in range(3)
    )
    print(
        f"{options.requests} samples of {options.tokens} tokens in {options.segments} segments,"
        f" {delivered / 1e6:.0f} MB of routes"
    )
    print(
        f"all {len(CHECKS)} route checks: {seconds:.2f} s, {delivered / seconds / 1e6:.0f} MB/s"
        f" (judge without checks: {base:.3f} s)"
    )
    print(f"peak memory: {peaks[0]:.0f} MB after a tenth, {peaks[-1]:.0f} MB after all")
    if failed:
        raise SystemExit(f"the clean trace failed {failed}")


if __name__ == "__main__":
    main()
