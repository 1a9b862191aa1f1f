"""Panel: every metric of a set of pairs with its interval, and the tokens that are worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from rollproof.gap.agreement import Agreement, agreement
from rollproof.gap.intervals import Interval, Resampler, metric_interval, share_bounds
from rollproof.gap.metrics import METRICS, PLACE, sequence_sums
from rollproof.gap.token_pairs import BoolArray, FloatArray, TokenPairs

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.gap.token_pairs import FloatArray

__all__ = [
    "GATED",
    "MEDIAN",
    "QUANTILES",
    "Panel",
    "abs_diff",
    "aliased",
    "batch_median",
    "measure_panel",
    "quantile_intervals",
]

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


QUANTILES: Mapping[str, float] = {"abs_diff_p50": 0.5, "abs_diff_p99": 0.99, "abs_diff_p999": 0.999}
"""Names and orders; the median, and the tails that can be estimated (a maximum only grows with the
number of tokens).
"""
MEDIAN = "token_mult_prob_error_median"
"""Median over batches of their mean exp(|d|) (NeMo-RL); over sequences where no batches are told.

One token with |d| = 10 adds 1 to the mean over 22,000 of them, and nothing to this."""
AGREEMENT = ("slot_mismatch", "layer_mismatch", "any_layer_mismatch", "jaccard")
GATED: tuple[str, ...] = (*METRICS, *QUANTILES, MEDIAN, "abs_diff_max", *AGREEMENT)
"""Names that a limit can be set for: the whole panel."""
_BEYOND = 5
_GRID = 160
_REACH = 8.0
"""How many standard errors of the order (for independent tokens) the grid spans on either side,
before clustering widens it.
"""


def abs_diff(pairs: TokenPairs) -> FloatArray:
    """``(n,)``: |d|; NaN where a logprob is not finite."""
    with np.errstate(invalid="ignore"):
        size = np.abs(pairs.trainer - pairs.rollout)
    size[~np.isfinite(size)] = np.nan
    return size


def quantile_intervals(pairs: TokenPairs) -> dict[str, Interval]:
    """Each of ``QUANTILES``; NaN bounds where there are too few tokens to bound it (fewer than 5
    beyond it) or too few sequences.
    """
    size = abs_diff(pairs)
    known = np.isfinite(size)
    n = int(known.sum())
    if n == 0:
        return {name: Interval(value=np.nan, low=np.nan, high=np.nan) for name in QUANTILES}
    grids = {name: _grid(size[known], order) for name, order in QUANTILES.items()}
    ends = np.concatenate([grid for grid, _ in grids.values()])
    above, tokens = _counts_above(pairs, size, known, ends)
    _, least, most = share_bounds(above, tokens)
    out, begin = {}, 0
    for name, order in QUANTILES.items():
        grid, value = grids[name]
        part = slice(begin, begin := begin + len(grid))
        # the share above falls along the grid: below the interval it is surely more than the
        # quantile leaves, above it surely less
        under, over = (
            np.flatnonzero(least[part] > 1 - order),
            np.flatnonzero(most[part] < 1 - order),
        )
        if pairs.n_sequences < 2 or n * (1 - order) < _BEYOND or not len(over):
            out[name] = Interval(value=value, low=np.nan, high=np.nan)
        else:
            low = float(grid[under[-1]]) if len(under) else 0.0
            out[name] = Interval(
                value=value, low=min(low, value), high=max(float(grid[over[0]]), value)
            )
    return out


def batch_median(pairs: TokenPairs, sums: FloatArray) -> Interval:
    """``MEDIAN``, with the sign test's interval (order statistics; exact for any law)."""
    above, below = sums[:, PLACE["mult"]], sums[:, PLACE["finite"]]
    if "batch" in pairs.sides:
        _, codes = np.unique(pairs.sides["batch"][pairs.starts], return_inverse=True)
        above, below = (
            np.bincount(codes, weights=column).astype(np.float64) for column in (above, below)
        )
    values = np.sort(above[below > 0] / below[below > 0])
    n = len(values)
    if not n:
        return Interval(value=np.nan, low=np.nan, high=np.nan)
    rank = int(stats.binom.ppf(0.025, n, 0.5))
    if rank < 1:  # fewer than 6 values bound no median
        return Interval(value=float(np.median(values)), low=np.nan, high=np.nan)
    return Interval(
        value=float(np.median(values)), low=float(values[rank - 1]), high=float(values[n - rank])
    )


