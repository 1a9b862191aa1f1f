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

from rollproof.gap.columns import known
from rollproof.gap.intervals import FEW_TOKENS, Interval, Resampler, metric_interval
from rollproof.gap.metrics import METRICS
from rollproof.gap.sums import sequence_sums
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["NEAR", "Bucket", "bucket_codes", "bucketed", "resume_parts", "staleness"]

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
