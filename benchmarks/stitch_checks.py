"""How fast stitching and version checks judge long rollouts: millions of tokens per second of
processor time.

``python benchmarks/stitch_checks.py`` judges a million tokens in four shapes, from one call of a
million tokens to a thousand requests of four calls each. Resuming sends the whole sequence again,
so what is compared grows with the number of calls; the comparison itself runs at the speed of C.
"""

from __future__ import annotations

import time

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Call, Reply, Result, Submit, Weights
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout, Span
from rollproof.core.trace import Header, Trace
from rollproof.invariants import stitch, versions
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge

CONTRACT = Contract(
    rows="none",
    resume="client",
    versions="token",
    logprobs="raw",
    abort_surfaces=False,
    kv_policy="recompute",
    loss_mask=True,
)  # type: ignore[arg-type]


def rollouts(requests: int, calls: int, tokens: int) -> Trace:
    """Return ``requests`` rollouts of ``calls`` calls of ``tokens`` tokens, a version per call."""
    draw = np.random.default_rng(0)
    events: list[Event] = []
    for number in range(requests):
        name, prompt = f"r{number}", (number, 1, 2)
        events.append(
            Submit(request=Request(request_id=name, prompt_ids=prompt, max_tokens=calls * tokens))
        )
        ids: tuple[int, ...] = ()
        values: list[np.ndarray] = []
        for i in range(calls):
            if number == 0:
                events.append(Weights(server_id="s", version=i, label=i))
            call = Call(
                call_id=len(events),
                request_id=name,
                server_id="s",
                prompt_ids=prompt + ids,
                max_tokens=(calls - i) * tokens,
            )
            output = EngineOutput(
                token_ids=tuple(draw.integers(0, 1000, tokens).tolist()),
                logprobs=-draw.random(tokens),
                routes=None,
                finish_reason=FinishReason.LENGTH if i == calls - 1 else FinishReason.ABORT,
                version=i,
            )
            true = (Span(start=0, end=tokens, version=i),)
            events += [
                call,
                Admit(call_id=call.call_id, server_id="s"),
                Reply(call_id=call.call_id, output=output, true_tokens=true),
            ]
            ids += output.token_ids
            values.append(output.logprobs)  # type: ignore[arg-type]
        rollout = Rollout(
            request_id=name,
            prompt_ids=prompt,
            response_ids=ids,
            finish_reason=FinishReason.LENGTH,
            logprobs=np.concatenate(values),
            loss_mask=np.ones(len(ids), dtype=np.int64),
            token_versions=tuple(i for i in range(calls) for _ in range(tokens)),
        )
        events.append(Result(request_id=name, rollout=rollout))
    return Trace(header=Header(subject="benchmark", contract=CONTRACT), events=()).with_events(
        events
    )


def main() -> None:
    """Print the table."""
    registry = Registry([*stitch.CHECKS, *versions.CHECKS])
    for requests, calls, tokens in (
        (1, 1, 1_000_000),
        (1, 20, 50_000),
        (100, 10, 1_000),
        (1_000, 4, 250),
    ):
        trace = rollouts(requests, calls, tokens)
        start = time.process_time()
        judgement = judge(trace, registry)
        seconds = time.process_time() - start
        if judgement.failed:
            raise SystemExit(f"The trace is correct, but {judgement.failed} found something.")
        print(
            f"{requests:5d} requests x {calls:2d} calls x {tokens:7d} tokens:"
            f" {requests * calls * tokens / seconds / 1e6:6.2f} M tokens/s"
        )


if __name__ == "__main__":
    main()
