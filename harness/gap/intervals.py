"""Intervals: what a number could have been, had other sequences been sampled.

Tokens of one sequence err together, so that only sequences are resampled: an interval that takes
tokens for independent covers 71 to 82 % where it claims 95 %. The kinds, by ``Scale``:

- means: t intervals over sequences, studentised by the bootstrap (Efron & Tibshirani 1993, 12.5)
  and never narrower than Student's, on the log scale where the values are never negative (gaps have
  heavy tails to the right). No resample holds a token that was not sampled: where rare ones carry
  the mean, the upper end has room for them, by the rule of three (Hanley & Lippman-Hand 1983);
- shares: Clopper-Pearson at the effective number of tokens, n over the design effect (Korn &
  Graubard 1998), so that no event among n tokens still has an upper bound of about 3 / n;
- other smooth functions: BCa bootstrap (Efron 1987), expanded for few sequences (Hesterberg 2015,
  3.2);
- ratios of two scores of one rollout: studentised on the log scale, symmetric (Hall 1992, 3.5);
- what rare tokens decide (chi2, the effective sample size, the variance of sequences' sums): none.
  Studentised, BCa and jackknife intervals on any scale hold the true value in 62 to 88 % of
  clustered data sets, and say nothing of when they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rollproof.core.records import IntArray
from rollproof.gap.metrics import METRICS, PLACE, Metric, Scale, Statistic
from rollproof.gap.token_pairs import FloatArray

__all__ = [
    "FEW_TOKENS",
    "Interval",
    "Resampler",
    "metric_interval",
    "share_bounds",
    "share_interval",
]

FEW_TOKENS = 2_000
"""Tokens below which the interval of k3 holds less often than it claims: of 640 in 90 %, of 1,920
in 95 % (docs/benchmarks.md).
"""
_TAIL = 0.025
"""What a 95 % interval leaves out on either side."""
_UNITS = 20_000
"""More sequences than this are resampled in random groups of sequences: as exact, and the counts
stay small.
"""
_BATCH = 100
_MEANS = list(
    dict.fromkeys(
        (m.above, m.below) for m in METRICS.values() if m.scale in (Scale.SIGNED, Scale.POSITIVE)
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value and the bounds of its 95 % interval; NaN where it cannot be known (one sequence,
    nothing to divide by).
    """

    value: float
    low: float
    high: float


