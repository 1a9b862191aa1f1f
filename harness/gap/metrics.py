"""The metrics of the panel, and the sums over sequences that they are functions of.

Tokens are sampled by the rollout engine (mu) and scored by the trainer (pi): d = log pi - log mu,
rho = exp(d). One pass over the tokens leaves one row of sums for each sequence; every metric and
every resample is a function of those rows. Names and formulas are those of the field; a name that
another project logs is listed as an alias if its formula is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from rollproof.gap.column_checks import FloatArray, IntArray
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "FRACTIONS",
    "METRICS",
    "NAMES",
    "PLACE",
    "WINSOR",
    "Metric",
    "Scale",
    "Statistic",
    "sequence_chunks",
    "sequence_sums",
]

FRACTIONS: Mapping[str, float] = {"F2": math.log(2), "F5": math.log(5), "F10": math.log(10)}
"""Bounds on |d| of the R3 paper's F(tau) = P(max(rho, 1/rho) > tau)."""
WINSOR = 2.0
"""|d| at which the winsorised k3 is cut."""
# |d| from which two logprobs count as different (TorchTitan's ratio_tokens_different)
_DIFFERENT = 1e-6
# Larger exponents are cut: their exp leaves float64's useful range, and F10 counts such tokens
_CAP = 80.0
_CHUNK = 1 << 19
# Part of a sum of squares that rounding may leave of a variance of 0
_ROUNDING = 1e-11

NAMES: tuple[str, ...] = (
    "sequences", "tokens", "finite",
    "d", "d2", "abs", "k3", "k3_winsor", "rho", "rho2", "mult",
    "diff_prob", "diff_prob2", "p", "q", "pp", "qq", "pq",
    "F2", "F5", "F10", "different",
    "seq_k1", "seq_abs_k1", "seq_k3", "seq_abs", "seq_geo", "seq_d", "seq_d2", "seq_n",
    "top_d2", "top_k3", "top_k3_winsor", "top_mult",
)  # fmt: skip
"""Columns of the sums, in order.

``seq_*`` are one value a sequence, of its mean (or sum), ``top_*`` that of its largest token; the
others add up over tokens.
"""
PLACE: Mapping[str, int] = {name: i for i, name in enumerate(NAMES)}
"""Index of each column of the sums."""

Statistic: TypeAlias = "Callable[[FloatArray], FloatArray]"
"""From sums ``(..., len(NAMES))`` to values ``(...)``; NaN if it would divide by 0."""


