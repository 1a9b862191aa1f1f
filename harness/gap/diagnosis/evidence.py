"""The evidence of a diagnosis, measured once on a bounded sample of complete sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from rollproof.gap.agreement import Selections, selections
from rollproof.gap.column_checks import BoolArray, FloatArray, IntArray
from rollproof.gap.diagnosis.agreeing_parts import APART as _APART
from rollproof.gap.diagnosis.agreeing_parts import agreeing_parts
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
from rollproof.gap.token_pairs import TokenPairs

__all__ = ["Evidence", "RouteEvidence", "gather_evidence", "sample_sequences"]

# More tokens change no conclusion, and cost seconds
_MAX_TOKENS = 400_000
_BINS = 20
_PER_BIN = 25
_MAX_DIFF = 3.0
# With fewer slots, a token with one flip may look like one without any agreement
_MIN_SLOTS = 8
# Slots of a token with several experts a layer, of which no healthy token has as many wrong as
# chance has.
_MANY_SLOTS = 24
_MIN_RARE = 5
_MIN_ROWS = 20
# If this share of a sequence's rows agrees no better than chance, it is another request's: healthy
# ones never do that.
_ALMOST_ALL = 0.9
# More slots change no conclusion, and cost seconds
_MAX_ROUTE_SLOTS = 1 << 22
_MIN_CAPTURED = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteEvidence:
    """How the routes of rollout and trainer differ, and whether other rows or layers fit better.

    Attributes:
        mismatch: slot mismatch of the routes as they stand.
        token_shift: mismatch that is left with the trainer's rows moved by some tokens.
        layer_shift: mismatch that is left with them moved by some layers.
        shift: the shift that mends a part of the tokens or layers.
        polluted: share of tokens with rows that agree no better than chance; NaN if a token has too
            few slots to know.
        healthy: mismatch of the other tokens.
        strange: sequences with hardly a row that agrees better.
        rare: single rows that agree no better, if hardly any are between those and the good ones.
        empty_layers: leading layers of the axis without a selection (one expert several times, or
            negative ids).
    """

    mismatch: float
    token_shift: dict[int, float]
    layer_shift: dict[int, float]
    shift: Shift | None
    polluted: float
    healthy: float
    strange: int
    rare: int
    empty_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Signs over the tokens with finite logprobs.

    Attributes:
        tokens: how many there are.
        size: their mean |d|.
        k1: their k1.
        k3: their k3.
        rho_excess: E[rho] - 1.
        rho_z: that over its standard error over sequences.
        rho_chance: its probability by chance with so few sequences (Student).
        explained: share of the mean square of d that a function of the rollout logprob explains.
        pearson: correlation of the two logprobs.
        apart: share of a sequence's tokens with |d| above ln 2, median over sequences.
        lagged: the correlation with the trainer's logprobs moved by -1 and +1 tokens.
        shift: the blocks of tokens with a neighbour's logprobs.
        routes: the evidence of the routes.
        agreeing: the parts of the tokens that agree, in words, if most of them have little in
            common.
    """

    tokens: int
    size: float = np.nan
    k1: float = np.nan
    k3: float = np.nan
    rho_excess: float = np.nan
    rho_z: float = np.nan
    rho_chance: float = 1.0
    explained: float = np.nan
    pearson: float = np.nan
    apart: float = np.nan
    lagged: dict[int, float] = field(default_factory=dict)
    shift: Shift | None = None
    routes: RouteEvidence | None = None
    agreeing: str = ""

    @property
    def little_in_common(self) -> bool:
        """Whether the logprobs of most sequences have little in common."""
        return self.k3 > 0.3 and self.pearson < 0.8 and self.apart > _APART


