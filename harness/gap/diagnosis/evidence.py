"""Evidence: what a diagnosis is drawn from, measured once on a bounded sample of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from rollproof.core.records import IntArray
from rollproof.gap.agreement import Selections, selections
from rollproof.gap.diagnosis.shifts import (
    ENOUGH,
    STEPS,
    Shift,
    logprob_shift,
    lost_shift,
    moved_layers,
    moved_tokens,
    route_shift,
)
from rollproof.gap.token_pairs import BoolArray, FloatArray, TokenPairs

__all__ = ["Evidence", "RouteEvidence", "gather", "route_evidence"]

_TOKENS = 400_000
"""Tokens that a diagnosis looks at: more change no conclusion, and cost seconds."""
_BINS = 20
_PER_BIN = 25
_CUT = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Signs over ``tokens`` tokens with finite logprobs, whose mean |d| is ``size``.

    ``rho_excess`` is E[rho] - 1 and ``rho_z`` that over its standard error over sequences,
    ``rho_chance`` how likely such a one is of so few sequences (Student); ``explained`` is the
    share of the mean square of d that a function of the rollout logprob alone explains; ``pearson``
    the correlation of the two logprobs and ``lagged`` that with the trainer's moved by -1 and +1
    places; ``apart`` the share of a sequence's tokens with |d| above ln 2, its median over
    sequences; ``shift`` the blocks of tokens whose logprobs are a neighbour's.
    """

    tokens: int
    size: float
    k1: float
    k3: float
    rho_excess: float
    rho_z: float
    rho_chance: float
    explained: float
    pearson: float
    apart: float
    lagged: dict[int, float] = field(default_factory=dict)
    shift: Shift | None = None
    routes: RouteEvidence | None = None


def gather(pairs: TokenPairs) -> Evidence:
    """The evidence of ``pairs``: of all tokens, or of whole sequences drawn until there are enough."""
    pairs = _sample(pairs)
    known = np.isfinite(pairs.rollout) & np.isfinite(pairs.trainer)
    whole = pairs if known.all() else pairs.chosen(known)
    d = whole.trainer - whole.rollout
    if not len(d):
        nan = float("nan")
        return Evidence(
            tokens=0,
            size=nan,
            k1=nan,
            k3=nan,
            rho_excess=nan,
            rho_z=nan,
            rho_chance=1.0,
            explained=nan,
            pearson=nan,
            apart=nan,
        )
    excess = np.expm1(np.clip(d, -80, 20))
    by_sequence = np.add.reduceat(excess, whole.starts)
    mean = float(excess.mean())
    count = whole.n_sequences
    error = float(
        np.sqrt(((by_sequence - mean * whole.lengths) ** 2).sum() * count / max(count - 1, 1))
    ) / len(d)
    away = mean / error if error > 1e-12 * abs(mean) and count > 1 else 0.0
    return Evidence(
        tokens=len(d),
        size=float(np.abs(d).mean()),
        k1=float(-d.mean()),
        k3=float((excess - d).mean()),
        rho_excess=mean,
        rho_z=away,
        rho_chance=float(2 * stats.t.sf(abs(away), count - 1)) if count > 1 else 1.0,
        explained=_explained(whole.rollout, d, whole.owner % 2),
        pearson=_correlation(whole.rollout, whole.trainer),
        apart=float(
            np.median(
                np.add.reduceat((np.abs(d) > np.log(2)).astype(np.float64), whole.starts)
                / whole.lengths
            )
        ),
        lagged={step: _lagged(pairs, step) for step in (-1, 1)},
        shift=logprob_shift(pairs),
        routes=route_evidence(pairs),
    )


def _sample(pairs: TokenPairs) -> TokenPairs:
    if pairs.n_tokens <= _TOKENS:
        return pairs
    order = np.random.default_rng(0).permutation(pairs.n_sequences)
    enough = int(np.searchsorted(np.cumsum(pairs.lengths[order]), _TOKENS)) + 1
    taken = np.zeros(pairs.n_sequences, bool)
    taken[order[:enough]] = True
    return pairs.chosen(np.repeat(taken, pairs.lengths))


