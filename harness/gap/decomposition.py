"""Decomposition: how much of the difference to the current weights is the engine's, and how much
the policy's own change.

A token that older weights sampled has three logprobs: the rollout's, the trainer's under the
weights that sampled it, and the trainer's under its current weights. Their differences add up,
token by token: current - rollout = (trainer - rollout), which is the engine's mismatch, + (current
- trainer), which is staleness and no fault of any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.gap.buckets import bucket_codes, staleness
from rollproof.gap.columns import FloatArray
from rollproof.gap.intervals import Interval, Resampler, metric_interval
from rollproof.gap.metrics import METRICS
from rollproof.gap.sums import sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["Decomposition", "Parts", "decompose"]

_NAMES = ("abs_diff_mean", "k1", "kl_mu_pi_k3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Tokens of one age (``label``; ``all`` for all of them): mean |d|, k1 and k3 of the parts
    ``engine``, ``policy``, ``total``.

    ``share`` is the engine's mean |d| over the sum of both parts' mean |d|.
    """

    label: str
    tokens: int
    engine: dict[str, Interval]
    policy: dict[str, Interval]
    total: dict[str, Interval]
    share: Interval

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""

        def ends(interval: Interval) -> list[float | None]:
            return [
                value if np.isfinite(value) else None
                for value in (interval.value, interval.low, interval.high)
            ]

        parts = {"engine": self.engine, "policy": self.policy, "total": self.total}
        numbers = {
            part: {name: ends(interval) for name, interval in row.items()}
            for part, row in parts.items()
        }
        return {
            "age": self.label,
            "tokens": self.tokens,
            "engine_share": ends(self.share),
            **numbers,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decomposition:
    """``engine`` and ``policy`` ``(n,)``: the two parts of each token's difference, NaN where a
    logprob is not finite; ``rows`` in numbers, of all tokens first and then of each age of the
    weights.
    """

    engine: FloatArray
    policy: FloatArray
    rows: tuple[Parts, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """JSON-ready form of the rows."""
        return [row.to_dict() for row in self.rows]


def decompose(pairs: TokenPairs, *, resamples: int = 1000, seed: int = 0) -> Decomposition | None:
    """The parts of ``pairs``; ``None`` where they have no ``current_logprob``, or no token with
    three finite logprobs.
    """
    current = pairs.sides.get("current_logprob")
    if current is None:
        return None
    known = np.isfinite(pairs.rollout) & np.isfinite(pairs.trainer) & np.isfinite(current)
    if not known.any():
        return None
    lag = staleness(pairs)
    codes, labels = (np.zeros(pairs.n_tokens, int), []) if lag is None else bucket_codes(lag)
    rows = [_parts("all", pairs, known, resamples, seed)]
    rows += [
        _parts(label, pairs, own, resamples, seed)
        for code, label in enumerate(labels)
        if (own := known & (codes == code)).any()
    ]
    with np.errstate(invalid="ignore"):
        engine, policy = pairs.trainer - pairs.rollout, current - pairs.trainer
    return Decomposition(
        engine=np.where(known, engine, np.nan),
        policy=np.where(known, policy, np.nan),
        rows=tuple(rows),
    )


def _parts(label: str, pairs: TokenPairs, keep: Any, resamples: int, seed: int) -> Parts:
    own = pairs.chosen(keep)
    current = own.sides["current_logprob"]
    sides = {
        "engine": (own.rollout, own.trainer),
        "policy": (own.trainer, current),
        "total": (own.rollout, current),
    }
    found = {}
    for part, (first, second) in sides.items():
        resampler = Resampler(
            sequence_sums(
                TokenPairs(
                    rollout=first, trainer=second, starts=own.starts, sequences=own.sequences
                )
            ),
            resamples=resamples,
            seed=seed,
        )
        found[part] = {name: metric_interval(METRICS[name], resampler) for name in _NAMES}
    apart = [
        np.add.reduceat(np.abs(second - first), own.starts)
        for first, second in (sides["engine"], sides["policy"])
    ]
    share = Resampler(
        np.stack([apart[0], apart[0] + apart[1]], axis=1), resamples=resamples, seed=seed
    ).ratio(0, 1)
    share = Interval(
        value=share.value,
        low=share.low,
        high=min(share.high, 1.0) if np.isfinite(share.high) else share.high,
    )
    return Parts(label=label, tokens=own.n_tokens, share=share, **found)
