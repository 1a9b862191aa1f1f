"""Panel: every metric of a set of pairs with its interval, and the tokens that are worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollproof.gap.agreement import Agreement, agreement
from rollproof.gap.intervals import Interval, Resampler, metric_interval
from rollproof.gap.metrics import METRICS
from rollproof.gap.quantiles import MEDIAN, QUANTILES, abs_diff, batch_median, quantile_intervals
from rollproof.gap.sums import PLACE, sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["GATED", "Panel", "measure_panel"]

AGREEMENT = ("slot_mismatch", "layer_mismatch", "any_layer_mismatch", "jaccard")
GATED: tuple[str, ...] = (*METRICS, *QUANTILES, MEDIAN, "abs_diff_max", *AGREEMENT)
"""Names that a limit can be set for: the whole panel."""
_WORST = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """The measured gap of ``n_tokens`` loss-masked tokens in ``n_sequences`` sequences.

    ``metrics`` maps names to value and 95 % interval; ``n_nonfinite`` tokens had a logprob that is
    not finite and are in none of them. ``worst`` are the tokens with the largest |d|. ``resampler``
    holds the sums, for whoever wants another function of them.
    """

    metrics: Mapping[str, Interval]
    n_tokens: int
    n_sequences: int
    n_nonfinite: int
    masked: int
    worst: tuple[Mapping[str, Any], ...]
    agreement: Agreement | None
    resampler: Resampler


def measure_panel(pairs: TokenPairs, *, resamples: int = 1000, seed: int = 0) -> Panel:
    """Every metric of ``pairs``; ``resamples`` and ``seed`` are those of the bootstrap over
    sequences.
    """
    sums = sequence_sums(pairs)
    resampler = Resampler(sums, resamples=resamples, seed=seed)
    routes = agreement(pairs)
    metrics = {name: metric_interval(metric, resampler) for name, metric in METRICS.items()}
    metrics |= quantile_intervals(pairs)
    metrics[MEDIAN] = batch_median(pairs, sums)
    size = abs_diff(pairs)
    finite = int(resampler.total[PLACE["finite"]])
    largest = float(np.nanmax(size)) if finite else float("nan")
    metrics["abs_diff_max"] = Interval(value=largest, low=float("nan"), high=float("nan"))
    if routes is not None:
        metrics |= routes.metrics
    return Panel(
        metrics=metrics,
        n_tokens=pairs.n_tokens,
        n_sequences=pairs.n_sequences,
        n_nonfinite=pairs.n_tokens - finite,
        masked=pairs.masked,
        worst=_worst(pairs, size),
        agreement=routes,
        resampler=resampler,
    )


def _worst(pairs: TokenPairs, size: Any) -> tuple[Mapping[str, Any], ...]:
    known = np.flatnonzero(np.isfinite(size))
    if not len(known):
        return ()
    count = min(_WORST, len(known))
    top = known[np.argpartition(size[known], -count)[-count:]]
    ordered = sorted(top.tolist(), key=lambda token: -size[token])
    return tuple(pairs.where(token) | {"abs_diff": float(size[token])} for token in ordered)
