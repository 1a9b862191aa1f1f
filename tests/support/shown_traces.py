"""Traces for `rollproof show`: many requests, faulty samples, and hostile names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollproof.core.trace import Trace
from rollproof.store import TraceWriter
from tests.support.trace_builder import TraceBuilder, coded_rows, contract

PROMPT = (1, 2, 3)


def traced(count: int, *, wrong: Sequence[int] = (), shifted: Sequence[int] = ()) -> Trace:
    """Requests ``r0`` to ``r{count - 1}``, each aborted after two tokens and resumed on another
    server.

    The samples of ``wrong`` have another last token; those of ``shifted`` have rows shifted by one.
    """
    builder = TraceBuilder(contract())
    builder.weights(0).weights(0, "s1")
    for number in range(count):
        name = f"r{number}"
        builder.submit(name, prompt=PROMPT)
        first = builder.call(PROMPT, request_id=name)
        builder.reply(first, (4, 5), "abort", prompt_len=3)
        second = builder.call((*PROMPT, 4, 5), request_id=name, server="s1", max_tokens=2)
        builder.reply(second, (6, 7), prompt_len=5)
        rows = coded_rows(0, 6, 0)
        builder.result(
            (4, 5, 6, 9 if number in wrong else 7),
            name,
            prompt=PROMPT,
            logprobs=np.array([-0.5, -0.51, -0.5, -0.51]),
            min_version=0,
            max_version=0,
            routes=np.roll(rows, 1, axis=0) if number in shifted else rows,
        )
    return builder.trace()


def written(path: Path, *traces: Trace, batch_events: int = 16) -> Path:
    """An Arrow file with an episode for each trace, in small batches."""
    with TraceWriter(path, mode="w", header=traces[0].header, batch_events=batch_events) as writer:
        for event in traces[0].events:
            writer.append(event)
        for trace in traces[1:]:
            writer.write(trace)
    return path