def _explained(rollout: FloatArray, d: FloatArray, group: IntArray) -> float:
    """Share of sum d^2 that a function of the rollout logprob explains: the mean of d within bins,
    learnt from half of the sequences and tried on the other, so that neither a few tokens nor as
    many bins explain anything. ``group`` ``(n,)`` is 0 or 1.

    An offset, which is the same in all bins, is no function of the logprob and is left out; so is
    what of |d| is beyond ``_CUT``.
    """
    d = np.clip(d, -_CUT, _CUT)
    total = float((d * d).sum())
    edges = np.unique(np.quantile(rollout, np.linspace(0, 1, min(_BINS, len(d) // _PER_BIN) + 1)))
    if total == 0 or len(edges) < 3 or not 0 < group.mean() < 1:
        return 0.0
    place = np.clip(np.searchsorted(edges, rollout, side="right") - 1, 0, len(edges) - 2)
    gained = 0.0
    for half in (0, 1):
        learnt, tried = group == half, group != half
        count = np.bincount(place[learnt], minlength=len(edges) - 1)
        own = d[learnt] - d[learnt].mean()
        mean = np.bincount(place[learnt], weights=own, minlength=len(count)) / np.maximum(count, 1)
        told = mean[place[tried]]
        rest = d[tried] - d[tried].mean()
        gained += float((2 * rest * told - told * told).sum())
    return max(0.0, gained / total)


def _correlation(a: FloatArray, b: FloatArray) -> float:
    a, b = np.maximum(a, -20.0), np.maximum(b, -20.0)
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _lagged(pairs: TokenPairs, step: int) -> float:
    """Correlation of each token's rollout logprob with the trainer's of ``step`` places further on
    in the same sequence.
    """
    ours = np.arange(max(0, -step), pairs.n_tokens - max(0, step))
    theirs = ours + step
    owner = pairs.owner
    keep = (
        (owner[ours] == owner[theirs])
        & np.isfinite(pairs.rollout[ours])
        & np.isfinite(pairs.trainer[theirs])
    )
    if keep.sum() < ENOUGH:
        return float("nan")
    return _correlation(pairs.rollout[ours[keep]], pairs.trainer[theirs[keep]])


_SLOTS = 8
_MANY_SLOTS = 24
"""Slots of a row of which no healthy one has as many wrong as chance has, where a token has several
experts a layer.
"""
_HANDFUL = 5
_ROWS = 20
_ALMOST = 0.9
"""A sequence of at least so many rows, of which so many agree no better than chance, is another
request's: healthy ones never are.
"""
_MOST = 1 << 22
"""Slots that are looked at: more change no conclusion, and cost seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteEvidence:
    """Slot mismatch of the routes as they stand, after shifting them by tokens or layers, and where
    it sits.

    ``token_shift`` and ``layer_shift`` map a shift to the mismatch that is left when the trainer's
    rows are moved by it; ``shift`` is one that mends a part of the tokens or layers. ``polluted``
    is the share of tokens whose rows agree no better than chance, ``healthy`` the mismatch of the
    others; NaN where a token has so few slots (``_SLOTS``) that one flip could look so. ``strange``
    counts the sequences of which hardly a row agrees better, and ``rare`` single rows that agree no
    better where hardly any are between those and the good. ``dull_layers`` are leading layers of
    the axis whose rows hold no selection (one expert several times, or negative).
    """

    mismatch: float
    token_shift: dict[int, float]
    layer_shift: dict[int, float]
    shift: Shift | None
    polluted: float
    healthy: float
    strange: int
    rare: int
    dull_layers: int


def route_evidence(pairs: TokenPairs) -> RouteEvidence | None:
    """The evidence of the routes of ``pairs``; ``None`` where a side has none, or too few."""
    rollout, trainer = pairs.routes.get("rollout_routes"), pairs.routes.get("trainer_routes")
    if (
        rollout is None
        or trainer is None
        or rollout.shape != trainer.shape
        or len(rollout) * rollout.shape[1] < ENOUGH
    ):
        return None
    most = max(1, _MOST // (rollout.shape[1] * rollout.shape[2]))
    rollout, trainer, owner = rollout[:most], trainer[:most], pairs.owner[:most]
    left, right = selections(rollout, trainer)
    top_k = left.top_k
    common, whole = left.overlap(right)
    captured = whole.mean(axis=0) > 0.05
    missed, rows = ((top_k - common) * whole).sum(axis=1), whole.sum(axis=1)
    told = rows > 0
    row = np.divide(missed, rows * top_k, out=np.zeros(len(left)), where=told)
    chance = 1 - top_k / (int(max(rollout.max(), trainer.max())) + 1)
    lost = told & (row > 0.7 * chance)
    well = told & ~lost
    many = left.layers * top_k >= _SLOTS
    known, gone = (
        np.bincount(owner, weights=one, minlength=pairs.n_sequences) for one in (told, lost)
    )
    return RouteEvidence(
        mismatch=_missed(left, right),
        token_shift={step: _missed(*moved_tokens(left, right, owner, step)) for step in STEPS},
        layer_shift={
            step: _missed(*moved_layers(left, right, step))
            for step in STEPS
            if abs(step) < left.layers
        },
        shift=route_shift(left, right, pairs)
        or (lost_shift(left, right, lost, pairs) if many else None),
        polluted=float(lost.mean()) if many else float("nan"),
        healthy=float(row[well].mean()) if well.any() else float("nan"),
        strange=int(((known >= _ROWS) & (gone > _ALMOST * known)).sum()) if many else 0,
        rare=(
            _rare(lost, told & (row > 0.35 * chance), owner)
            if top_k > 1 and left.layers * top_k >= _MANY_SLOTS
            else 0
        ),
        dull_layers=int(np.argmax(captured)) if captured.any() else left.layers,
    )


def _rare(lost: BoolArray, poor: BoolArray, owner: IntArray) -> int:
    """Lost rows, but for the last of each sequence, which may be a filler; 0 where they are a
    handful, or the tail of poor ones.
    """
    inner = int((lost[:-1] & (owner[:-1] == owner[1:])).sum())
    return inner if inner >= _HANDFUL and 4 * int((poor & ~lost).sum()) <= inner else 0


def _missed(left: Selections, right: Selections) -> float:
    common, whole = left.overlap(right)
    return float(1 - common[whole].mean() / left.top_k) if whole.any() else float("nan")