class Resampler:
    """Bootstrap resamples of sequences: ``resamples`` draws with replacement, the same for every
    metric and every run of ``seed``.

    ``sums`` is ``(sequences, columns)``, one row a sequence.
    """

    def __init__(self, sums: FloatArray, *, resamples: int = 1000, seed: int = 0) -> None:
        self.sums: FloatArray = sums
        self.total: FloatArray = sums.sum(axis=0)
        self.resamples: int = resamples
        self.seed: int = seed
        self.group: IntArray | None = None
        if len(sums) > _UNITS:
            self.group = np.random.default_rng(seed + 1).permutation(len(sums)) % _UNITS
        self.units: FloatArray = self.grouped(sums)
        self._drawn: FloatArray | None = None

    def grouped(self, columns: FloatArray) -> FloatArray:
        """``(units, columns)`` of what is ``(sequences, columns)``: the rows that are resampled."""
        if self.group is None:
            return columns
        out = [
            np.bincount(self.group, weights=columns[:, i], minlength=_UNITS)
            for i in range(columns.shape[1])
        ]
        return np.stack(out, axis=1).astype(np.float64, copy=False)

    def counts(self) -> Iterator[FloatArray]:
        """Batches ``(b, units)``: how often each unit was drawn in each of ``b`` resamples; the
        same batches each time.
        """
        rng = np.random.default_rng(self.seed)
        n = len(self.units)
        for begin in range(0, self.resamples, _BATCH):
            size = min(_BATCH, self.resamples - begin)
            picks = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
            yield np.bincount(picks.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)

    @property
    def drawn(self) -> FloatArray:
        """``(resamples, columns)``: the sums of each resample, and behind them those of the means'
        products.
        """
        if self._drawn is None:
            self._drawn = np.concatenate(
                [counts @ np.hstack([self.units, self._squares()]) for counts in self.counts()]
            )
        return self._drawn

    def _squares(self) -> FloatArray:
        """Products of a mean's columns, per unit: what the spread within a resample needs."""
        columns = []
        for above, below in _MEANS:
            y, n = self.units[:, PLACE[above]], self.units[:, PLACE[below]]
            columns += [y * y, y * n, n * n]
        return np.stack(columns, axis=1)

    def mean(self, metric: Metric) -> Interval:
        """Studentised interval of a mean."""
        value = float(metric.statistic(self.total))
        n = len(self.units)
        y, size = self.units[:, PLACE[metric.above]], self.units[:, PLACE[metric.below]]
        if n < 2 or not np.isfinite(value):
            return Interval(value=value, low=np.nan, high=np.nan)
        plain = y.sum() / size.sum()
        error = np.sqrt(((y - plain * size) ** 2).sum() * n / (n - 1)) / size.sum()
        least = metric.healthy - metric.shift if metric.scale is Scale.POSITIVE else None
        if error == 0 or (least is not None and plain * metric.factor <= least):
            return Interval(value=value, low=value, high=value)
        first = self.units.shape[1] + 3 * _MEANS.index((metric.above, metric.below))
        above, below = self.drawn[:, PLACE[metric.above]], self.drawn[:, PLACE[metric.below]]
        yy, yn, nn = (self.drawn[:, first + i] for i in range(3))
        with np.errstate(invalid="ignore", divide="ignore"):
            means = above / below
            errors = (
                np.sqrt(np.maximum(yy - 2 * means * yn + means**2 * nn, 0.0) * n / (n - 1)) / below
            )
            lift = (least or 0.0) / metric.factor
            if least is not None:
                pivots = (np.log(means - lift) - np.log(plain - lift)) * (means - lift) / errors
            else:
                pivots = (means - plain) / errors
        left, right = _pivot_ends(pivots, n)
        if least is not None:
            reach = error / (plain - lift)
            with np.errstate(over="ignore"):  # of few sequences nothing is known above
                ends = (
                    lift + (plain - lift) * np.exp(-right * reach),
                    lift + (plain - lift) * np.exp(-left * reach),
                )
        else:
            ends = (plain - right * error, plain - left * error)
        low, high = sorted(metric.factor * end + metric.shift for end in ends)
        return Interval(value=value, low=float(low), high=float(high + self._unseen(metric)))

    def _unseen(self, metric: Metric) -> float:
        """What a kind of token would add that none of n sampled ones was of: up to 3 in n may be,
        and of the largest's size.
        """
        if not metric.top:
            return 0.0
        largest = metric.factor * float(self.sums[:, PLACE[metric.top]].max()) - metric.healthy
        return 3 * max(largest, 0.0) / float(self.total[PLACE["finite"]])

    def ratio(self, above: int, below: int) -> Interval:
        """Studentised interval of the total of column ``above`` over that of ``below``, both never
        negative, on the log scale.

        Where the two err on the same tokens (one rollout scored twice) the ratio is far better
        known than either total.
        """
        a, b = self.units[:, above], self.units[:, below]
        n = len(a)
        if not b.sum() > 0:
            return Interval(value=np.nan, low=np.nan, high=np.nan)
        value = float(a.sum() / b.sum())
        if n < 2 or value == 0:
            return Interval(value=value, low=np.nan, high=np.nan)
        error = float(np.sqrt(((a / a.sum() - b / b.sum()) ** 2).sum() * n / (n - 1)))
        if error < 1e-12:  # one side is a multiple of the other, up to rounding
            return Interval(value=value, low=value, high=value)
        columns = np.stack([a, b, a * a, a * b, b * b], axis=1)
        top, bottom, aa, ab, bb = np.concatenate([counts @ columns for counts in self.counts()]).T
        with np.errstate(invalid="ignore", divide="ignore"):
            spread = aa / top**2 - 2 * ab / (top * bottom) + bb / bottom**2
            pivots = np.log(top / bottom / value) / np.sqrt(np.maximum(spread, 0.0) * n / (n - 1))
        reach = _symmetric_end(pivots, n) * error
        with np.errstate(over="ignore"):  # of few sequences nothing is known above
            return Interval(
                value=value, low=float(value * np.exp(-reach)), high=float(value * np.exp(reach))
            )

    def bca(self, statistic: Statistic) -> Interval:
        """BCa interval of a function of the sums."""
        value = float(statistic(self.total))
        if len(self.units) < 2 or not np.isfinite(value):
            return Interval(value=value, low=np.nan, high=np.nan)
        draws = statistic(self.drawn[:, : self.units.shape[1]])
        draws = draws[np.isfinite(draws)]
        if len(draws) < 2:
            return Interval(value=value, low=np.nan, high=np.nan)
        rank = np.clip((np.mean(draws < value) + np.mean(draws <= value)) / 2, 1e-4, 1 - 1e-4)
        left_out = statistic(self.total - self.units)
        left_out = left_out[np.isfinite(left_out)]
        pull = left_out.mean() - left_out if len(left_out) else left_out
        spread = float((pull**2).sum())
        skew = float((pull**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
        n = len(self.units)
        reach = np.sqrt(n / (n - 1)) * stats.t.ppf(1 - _TAIL, n - 1)
        ends = np.array([-reach, reach])
        bias = stats.norm.ppf(rank)
        orders = np.asarray(stats.norm.cdf(bias + (bias + ends) / (1 - skew * (bias + ends))))
        low, high = (float(np.quantile(draws, order)) for order in orders)
        return Interval(value=value, low=min(low, value), high=max(high, value))


def share_interval(events: FloatArray, tokens: FloatArray) -> Interval:
    """Korn-Graubard interval of ``sum(events) / sum(tokens)``, both ``(sequences,)``."""
    if not tokens.sum() > 0:
        return Interval(value=np.nan, low=np.nan, high=np.nan)
    share, low, high = share_bounds(events[:, None], tokens)
    return Interval(value=float(share[0]), low=float(low[0]), high=float(high[0]))


def share_bounds(
    events: FloatArray, tokens: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """As ``share_interval`` of each column of ``events`` ``(sequences, columns)``: the shares and
    the two ends, ``(columns,)``.
    """
    n, units = float(tokens.sum()), int((tokens > 0).sum())
    share = events.sum(axis=0) / n
    effect = np.ones(len(share))
    if units > 1:
        squares = (
            np.einsum("ij,ij->j", events, events)
            - 2 * share * (tokens @ events)
            + share**2 * float(tokens @ tokens)
        )
        variance = np.maximum(squares, 0.0) * units / (units - 1) / n**2
        inner = (share > 0) & (share < 1)
        student = (stats.t.ppf(1 - _TAIL, units - 1) / stats.norm.ppf(1 - _TAIL)) ** 2
        effect[inner] = (
            np.maximum(1.0, variance[inner] * n / (share * (1 - share))[inner]) * student
        )
    size = n / effect
    hits = share * size
    with np.errstate(invalid="ignore"):
        low = np.where(share > 0, stats.beta.ppf(_TAIL, hits, size - hits + 1), 0.0)
        high = np.where(
            share < 1, stats.beta.ppf(1 - _TAIL, hits + 1, np.maximum(size - hits, 1e-12)), 1.0
        )
    return share, low, high


def metric_interval(metric: Metric, resampler: Resampler) -> Interval:
    """The metric over all sequences, with its interval."""
    return _KINDS[metric.scale](metric, resampler)


def _share(metric: Metric, resampler: Resampler) -> Interval:
    return share_interval(
        resampler.sums[:, PLACE[metric.above]], resampler.sums[:, PLACE[metric.below]]
    )


def _pivot_ends(pivots: FloatArray, n: int) -> tuple[float, float]:
    student = float(stats.t.ppf(1 - _TAIL, n - 1))
    known = pivots[np.isfinite(pivots)]
    if not len(known):
        return -student, student
    low, high = np.quantile(known, [_TAIL, 1 - _TAIL])
    return min(float(low), -student), max(float(high), student)


def _symmetric_end(pivots: FloatArray, n: int) -> float:
    """As ``_pivot_ends``, one number for both sides: of the size of a pivot, which is known better
    than either of its tails.
    """
    known = np.abs(pivots[np.isfinite(pivots)])
    student = float(stats.t.ppf(1 - _TAIL, n - 1))
    return max(float(np.quantile(known, 1 - 2 * _TAIL)), student) if len(known) else student


_KINDS: Mapping[Scale, Callable[[Metric, Resampler], Interval]] = {
    Scale.SIGNED: lambda metric, resampler: resampler.mean(metric),
    Scale.POSITIVE: lambda metric, resampler: resampler.mean(metric),
    Scale.SHARE: _share,
    Scale.OTHER: lambda metric, resampler: resampler.bca(metric.statistic),
    Scale.BARE: lambda metric, resampler: Interval(
        value=float(metric.statistic(resampler.total)), low=np.nan, high=np.nan
    ),
}