def _grid(size: FloatArray, order: float) -> tuple[FloatArray, float]:
    """Order statistics around a quantile, ascending, and the quantile."""
    n = len(size)
    middle = order * (n - 1)
    # sequences err together: a design effect of 25 is far beyond what was seen
    reach = 5 * _REACH * np.sqrt(order * (1 - order) * n) / 2
    spots = np.append(np.linspace(middle - reach, middle + reach, _GRID), middle)
    ranks = np.unique(np.clip(spots, 0, n - 1).astype(np.int64))
    parted = np.partition(size, ranks)
    return np.unique(parted[ranks]), float(parted[int(middle)])


def _counts_above(
    pairs: TokenPairs, size: FloatArray, known: BoolArray, ends: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """``(sequences, ends)``: tokens above each end; ``(sequences,)``: finite tokens."""
    order = np.argsort(ends, kind="stable")
    place = np.searchsorted(ends[order], size[known], side="left")
    owner = pairs.owner[known]
    sequences, width = pairs.n_sequences, len(ends) + 1
    cells = np.bincount(owner * width + place, minlength=sequences * width).reshape(
        sequences, width
    )
    above = np.empty((sequences, len(ends)))
    above[:, order] = cells[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    return above, np.bincount(owner, minlength=sequences).astype(np.float64)


_BOUND = 20.0
"""verl clips a logarithm here before its exponential."""


def aliased(report: GapReport) -> dict[str, float]:
    """Value by foreign name; NaN where nothing was measured."""
    values = {
        alias: report.panel.metrics[name].value
        for name, metric in METRICS.items()
        for alias in metric.aliases
    }
    largest = report.panel.metrics["abs_diff_max"].value
    values |= dict.fromkeys(_LARGEST, largest)
    sums = report.panel.resampler.sums
    values |= {
        name: function(sums[sums[:, PLACE["finite"]] > 0])
        for name, function in _OF_SEQUENCES.items()
    }
    values["sampling_importance_ratio"] = report.panel.metrics["rho_mean_minus_1"].value + 1
    values["training/rollout_probs_diff_max"] = _largest_probability_difference(report)
    return dict(sorted(values.items()))


_LARGEST = (
    "sampling/sampling_logp_difference/max",
    "bit_wise/logprob_diff/max",
    "policy/rollout_train_logprobs_abs_diff_max",
)
"""TRL, TorchTitan and SkyRL: the largest |d|."""


def _gaps(sums: FloatArray) -> FloatArray:
    """``(sequences,)``: the rollout's mean logprob less the trainer's."""
    return np.asarray(-sums[:, PLACE["d"]] / sums[:, PLACE["finite"]])


def _products(sums: FloatArray) -> FloatArray:
    """``(sequences,)``: the mean of exp(|d|)."""
    return np.asarray(sums[:, PLACE["mult"]] / sums[:, PLACE["finite"]])


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


_OF_SEQUENCES: Mapping[str, Callable[[FloatArray], float]] = {
    "mismatch_kl/all/max": lambda sums: (
        float(sums[:, PLACE["top_k3"]].max()) if len(sums) else math.nan
    ),
    "rollout_corr/log_ppl_diff_max": lambda sums: (
        float(_gaps(sums).max(initial=-math.inf)) if len(sums) else math.nan
    ),
    "rollout_corr/log_ppl_diff_min": lambda sums: (
        float(_gaps(sums).min(initial=math.inf)) if len(sums) else math.nan
    ),
    "rollout_corr/ppl_ratio": lambda sums: _mean(np.exp(np.clip(_gaps(sums), -80, 80))),
    "rollout_corr/chi2_seq": lambda sums: (
        _mean(np.exp(2 * np.clip(sums[:, PLACE["d"]], -_BOUND, _BOUND))) - 1
    ),
    "max_seq_mult_prob_error": lambda sums: float(_products(sums).max()) if len(sums) else math.nan,
    "mean_seq_mult_prob_error": lambda sums: _mean(_products(sums)),
    "min_seq_mult_prob_error": lambda sums: float(_products(sums).min()) if len(sums) else math.nan,
}
"""prime-rl's largest k3 of a token, and metrics of whole sequences: verl's (its
rollout_corr_helper) and NeMo-RL's (its GRPO).
"""


def _largest_probability_difference(report: GapReport) -> float:
    rollout, trainer = report.pairs.rollout, report.pairs.trainer
    known = np.isfinite(rollout) & np.isfinite(trainer)
    return (
        float(np.abs(np.exp(trainer[known]) - np.exp(rollout[known])).max())
        if known.any()
        else math.nan
    )
