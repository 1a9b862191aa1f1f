"""Parts of the tokens: buckets by age, resume, position and so on, and the engine's share by age.

Faults of resuming, of staleness and of position show in such parts. The numbers of a bucket are
those of its tokens alone; its interval resamples sequences, like every other.

The decomposition answers how much of the difference to the current weights is the engine's, and how
much the policy's own change. A token that older weights sampled has three logprobs: the rollout's,
the trainer's under the weights that sampled it, and the trainer's under its current weights. Their
differences add up, token by token: current - rollout = (trainer - rollout), the engine's mismatch,
+ (current - trainer), which is staleness and no fault of any kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.gap.column_checks import BoolArray, FloatArray, IntArray, is_present
from rollproof.gap.intervals import FEW_TOKENS, Interval, Resampler, metric_interval
from rollproof.gap.metrics import METRICS, sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "NEAR",
    "Bucket",
    "Decomposition",
    "Parts",
    "bucket_codes",
    "bucket_pairs",
    "decompose",
    "resume_parts",
    "staleness",
]

# A column with more values (versions of a long run) is cut into ranges of equal token count
_MAX_BUCKETS = 24
NEAR = 8
"""Tokens after a resume that count as near it."""
_RESUME = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2-7", 2, NEAR - 1),
    ("8+", NEAR, np.inf),
    ("before any", -np.inf, -1),
)
_DECOMPOSED = ("abs_diff_mean", "k1", "kl_mu_pi_k3")

# `(n,)` the bucket of each token, -1 for none; and the labels of the buckets
_Labelling: TypeAlias = "tuple[IntArray, list[str]]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The tokens with one label.

    Attributes:
        label: the value or range that they share.
        tokens: how many there are.
        sequences: in how many sequences.
        k3: their k3.
        abs_diff: their mean |d|.
        rho: their mean rho - 1.
    """

    label: str
    tokens: int
    sequences: int
    k3: Interval
    abs_diff: Interval
    rho: Interval

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "label": self.label,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "kl_mu_pi_k3": self.k3.to_list(),
            "abs_diff_mean": self.abs_diff.to_list(),
            "rho_mean_minus_1": self.rho.to_list(),
        }


def staleness(pairs: TokenPairs) -> FloatArray | None:
    """``(n,)``: age of the weights that sampled each token, in versions; ``None`` if unknown."""
    version, current = pairs.columns.get("version"), pairs.columns.get("current_version")
    if (
        version is None
        or version.dtype.kind not in "iuf"
        or (current is not None and current.dtype.kind not in "iuf")
    ):
        return None
    if not is_present(version).any():
        return None
    # without a current version the newest that sampled is the best guess
    newest = np.nanmax(version) if current is None else current
    return np.asarray(newest - version, dtype=np.float64)


def bucket_pairs(
    pairs: TokenPairs, *, resamples: int = 200, seed: int = 0
) -> dict[str, tuple[Bucket, ...]]:
    """Return buckets by every column that the pairs have.

    The columns are staleness, distance to a resume, position, part, replica, rollout logprob and so
    on.
    """
    if not pairs.n_tokens:
        return {}
    out = {}
    for name, (codes, labels) in _labellings(pairs).items():
        buckets = []
        for code, label in enumerate(labels):
            in_bucket = codes == code
            if in_bucket.any():
                buckets.append(_bucket(label, pairs.select(in_bucket), resamples, seed))
        # a single bucket repeats the panel; the boundary rule needs that of resumes all the same
        if len(buckets) > 1 or name == "since_resume":
            out[name] = tuple(buckets)
    return out


def resume_parts(since: npt.NDArray[Any]) -> dict[str, BoolArray]:
    """``(n,)`` masks of the tokens by their distance to the last resume."""
    return {label: (since >= low) & (since <= high) for label, low, high in _RESUME}


def _labellings(pairs: TokenPairs) -> Mapping[str, _Labelling]:
    out: dict[str, _Labelling] = {}
    age = staleness(pairs)
    if age is not None and not np.isnan(age).all():
        out["staleness"] = bucket_codes(age)
    if "since_resume" in pairs.columns:
        parts = resume_parts(pairs.columns["since_resume"])
        codes = np.select(list(parts.values()), list(range(len(parts))), -1)
        out["since_resume"] = codes, list(parts)
    for name in ("part", "replica", "version", "temperature"):
        if name in pairs.columns:
            out[name] = bucket_codes(pairs.columns[name])
    for name, grouping in pairs.groups.items():
        out[name if name not in out else f"group {name}"] = grouping.codes, list(grouping.labels)
    if "pack_index" in pairs.columns:
        later = np.asarray(pairs.columns["pack_index"] > 0).astype(np.int64)
        out["pack_index"] = later, ["first of its row", "after another"]
    last = np.maximum(np.repeat(pairs.lengths, pairs.lengths) - 1, 1)
    out["position_decile"] = _deciles(np.asarray(pairs.index_in_sequence / last))
    out["rollout_logprob_decile"] = _deciles(pairs.rollout)
    return out


