"""Quantiles of |d|, and the median over batches of NeMo-RL's error, with intervals that take
sequences or batches for the units.

A quantile's interval is that of a share turned round (Woodruff 1952): the values, out of some
hundred order statistics around it, of which the share of tokens above may be the quantile's. Of the
largest of a thousand a few tokens are above, which a bootstrap takes for better known than they are
(it held the true value in 88 to 93 %).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import stats

from rollproof.gap.intervals import Interval, share_bounds
from rollproof.gap.sums import PLACE
from rollproof.gap.token_pairs import BoolArray, FloatArray, TokenPairs

__all__ = ["MEDIAN", "QUANTILES", "abs_diff", "batch_median", "quantile_intervals"]

QUANTILES: Mapping[str, float] = {"abs_diff_p50": 0.5, "abs_diff_p99": 0.99, "abs_diff_p999": 0.999}
"""Names and orders; the median, and the tails that can be estimated (a maximum only grows with the
number of tokens).
"""
MEDIAN = "token_mult_prob_error_median"
"""Median over batches of their mean exp(|d|) (NeMo-RL); over sequences where no batches are told.

One token with |d| = 10 adds 1 to the mean over 22,000 of them, and nothing to this."""
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
