"""The panel: every metric of a set of token pairs with its interval, and the worst tokens.

Quantiles of |d|, and the median over batches of NeMo-RL's error, are here too; their intervals take
sequences or batches for the units. A quantile's interval is that of a share turned round (Woodruff
1952): the values, out of some hundred order statistics around it, at which the share of tokens
above may be the quantile's. A bootstrap is too sure of far quantiles: with a few tokens above one,
it held the true value in 88 to 93 %.

``metric_aliases`` gives the numbers the names under which verl, NeMo-RL, slime, miles, prime-rl,
TRL, SkyRL, AReaL and TorchTitan log them. A name is here only if its formula is ours, or one of the
sums' that is computed here. What differs: each of these projects averages over the batch of one
step (and some over its micro-batches or ranks), and this over all the tokens that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from rollproof.gap.agreement import Agreement, agreement
from rollproof.gap.column_checks import BoolArray, FloatArray
from rollproof.gap.intervals import Interval, Resampler, metric_interval, share_bounds
from rollproof.gap.metrics import METRICS, PLACE, sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "GATED",
    "MEDIAN",
    "QUANTILES",
    "Panel",
    "batch_median",
    "measure_panel",
    "metric_aliases",
    "quantile_intervals",
]

QUANTILES: Mapping[str, float] = {"abs_diff_p50": 0.5, "abs_diff_p99": 0.99, "abs_diff_p999": 0.999}
"""Names and orders: the median, and the tails that can be estimated (a maximum only grows with the
number of tokens).
"""
MEDIAN = "token_mult_prob_error_median"
"""Median over batches of their mean exp(|d|) (NeMo-RL); over sequences if no batches are given.

One token with |d| = 10 adds 1 to the mean over 22,000 of them, and nothing to this."""
_AGREEMENT = ("slot_mismatch", "layer_mismatch", "any_layer_mismatch", "jaccard")
GATED: tuple[str, ...] = (*METRICS, *QUANTILES, MEDIAN, "abs_diff_max", *_AGREEMENT)
"""Names that a limit can be set for: the complete panel."""
_WORST = 5
# Tokens beyond a quantile below which it has no interval
_MIN_BEYOND = 5
_GRID = 160
# How many standard errors of the order (for independent tokens) the grid spans, together.
# Sequences err together: this allows a design effect of 25, far beyond what was seen.
_REACH = 40.0
# verl cuts a logarithm here before its exponential
_MAX_LOG = 20.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """The measured gap of loss-masked tokens.

    Attributes:
        metrics: value and 95 % interval by name.
        n_tokens: the tokens.
        n_sequences: the sequences that they are in.
        n_nonfinite: tokens with a logprob that is not finite; no metric includes them.
        masked: tokens that the mask left out.
        worst: the tokens with the largest |d|.
        agreement: agreement of the routers, if routes were given.
        resampler: the sums, for other functions of them.
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
    """Measure every metric; ``resamples`` and ``seed`` are those of the bootstrap."""
    sums = sequence_sums(pairs)
    resampler = Resampler(sums, resamples=resamples, seed=seed)
    routes = agreement(pairs)
    metrics = {name: metric_interval(metric, resampler) for name, metric in METRICS.items()}
    metrics |= quantile_intervals(pairs)
    metrics[MEDIAN] = batch_median(pairs, sums)
    abs_diff = pairs.abs_diff
    finite = int(resampler.total[PLACE["finite"]])
    # a maximum grows with the number of tokens, so no interval of it means anything
    metrics["abs_diff_max"] = Interval.unbounded(float(np.nanmax(abs_diff)) if finite else math.nan)
    if routes is not None:
        metrics |= routes.metrics
    return Panel(
        metrics=metrics,
        n_tokens=pairs.n_tokens,
        n_sequences=pairs.n_sequences,
        n_nonfinite=pairs.n_tokens - finite,
        masked=pairs.masked,
        worst=_worst_tokens(pairs, abs_diff),
        agreement=routes,
        resampler=resampler,
    )


def _worst_tokens(pairs: TokenPairs, abs_diff: FloatArray) -> tuple[Mapping[str, Any], ...]:
    finite = np.flatnonzero(np.isfinite(abs_diff))
    if not len(finite):
        return ()
    count = min(_WORST, len(finite))
    top = finite[np.argpartition(abs_diff[finite], -count)[-count:]]
    ordered = sorted(top.tolist(), key=lambda token: -abs_diff[token])
    return tuple(pairs.describe(token) | {"abs_diff": float(abs_diff[token])} for token in ordered)


def quantile_intervals(pairs: TokenPairs) -> dict[str, Interval]:
    """Return each of ``QUANTILES``.

    It has no interval with fewer than 5 tokens beyond it, or with a single sequence.
    """
    abs_diff = pairs.abs_diff
    finite = np.isfinite(abs_diff)
    n = int(finite.sum())
    if n == 0:
        return {name: Interval.unbounded() for name in QUANTILES}
    grids = {name: _grid(abs_diff[finite], order) for name, order in QUANTILES.items()}
    ends = np.concatenate([grid for grid, _ in grids.values()])
    above, tokens = _counts_above(pairs, abs_diff, finite, ends)
    _, lows, highs = share_bounds(above, tokens)
    out = {}
    begin = 0
    for name, order in QUANTILES.items():
        grid, value = grids[name]
        part = slice(begin, begin + len(grid))
        begin = part.stop
        # the share above falls along the grid: below the interval it is surely more than the
        # quantile leaves, above it surely less
        under = np.flatnonzero(lows[part] > 1 - order)
        over = np.flatnonzero(highs[part] < 1 - order)
        if pairs.n_sequences < 2 or n * (1 - order) < _MIN_BEYOND or not len(over):
            out[name] = Interval.unbounded(value)
            continue
        low = float(grid[under[-1]]) if len(under) else 0.0
        high = float(grid[over[0]])
        out[name] = Interval(value=value, low=min(low, value), high=max(high, value))
    return out