def bucket_codes(column: npt.NDArray[Any]) -> _Labelling:
    """Return the buckets of a column: by value, or by range if it holds many numbers."""
    present = is_present(column)
    names, inverse = np.unique(column[present], return_inverse=True)
    numeric = names.dtype.kind in "iuf"
    codes = np.full(len(column), -1)
    if len(names) > _MAX_BUCKETS and numeric:
        codes[present], labels = _deciles(column[present].astype(np.float64))
        return codes, labels
    codes[present] = inverse
    return codes, [f"{name:g}" if numeric else str(name) for name in names]


def _deciles(values: FloatArray) -> _Labelling:
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(len(values), -1), []
    edges = np.unique(np.quantile(values[finite], np.linspace(0, 1, 11)))
    codes = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    # equal values have one edge, which begins and ends their only range
    ranges = itertools.pairwise(edges if len(edges) > 1 else np.repeat(edges, 2))
    return np.where(finite, codes, -1), [f"{low:.3g} to {high:.3g}" for low, high in ranges]


def _bucket(label: str, pairs: TokenPairs, resamples: int, seed: int) -> Bucket:
    resampler = Resampler(sequence_sums(pairs), resamples=resamples, seed=seed)
    k3, abs_diff, rho = (
        metric_interval(METRICS[name], resampler)
        for name in ("kl_mu_pi_k3", "abs_diff_mean", "rho_mean_minus_1")
    )
    # its interval would hold less often than it claims
    if pairs.n_tokens < FEW_TOKENS:
        k3 = Interval.unbounded(k3.value)
    return Bucket(
        label=label,
        tokens=pairs.n_tokens,
        sequences=pairs.n_sequences,
        k3=k3,
        abs_diff=abs_diff,
        rho=rho,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of the difference to the current weights, for tokens of one age.

    Attributes:
        label: the age; ``all`` for tokens of any age.
        tokens: how many there are.
        engine: mean |d|, k1 and k3 between rollout and trainer.
        policy: the same between the trainer's weights that sampled and its current ones.
        total: the same between rollout and current weights.
        share: the engine's mean |d| over the sum of engine's and policy's.
    """

    label: str
    tokens: int
    engine: dict[str, Interval]
    policy: dict[str, Interval]
    total: dict[str, Interval]
    share: Interval

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        parts = {"engine": self.engine, "policy": self.policy, "total": self.total}
        return {
            "age": self.label,
            "tokens": self.tokens,
            "engine_share": self.share.to_list(),
            **{
                part: {name: interval.to_list() for name, interval in intervals.items()}
                for part, intervals in parts.items()
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decomposition:
    """The difference to the current weights in two parts.

    Attributes:
        engine: ``(n,)``: trainer - rollout; NaN if a logprob is not finite.
        policy: ``(n,)``: current - trainer; NaN likewise.
        rows: the parts over all tokens first, then over those of each age.
    """

    engine: FloatArray
    policy: FloatArray
    rows: tuple[Parts, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the JSON form of the rows."""
        return [row.to_dict() for row in self.rows]


def decompose(pairs: TokenPairs, *, resamples: int = 1000, seed: int = 0) -> Decomposition | None:
    """Return the parts of ``pairs``.

    ``None`` if they have no ``current_logprob``, or no token with three finite logprobs.
    """
    current = pairs.columns.get("current_logprob")
    if current is None:
        return None
    finite = pairs.finite & np.isfinite(current)
    if not finite.any():
        return None
    rows = [_parts("all", pairs, finite, resamples, seed)]
    age = staleness(pairs)
    if age is not None:
        codes, labels = bucket_codes(age)
        for code, label in enumerate(labels):
            in_bucket = finite & (codes == code)
            if in_bucket.any():
                rows.append(_parts(label, pairs, in_bucket, resamples, seed))
    with np.errstate(invalid="ignore"):
        engine, policy = pairs.trainer - pairs.rollout, current - pairs.trainer
    return Decomposition(
        engine=np.where(finite, engine, np.nan),
        policy=np.where(finite, policy, np.nan),
        rows=tuple(rows),
    )


def _parts(label: str, pairs: TokenPairs, mask: BoolArray, resamples: int, seed: int) -> Parts:
    pairs = pairs.select(mask)
    current = pairs.columns["current_logprob"]
    logprobs = {
        "engine": (pairs.rollout, pairs.trainer),
        "policy": (pairs.trainer, current),
        "total": (pairs.rollout, current),
    }
    intervals = {}
    for part, (first, second) in logprobs.items():
        between = TokenPairs(
            rollout=first, trainer=second, starts=pairs.starts, sequences=pairs.sequences
        )
        resampler = Resampler(sequence_sums(between), resamples=resamples, seed=seed)
        intervals[part] = {name: metric_interval(METRICS[name], resampler) for name in _DECOMPOSED}
    engine, policy = (
        np.add.reduceat(np.abs(second - first), pairs.starts)
        for first, second in (logprobs["engine"], logprobs["policy"])
    )
    sums = np.stack([engine, engine + policy], axis=1)
    share = Resampler(sums, resamples=resamples, seed=seed).ratio(0, 1)
    # the interval is symmetric on the log scale, and a share is at most 1
    share = Interval(value=share.value, low=share.low, high=float(np.minimum(share.high, 1.0)))
    return Parts(label=label, tokens=pairs.n_tokens, share=share, **intervals)
