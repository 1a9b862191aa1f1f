"""What ``record_live`` costs the loop: microseconds an event, for the thread that records it.

The goal: at most 20 us an event. A call and a reply of an async engine function of 1,000 prompt and
200 sampled tokens, a submission and a sample, are timed next to the same loop unrecorded. The
thread that writes runs next to it, as in production; its processor time is shown apart.

Run: python benchmarks/recorder.py [ROUNDS]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import rollproof
from rollproof.core.contract import Contract
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout

CONTRACT = Contract(
    rows="none",
    resume="client",
    versions="none",
    logprobs="raw",
    abort_surfaces=True,
    kv_policy="keep",
)
REQUESTS = 400
EVENTS = 4


def loop(recorder: rollproof.LiveRecorder | None, prompt: list[int], sampled: list[int]) -> float:
    """Run requests of one call each, and return the processor time of this thread in seconds."""
    logprobs = np.zeros(len(sampled))

    async def generate(_ids: list[int]) -> list[int]:
        return sampled

    def to_call(ids: list[int]) -> rollproof.EngineCall:
        return rollproof.EngineCall(prompt_ids=ids, max_tokens=200, request_id=None)  # type: ignore[arg-type]

    def to_output(ids: list[int]) -> EngineOutput:
        return EngineOutput(
            token_ids=ids,  # type: ignore[arg-type]
            logprobs=logprobs,
            routes=None,
            finish_reason=FinishReason.LENGTH,
        )

    number = 0

    def to_request(ids: list[int]) -> Request:
        nonlocal number
        number += 1
        return Request(request_id=f"r{number}", prompt_ids=ids)  # type: ignore[arg-type]

    def to_record(ids: list[int]) -> Rollout:
        return Rollout(
            request_id="",
            prompt_ids=prompt,  # type: ignore[arg-type]
            response_ids=ids,  # type: ignore[arg-type]
            finish_reason=FinishReason.LENGTH,
            logprobs=logprobs,
        )

    engine: Any = generate
    if recorder is not None:
        engine = recorder.engine(generate, to_call=to_call, to_output=to_output)

    async def rollout(ids: list[int]) -> list[int]:
        sampled: list[int] = await engine(ids)
        return sampled

    run: Any = rollout
    if recorder is not None:
        run = recorder.rollout(rollout, to_request=to_request, to_record=to_record)

    async def main() -> float:
        began = time.thread_time()
        for _ in range(REQUESTS):
            await run(prompt)
        return time.thread_time() - began

    return asyncio.run(main())


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for length, count in ((1000, 200), (8000, 4000), (32000, 8000)):
        prompt, sampled = list(range(length)), list(range(count))
        bare, recorded, whole = [], [], []
        for _ in range(rounds):
            bare.append(loop(None, prompt, sampled))
            with tempfile.TemporaryDirectory() as folder:
                before = time.process_time()
                with rollproof.record_live(
                    Path(folder), CONTRACT, name="b", queue_bytes=4 << 30
                ) as recorder:
                    recorded.append(loop(recorder, prompt, sampled))
                whole.append(time.process_time() - before)
                assert not recorder.counts.dropped, recorder.counts
        cost = statistics.median(recorded) - statistics.median(bare)
        events = REQUESTS * EVENTS
        written = statistics.median(whole) - statistics.median(recorded)
        print(
            f"{length:6,} prompt and {count:5,} sampled tokens:"
            f" {cost / events * 1e6:.1f} us an event in the loop,"
            f" {written / events * 1e6:.0f} us in the writer"
        )


if __name__ == "__main__":
    main()
