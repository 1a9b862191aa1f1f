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
        self._whole = expected
        self._terms = expected.terms

    @cached_property
    def _coefficients(self) -> FloatArray:
        """What the loss of each token is multiplied by in the sum over all of them."""
        counted = self._whole.trained
        if self._terms.rejects and self._terms.denominator is Denominator.KEPT:
            counted = self._whole.kept
        left = self._whole.kept if self._terms.rejects else self._whole.trained
        if self._terms.aggregation is Aggregation.TOKEN_SUM:
            return left.astype(np.float64)
        if self._terms.aggregation is Aggregation.TOKEN_MEAN:
            return left / max(int(counted.sum()), 1)
        lengths = counted.sum(axis=1)
        sequences = max(int((lengths > 0).sum()), 1)
        found: FloatArray = left / np.maximum(lengths, 1)[:, None] / sequences
        return found

    @cached_property
    def value(self) -> tuple[float, float] | None:
        """The loss and its error; ``None`` if rounding could decide a rejection."""
        if self._whole.undecided.any():
            return None
        terms, given = self._terms, self._whole.inputs
        if terms.weights:
            weights = self._whole.weights
        else:
            ones = self._whole.trained.astype(np.float64)
            weights = Bounded(value=ones, error=np.zeros(ones.shape))
        coefficients = self._coefficients
        size = np.abs(given.advantages)
        slack = FEW * self._whole.unit
        if terms.loss is LossKind.REINFORCE:
            factor = given.advantages * given.current
            spread = np.abs(factor) * slack
        elif terms.loss is LossKind.PPO:
            ratio = self._policy_ratio
            clipped = np.clip(ratio.value, 1 - terms.clip_low, 1 + terms.clip_high)
            factor = np.minimum(ratio.value * given.advantages, clipped * given.advantages)
            spread = size * (ratio.error + ratio.value * slack)
        else:
            factor, spread = given.advantages, size * slack
        lost = -np.where(coefficients > 0, weights.value * factor * coefficients, 0.0)
        error = np.where(
            coefficients > 0,
            coefficients * (weights.error * np.abs(factor) + weights.value * spread),
            0.0,
        )
        total = float(lost.sum())
        summed = self._whole.unit * (self._whole.tokens + FEW) * float(np.abs(lost).sum())
        return total, SAFETY * (float(error.sum()) + summed)

    @cached_property
    def _policy_ratio(self) -> Bounded:
        log = self._whole.log_ratio_of(self._terms.policy_ratio)
        with np.errstate(over="ignore"):
            value = np.exp(log.value)
        return Bounded(
            value=np.where(self._whole.trained, value, 0.0),
            error=value * (np.expm1(log.error) + EXP_UNITS * self._whole.unit),
        )

    @cached_property
    def gradient(self) -> Bounded | None:
        """The derivative of the loss to the current logprobs; ``None`` if rounding could
        decide.
        """
        if self._whole.undecided.any() or (self._terms.weights and self._whole.at_bound.any()):
            return None
        terms, given = self._terms, self._whole.inputs
        coefficients = self._coefficients
        weights = (
            self._whole.weights.value if terms.weights else self._whole.trained.astype(np.float64)
        )
        if terms.loss is LossKind.PPO:
            ratio = self._policy_ratio
            edges = np.array([1 - terms.clip_low, 1 + terms.clip_high])
            near = np.abs(ratio.value[..., None] - edges) <= SAFETY * ratio.error[..., None]
            if (near.any(axis=-1) & (coefficients > 0)).any():
                return None
            clipped = np.clip(ratio.value, *edges)
            active = ratio.value * given.advantages <= clipped * given.advantages
            direct = np.where(active, weights * given.advantages * ratio.value, 0.0)
            factor = np.minimum(ratio.value * given.advantages, clipped * given.advantages)
        elif terms.loss is LossKind.REINFORCE:
            direct, factor = weights * given.advantages, given.advantages * given.current
        else:
            direct, factor = np.zeros(self._whole.trained.shape), given.advantages
        direct = np.where(coefficients > 0, direct * coefficients, 0.0)
        through = self._whole.pulled(np.where(coefficients > 0, factor * coefficients, 0.0))
        value = -(direct + through)
        relative = self._whole.unit * (self._whole.tokens + FEW)
        worst = 0.0
        if terms.weights:
            sizes, errors = self._whole.weights.value, self._whole.weights.error
            shares = errors / np.where(sizes > 0, sizes, np.inf)
            worst = float(np.max(shares, initial=0.0))
        scale = np.abs(direct) + np.abs(through)
        return Bounded(
            value=value, error=SAFETY * scale * (relative + worst) + self._whole.limits.smallest
        )