def gather_evidence(pairs: TokenPairs) -> Evidence:
    """Return the evidence of ``pairs``, or of a sample of complete sequences if they are many."""
    pairs = sample_sequences(pairs)
    finite = pairs.finite
    finite_pairs = pairs if finite.all() else pairs.select(finite)
    d = finite_pairs.trainer - finite_pairs.rollout
    if not len(d):
        return Evidence(tokens=0)
    # expm1 keeps the digits that rho - 1 loses for small d
    excess = np.expm1(np.clip(d, -80, 20))
    mean = float(excess.mean())
    by_sequence = np.add.reduceat(excess, finite_pairs.starts)
    count = finite_pairs.n_sequences
    squares = ((by_sequence - mean * finite_pairs.lengths) ** 2).sum()
    error = float(np.sqrt(squares * count / max(count - 1, 1))) / len(d)
    # an error that is rounding alone says nothing
    z = mean / error if error > 1e-12 * abs(mean) and count > 1 else 0.0
    far = np.add.reduceat((np.abs(d) > np.log(2)).astype(np.float64), finite_pairs.starts)
    signs = Evidence(
        tokens=len(d),
        size=float(np.abs(d).mean()),
        k1=float(-d.mean()),
        k3=float((excess - d).mean()),
        rho_excess=mean,
        rho_z=z,
        rho_chance=float(2 * stats.t.sf(abs(z), count - 1)) if count > 1 else 1.0,
        explained=_explained(finite_pairs.rollout, d, finite_pairs.owner % 2),
        pearson=_correlation(finite_pairs.rollout, finite_pairs.trainer),
        apart=float(np.median(far / finite_pairs.lengths)),
        lagged={step: _lagged_correlation(pairs, step) for step in (-1, 1)},
        shift=logprob_shift(pairs),
        routes=_route_evidence(pairs),
    )
    if signs.little_in_common:
        signs = replace(signs, agreeing=agreeing_parts(finite_pairs))
    return signs


def sample_sequences(pairs: TokenPairs) -> TokenPairs:
    """Return complete sequences of about 400,000 tokens, drawn evenly; all if they are fewer."""
    if pairs.n_tokens <= _MAX_TOKENS:
        return pairs
    order = np.random.default_rng(0).permutation(pairs.n_sequences)
    enough = int(np.searchsorted(np.cumsum(pairs.lengths[order]), _MAX_TOKENS)) + 1
    taken = np.zeros(pairs.n_sequences, bool)
    taken[order[:enough]] = True
    return pairs.select(np.repeat(taken, pairs.lengths))


