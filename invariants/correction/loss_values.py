"""Checks of what is derived from weights: gradients, the loss, and reported numbers."""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.correction_terms import Gradient, LossKind, Metric
from rollproof.core.events.corrections import Purpose
from rollproof.corrections.expected_loss import ExpectedLoss
from rollproof.corrections.expected_metrics import ExpectedMetrics
from rollproof.invariants._shared.phrases import share
from rollproof.invariants.correction.corrected_batch import (
    CorrectedBatch,
    correction_check,
    first_place,
    follows_from_pair,
    has_weights,
)
from rollproof.judging.checks import Collector

__all__ = ["correction_detached", "correction_gradient", "correction_loss", "correction_metrics"]


@correction_check(
    "correction.detached",
    Purpose.FORMULA,
    Purpose.BOUNDS,
    promise=(
        "No gradient flows through weights that the contract declares as detached; through others"
        " flows that of the ratio, and none where a bound clamps it."
    ),
    exercised_by="batches of which gradients were taken",
    applies=has_weights,
)
def correction_detached(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the gradient that flows through the weights."""
    found = batch.event.weights_gradient
    if found is None:
        out.inapplicable("the subject takes numpy arrays, and reports no gradients")
        return
    out.exercised("batches of which gradients were taken")
    if batch.terms.gradient is Gradient.NONE:
        for name, gradient in found.items():
            # without a tolerance: a detached tensor has a gradient of exactly 0
            wrong = gradient != 0
            if wrong.any():
                at = first_place(wrong)
                out.finding(
                    "a gradient flows through weights that are declared as detached",
                    expected=f"no gradient to the {name} logprobs: gradient='none'",
                    observed=f"{gradient[at]:.6g} for {int(wrong.sum())} tokens",
                    where=batch.place(at),
                    hint=(
                        "Importance weights change the measure, not the objective: detach them, or"
                        " compute them without gradients."
                    ),
                )
                return
        return
    if "current" not in found:
        return
    gradient = found["current"]
    unsure = batch.expected.at_bound | batch.expected.at_log_bound | batch.expected.undecided
    if unsure.any():
        return
    exact = batch.expected.pulled(batch.event.advantages)
    error = np.abs(exact) * batch.expected.unit * 64 * max(gradient.shape[1], 1)
    raw = batch.expected.raw
    with np.errstate(invalid="ignore", divide="ignore"):
        error += np.abs(exact) * np.where(raw.value > 0, raw.error / raw.value, 0.0)
        wrong = ~(np.abs(gradient - exact) <= error + batch.expected.limits.smallest)
    wrong &= batch.expected.trained
    if wrong.any():
        at = first_place(wrong)
        below, above = batch.expected.outside
        clamped = bool((below | above | batch.expected.beyond_log_bound)[at])
        out.finding(
            (
                "a gradient flows through a weight that a bound clamps"
                if clamped
                else "the gradient of a weight is not that of the ratio"
            ),
            expected=f"{exact[at]:.6g}: gradient='current'",
            observed=f"{gradient[at]:.6g}; wrong for {int(wrong.sum())} tokens",
            where=batch.place(at),
            hint="A clamp passes no gradient outside its bounds, and all of it within.",
        )


def _has_loss(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is not None and terms.loss is LossKind.NONE:
        return "the contract declares no loss"
    return None


@correction_check(
    "correction.loss",
    Purpose.LOSS,
    promise=(
        "The loss sums what the contract declares over the tokens that are left, and divides by"
        " the declared number."
    ),
    exercised_by="losses of batches with masked and rejected tokens",
    applies=_has_loss,
)
def correction_loss(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the loss."""
    exact = ExpectedLoss(batch.expected).value
    seen = batch.event.loss
    if exact is None or seen is None:
        return
    out.exercised("losses of batches with masked and rejected tokens")
    value, error = exact
    if abs(seen - value) <= error:
        return
    expected = batch.expected
    counts = {
        "all places": expected.trained.size,
        "the trained tokens": expected.tokens,
        "the tokens left after rejection": int(expected.kept.sum()),
        "the sequences": len(expected.trained),
    }
    ratio = value / seen if seen else 0.0
    why = [
        f"; it fits a division by {name} ({count}) in place of {own}"
        for own, base in counts.items()
        for name, count in counts.items()
        if base != count and base and count and abs(ratio * base / count - 1) < 1e-4
    ]
    out.finding(
        "the loss is another one",
        expected=(
            f"{value:.6g}, within {error:.2g}: {batch.terms.loss} by {batch.terms.aggregation} over"
            f" the {batch.terms.denominator} tokens"
        ),
        observed=f"{seen:.6g}{why[0] if why else ''}",
        where=batch.place(trained=expected.tokens, left=int(expected.kept.sum())),
        hint=(
            "Rejected tokens are in the sum but not in the count, or the reverse (slime #657); or"
            " padding is counted."
        ),
    )


@correction_check(
    "correction.gradient",
    Purpose.LOSS,
    promise=(
        "The gradient of the loss to the current logprobs is that of the declared loss, with"
        " detached weights as constants."
    ),
    exercised_by="gradients of losses",
    applies=_has_loss,
)
def correction_gradient(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the gradient of the loss."""
    seen = batch.event.loss_gradient
    if seen is None:
        out.inapplicable("the subject takes numpy arrays, and reports no gradient of its loss")
        return
    exact = ExpectedLoss(batch.expected).gradient
    if exact is None:
        return
    out.exercised("gradients of losses")
    # a wrong count is one factor for all tokens: correction.loss
    factor = _common_factor(seen, exact.value)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(seen / factor - exact.value) <= exact.error)
    if not wrong.any():
        return
    at = first_place(wrong)
    out.finding(
        "the gradient of the loss is another one",
        expected=f"{exact.value[at]:.6g}, within {exact.error[at]:.2g} ({batch.inputs_at(at)})",
        observed=f"{seen[at]:.6g}; wrong for {share(int(wrong.sum()), seen.size, 'place')}",
        where=batch.place(at, trained=bool(batch.expected.trained[at])),
        hint=(
            "A gradient flows through the weights, through a masked place, or through a clamp that"
            " the contract says stops it."
        ),
    )


def _common_factor(seen: np.ndarray, exact: np.ndarray) -> float:
    """Return the factor by which a whole gradient is off; 1 if there is none."""
    own = (exact != 0) & np.isfinite(seen)
    if not own.any():
        return 1.0
    ratios = seen[own] / exact[own]
    middle = float(np.median(ratios))
    # a turned sign comes from no count: it stays a finding
    alike = middle > 0 and bool((np.abs(ratios / middle - 1) < 1e-3).all())
    return middle if alike else 1.0


def _has_metrics(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is not None and not terms.metrics:
        return "the contract declares no metrics"
    return None


@correction_check(
    "correction.metrics",
    Purpose.METRICS,
    promise=(
        "A reported number is what the contract says, over trained tokens and over sequences that"
        " have some."
    ),
    exercised_by="reported numbers",
    applies=_has_metrics,
)
def correction_metrics(batch: CorrectedBatch, out: Collector) -> None:
    """Compare every declared metric."""
    exact = ExpectedMetrics(batch.expected)
    for name, metric in batch.terms.metrics:
        found = exact.value(metric)
        seen = batch.event.metrics.get(name)
        if found is None or seen is None:
            continue
        out.exercised("reported numbers")
        value, error = found
        if abs(seen - value) <= error:
            continue
        empty = int((batch.expected.lengths == 0).sum())
        pair = _pair_of(batch, metric, seen)
        if pair is not None:
            out.finding(
                f"{name} is of another pair of logprobs",
                expected=f"{value:.6g}, within {error:.2g}: {Metric(metric)}",
                observed=f"{seen:.6g}: {metric} of {pair}",
                where=batch.place(metric=name),
                hint=follows_from_pair(pair),
            )
            continue
        out.finding(
            f"{name} is not {metric}",
            expected=f"{value:.6g}, within {error:.2g}: {Metric(metric)}",
            observed=f"{seen:.6g}",
            where=batch.place(metric=name, sequences_without_trained_tokens=empty),
            hint=_divided_by(batch, metric, seen, value)
            or (
                "The mean is over other tokens than are trained: padding, masked tokens, or"
                " sequences without a trained token, which count as 0 or as 1."
            ),
            kind=(
                f"{name} counts sequences without trained tokens" if empty else f"{name} is wrong"
            ),
        )


def _divided_by(batch: CorrectedBatch, metric: Metric, seen: float, value: float) -> str:
    """Return by which count a number seems to be divided instead of the right one; empty if it is
    by none.
    """
    if metric in _EXTREMES:
        return ""
    trained, lengths = batch.expected.trained, batch.expected.lengths
    per_sequence = metric in _OF_SEQUENCES
    base = int((lengths > 0).sum()) if per_sequence else int(trained.sum())
    counts = {"sequences": len(lengths)}
    if not per_sequence:
        counts |= {
            "sequences with trained tokens": int((lengths > 0).sum()),
            "places, padding and masked tokens among them": trained.size,
        }
    for noun, number in counts.items():
        if number != base and value and abs(seen * number / (value * base) - 1) < _ALIKE:
            right = "sequences with trained tokens" if per_sequence else "trained tokens"
            return f"The sum is divided by the {number} {noun}, and not by the {base} {right}."
    return ""


_EXTREMES = frozenset(
    {
        Metric.WEIGHTS_MAX,
        Metric.WEIGHTS_MIN,
        Metric.SEQUENCE_WEIGHTS_MAX,
        Metric.SEQUENCE_WEIGHTS_MIN,
        Metric.LOG_RATIO_ABS_MAX,
    }
)
"""Metrics that are no means."""
_OF_SEQUENCES = frozenset(
    {
        Metric.REJECTED_SEQUENCES,
        Metric.FIRST_PERPLEXITY,
        Metric.SECOND_PERPLEXITY,
        Metric.SEQUENCE_WEIGHTS_MEAN,
    }
)
"""Means over sequences; the others are means over tokens."""
_ALIKE = 1e-3
"""The largest relative difference of two numbers that are taken for the same."""


def _pair_of(batch: CorrectedBatch, metric: Metric, seen: float) -> str | None:
    """Return the pair of which the weights of the batch are, if this number is of it as well."""
    if batch.other_pair is None:
        return None
    name, other = batch.other_pair
    found = ExpectedMetrics(other.expected).value(metric)
    return name if found is not None and abs(seen - found[0]) <= found[1] else None