def batch_median(pairs: TokenPairs, sums: FloatArray) -> Interval:
    """``MEDIAN`` with the interval of the sign test (exact for any distribution)."""
    above, below = sums[:, PLACE["mult"]], sums[:, PLACE["finite"]]
    if "batch" in pairs.columns:
        _, codes = np.unique(pairs.columns["batch"][pairs.starts], return_inverse=True)
        above, below = (
            np.bincount(codes, weights=column).astype(np.float64) for column in (above, below)
        )
    values = np.sort(above[below > 0] / below[below > 0])
    n = len(values)
    if not n:
        return Interval.unbounded()
    median = float(np.median(values))
    rank = int(stats.binom.ppf(0.025, n, 0.5))
    if rank < 1:  # fewer than 6 values bound no median
        return Interval.unbounded(median)
    return Interval(value=median, low=float(values[rank - 1]), high=float(values[n - rank]))


def _grid(abs_diff: FloatArray, order: float) -> tuple[FloatArray, float]:
    """Return order statistics around a quantile, ascending, and the quantile."""
    n = len(abs_diff)
    middle = order * (n - 1)
    # in standard errors of the rank of an order statistic, which is binomial
    reach = _REACH * np.sqrt(order * (1 - order) * n) / 2
    spots = np.append(np.linspace(middle - reach, middle + reach, _GRID), middle)
    ranks = np.unique(np.clip(spots, 0, n - 1).astype(np.int64))
    # far cheaper than sorting ten million values
    parted = np.partition(abs_diff, ranks)
    return np.unique(parted[ranks]), float(parted[int(middle)])


def _counts_above(
    pairs: TokenPairs, abs_diff: FloatArray, finite: BoolArray, ends: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """``(sequences, ends)``: tokens above each end; ``(sequences,)``: finite tokens."""
    order = np.argsort(ends, kind="stable")
    cell = np.searchsorted(ends[order], abs_diff[finite], side="left")
    owner = pairs.owner[finite]
    sequences, width = pairs.n_sequences, len(ends) + 1
    cells = np.bincount(owner * width + cell, minlength=sequences * width)
    cells = cells.reshape(sequences, width)
    above = np.empty((sequences, len(ends)))
    above[:, order] = cells[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    return above, np.bincount(owner, minlength=sequences).astype(np.float64)


def metric_aliases(panel: Panel, pairs: TokenPairs) -> dict[str, float]:
    """Return the values by the names of other projects; NaN if nothing was measured."""
    metrics = panel.metrics
    values = {
        alias: metrics[name].value for name, metric in METRICS.items() for alias in metric.aliases
    }
    values |= dict.fromkeys(_LARGEST, metrics["abs_diff_max"].value)
    sums = panel.resampler.sums
    sums = sums[sums[:, PLACE["finite"]] > 0]
    values |= {name: function(sums) for name, function in _OF_SEQUENCES.items()}
    values["sampling_importance_ratio"] = metrics["rho_mean_minus_1"].value + 1
    finite = pairs.finite
    prob_diff = np.abs(np.exp(pairs.trainer[finite]) - np.exp(pairs.rollout[finite]))
    values["training/rollout_probs_diff_max"] = float(prob_diff.max()) if finite.any() else math.nan
    return dict(sorted(values.items()))


# TRL, TorchTitan and SkyRL: the largest |d|
_LARGEST = (
    "sampling/sampling_logp_difference/max",
    "bit_wise/logprob_diff/max",
    "policy/rollout_train_logprobs_abs_diff_max",
)


def _mean_gaps(sums: FloatArray) -> FloatArray:
    """``(sequences,)``: the rollout's mean logprob minus the trainer's."""
    return np.asarray(-sums[:, PLACE["d"]] / sums[:, PLACE["finite"]])


def _mean_products(sums: FloatArray) -> FloatArray:
    """``(sequences,)``: the mean of exp(|d|)."""
    return np.asarray(sums[:, PLACE["mult"]] / sums[:, PLACE["finite"]])


def _reduced(reduce: Callable[[FloatArray], Any], values: FloatArray) -> float:
    return float(reduce(values)) if len(values) else math.nan


def _chi2(sums: FloatArray) -> float:
    logs = np.clip(sums[:, PLACE["d"]], -_MAX_LOG, _MAX_LOG)
    return _reduced(np.mean, np.exp(2 * logs)) - 1


# prime-rl's largest k3 of a token, and metrics of complete sequences: verl's (its
# rollout_corr_helper) and NeMo-RL's (its GRPO).
_OF_SEQUENCES: Mapping[str, Callable[[FloatArray], float]] = {
    "mismatch_kl/all/max": lambda sums: _reduced(np.max, sums[:, PLACE["top_k3"]]),
    "rollout_corr/log_ppl_diff_max": lambda sums: _reduced(np.max, _mean_gaps(sums)),
    "rollout_corr/log_ppl_diff_min": lambda sums: _reduced(np.min, _mean_gaps(sums)),
    "rollout_corr/ppl_ratio": lambda sums: _reduced(
        np.mean, np.exp(np.clip(_mean_gaps(sums), -80, 80))
    ),
    "rollout_corr/chi2_seq": _chi2,
    "max_seq_mult_prob_error": lambda sums: _reduced(np.max, _mean_products(sums)),
    "mean_seq_mult_prob_error": lambda sums: _reduced(np.mean, _mean_products(sums)),
    "min_seq_mult_prob_error": lambda sums: _reduced(np.min, _mean_products(sums)),
}
