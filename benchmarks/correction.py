"""Processor time of the exact result of a correction: 10^7 tokens, metrics, loss and gradient.

``python -m benchmarks.correction [TOKENS]``
"""

from __future__ import annotations

import sys
import time

import numpy as np

from rollproof.corrections import Aggregate, CorrectionTerms, Metric, Rejection, Statistic
from rollproof.corrections.expected_correction import ExpectedCorrection, Inputs
from rollproof.corrections.expected_loss import ExpectedLoss
from rollproof.corrections.expected_metrics import ExpectedMetrics

LENGTH = 5_000


def inputs(tokens: int) -> Inputs:
    random = np.random.default_rng(0)
    shape = (max(tokens // LENGTH, 1), LENGTH)
    rollout = -random.exponential(0.5, shape)
    old = np.minimum(rollout + random.normal(0.0, 0.02, shape), 0.0)
    lengths = random.integers(LENGTH // 2, LENGTH + 1, shape[0])
    return Inputs(
        rollout=rollout,
        old=old,
        current=old - 0.001,
        mask=(np.arange(LENGTH) < lengths[:, None]).astype(np.int64),
        advantages=np.repeat(random.normal(0.0, 1.0, (shape[0], 1)), LENGTH, axis=1),
        groups=np.arange(shape[0]) // 8,
        versions=np.zeros(shape, np.int64),
    )


def measure(name: str, tokens: int, terms: CorrectionTerms) -> None:
    batch = inputs(tokens)
    started = time.process_time()
    expected = ExpectedCorrection(terms, batch)
    weights = expected.weights.value
    weighed = time.process_time() - started
    metrics = ExpectedMetrics(expected)
    found = [metrics.value(metric) for _, metric in terms.metrics]
    loss = ExpectedLoss(expected)
    print(
        f"{name}: {weights.size:,} places, {expected.tokens:,} trained; weights and rejection"
        f" {weighed:.2f} s, with {len(found)} metrics, loss {loss.value} and its gradient"
        f" ({loss.gradient is not None}) {time.process_time() - started:.2f} s"
    )


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    names = tuple((str(metric), metric) for metric in Metric)
    measure("token TIS", tokens, CorrectionTerms(upper=2.0, metrics=names, loss="reinforce"))  # type: ignore[arg-type]
    measure(
        "geometric, normalised by group, three rejections",
        tokens,
        CorrectionTerms(
            level="geometric",  # type: ignore[arg-type]
            upper=2.0,
            normalise="groups",  # type: ignore[arg-type]
            rejections=(
                Rejection(lower=0.2, upper=5.0),
                Rejection(statistic=Statistic.K3, aggregate=Aggregate.MEAN, upper=0.01),
                Rejection(aggregate=Aggregate.MIN, lower=1e-4),
            ),
            loss="ppo",  # type: ignore[arg-type]
        ),
    )


if __name__ == "__main__":
    main()
