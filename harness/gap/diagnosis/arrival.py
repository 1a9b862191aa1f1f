"""Arrival: the share of a weight update that the engine sampled with, estimated as a slope.

The trainer scores each token under the weights of its tag (new) and under those before (old). Their
difference u is what the update did to the token. A rollout with the new weights has logprobs near
``new``, one with the old weights near ``old``; if a part of the update arrived, its logprobs lie
between them, to first order by that share of u. So the share is 1/2 plus the slope of
m = rollout - (new + old) / 2 on u, over the tokens of all tags.

- A slope of single tokens is flattened, for u holds the numerics of two scores of the trainer, and
  an update is often smaller than those. But an update moves the tokens of a sequence together, and
  numerics err token by token: so each token's m is compared with the u of the other tokens of its
  sequence (an instrument; the jackknife form of Angrist, Imbens & Krueger 1999). Where updates do
  not move sequences, the interval is long.
- The interval is Fieller's (1954), over sequences: it is unbounded if u itself is not certain.
- Of u and m the part that is linear in the trainer's logprob is removed first: most of a constant
  offset, and of another temperature or logprob mode, is of that kind.
- A token counts in units of 1 - p, and no further than |u| / 2 and four times a deviation that a
  tenth of the tokens exceed, so that a few heavy tokens do not decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from rollproof.gap.column_checks import BoolArray, FloatArray, is_present
from rollproof.gap.intervals import Interval
from rollproof.gap.token_pairs import TokenPairs

__all__ = [
    "Arrival",
    "Mixture",
    "Update",
    "estimate_arrival",
    "find_update",
    "measure_arrivals",
]

# With fewer sequences that the update moved, an interval over them holds less often than it claims
_MIN_SEQUENCES = 8
_MIN_TOKENS = 200
# Beyond this |u|, in nats, the update is no small step, and its share no slope
_MAX_STEP = 2.0
_REACH = 4.0
# 1 - p below which a logprob is rounding
_LEAST_DOUBT = 1e-4
# A share far outside of 0 to 1 is noise; longer intervals say no more
_LOWEST, _HIGHEST = -0.5, 1.5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """The update that each token should have been sampled after.

    Attributes:
        new: ``(n,)``: logprobs under the weights of the token's tag; NaN if unknown.
        old: ``(n,)``: logprobs under the weights before; NaN if unknown.
        tags: the tags, each with the version before it; empty if the pairs have
            ``previous_logprob``.
    """

    new: FloatArray
    old: FloatArray
    tags: tuple[tuple[Any, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Sequences by the weights that fit them, if old and new ones explain more than one share does.

    Attributes:
        old: sequences that the old weights fit.
        new: sequences that the new weights fit.
        sure: whether the difference is beyond chance; otherwise either may be true.
    """

    old: int
    new: int
    sure: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """The share of the update that arrived.

    Attributes:
        label: the part of the tokens; ``""`` for all.
        tokens: tokens that it was estimated from.
        sequences: their sequences.
        share: the share, with its 95 % interval, within -0.5 and 1.5.
        if_all: the probability of such a small share if all of the update arrived, times the number
            of shares that were tried.
        apart: share of its tokens that neither weights come near, by a factor of 2. Tokens that
            have nothing to do with the scores give a share of 1/2, and say nothing.
        mixture: whether some sequences have old weights and the others new ones.
    """

    label: str
    tokens: int
    sequences: int
    share: Interval
    if_all: float
    apart: float
    mixture: Mixture | None = None

    @property
    def known(self) -> bool:
        """Whether the interval distinguishes an update that arrived from one that did not."""
        return not (self.share.low <= 0.0 and self.share.high >= 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "part": self.label or None,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "share": self.share.to_list(),
            "sequences_with_old_weights": self.mixture.old if self.mixture else None,
        }


def find_update(pairs: TokenPairs) -> Update | None:
    """Return the update of each token; ``None`` if no token has a logprob under older weights.

    The weights before a tag are those of the largest scored version below it. Versions that are
    text have no order, so they need ``previous_logprob``.
    """
    previous = pairs.columns.get("previous_logprob")
    if previous is not None:
        return Update(new=pairs.trainer, old=previous)
    tags = pairs.columns.get("version")
    versions = sorted(
        version
        for version in pairs.by_version
        if isinstance(version, int | np.integer) and not isinstance(version, bool)
    )
    if tags is None or tags.dtype.kind not in "iuf" or len(versions) < 2:
        return None
    new, old = np.full(pairs.n_tokens, np.nan), np.full(pairs.n_tokens, np.nan)
    known = []
    for before, version in itertools.pairwise(versions):
        rows = is_present(tags) & (tags == version)
        if rows.any():
            new[rows] = pairs.by_version[version][rows]
            old[rows] = pairs.by_version[before][rows]
            known.append((version, before))
    return Update(new=new, old=old, tags=tuple(known)) if known else None


def measure_arrivals(
    pairs: TokenPairs, parts: Iterable[tuple[str, BoolArray]] = ()
) -> tuple[Arrival, ...]:
    """Return the share over all tokens, then over each of ``parts`` (name, mask of tokens).

    Empty if nothing says what the update did, or too few tokens do.
    """
    update = find_update(pairs)
    if update is None:
        return ()
    known = [(name, tokens) for name, tokens in parts]
    tests = 1 + len(known)
    everywhere = estimate_arrival(pairs, update, tests=tests)
    if everywhere is None:
        return ()
    each = [
        estimate_arrival(pairs, update, among=tokens, label=name, tests=tests)
        for name, tokens in known
    ]
    return (everywhere, *(item for item in each if item is not None))


