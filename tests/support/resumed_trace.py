"""A trace of rollouts that were resumed under other weights, for tests that join it with a
trainer's logprobs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.events.training import Score
from rollproof.core.records import Span
from rollproof.core.trace import Trace
from tests.support.trace_builder import TraceBuilder, contract

ROLLOUT = np.array([-1.0, -0.25, -0.5, -0.75])
"""What the engine reported for the four tokens."""


def resumed(*scores: Score, requests: tuple[str, ...] = ("r0",), **result: Any) -> Trace:
    """Requests that are aborted after two tokens of version 1 and resumed under version 2."""
    builder = TraceBuilder(contract())
    for name in requests:
        builder.weights(1).submit(name, prompt=(1, 2, 3))
        first = builder.call((1, 2, 3), request_id=name)
        builder.reply(first, (4, 5), "abort", prompt_len=3)
        second = builder.call((1, 2, 3, 4, 5), request_id=name, max_tokens=2)
        builder.reply(second, (6, 7), prompt_len=5)
        fields = {
            "logprobs": ROLLOUT,
            "spans": (Span(start=0, end=2, version=1), Span(start=2, end=4, version=2)),
            **result,
        }
        builder.result((4, 5, 6, 7), name, prompt=(1, 2, 3), **fields)
    return builder.add(*scores).trace()
