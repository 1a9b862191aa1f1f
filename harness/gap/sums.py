"""Sums: what one pass over the tokens leaves of each sequence. Every metric and every resample is a
function of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from rollproof.core.records import IntArray
from rollproof.gap.token_pairs import FloatArray, TokenPairs

__all__ = ["FRACTIONS", "NAMES", "PLACE", "WINSOR", "sequence_sums"]

FRACTIONS: Mapping[str, float] = {"F2": math.log(2), "F5": math.log(5), "F10": math.log(10)}
"""Bounds on |d| of the R3 paper's F(tau) = P(max(rho, 1/rho) > tau)."""
WINSOR = 2.0
"""|d| beyond which the winsorised k3 counts no more."""
DIFFERENT = 1e-6
"""|d| from which two logprobs count as different (TorchTitan's ratio_tokens_different)."""
_CAP = 80.0
"""exp of more would leave float64's useful range; such tokens are already counted by F10."""
_CHUNK = 1 << 19

NAMES: tuple[str, ...] = (
    "sequences", "tokens", "finite",
    "d", "d2", "abs", "k3", "k3_winsor", "rho", "rho2", "mult",
    "diff_prob", "diff_prob2", "p", "q", "pp", "qq", "pq",
    "F2", "F5", "F10", "different",
    "seq_k1", "seq_abs_k1", "seq_k3", "seq_abs", "seq_geo", "seq_d", "seq_d2", "seq_n",
    "top_d2", "top_k3", "top_k3_winsor", "top_mult",
)  # fmt: skip
"""Columns of the sums, in order. ``seq_*`` are one value a sequence, of its mean (or sum),
``top_*`` that of its largest token; the others add up over tokens."""
PLACE: Mapping[str, int] = {name: i for i, name in enumerate(NAMES)}


def sequence_sums(pairs: TokenPairs) -> FloatArray:
    """``(sequences, len(NAMES))`` float64: per sequence, sums over its tokens whose two logprobs
    are finite.
    """
    out = np.zeros((pairs.n_sequences, len(NAMES)))
    bounds = np.append(pairs.starts, pairs.n_tokens)
    first = 0
    while first < pairs.n_sequences:
        last = max(
            first + 1, int(np.searchsorted(bounds, bounds[first] + _CHUNK, side="right")) - 1
        )
        begin, end = int(bounds[first]), int(bounds[last])
        _fill(
            out[first:last],
            pairs.rollout[begin:end],
            pairs.trainer[begin:end],
            bounds[first:last] - begin,
        )
        first = last
    return out


def _fill(out: FloatArray, rollout: FloatArray, trainer: FloatArray, starts: IntArray) -> None:
    finite = np.isfinite(rollout) & np.isfinite(trainer)
    with np.errstate(invalid="ignore"):
        d = np.where(finite, trainer - rollout, 0.0)
    size = np.abs(d)
    rho = np.exp(np.clip(d, -_CAP, _CAP))
    p, q = np.exp(np.where(finite, trainer, -np.inf)), np.exp(np.where(finite, rollout, -np.inf))
    apart = np.abs(p - q)
    small = np.clip(d, -WINSOR, WINSOR)
    with np.errstate(over="ignore"):
        columns = {
            "finite": finite,
            "d": d,
            "d2": d * d,
            "abs": size,
            # expm1 keeps the digits that rho - 1 - d loses for small d
            "k3": np.where(finite, np.expm1(np.clip(d, -_CAP, _CAP)) - d, 0.0),
            "k3_winsor": np.expm1(small) - small,
            "rho": np.where(finite, rho, 0.0),
            "rho2": np.where(finite, rho * rho, 0.0),
            "mult": np.where(finite, np.exp(np.minimum(size, _CAP)), 0.0),
            "diff_prob": apart,
            "diff_prob2": apart * apart,
            "p": p,
            "q": q,
            "pp": p * p,
            "qq": q * q,
            "pq": p * q,
            **{name: size > bound for name, bound in FRACTIONS.items()},
            "different": size > DIFFERENT,
        }
    for name, column in columns.items():
        out[:, PLACE[name]] = np.add.reduceat(column, starts, dtype=np.float64)
    for name in ("d2", "k3", "k3_winsor", "mult"):
        out[:, PLACE[f"top_{name}"]] = np.maximum.reduceat(columns[name], starts)
    out[:, PLACE["sequences"]] = 1.0
    out[:, PLACE["tokens"]] = np.diff(np.append(starts, len(d)))
    _sequence_values(out)


def _sequence_values(out: FloatArray) -> None:
    """The columns that are one value a sequence; 0 for a sequence without a finite token."""
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
