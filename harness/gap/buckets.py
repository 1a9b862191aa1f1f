"""Buckets: k3 and |d| of parts of the tokens, where faults of resuming, of staleness and of
position show.

A bucket's numbers are those of its tokens alone; its interval resamples sequences, like every
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.gap.column_checks import FloatArray, known
from rollproof.gap.intervals import FEW_TOKENS, Interval, Resampler, metric_interval
from rollproof.gap.metrics import METRICS, sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "NEAR",
    "Bucket",
    "Decomposition",
    "Parts",
    "bucket_codes",
    "bucketed",
    "decompose",
    "resume_parts",
    "staleness",
]

_MOST = 24
"""A column with more values than this (versions of a long run) is cut into as many ranges of equal
token count.
"""
NEAR = 8
"""Tokens after a resume that count as near it."""
_RESUME = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2-7", 2, NEAR - 1),
    ("8+", NEAR, np.inf),
    ("before any", -np.inf, -1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tokens of one ``label``: how many, in how many sequences, their k3, mean |d| and mean rho -
    1.
    """

    label: str
    tokens: int
    sequences: int
    k3: Interval
    abs_diff: Interval
    rho: Interval

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        numbers = {
            "kl_mu_pi_k3": self.k3,
            "abs_diff_mean": self.abs_diff,
            "rho_mean_minus_1": self.rho,
        }
        out: dict[str, Any] = {
            "label": self.label,
            "tokens": self.tokens,
            "sequences": self.sequences,
        }
        for name, interval in numbers.items():
            out[name] = [
                value if np.isfinite(value) else None
                for value in (interval.value, interval.low, interval.high)
            ]
        return out


def staleness(pairs: TokenPairs) -> npt.NDArray[np.float64] | None:
    """``(n,)``: how many versions older than the current one the weights were that sampled each
    token; ``None`` where not told.
    """
    version, current = pairs.sides.get("version"), pairs.sides.get("current_version")
    if (
        version is None
        or version.dtype.kind not in "iuf"
        or (current is not None and current.dtype.kind not in "iuf")
    ):
        return None
    if not known(version).any():
        return None
    newest = np.nanmax(version) if current is None else current
    return np.asarray(newest - version, dtype=np.float64)


def bucketed(
    pairs: TokenPairs, *, resamples: int = 200, seed: int = 0
) -> dict[str, tuple[Bucket, ...]]:
    """Buckets by every column that is there: staleness, distance to a resume, position, part,
    replica, rollout logprob.
    """
    if not pairs.n_tokens:
        return {}
    out = {}
    for name, labels in _labellings(pairs).items():
        codes, names = labels
        buckets = []
        for code, label in enumerate(names):
            keep = codes == code
            if keep.any():
                buckets.append(_bucket(label, pairs.chosen(keep), resamples, seed))
        if len(buckets) > 1 or name == "since_resume":
            out[name] = tuple(buckets)
    return out


def resume_parts(since: npt.NDArray[Any]) -> dict[str, npt.NDArray[np.bool_]]:
    """Which tokens ``(n,)`` stand how far behind a resume, by label."""
    return {label: (since >= low) & (since <= high) for label, low, high in _RESUME}


def _labellings(pairs: TokenPairs) -> Mapping[str, tuple[npt.NDArray[np.int64], list[str]]]:
    out = {}
    lag = staleness(pairs)
    if lag is not None and not np.isnan(lag).all():
        out["staleness"] = bucket_codes(lag)
    if "since_resume" in pairs.sides:
        parts = resume_parts(pairs.sides["since_resume"])
        out["since_resume"] = (
            np.select(list(parts.values()), list(range(len(parts))), -1),
            list(parts),
        )
    for name in ("part", "replica", "version", "temperature"):
        if name in pairs.sides:
            out[name] = bucket_codes(pairs.sides[name])
    out["position_decile"] = _deciles(_place(pairs))
    out["rollout_logprob_decile"] = _deciles(pairs.rollout)
    return out


def _place(pairs: TokenPairs) -> npt.NDArray[np.float64]:
    """Relative place of each token in its sequence, 0 to 1."""
    within = np.arange(pairs.n_tokens) - np.repeat(pairs.starts, pairs.lengths)
    return np.asarray(within / np.maximum(np.repeat(pairs.lengths, pairs.lengths) - 1, 1))


def bucket_codes(column: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """``(n,)``: the bucket of each token, by value or (of many numbers) by range, -1 where it is
    not told; and the buckets' labels.
    """
    told = known(column)
    names, found = np.unique(column[told], return_inverse=True)
    codes = np.full(len(column), -1)
    codes[told] = found
    if len(names) > _MOST and names.dtype.kind in "iuf":
        codes[told], labels = _deciles(column[told].astype(np.float64))
        return codes, labels
    return codes, [f"{name:g}" if names.dtype.kind in "iuf" else str(name) for name in names]


def _deciles(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], list[str]]:
    known = np.isfinite(values)
    if not known.any():
        return np.full(len(values), -1), []
    edges = np.unique(np.quantile(values[known], np.linspace(0, 1, 11)))
    codes = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    labels = [f"{low:.3g} to {high:.3g}" for low, high in _pairs(edges)]
    return np.where(known, codes, -1), labels


def _pairs(edges: npt.NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    if len(edges) == 1:
        yield float(edges[0]), float(edges[0])
    for low, high in itertools.pairwise(edges):
        yield float(low), float(high)


def _bucket(label: str, pairs: TokenPairs, resamples: int, seed: int) -> Bucket:
    resampler = Resampler(sequence_sums(pairs), resamples=resamples, seed=seed)
    k3, size, rho = (
        metric_interval(METRICS[name], resampler)
        for name in ("kl_mu_pi_k3", "abs_diff_mean", "rho_mean_minus_1")
    )
    if pairs.n_tokens < FEW_TOKENS:
        k3 = Interval(value=k3.value, low=np.nan, high=np.nan)
    return Bucket(
        label=label,
        tokens=pairs.n_tokens,
        sequences=pairs.n_sequences,
        k3=k3,
        abs_diff=size,
        rho=rho,
    )


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