def estimate_arrival(
    pairs: TokenPairs,
    update: Update,
    *,
    among: BoolArray | None = None,
    label: str = "",
    tests: int = 1,
) -> Arrival | None:
    """Estimate the share over the tokens in ``among`` (default: all); ``None`` with too few.

    ``tests``: how many shares are tried in all.
    """
    with np.errstate(invalid="ignore"):
        u = update.new - update.old
        m = pairs.rollout - (update.new + update.old) / 2
        level = (update.new + update.old) / 2
        usable = np.isfinite(u) & np.isfinite(m) & (np.abs(u) <= _MAX_STEP)
    if among is not None:
        usable &= among
    if usable.sum() < _MIN_TOKENS or not np.any(u[usable]):
        return None
    u, m, level, owner = u[usable], m[usable], level[usable], pairs.owner[usable]
    near = np.minimum(np.abs(m - u / 2), np.abs(m + u / 2))
    apart = float((near > math.log(2)).mean())
    # what changes logits a little, be it numerics or an update, changes a logprob by about 1 - p of
    # it
    scale = np.maximum(-np.expm1(level), _LEAST_DOUBT)
    u, m, near = u / scale, m / scale, near / scale
    reach = np.abs(u) / 2 + _REACH * float(np.quantile(near, 0.9))
    m = np.clip(m, -reach, reach)
    u, m = _without_trend(u, level), _without_trend(m, level)
    columns = (u, m, u * m, u * u, m * m, np.ones(len(u)))
    sums = np.stack([np.bincount(owner, weights=column) for column in columns])
    u_sum, m_sum, um, uu, mm, tokens = sums[:, sums[-1] > 0]
    # the u of the other tokens of the sequence, times the m and the u of each token
    moved, step = u_sum * m_sum - um, u_sum * u_sum - uu
    # one sequence that the update moved far more than the others decides nothing alone
    if (uu**2).sum() * _MIN_SEQUENCES > uu.sum() ** 2 or not step.any():
        return None
    slope = float(um.sum() / uu.sum())
    noise = max(float((mm - 2 * slope * um + slope**2 * uu).sum()), 0.0) / len(u)
    return Arrival(
        label=label,
        tokens=len(u),
        sequences=len(tokens),
        share=_share(moved, step),
        if_all=min(tests * _chance(step / 2 - moved), 1.0),
        apart=apart,
        mixture=_mixture(um, uu, mm, slope, noise),
    )


def _chance(excess: FloatArray) -> float:
    """Return the probability of so large a mean of ``excess`` ``(sequences,)`` by chance."""
    error = float(excess.std(ddof=1)) / math.sqrt(len(excess))
    if error == 0:
        return 1.0 if excess.mean() <= 0 else 0.0
    return float(stats.t.sf(float(excess.mean()) / error, len(excess) - 1))


def _share(moved: FloatArray, step: FloatArray) -> Interval:
    """Return 1/2 + ``moved`` over ``step``, both ``(sequences,)``, with Fieller's interval."""
    count = len(step)
    top, bottom = float(moved.sum()), float(step.sum())
    reach = float(stats.t.ppf(0.975, count - 1)) ** 2 * count / (count - 1)
    deviations = np.stack([moved - top / count, step - bottom / count])
    (aa, ab), (_, bb) = reach * (deviations @ deviations.T)
    # the slopes s for which sum(moved - s step) is within its error: a s^2 - 2 b s + c <= 0
    a, b, c = bottom**2 - bb, top * bottom - ab, top**2 - aa
    value = float(np.clip(0.5 + top / bottom, _LOWEST, _HIGHEST)) if bottom else np.nan
    # no share is printed as -0.00
    value = 0.0 if abs(value) < 5e-3 else value
    if a <= 0 or bottom <= 0:
        return Interval(value=value, low=_LOWEST, high=_HIGHEST)
    root = math.sqrt(max(b * b - a * c, 0.0))
    low, high = (float(np.clip(0.5 + end / a, _LOWEST, _HIGHEST)) for end in (b - root, b + root))
    return Interval(value=value, low=low, high=high)


def _without_trend(values: FloatArray, level: FloatArray) -> FloatArray:
    """Return what a linear function of the logprob does not explain.

    A closer fit than a line would compare tokens of equal logprob under the trainer: among those
    what an update added, numerics took away.
    """
    centre, rest = level - level.mean(), values - values.mean()
    spread = float(centre @ centre)
    slope = float(centre @ rest) / spread if spread > 0 else 0.0
    return np.asarray(rest - centre * slope)


def _mixture(
    um: FloatArray, uu: FloatArray, mm: FloatArray, slope: float, noise: float
) -> Mixture | None:
    """Compare one share for all sequences with old or new weights for each."""
    one_share = mm - 2 * slope * um + slope**2 * uu
    new, old = mm - um + uu / 4, mm + um + uu / 4
    gain = float((one_share - np.minimum(new, old)).sum())
    # the better of two fits gains by chance alone, on the average less than noise a sequence
    chance = 4 * noise * len(uu)
    # sequences that the update hardly moved fit both
    moved = np.abs(new - old) > 4 * noise
    if gain < -chance or not moved.any():
        return None
    return Mixture(
        old=int((moved & (old < new)).sum()),
        new=int((moved & (new < old)).sum()),
        sure=gain > chance,
    )
