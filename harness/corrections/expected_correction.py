"""What a correction must return: computed in float64 from its terms, with the error that rounding
may add (``rounding``).

Where rounding could decide (a statistic at its bound), the outcome is undecided, and nothing that
depends on it is judged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.correction_terms import (
    Aggregate,
    CorrectionTerms,
    Gradient,
    Level,
    Missing,
    Normalise,
    Pair,
    Rejection,
    Sign,
    StaleTokens,
    Statistic,
)
from rollproof.core.events.corrections import Corrected
from rollproof.core.records import FloatArray, IntArray
from rollproof.corrections.rounding import EXP_UNITS, FEW, SAFETY, FloatLimits, limits_of

__all__ = ["BoolArray", "Bounded", "ExpectedCorrection", "Inputs"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]
# part of the statistic that is declared, no tolerance: it keeps the logarithms finite
_PROBABILITY_EDGE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """A batch as float64 arrays ``(sequences, tokens)``; ``groups`` is ``(sequences,)``."""

    rollout: FloatArray
    old: FloatArray
    current: FloatArray
    mask: IntArray
    advantages: FloatArray
    groups: IntArray
    versions: IntArray
    current_version: int = 0

    @classmethod
    def of(cls, event: Corrected) -> Self:
        """Return the batch of an event."""
        return cls(**{entry.name: getattr(event, entry.name) for entry in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bounded:
    """Exact values, and how far rounding may carry a result from them."""

    value: FloatArray
    error: FloatArray


class ExpectedCorrection:
    """The exact result for one batch. Everything is computed when it is first read.

    Args:
        terms: What the correction promises.
        inputs: The batch.
    """

    def __init__(self, terms: CorrectionTerms, inputs: Inputs) -> None:
        self.terms = terms
        self.inputs = inputs
        self.trained: BoolArray = inputs.mask != 0
        self.limits: FloatLimits = limits_of(terms.computes_in)
        self.unit: float = self.limits.unit
        # wider logprobs are rounded before the subtraction, each by a share of its own size
        self._casts = limits_of(terms.dtype).unit < self.unit
        self.lengths: IntArray = self.trained.sum(axis=1)
        """Trained tokens of each sequence."""

    @cached_property
    def interpolated(self) -> FloatArray:
        """The old logprobs that are interpolated by versions."""
        batch = self.inputs
        return batch.rollout + self._share * (batch.current - batch.rollout)

    @cached_property
    def _share(self) -> FloatArray:
        """How far the interpolated policy is on the way from the rollout's to the current one."""
        age = self.inputs.current_version - self.inputs.versions
        # -1 is padding's version: it would pass for a very old one
        known = (age > 0) & (self.inputs.versions >= 0)
        return np.where(known, (age - 1) / np.where(known, age, 1), 0.0)

    def policies(self, pair: Pair) -> tuple[FloatArray, FloatArray]:
        """Return the logprobs of the first and of the second policy of a pair."""
        batch = self.inputs
        # the interpolated policy stands for the old one in PPO's own ratio as well
        old = self.interpolated if self.terms.pair is Pair.INTERPOLATED_ROLLOUT else batch.old
        return {
            Pair.OLD_ROLLOUT: (batch.old, batch.rollout),
            Pair.CURRENT_ROLLOUT: (batch.current, batch.rollout),
            Pair.CURRENT_OLD: (batch.current, old),
            Pair.INTERPOLATED_ROLLOUT: (old, batch.rollout),
        }[pair]

    @cached_property
    def log_ratio(self) -> Bounded:
        """The log ratio of each trained token; 0 elsewhere."""
        return self.log_ratio_of(self.terms.pair)

    def log_ratio_of(self, pair: Pair) -> Bounded:
        """Return the log ratio of a pair for each trained token; 0 elsewhere."""
        first, second = self.policies(pair)
        chosen = self.trained
        if self.terms.missing is Missing.ONE and pair is not Pair.CURRENT_OLD:
            chosen = chosen & ~np.isnan(self.inputs.rollout)
        # selected, not multiplied by a mask: NaN times 0 is NaN
        value = np.where(chosen, first - second, 0.0)
        error = self.unit * np.abs(value)
        if self._casts or pair is Pair.INTERPOLATED_ROLLOUT:
            error += np.where(chosen, 4 * self.unit * (np.abs(first) + np.abs(second)), 0.0)
        return Bounded(value=value, error=error)

    def summed(self, tokens: Bounded) -> Bounded:
        """Return sums over the trained tokens of each sequence, ``(sequences, 1)``."""
        value = tokens.value.sum(axis=1, keepdims=True)
        sizes = np.abs(tokens.value).sum(axis=1, keepdims=True)
        error = tokens.error.sum(axis=1, keepdims=True)
        return Bounded(value=value, error=error + self.unit * self.lengths[:, None] * sizes)

    def averaged(self, tokens: Bounded) -> Bounded:
        """Return means over the trained tokens of each sequence, ``(sequences, 1)``."""
        total = self.summed(tokens)
        count = np.maximum(self.lengths, 1)[:, None]
        value = total.value / count
        return Bounded(value=value, error=total.error / count + 2 * self.unit * np.abs(value))

    @cached_property
    def _log_weight(self) -> Bounded:
        """The logarithm of the weight, ``(sequences, tokens)`` or ``(sequences, 1)``."""
        if self.terms.level is Level.TOKEN:
            return self.log_ratio
        if self.terms.level is Level.SEQUENCE:
            return self.summed(self.log_ratio)
        return self.averaged(self.log_ratio)

    @cached_property
    def raw(self) -> Bounded:
        """The weight before bounds, of each trained token; 0 elsewhere."""
        log, bound = self._log_weight, self.terms.log_bound
        logs = log.value if bound is None else np.clip(log.value, -bound, bound)
        with np.errstate(over="ignore"):
            value = np.exp(logs)
            error = value * (np.expm1(log.error) + EXP_UNITS * self.unit) * SAFETY
        if bound is not None:
            # some stacks bound it from above only
            error = error + np.where(log.value < -bound, np.exp(-bound), 0.0)
        # what underflows is off by all of itself, which no relative error covers
        floor = self.limits.smallest
        return Bounded(
            value=np.where(self.trained, value, 0.0),
            error=np.where(self.trained, error + floor, 0.0),
        )

    @cached_property
    def outside(self) -> tuple[BoolArray, BoolArray]:
        """Trained tokens whose raw weight is below the lower, and above the upper bound."""
        low, high = self.terms.lower, self.terms.upper
        none = np.zeros_like(self.trained)
        value = self.raw.value
        return (
            none if low is None else self.trained & (value < low),
            none if high is None else self.trained & (value > high),
        )

    @cached_property
    def beyond_log_bound(self) -> BoolArray:
        """Trained tokens whose log ratio is above the log bound, which limits the raw weight."""
        bound = self.terms.log_bound
        if bound is None:
            return np.zeros_like(self.trained)
        return self.trained & (self._log_weight.value > bound)

    @cached_property
    def at_log_bound(self) -> BoolArray:
        """Trained tokens whose log ratio may be on either side of the log bound."""
        bound, log = self.terms.log_bound, self._log_weight
        if bound is None:
            return np.zeros_like(self.trained)
        slack = SAFETY * log.error + 4 * self.unit * bound
        return self.trained & (np.abs(np.abs(log.value) - bound) <= slack)

    @cached_property
    def at_bound(self) -> BoolArray:
        """Trained tokens whose raw weight may be on either side of a bound."""
        value, error = self.raw.value, self.raw.error
        near = np.zeros_like(self.trained)
        for bound in (self.terms.lower, self.terms.upper):
            if bound is not None:
                # a bound such as 0.2 is no binary fraction: it is rounded, too
                near |= np.abs(value - bound) <= error + 4 * self.unit * bound
        return near & self.trained

    @cached_property
    def clamped(self) -> Bounded:
        """The weight after the bounds, of each trained token; 0 elsewhere."""
        low, high = self.terms.lower, self.terms.upper
        if low is None and high is None:
            return self.raw
        with np.errstate(invalid="ignore"):
            value = np.where(self.trained, np.clip(self.raw.value, low, high), 0.0)
        error = np.where(np.isfinite(self.raw.error), self.raw.error, 0.0)
        # what is surely clamped is the bound itself, without the error of an exponential
        decided = (self.outside[0] | self.outside[1]) & ~self.at_bound
        return Bounded(value=value, error=np.where(decided, 4 * self.unit * value, error))

    @cached_property
    def _verdicts(self) -> tuple[BoolArray, BoolArray]:
        """The rejected tokens, and those of which rounding could decide; both trained."""
        # versions are integers, of which no rounding decides
        rejected = self.stale_tokens.copy()
        doubtful = np.zeros_like(rejected)
        for rejection in self.terms.rejections:
            dropped, unsure = self._rejected_by(rejection)
            rejected |= dropped & ~unsure
            doubtful |= unsure
        return rejected, doubtful & ~rejected

    @property
    def rejected(self) -> BoolArray:
        """Trained tokens that are rejected for certain."""
        return self._verdicts[0]

    @property
    def undecided(self) -> BoolArray:
        """Trained tokens that rounding may reject or keep."""
        return self._verdicts[1]

    @cached_property
    def stale_tokens(self) -> BoolArray:
        """Trained tokens that are rejected for their version."""
        if self.terms.max_staleness is None:
            return np.zeros_like(self.trained)
        age = self.inputs.current_version - self.inputs.versions
        stale = self.trained & (age > self.terms.max_staleness)
        if self.terms.stale is StaleTokens.DROP_SEQUENCE:
            return self.trained & stale.any(axis=1, keepdims=True)
        return stale

    def _rejected_by(self, rejection: Rejection) -> tuple[BoolArray, BoolArray]:
        bound = self.terms.log_bound
        log = self.log_ratio
        if bound is None or not (np.abs(log.value) > bound).any():
            found = self._outside(rejection, self._statistic(rejection, log))
        else:
            # Stacks bound the log ratio of each token, or that of the sequence, or none of a
            # comparison: where these differ, nothing is promised.
            tokens = Bounded(value=np.clip(log.value, -bound, bound), error=log.error)
            first = self._outside(rejection, self._statistic(rejection, log))
            second = self._outside(rejection, self._statistic(rejection, tokens))
            found = first[0], first[1] | second[1] | (first[0] != second[0])
        held = self.trained & self._held(rejection.advantages, rejection.aggregate)
        return found[0] & held, found[1] & held

    def _held(self, sign: Sign | None, aggregate: Aggregate) -> BoolArray:
        """Return the tokens for whose advantages a rejection holds."""
        if sign is None:
            return np.ones_like(self.trained)
        advantages = self.inputs.advantages
        if aggregate is not Aggregate.TOKEN and advantages.shape[1]:
            first = self.trained.argmax(axis=1)
            own = np.take_along_axis(advantages, first[:, None], axis=1)
            advantages = np.broadcast_to(own, advantages.shape)
        if sign is Sign.POSITIVE:
            return advantages > 0
        return advantages < 0 if sign is Sign.NEGATIVE else advantages <= 0

    def _statistic(self, rejection: Rejection, log: Bounded) -> Bounded:
        """Return the statistic that is compared: of ``ratio``, its logarithm."""
        tokens = self.token_statistic(rejection.statistic, log)
        if rejection.aggregate is Aggregate.TOKEN:
            return tokens
        if rejection.aggregate is Aggregate.SUM:
            return self.summed(tokens)
        if rejection.aggregate is Aggregate.MEAN:
            return self.averaged(tokens)
        top = rejection.aggregate is Aggregate.MAX
        # not 0 at masked tokens: it would be the largest of negative values
        value = np.where(self.trained, tokens.value, -np.inf if top else np.inf)
        found = value.max(axis=1, initial=-np.inf, keepdims=True)
        if not top:
            found = value.min(axis=1, initial=np.inf, keepdims=True)
        # rounding may make another token the extreme one: the largest error of all holds
        error = tokens.error.max(axis=1, initial=0.0, keepdims=True)
        # a sequence without trained tokens has nothing to reject
        return Bounded(value=np.where(np.isfinite(found), found, 0.0), error=error)

    def token_statistic(self, statistic: Statistic, log: Bounded) -> Bounded:
        """Return a statistic of each token with the log ratios ``log``: of ``ratio``, its
        logarithm.
        """
        value, error, unit = log.value, log.error, self.unit
        if statistic in (Statistic.RATIO, Statistic.LOG_RATIO):
            return log
        if statistic is Statistic.K1:
            return Bounded(value=-value, error=error)
        if statistic is Statistic.K2:
            square = value**2 / 2
            return Bounded(value=square, error=np.abs(value) * error + 4 * unit * square)
        if statistic is Statistic.K3:
            with np.errstate(over="ignore"):
                ratio = np.exp(value)
                rounding = ratio * (np.expm1(error) + EXP_UNITS * unit) + error
            # near 1 the terms cancel: the error is that of the terms, not of the small rest
            return Bounded(
                value=ratio - 1 - value,
                error=rounding + 4 * unit * (ratio + 1 + np.abs(value)),
            )
        return self._probability_statistic(statistic)

    def _probability_statistic(self, statistic: Statistic) -> Bounded:
        first, second = self.policies(self.terms.pair)
        # cast logprobs are off by their size, and so are probabilities
        spread = EXP_UNITS * self.unit
        spread_of = [
            spread + (self.unit * np.abs(logs) if self._casts else 0.0) for logs in (first, second)
        ]
        p, q = (np.where(self.trained, np.exp(logs), 0.5) for logs in (first, second))
        error = p * spread_of[0] + q * spread_of[1]
        if statistic is Statistic.TV:
            return Bounded(value=np.abs(p - q), error=error)
        if statistic is Statistic.PROBABILITY_CHANGE:
            return Bounded(value=p - q, error=error)
        p = np.clip(p, _PROBABILITY_EDGE, 1 - _PROBABILITY_EDGE)
        q = np.clip(q, _PROBABILITY_EDGE, 1 - _PROBABILITY_EDGE)
        ratio, rest = np.log(q / p), np.log((1 - q) / (1 - p))
        # 1 - p is off by a unit, however small it is
        cancelled = self.unit / (1 - p) + self.unit / (1 - q)
        rounding = FEW * self.unit * (1 + np.abs(ratio) + np.abs(rest))
        return Bounded(
            value=q * ratio + (1 - q) * rest,
            error=rounding + 8 * (1 - q) * cancelled + error,
        )

    def _outside(self, rejection: Rejection, found: Bounded) -> tuple[BoolArray, BoolArray]:
        """Return where a statistic is outside its bounds, and where rounding could decide."""
        value, error = found.value, SAFETY * found.error
        outside, near = np.zeros(value.shape, bool), np.zeros(value.shape, bool)
        for bound, sign in ((rejection.lower, -1.0), (rejection.upper, 1.0)):
            if bound is None:
                continue
            edge = bound
            slack = error + FEW * self.unit * (1 + abs(bound))
            if rejection.statistic is Statistic.RATIO:
                # compared in the logarithm, or after an exponential of it
                edge = float(np.log(bound))
                slack = error + FEW * self.unit * (1 + abs(edge))
            outside |= sign * (value - edge) > 0
            near |= np.abs(value - edge) <= slack
        shape = self.trained.shape
        return np.broadcast_to(outside, shape), np.broadcast_to(near, shape)

    @cached_property
    def kept(self) -> BoolArray:
        """Trained tokens that are left after rejection."""
        return self.trained & ~self.rejected

    @cached_property
    def applied(self) -> Bounded:
        """The weight after bounds and rejection, before it is normalised."""
        if not (self.terms.rejects_weights and self.terms.rejects):
            return self.clamped
        return Bounded(
            value=np.where(self.rejected, 0.0, self.clamped.value),
            error=np.where(self.rejected, 0.0, self.clamped.error),
        )

    @cached_property
    def scopes(self) -> IntArray:
        """The number of the scope of each sequence, within which weights are normalised."""
        if self.terms.normalise is not Normalise.GROUPS:
            return np.zeros(len(self.trained), np.int64)
        # the numbers of groups have gaps, and come in any order
        return np.unique(self.inputs.groups, return_inverse=True)[1].astype(np.int64)

    def scope_means(self, weights: FloatArray) -> FloatArray:
        """Return the mean weight in each scope, ``(scopes,)``; 1 in one without trained tokens."""
        totals = np.where(self.trained, weights, 0.0).sum(axis=1)
        counts = self.lengths.astype(np.float64)
        if self.terms.normalise is Normalise.SEQUENCES:
            totals, counts = totals / np.maximum(counts, 1), (counts > 0).astype(np.float64)
        scopes = self.scopes
        size = int(scopes.max()) + 1 if len(scopes) else 0
        total = np.bincount(scopes, weights=totals, minlength=size)
        count = np.bincount(scopes, weights=counts, minlength=size)
        return np.where(count > 0, total / np.maximum(count, 1), 1.0)

    @cached_property
    def weights(self) -> Bounded:
        """The weight of each trained token; 0 elsewhere."""
        applied = self.applied
        if self.terms.normalise is Normalise.NONE:
            return applied
        means = self.scope_means(applied.value)
        # nothing to divide by: verl and slime leave such weights as they are
        means = np.where(means > 1e-8, means, 1.0)
        slack = self.scope_means(applied.error) / means + self.unit * (self.tokens + FEW)
        scopes = self.scopes
        factor = means[scopes][:, None]
        value = applied.value / factor
        return Bounded(
            value=value,
            error=applied.error / factor + value * SAFETY * slack[scopes][:, None],
        )

    @property
    def tokens(self) -> int:
        """How many tokens are trained."""
        return int(self.lengths.sum())

    def pulled(self, factors: FloatArray) -> FloatArray:
        """Return the derivative of the sum of ``factors`` times weight to the current logprobs.

        It is that of the ratio itself: none where a bound clamps the weight, or rejection zeroes
        it.
        """
        if self.terms.gradient is Gradient.NONE or self.terms.pair is Pair.OLD_ROLLOUT:
            return np.zeros(self.trained.shape)
        open_ = self.trained & ~self.outside[0] & ~self.outside[1]
        if self.terms.log_bound is not None:
            open_ &= np.abs(self._log_weight.value) <= self.terms.log_bound
        if self.terms.rejects_weights:
            open_ &= ~self.rejected
        flow = np.where(open_, factors * self.raw.value, 0.0)
        # of an interpolated logprob only this share moves with the current one
        interpolates = self.terms.pair is Pair.INTERPOLATED_ROLLOUT
        share = self._share if interpolates else np.ones(self.trained.shape)
        if self.terms.level is Level.TOKEN:
            return flow * share
        # every token moves the one weight of its sequence, which all its tokens are given
        total = flow.sum(axis=1, keepdims=True)
        if self.terms.level is Level.GEOMETRIC:
            total = total / np.maximum(self.lengths, 1)[:, None]
        return np.where(self.trained, total * share, 0.0)
