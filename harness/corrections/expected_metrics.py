"""The numbers that a correction must report."""

from __future__ import annotations

import numpy as np

from rollproof.core.correction_terms import Metric, Statistic
from rollproof.core.records import FloatArray
from rollproof.corrections.expected_correction import Bounded, ExpectedCorrection
from rollproof.corrections.rounding import EXP_UNITS, FEW, SAFETY

__all__ = ["ExpectedMetrics"]


class ExpectedMetrics:
    """The metrics of a batch whose correction is ``expected``."""

    def __init__(self, expected: ExpectedCorrection) -> None:
        self._exact = expected
        self._terms = expected.terms

    def value(self, metric: Metric) -> tuple[float, float] | None:
        """Return a metric and its error.

        ``None`` if no token is trained, if rounding could decide it, or if it is too large for the
        type that the subject computes in.
        """
        if not self._exact.tokens:
            return None
        found = self._metric(metric)
        if found is None or not np.isfinite(found[0]) or abs(found[0]) > self._exact.limits.largest:
            return None
        return found

    def _metric(self, metric: Metric) -> tuple[float, float] | None:
        if metric in _OF_WEIGHTS:
            if self._terms.rejects_weights and self._exact.undecided.any():
                return None
            return self._weight_metric(metric)
        if metric in (Metric.CLIPPED_FRACTION, Metric.ABOVE_FRACTION):
            if self._exact.at_bound.any():
                return None
            below, above = self._exact.outside
            hit = above if metric is Metric.ABOVE_FRACTION else below | above
            return self._mean(hit.astype(np.float64))
        if metric in (Metric.REJECTED_FRACTION, Metric.REJECTED_SEQUENCES):
            if self._exact.undecided.any():
                return None
            if metric is Metric.REJECTED_FRACTION:
                return self._mean(self._exact.rejected.astype(np.float64))
            lost: FloatArray = np.any(self._exact.rejected, axis=1).astype(np.float64)
            return self._sequence_mean(lost, 0.0)
        if metric in (Metric.FIRST_PERPLEXITY, Metric.SECOND_PERPLEXITY):
            logs = self._exact.policies(self._terms.pair)[metric is Metric.SECOND_PERPLEXITY]
            own = np.where(self._exact.trained, logs, 0.0)
            mean = self._exact.averaged(Bounded(value=own, error=self._exact.unit * np.abs(own)))
            with np.errstate(over="ignore"):
                value = np.asarray(np.exp(-mean.value[:, 0]))
            error = value * (np.expm1(mean.error[:, 0]) + EXP_UNITS * self._exact.unit)
            return self._sequence_mean(value, error)
        return self._ratio_metric(metric)

    def _weight_metric(self, metric: Metric) -> tuple[float, float] | None:
        weights = self._exact.applied
        if metric is Metric.WEIGHTS_MEAN:
            return self._mean(weights.value, weights.error)
        if metric in (Metric.WEIGHTS_MAX, Metric.WEIGHTS_MIN):
            values = weights.value[self._exact.trained]
            place = int(values.argmax() if metric is Metric.WEIGHTS_MAX else values.argmin())
            return float(values[place]), SAFETY * float(weights.error[self._exact.trained].max())
        if metric is Metric.EFFECTIVE_SAMPLES:
            return self._effective_samples()
        counts = np.maximum(self._exact.lengths, 1)
        means, errors = weights.value.sum(axis=1) / counts, weights.error.sum(axis=1) / counts
        errors += self._exact.unit * (self._exact.lengths + FEW) * np.abs(means)
        if metric is Metric.SEQUENCE_WEIGHTS_MEAN:
            return self._sequence_mean(means, errors)
        own = means[self._exact.lengths > 0]
        place = own.argmax() if metric is Metric.SEQUENCE_WEIGHTS_MAX else own.argmin()
        return float(own[place]), SAFETY * float(errors[self._exact.lengths > 0].max())

    def _effective_samples(self) -> tuple[float, float] | None:
        weights = self._exact.applied
        total, squares = float(weights.value.sum()), float((weights.value**2).sum())
        if not squares:
            return None
        value = total**2 / (self._exact.tokens * squares)
        relative = float(weights.error.sum()) / total + self._exact.unit * (
            self._exact.tokens + FEW
        )
        return value, 8 * SAFETY * relative * value

    def _ratio_metric(self, metric: Metric) -> tuple[float, float]:
        log = self._exact.log_ratio
        if metric is Metric.LOG_RATIO_ABS_MAX:
            place = np.unravel_index(np.abs(log.value).argmax(), log.value.shape)
            return float(np.abs(log.value[place])), SAFETY * float(log.error.max())
        if metric is Metric.LOG_RATIO_ABS_MEAN:
            return self._mean(np.abs(log.value), log.error)
        if metric is Metric.K1_MEAN:
            return self._mean(-log.value, log.error)
        if metric is Metric.K3_MEAN:
            found = self._exact.token_statistic(Statistic.K3, log)
            return self._mean(found.value, found.error)
        with np.errstate(over="ignore"):
            ratio = np.exp(log.value)
        return self._mean(ratio, ratio * (np.expm1(log.error) + EXP_UNITS * self._exact.unit))

    def _mean(self, values: FloatArray, errors: FloatArray | float = 0.0) -> tuple[float, float]:
        """Return the mean over trained tokens, and its error."""
        own = np.where(self._exact.trained, values, 0.0)
        slack = np.where(self._exact.trained, errors, 0.0)
        size = self._exact.tokens
        summed = self._exact.unit * (size + FEW) * float(np.abs(own).sum())
        return float(own.sum()) / size, SAFETY * (float(slack.sum()) + summed) / size

    def _sequence_mean(self, values: FloatArray, errors: FloatArray | float) -> tuple[float, float]:
        """Return the mean over sequences with trained tokens, and its error."""
        counted = self._exact.lengths > 0
        own, size = np.where(counted, values, 0.0), max(int(counted.sum()), 1)
        slack = float(np.where(counted, errors, 0.0).sum())
        summed = self._exact.unit * (size + FEW) * float(np.abs(own).sum())
        return float(own.sum()) / size, SAFETY * (slack + summed) / size


_OF_WEIGHTS = frozenset(
    {
        Metric.WEIGHTS_MEAN,
        Metric.WEIGHTS_MAX,
        Metric.WEIGHTS_MIN,
        Metric.SEQUENCE_WEIGHTS_MEAN,
        Metric.SEQUENCE_WEIGHTS_MAX,
        Metric.SEQUENCE_WEIGHTS_MIN,
        Metric.EFFECTIVE_SAMPLES,
    }
)
