"""Random terms of corrections, all of them valid."""

from __future__ import annotations

import random
from typing import Any

from rollproof.corrections import (
    Aggregate,
    CorrectionTerms,
    Metric,
    Rejection,
    RejectionChannel,
    Statistic,
)
from rollproof.errors import ContractError

__all__ = ["random_terms"]

_UPPER = {
    Statistic.RATIO: (1.5, 2.0, 5.0, 10.0),
    Statistic.LOG_RATIO: (0.4, 1.0),
    Statistic.K1: (0.4, 1.0),
    Statistic.K2: (0.05, 0.5, 2.0),
    Statistic.K3: (0.05, 0.5, 2.0),
    Statistic.TV: (0.1, 0.3),
    Statistic.PROBABILITY_CHANGE: (0.1, 0.3),
    Statistic.BINARY_KL: (0.05, 0.3),
}


def random_terms(seed: int, **fixed: Any) -> CorrectionTerms:
    """Return valid terms; ``fixed`` are fields that are not drawn."""
    draw = random.Random(seed)
    while True:
        try:
            return CorrectionTerms(**{**_drawn(draw), **fixed})
        except ContractError:
            continue  # two of the drawn terms contradict each other


def _drawn(draw: random.Random) -> dict[str, Any]:
    stale = draw.choice(["keep", "keep", "drop", "drop-sequence"])
    return {
        "pair": draw.choice(
            ["old/rollout", "old/rollout", "current/rollout", "current/old", "interpolated/rollout"]
        ),
        "weights": draw.random() < 0.9,
        "level": draw.choice(["token", "sequence", "geometric"]),
        "lower": draw.choice([None, None, 0.3, 0.5]),
        "upper": draw.choice([None, 1.5, 2.0, 5.0]),
        "rejections": tuple(_rejection(draw) for _ in range(draw.choice([0, 0, 1, 1, 2]))),
        "rejects_by": draw.choice(list(RejectionChannel)),
        "normalise": draw.choice(["none", "none", "tokens", "sequences", "groups"]),
        "log_bound": draw.choice([None, 20.0]),
        "max_staleness": None if stale == "keep" else draw.choice([0, 1, 3]),
        "stale": stale,
        "missing": draw.choice(["never", "one"]),
        "gradient": draw.choice(["none", "none", "current"]),
        "empty_batch": draw.random() < 0.5,
        "metrics": {str(metric): metric for metric in draw.sample(list(Metric), 6)},
        "loss": draw.choice(["none", "reinforce", "ppo", "surrogate"]),
        "policy_ratio": draw.choice(["current/old", "current/rollout"]),
        "aggregation": draw.choice(["token-mean", "sequence-mean", "token-sum"]),
        "denominator": draw.choice(["response", "kept"]),
        "dtype": draw.choice(["float32", "float64"]),
    }


def _rejection(draw: random.Random) -> Rejection:
    statistic = draw.choice(list(Statistic))
    upper: float | None = draw.choice(_UPPER[statistic])
    lower = None
    if statistic is Statistic.RATIO:
        lower = draw.choice([None, 0.2, 0.5])
    elif statistic in (Statistic.LOG_RATIO, Statistic.K1, Statistic.PROBABILITY_CHANGE):
        lower = draw.choice([None, -0.3])
    if lower is not None and draw.random() < 0.3:
        upper = None
    return Rejection(
        statistic=statistic,
        aggregate=draw.choice(list(Aggregate)),
        lower=lower,
        upper=upper,
        advantages=draw.choice([None, None, None, "positive", "negative", "not-positive"]),
    )
