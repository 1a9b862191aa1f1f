"""The loss that a correction must return, and its gradient."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rollproof.core.correction_terms import Aggregation, Denominator, LossKind
from rollproof.core.records import FloatArray
from rollproof.corrections.expected_correction import Bounded, ExpectedCorrection
from rollproof.corrections.rounding import EXP_UNITS, FEW, SAFETY

__all__ = ["ExpectedLoss"]


class ExpectedLoss:
    """The loss of a batch whose correction is ``expected``."""

    def __init__(self, expected: ExpectedCorrection) -> None:
        self._exact = expected
        self._terms = expected.terms

    @cached_property
    def _coefficients(self) -> FloatArray:
        """What the loss of each token is multiplied by in the sum over all of them."""
        counted = self._exact.trained
        if self._terms.rejects and self._terms.denominator is Denominator.KEPT:
            counted = self._exact.kept
        left = self._exact.kept if self._terms.rejects else self._exact.trained
        if self._terms.aggregation is Aggregation.TOKEN_SUM:
            return left.astype(np.float64)
        if self._terms.aggregation is Aggregation.TOKEN_MEAN:
            # the loss of a batch of which nothing is left is 0, not 0 / 0
            return left / max(int(counted.sum()), 1)
        lengths = counted.sum(axis=1)
        sequences = max(int((lengths > 0).sum()), 1)
        found: FloatArray = left / np.maximum(lengths, 1)[:, None] / sequences
        return found

    @cached_property
    def value(self) -> tuple[float, float] | None:
        """The loss and its error; ``None`` if rounding could decide a rejection."""
        if self._exact.undecided.any():
            return None
        terms, batch = self._terms, self._exact.inputs
        if terms.weights:
            weights = self._exact.weights
        else:
            ones = self._exact.trained.astype(np.float64)
            weights = Bounded(value=ones, error=np.zeros(ones.shape))
        coefficients = self._coefficients
        size = np.abs(batch.advantages)
        slack = FEW * self._exact.unit
        if terms.loss is LossKind.REINFORCE:
            factor = batch.advantages * batch.current
            spread = np.abs(factor) * slack
        elif terms.loss is LossKind.PPO:
            ratio = self._policy_ratio
            clipped = np.clip(ratio.value, 1 - terms.clip_low, 1 + terms.clip_high)
            factor = np.minimum(ratio.value * batch.advantages, clipped * batch.advantages)
            spread = size * (ratio.error + ratio.value * slack)
        else:
            factor, spread = batch.advantages, size * slack
        # a token rejected by the mask may have an infinite weight: times 0 it is NaN
        lost = -np.where(coefficients > 0, weights.value * factor * coefficients, 0.0)
        error = np.where(
            coefficients > 0,
            coefficients * (weights.error * np.abs(factor) + weights.value * spread),
            0.0,
        )
        total = float(lost.sum())
        summed = self._exact.unit * (self._exact.tokens + FEW) * float(np.abs(lost).sum())
        return total, SAFETY * (float(error.sum()) + summed)

    @cached_property
    def _policy_ratio(self) -> Bounded:
        log = self._exact.log_ratio_of(self._terms.policy_ratio)
        with np.errstate(over="ignore"):
            value = np.exp(log.value)
        return Bounded(
            value=np.where(self._exact.trained, value, 0.0),
            error=value * (np.expm1(log.error) + EXP_UNITS * self._exact.unit),
        )

    @cached_property
    def gradient(self) -> Bounded | None:
        """The derivative of the loss to the current logprobs; ``None`` if rounding could
        decide.
        """
        # at a bound a weight is continuous, and its gradient is not
        if self._exact.undecided.any() or (self._terms.weights and self._exact.at_bound.any()):
            return None
        terms, batch = self._terms, self._exact.inputs
        coefficients = self._coefficients
        weights = (
            self._exact.weights.value if terms.weights else self._exact.trained.astype(np.float64)
        )
        if terms.loss is LossKind.PPO:
            ratio = self._policy_ratio
            edges = np.array([1 - terms.clip_low, 1 + terms.clip_high])
            near = np.abs(ratio.value[..., None] - edges) <= SAFETY * ratio.error[..., None]
            if (near.any(axis=-1) & (coefficients > 0)).any():
                return None
            clipped = np.clip(ratio.value, *edges)
            active = ratio.value * batch.advantages <= clipped * batch.advantages
            direct = np.where(active, weights * batch.advantages * ratio.value, 0.0)
            factor = np.minimum(ratio.value * batch.advantages, clipped * batch.advantages)
        elif terms.loss is LossKind.REINFORCE:
            direct, factor = weights * batch.advantages, batch.advantages * batch.current
        else:
            direct, factor = np.zeros(self._exact.trained.shape), batch.advantages
        direct = np.where(coefficients > 0, direct * coefficients, 0.0)
        through = self._exact.pulled(np.where(coefficients > 0, factor * coefficients, 0.0))
        value = -(direct + through)
        relative = self._exact.unit * (self._exact.tokens + FEW)
        worst = 0.0
        if terms.weights:
            sizes, errors = self._exact.weights.value, self._exact.weights.error
            shares = errors / np.where(sizes > 0, sizes, np.inf)
            worst = float(np.max(shares, initial=0.0))
        scale = np.abs(direct) + np.abs(through)
        return Bounded(
            value=value, error=SAFETY * scale * (relative + worst) + self._exact.limits.smallest
        )