def _explained(rollout: FloatArray, d: FloatArray, group: IntArray) -> float:
    """Return the share of sum d^2 that a function of the rollout logprob explains.

    The function is the mean of d within bins of the logprob. ``group`` ``(n,)`` is 0 or 1.
    """
    d = np.clip(d, -_MAX_DIFF, _MAX_DIFF)
    total = float((d * d).sum())
    edges = np.unique(np.quantile(rollout, np.linspace(0, 1, min(_BINS, len(d) // _PER_BIN) + 1)))
    if total == 0 or len(edges) < 3 or not 0 < group.mean() < 1:
        return 0.0
    bins = np.clip(np.searchsorted(edges, rollout, side="right") - 1, 0, len(edges) - 2)
    gained = 0.0
    # learnt from half of the sequences and tried on the other half: otherwise a few tokens, or many
    # bins, would explain something by chance
    for half in (0, 1):
        learnt, tried = group == half, group != half
        count = np.bincount(bins[learnt], minlength=len(edges) - 1)
        # an offset is the same in all bins, and so no function of the logprob
        own = d[learnt] - d[learnt].mean()
        sums = np.bincount(bins[learnt], weights=own, minlength=len(count))
        predicted = (sums / np.maximum(count, 1))[bins[tried]]
        actual = d[tried] - d[tried].mean()
        gained += float((2 * actual * predicted - predicted * predicted).sum())
    return max(0.0, gained / total)


def _correlation(a: FloatArray, b: FloatArray) -> float:
    # one token at -60 would decide the correlation alone
    a, b = np.maximum(a, -20.0), np.maximum(b, -20.0)
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _lagged_correlation(pairs: TokenPairs, step: int) -> float:
    """Correlation of the rollout's logprobs with the trainer's, ``step`` tokens further on."""
    ours = np.arange(max(0, -step), pairs.n_tokens - max(0, step))
    theirs = ours + step
    owner = pairs.owner
    comparable = (
        (owner[ours] == owner[theirs])
        & np.isfinite(pairs.rollout[ours])
        & np.isfinite(pairs.trainer[theirs])
    )
    if comparable.sum() < ENOUGH:
        return float("nan")
    return _correlation(pairs.rollout[ours[comparable]], pairs.trainer[theirs[comparable]])


def _route_evidence(pairs: TokenPairs) -> RouteEvidence | None:
    """Return the evidence of the routes; ``None`` if a side has none, or too few."""
    rollout, trainer = pairs.routes.get("rollout_routes"), pairs.routes.get("trainer_routes")
    if rollout is None or trainer is None or rollout.shape != trainer.shape:
        return None
    if len(rollout) * rollout.shape[1] < ENOUGH:
        return None
    rows = max(1, _MAX_ROUTE_SLOTS // (rollout.shape[1] * rollout.shape[2]))
    rollout, trainer, owner = rollout[:rows], trainer[:rows], pairs.owner[:rows]
    left, right = selections(rollout, trainer)
    slots = left.layers * left.top_k
    missed, complete = left.missed(right)
    captured = complete.mean(axis=0) > _MIN_CAPTURED
    layers = complete.sum(axis=1)
    seen = layers > 0
    row = np.divide(missed.sum(axis=1), layers, out=np.zeros(len(left)), where=seen)
    # mismatch of random selections: the largest id seen stands for the number of experts
    chance = 1 - left.top_k / (int(max(rollout.max(), trainer.max())) + 1)
    lost = seen & (row > 0.7 * chance)
    well = seen & ~lost
    enough_slots = slots >= _MIN_SLOTS
    shift = route_shift(left, right, pairs)
    if shift is None and enough_slots:
        shift = lost_shift(left, right, lost, pairs)
    rare = 0
    if left.top_k > 1 and slots >= _MANY_SLOTS:
        rare = _rare_rows(lost, seen & (row > 0.35 * chance), owner)
    return RouteEvidence(
        mismatch=_mismatch(left, right),
        token_shift={step: _mismatch(*moved_tokens(left, right, owner, step)) for step in STEPS},
        layer_shift={
            step: _mismatch(*moved_layers(left, right, step))
            for step in STEPS
            if abs(step) < left.layers
        },
        shift=shift,
        polluted=float(lost.mean()) if enough_slots else float("nan"),
        healthy=float(row[well].mean()) if well.any() else float("nan"),
        strange=_strange_sequences(seen, lost, owner) if enough_slots else 0,
        rare=rare,
        empty_layers=int(np.argmax(captured)) if captured.any() else left.layers,
    )


def _strange_sequences(seen: BoolArray, lost: BoolArray, owner: IntArray) -> int:
    """Count the sequences with almost no row that agrees better than chance."""
    total, gone = (np.bincount(owner, weights=rows) for rows in (seen, lost))
    return int(((total >= _MIN_ROWS) & (gone > _ALMOST_ALL * total)).sum())


def _rare_rows(lost: BoolArray, poor: BoolArray, owner: IntArray) -> int:
    """Count lost rows; 0 if they are a handful, or the tail of poor ones."""
    # the last row of a sequence may be a filler
    inner = int((lost[:-1] & (owner[:-1] == owner[1:])).sum())
    return inner if inner >= _MIN_RARE and 4 * int((poor & ~lost).sum()) <= inner else 0


def _mismatch(left: Selections, right: Selections) -> float:
    missed, complete = left.missed(right)
    return float(missed[complete].mean()) if complete.any() else float("nan")