def sequence_chunks(pairs: TokenPairs, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield whole sequences of about ``size`` tokens together.

    Each item is the first token, the token after the last, and which sequences those are.
    """
    bounds = np.append(pairs.starts, pairs.n_tokens)
    first = 0
    while first < pairs.n_sequences:
        end = int(np.searchsorted(bounds, bounds[first] + size, side="right")) - 1
        last = max(first + 1, end)
        yield int(bounds[first]), int(bounds[last]), slice(first, last)
        first = last


def sequence_sums(pairs: TokenPairs) -> FloatArray:
    """``(sequences, len(NAMES))``: sums over each sequence's tokens with two finite logprobs."""
    out = np.zeros((pairs.n_sequences, len(NAMES)))
    # in chunks, because the intermediate columns of ten million tokens need gigabytes
    for begin, end, rows in sequence_chunks(pairs, _CHUNK):
        starts = pairs.starts[rows] - begin
        _fill(out[rows], pairs.rollout[begin:end], pairs.trainer[begin:end], starts)
    return out


def _fill(out: FloatArray, rollout: FloatArray, trainer: FloatArray, starts: IntArray) -> None:
    """Fill the rows ``out`` with the sums of the sequences that begin at ``starts``."""
    finite = np.isfinite(rollout) & np.isfinite(trainer)
    with np.errstate(invalid="ignore"):
        d = np.where(finite, trainer - rollout, 0.0)
    abs_d = np.abs(d)
    rho = np.exp(np.clip(d, -_CAP, _CAP))
    p, q = np.exp(np.where(finite, trainer, -np.inf)), np.exp(np.where(finite, rollout, -np.inf))
    diff_prob = np.abs(p - q)
    clipped = np.clip(d, -WINSOR, WINSOR)
    with np.errstate(over="ignore"):
        columns = {
            "finite": finite,
            "d": d,
            "d2": d * d,
            "abs": abs_d,
            # expm1 keeps the digits that rho - 1 - d loses for small d
            "k3": np.where(finite, np.expm1(np.clip(d, -_CAP, _CAP)) - d, 0.0),
            "k3_winsor": np.expm1(clipped) - clipped,
            "rho": np.where(finite, rho, 0.0),
            "rho2": np.where(finite, rho * rho, 0.0),
            "mult": np.where(finite, np.exp(np.minimum(abs_d, _CAP)), 0.0),
            "diff_prob": diff_prob,
            "diff_prob2": diff_prob * diff_prob,
            "p": p,
            "q": q,
            "pp": p * p,
            "qq": q * q,
            "pq": p * q,
            **{name: abs_d > bound for name, bound in FRACTIONS.items()},
            "different": abs_d > _DIFFERENT,
        }
    for name, column in columns.items():
        out[:, PLACE[name]] = np.add.reduceat(column, starts, dtype=np.float64)
    for name in ("d2", "k3", "k3_winsor", "mult"):
        out[:, PLACE[f"top_{name}"]] = np.maximum.reduceat(columns[name], starts)
    out[:, PLACE["sequences"]] = 1.0
    out[:, PLACE["tokens"]] = np.diff(np.append(starts, len(d)))
    _sequence_values(out)


def _sequence_values(out: FloatArray) -> None:
    """Fill the columns with one value a sequence; 0 for a sequence without a finite token."""
    n = out[:, PLACE["finite"]]
    mean = {
        name: np.divide(out[:, PLACE[name]], n, out=np.zeros(len(n)), where=n > 0)
        for name in ("d", "k3", "abs")
    }
    out[:, PLACE["seq_k1"]] = -mean["d"]
    out[:, PLACE["seq_abs_k1"]] = np.abs(mean["d"])
    out[:, PLACE["seq_k3"]] = mean["k3"]
    out[:, PLACE["seq_abs"]] = mean["abs"]
    out[:, PLACE["seq_geo"]] = np.where(n > 0, np.exp(np.clip(mean["d"], -_CAP, _CAP)), 0.0)
    out[:, PLACE["seq_d"]] = out[:, PLACE["d"]]
    out[:, PLACE["seq_d2"]] = out[:, PLACE["d"]] ** 2
    out[:, PLACE["seq_n"]] = n > 0


class Scale(Enum):
    """What kind of number a metric is, which decides the kind of interval."""

    SIGNED = "mean of values of either sign"
    POSITIVE = "mean of values that are never negative: its interval is taken on the log scale"
    SHARE = "share of tokens for which something holds"
    OTHER = "smooth function of several means"
    BARE = (
        "a handful of tokens decides it: no interval holds what it claims at ordinary sizes, so"
        " there is none"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number of the panel.

    A mean is ``factor`` * (column ``above`` / column ``below``) + ``shift`` of the sums.

    Attributes:
        name: its name in reports and limits.
        formula: what it is, in words.
        scale: what kind of number it is.
        above: the column of the sums that is divided.
        below: the column of the sums that it is divided by.
        factor: times this.
        shift: plus this.
        function: the metric as a function of the sums, in place of the quotient.
        healthy: its value if rollout and trainer agree exactly.
        top: the column of the largest token, if rare tokens carry the mean.
        aliases: names under which other projects log the same formula.
    """

    name: str
    formula: str
    scale: Scale
    above: str = ""
    below: str = "finite"
    factor: float = 1.0
    shift: float = 0.0
    function: Statistic | None = None
    healthy: float = 0.0
    top: str = ""
    aliases: tuple[str, ...] = ()

    def statistic(self, sums: FloatArray) -> FloatArray:
        """The value of summed columns ``(..., len(NAMES))``."""
        if self.function is not None:
            return self.function(sums)
        return np.asarray(
            self.factor * _ratio(sums[..., PLACE[self.above]], sums[..., PLACE[self.below]])
            + self.shift
        )


def _ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    return np.asarray(
        np.divide(
            above, below, out=np.full(np.broadcast(above, below).shape, np.nan), where=below > 0
        )
    )


def _pearson(sums: FloatArray) -> FloatArray:
    n, p, q, pp, qq, pq = (
        sums[..., PLACE[name]] for name in ("finite", "p", "q", "pp", "qq", "pq")
    )
    first, second = n * pp - p * p, n * qq - q * q
    # equal values leave rounding errors, and their correlation is noise
    varied = (first > _ROUNDING * n * pp) & (second > _ROUNDING * n * qq)
    return _ratio(n * pq - p * q, np.where(varied, np.sqrt(np.maximum(first * second, 0.0)), 0.0))


def _ess(sums: FloatArray) -> FloatArray:
    return _ratio(
        sums[..., PLACE["rho"]] ** 2, sums[..., PLACE["finite"]] * sums[..., PLACE["rho2"]]
    )


def _deviation(sums: FloatArray, first: str, second: str) -> FloatArray:
    """Standard deviation of a value, from the columns of its sum and of its squares' sum.

    It divides by n - 1, as torch.std does.
    """
    n = sums[..., PLACE["finite"]]
    variance = _ratio(sums[..., PLACE[second]], n) - _ratio(sums[..., PLACE[first]], n) ** 2
    return np.sqrt(np.maximum(variance * _ratio(n, n - 1), 0.0))


def _variance_rate(sums: FloatArray) -> FloatArray:
    n = sums[..., PLACE["seq_n"]]
    variance = _ratio(sums[..., PLACE["seq_d2"]], n) - _ratio(sums[..., PLACE["seq_d"]], n) ** 2
    return _ratio(variance * n * n, (n - 1) * sums[..., PLACE["finite"]])


_LIST = (
    Metric(
        name="kl_mu_pi_k3",
        formula="mean of rho - 1 - d: estimates KL(rollout || trainer), never negative",
        scale=Scale.POSITIVE,
        above="k3",
        top="top_k3",
        aliases=("rollout_corr/k3_kl", "mismatch_kl", "mismatch_kl/all/mean", "gen_kl_error"),
    ),
    Metric(
        name="k1",
        formula="mean of -d: unbiased for KL(rollout || trainer), may be negative",
        scale=Scale.SIGNED,
        above="d",
        factor=-1.0,
        aliases=("rollout_corr/kl",),
    ),
    Metric(
        name="k2",
        formula="mean of d^2 / 2",
        scale=Scale.POSITIVE,
        above="d2",
        factor=0.5,
        top="top_d2",
        aliases=("kl_v2",),
    ),
    Metric(
        name="k3_winsorised",
        formula="k3 with |d| cut at 2: parts from k3 where a few tokens carry it",
        scale=Scale.POSITIVE,
        above="k3_winsor",
        top="top_k3_winsor",
    ),
    Metric(
        name="k3_sequence_mean",
        formula="mean over sequences of their mean k3",
        scale=Scale.POSITIVE,
        above="seq_k3",
        below="seq_n",
        top="top_k3",
        # miles averages per sample, and clips a token's k3 at 10
        aliases=("train_rollout_kl",),
    ),
    Metric(
        name="abs_diff_mean",
        formula="mean of |d|",
        scale=Scale.POSITIVE,
        above="abs",
        aliases=(
            "sampling/sampling_logp_difference/mean",
            "policy/rollout_train_logprobs_abs_diff_mean",
        ),
    ),
    Metric(
        name="abs_diff_std",
        formula="standard deviation of |d|",
        scale=Scale.BARE,
        function=lambda sums: _deviation(sums, "abs", "d2"),
        aliases=("policy/rollout_train_logprobs_abs_diff_std",),
    ),
    Metric(
        name="abs_diff_sequence_mean",
        formula="mean over sequences of their mean |d|",
        scale=Scale.POSITIVE,
        above="seq_abs",
        below="seq_n",
        aliases=("train_rollout_logprob_abs_diff",),
    ),
    Metric(
        name="rho_mean_minus_1",
        formula=(
            "mean of rho - 1: 0 for every trainer that covers what was sampled, whatever its"
            " weights"
        ),
        scale=Scale.SIGNED,
        above="rho",
        shift=-1.0,
    ),
    Metric(
        name="chi2_token",
        formula="mean of rho^2 - 1",
        scale=Scale.BARE,
        above="rho2",
        shift=-1.0,
        aliases=("rollout_corr/chi2_token",),
    ),
    Metric(
        name="ess_token",
        formula="(sum rho)^2 / (n sum rho^2), rho not truncated",
        scale=Scale.BARE,
        function=_ess,
        healthy=1.0,
    ),
    Metric(
        name="F2",
        formula="share of tokens with max(rho, 1/rho) > 2",
        scale=Scale.SHARE,
        above="F2",
        aliases=("extreme_frac_tau2",),
    ),
    Metric(
        name="F5", formula="share of tokens with max(rho, 1/rho) > 5", scale=Scale.SHARE, above="F5"
    ),
    Metric(
        name="F10",
        formula="share of tokens with max(rho, 1/rho) > 10",
        scale=Scale.SHARE,
        above="F10",
    ),
    Metric(
        name="prob_diff_mean",
        formula="mean of |exp(trainer) - exp(rollout)|",
        scale=Scale.POSITIVE,
        above="diff_prob",
        aliases=("training/rollout_probs_diff_mean",),
    ),
    Metric(
        name="prob_diff_std",
        formula="standard deviation of |exp(trainer) - exp(rollout)|",
        scale=Scale.OTHER,
        function=lambda sums: _deviation(sums, "diff_prob", "diff_prob2"),
        aliases=("training/rollout_probs_diff_std",),
    ),
    Metric(
        name="pearson",
        formula="correlation of exp(trainer) and exp(rollout)",
        scale=Scale.OTHER,
        function=_pearson,
        healthy=1.0,
        aliases=("training/rollout_actor_probs_pearson_corr",),
    ),
    Metric(
        name="token_mult_prob_error",
        formula="mean of exp(|d|)",
        scale=Scale.POSITIVE,
        above="mult",
        healthy=1.0,
        top="top_mult",
        aliases=("token_mult_prob_error",),
    ),
    Metric(
        name="log_ppl_gap",
        formula="mean over sequences of their mean -d",
        scale=Scale.SIGNED,
        above="seq_k1",
        below="seq_n",
        aliases=("rollout_corr/log_ppl_diff",),
    ),
    Metric(
        name="log_ppl_abs_gap",
        formula="mean over sequences of |their mean d|",
        scale=Scale.POSITIVE,
        above="seq_abs_k1",
        below="seq_n",
        aliases=("rollout_corr/log_ppl_abs_diff",),
    ),
    Metric(
        name="geometric_ratio",
        formula="mean over sequences of exp(their mean d)",
        scale=Scale.SIGNED,
        above="seq_geo",
        below="seq_n",
        healthy=1.0,
    ),
    Metric(
        name="variance_rate",
        formula=(
            "variance over sequences of their sum of d, per token: about 2 KL where tokens err"
            " independently"
        ),
        scale=Scale.BARE,
        function=_variance_rate,
    ),
    Metric(
        name="different_token_fraction",
        formula="share of tokens with |d| > 1e-6",
        scale=Scale.SHARE,
        above="different",
        aliases=("ratio_tokens_different",),
    ),
)


METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _LIST}
"""The metrics that are functions of the sums, by name.

``rollproof.gap.panel`` adds the quantiles of |d|, ``rollproof.gap.agreement`` the routers'.
"""
