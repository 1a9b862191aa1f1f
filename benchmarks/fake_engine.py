"""Coded tokens per second of one fake engine: 48 layers, top-8 of 128 experts, a batch of 64, rows
and logprobs returned.

Run: ``python benchmarks/fake_engine.py``. Goal: at least 200,000 tokens/s on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from rollproof.core.case import EngineOptions, Model
from rollproof.core.trace import Recorder
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.simulation import virtual_loop


async def measure(
    calls: int, prompt: int, response: int, batch: int, update: bool
) -> tuple[int, float]:
    """Return the tokens sampled, and the processor seconds."""
    model = Model(
        num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8, vocab=150_000
    )
    recorder = Recorder(asyncio.get_running_loop().time)
    engine = FakeEngine(
        "s0",
        CodedPolicy.from_model(model, 0),
        FLAVOURS["vllm"],
        EngineOptions(max_batch=batch),
        recorder,
    )
    began = time.process_time()
    calls_to_make = [
        engine.generate(prompt_ids=[i, *range(prompt - 1)], max_tokens=response)
        for i in range(calls)
    ]
    tasks = [asyncio.ensure_future(call) for call in calls_to_make]
    if update:
        await asyncio.sleep(response / 2)
        await engine.load(1, 1)
    outputs = await asyncio.gather(*tasks)
    seconds = time.process_time() - began
    assert all(
        output.routes is not None and len(output.routes) == prompt + len(output.token_ids) - 1
        for output in outputs
    )
    return sum(len(output.token_ids) for output in outputs), seconds


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--update", action="store_true", help="change the weights in the middle")
    args = parser.parse_args()
    best = 0.0
    for _ in range(3):
        tokens, seconds = virtual_loop.run(
            lambda: measure(args.calls, args.prompt, args.response, args.batch, args.update)
        )
        best = max(best, tokens / seconds)
        print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s")
    print(f"best: {best:,.0f} tokens/s (goal 200,000)")


if __name__ == "__main__":
    main()
