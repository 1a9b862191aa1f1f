"""Checks of single weights: the formula, its rounding, its direction, its bounds."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.correction_terms import (
    Level,
    MaskedWeights,
    Missing,
    Normalise,
)
from rollproof.core.events.corrections import Purpose
from rollproof.core.records import FloatArray
from rollproof.corrections.rounding import ROUGH
from rollproof.invariants._shared.phrases import share
from rollproof.invariants.correction.corrected_batch import (
    POLICIES,
    CorrectedBatch,
    compare_weights,
    correction_check,
    first_place,
    has_weights,
    pair_names,
)
from rollproof.judging.checks import Collector

__all__ = [
    "correction_bounds",
    "correction_direction",
    "correction_finite",
    "correction_identity",
    "correction_missing",
    "correction_precision",
    "correction_weights",
]

_ENOUGH = 5
"""Weights that another formula is not near to by chance, all at once."""


@correction_check(
    "correction.weights",
    Purpose.FORMULA,
    promise=(
        "The weight of a token is the ratio that the contract declares: of its own probabilities,"
        " of its sequence's product, or of the geometric mean."
    ),
    exercised_by="weights of one sequence",
    applies=has_weights,
)
def correction_weights(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the weights of single sequences with the formula."""

    def explain(at: tuple[int, int]) -> str:
        seen = batch.unscaled[at]
        logs = np.where(batch.expected.trained, batch.expected.log_ratio.value, 0.0)[at[0]]
        total, mean = float(logs.sum()), float(logs.mean())
        own = float(batch.expected.log_ratio.value[at])
        others = {
            Level.TOKEN: ("the ratio of the token alone", own),
            Level.SEQUENCE: ("the product over the sequence", total),
            Level.GEOMETRIC: ("the geometric mean over the sequence", mean),
        }
        names = [
            name
            for level, (name, log) in others.items()
            if level is not batch.terms.level and abs(seen - np.exp(log)) <= ROUGH * np.exp(log)
        ]
        return f"; this is {names[0]}" if names else ""

    compare_weights(
        batch,
        out,
        "weights of one sequence",
        np.ones_like(batch.expected.trained),
        title="a weight does not follow the declared formula",
        hint=(
            "Compare level (token, sequence or geometric) with what the function computes, and"
            " where it takes the mean."
        ),
        explain=explain,
    )


@correction_check(
    "correction.precision",
    Purpose.FORMULA,
    promise=(
        "Weights are as exact as the type that the contract declares: within the largest error of"
        " a subtraction, a sum and an exponential in that type."
    ),
    exercised_by="weights of one sequence",
    applies=has_weights,
)
def correction_precision(batch: CorrectedBatch, out: Collector) -> None:
    """Compare small differences with the derived rounding error."""
    expected = batch.expected.weights
    chosen = batch.decided & np.isfinite(batch.unscaled)
    off = np.abs(batch.unscaled - expected.value)
    rough = chosen & (off > np.maximum(expected.error, ROUGH * expected.value))
    # Another formula, or another pair of logprobs: correction.weights, correction.direction. On a
    # few tokens it may differ as little as rounding does.
    if rough.any() or chosen.sum() < _ENOUGH:
        return
    out.exercised("weights of one sequence", int(chosen.sum()))
    wrong = chosen & (off > expected.error)
    if not wrong.any():
        return
    at = first_place(wrong)
    kind = batch.terms.computes_in
    out.finding(
        "a weight is less exact than the declared type",
        expected=(
            f"{expected.value[at]:.9g}, within {expected.error[at]:.2g}: what rounding in {kind}"
            f" adds at most ({batch.inputs_at(at)})"
        ),
        observed=(
            f"{batch.unscaled[at]:.9g}, off by {off[at]:.2g}; so for"
            f" {share(int(wrong.sum()), int(chosen.sum()), 'token')}"
        ),
        where=batch.place(at),
        hint=(
            "Logprobs or ratios pass through a narrower type (bfloat16 under autocast, float16)."
            " Subtract and exponentiate in float32, or declare the precision."
        ),
    )


@correction_check(
    "correction.direction",
    Purpose.DIRECTION,
    promise=(
        "A weight divides the probabilities of the two policies that the contract names, in that"
        " order."
    ),
    exercised_by="weights of tokens with three different logprobs",
    applies=has_weights,
)
def correction_direction(batch: CorrectedBatch, out: Collector) -> None:
    """Look for the ratio of another pair, or the inverse."""
    expected = batch.expected
    out.exercised("weights of tokens with three different logprobs", int(batch.decided.sum()))
    # a pair is recognised by all weights together: one that is in doubt spoils it
    if not batch.decided.all() or _agree(batch, batch.weights, expected.weights.value):
        return
    logs = {name: getattr(batch.event, name) for name in POLICIES}
    declared = pair_names(batch.terms.pair)
    for first, second in permutations(POLICIES, 2):
        if (first, second) == declared:
            continue
        ratio = np.exp(logs[first] - logs[second])
        if _agree(batch, batch.weights, ratio):
            inverse = (second, first) == declared
            out.finding(
                "the ratio is inverted" if inverse else "the ratio is of another pair of logprobs",
                expected=(
                    f"{declared[0]} over {declared[1]}: {expected.weights.value[0, 0]:.6g}"
                    f" ({batch.inputs_at((0, 0))})"
                ),
                observed=f"{batch.weights[0, 0]:.6g}: {first} over {second}",
                where=batch.place((0, 0)),
                hint=(
                    "The weight corrects for who sampled: the trained policy's probability over"
                    " that of the rollout. Old and current logprobs differ after the first"
                    " minibatch only, so a mix-up goes unnoticed on the first one (slime #179)."
                ),
            )
            return


def _agree(batch: CorrectedBatch, weights: FloatArray, ratio: FloatArray) -> bool:
    """Return whether weights are these ratios, up to the factor of a normalisation."""
    expected = batch.expected
    if batch.terms.normalise is not Normalise.NONE:
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = weights / expected.scope_means(weights)[expected.scopes][:, None]
            ratio = ratio / expected.scope_means(ratio)[expected.scopes][:, None]
    chosen = expected.trained
    slack = np.maximum(expected.weights.error, ROUGH * ratio)
    with np.errstate(invalid="ignore"):
        return bool((np.abs(weights - ratio) <= slack)[chosen].all())


def _has_bounds(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is None or (
        terms.weights and (terms.lower, terms.upper, terms.log_bound) != (None, None, None)
    ):
        return None
    return has_weights(contract) or "the contract declares no bounds of the weights"


@correction_check(
    "correction.bounds",
    Purpose.BOUNDS,
    Purpose.EXTREME,
    promise=(
        "A weight beyond a declared bound is clamped to it, on the side that the bound is on, and"
        " a log ratio above the log bound to that; a weight within is left as it is."
    ),
    exercised_by=("weights beyond a bound", "weights near a bound, within it"),
    applies=_has_bounds,
)
def correction_bounds(batch: CorrectedBatch, out: Collector) -> None:
    """Compare weights on both sides of the bounds."""
    expected = batch.expected
    beyond = expected.outside[0] | expected.outside[1] | expected.beyond_log_bound
    sure = batch.decided & ~expected.at_bound
    if batch.terms.rejects_weights:
        # correction.mask judges these
        sure &= ~expected.rejected
    if not sure.any():
        out.inapplicable("by the contract, every weight near a bound is rejected, or overflows")
        return
    for counter, chosen, title in (
        ("weights beyond a bound", sure & beyond, "a weight beyond a bound is not clamped to it"),
        (
            "weights near a bound, within it",
            sure & ~beyond,
            "a weight within the bounds is changed",
        ),
    ):
        # extreme ratios within all bounds would count as tested, and test no bound
        if batch.event.purpose is Purpose.EXTREME and not beyond.any():
            continue
        compare_weights(
            batch,
            out,
            counter,
            chosen,
            title=title,
            hint=(
                "Truncation keeps the token, with the bound as its weight. Look for bounds of the"
                " other side, bounds of the log ratio that are compared with the ratio, and a"
                " clamp before the exponential or the sum."
            ),
        )


@correction_check(
    "correction.identity",
    Purpose.IDENTITY,
    promise="If all policies agree, every weight is 1 and nothing is rejected.",
    exercised_by="tokens on which all policies agree",
)
def correction_identity(batch: CorrectedBatch, out: Collector) -> None:
    """Compare weights and mask of equal logprobs."""
    expected, event = batch.expected, batch.event
    trained = expected.trained
    out.exercised("tokens on which all policies agree", int(trained.sum()))
    if event.weights is not None:
        exact = expected.weights
        slack = np.maximum(exact.error, 8 * expected.unit)
        with np.errstate(invalid="ignore"):
            # negated, so that NaN is wrong, too
            wrong = trained & ~(np.abs(event.weights - exact.value) <= slack)
        if wrong.any():
            at = first_place(wrong)
            out.finding(
                "a weight of equal logprobs is not 1",
                expected=f"{exact.value[at]:.6g} ({batch.inputs_at(at)})",
                observed=(
                    f"{event.weights[at]:.6g}; so for"
                    f" {share(int(wrong.sum()), int(trained.sum()), 'trained token')}"
                ),
                where=batch.place(at),
                hint=(
                    "On policy a correction must change nothing. Look for a constant in the"
                    " exponent, a mean over more tokens than are summed, or a normalisation that"
                    " counts padding."
                ),
            )
    if event.kept is not None:
        lost = trained & ~expected.rejected & (event.kept == 0)
        if lost.any():
            at = first_place(lost)
            out.finding(
                "a token on which all policies agree is rejected",
                expected="no rejection: every ratio is 1",
                observed=f"{share(int(lost.sum()), int(trained.sum()), 'trained token')} rejected",
                where=batch.place(at),
                hint="A bound is compared with another statistic, or in another unit, than it has.",
            )


def _takes_missing(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is not None and terms.missing is Missing.NEVER:
        return "the contract declares missing='never'"
    return has_weights(contract)


@correction_check(
    "correction.missing",
    Purpose.MISSING,
    promise=(
        "A trained token without a rollout logprob has a ratio of 1, and changes no other weight"
        " in another way."
    ),
    exercised_by=("tokens without a rollout logprob", "tokens next to them"),
    applies=_takes_missing,
)
def correction_missing(batch: CorrectedBatch, out: Collector) -> None:
    """Compare weights where logprobs are absent; NaN is wrong, too."""
    absent = np.isnan(batch.event.rollout) & batch.expected.trained
    with np.errstate(invalid="ignore"):
        lost = batch.expected.trained & ~np.isfinite(batch.weights)
    out.exercised("tokens without a rollout logprob", int(absent.sum()))
    if lost.any():
        at = first_place(lost)
        out.finding(
            "a missing logprob makes weights that are no numbers",
            expected=f"{batch.expected.weights.value[at]:.6g}",
            observed=f"{batch.weights[at]}; so for {int(lost.sum())} trained tokens",
            where=batch.place(at),
            hint=(
                "vLLM reports no logprob for some tokens of certainty (TRL #6166). Replace what is"
                " missing before it enters a sum."
            ),
        )
        return
    compare_weights(
        batch,
        out,
        "tokens next to them",
        batch.expected.trained,
        title="a missing logprob changes a weight",
        hint="The ratio of a token whose rollout logprob is missing is 1: its log ratio is 0.",
    )


@correction_check(
    "correction.finite",
    Purpose.EXTREME,
    Purpose.EMPTY_ROWS,
    Purpose.EMPTY_BATCH,
    promise=(
        "No weight, mask or loss is NaN or infinite: whatever the logprobs, for sequences of which"
        " no token is trained, and for products that overflow."
    ),
    exercised_by=("weights of extreme ratios", "sequences without trained tokens"),
)
def correction_finite(batch: CorrectedBatch, out: Collector) -> None:
    """Look for numbers that are none."""
    event, expected = batch.event, batch.expected
    trained = expected.trained
    if event.purpose is Purpose.EXTREME:
        out.exercised("weights of extreme ratios", int(trained.sum()))
    else:
        out.exercised("sequences without trained tokens", int((expected.lengths == 0).sum()))
    if event.weights is not None:
        # an unbounded product may be infinite
        must = batch.decided | (~trained & (batch.terms.masked is not MaskedWeights.ANY))
        wrong = must & ~np.isfinite(event.weights)
        if wrong.any():
            at = first_place(wrong)
            own = "trained" if trained[at] else "masked"
            out.finding(
                f"the weight of a {own} token is no finite number",
                expected=(
                    f"{expected.weights.value[at]:.6g} ({batch.inputs_at(at)})"
                    if trained[at]
                    else "a finite number: NaN times a mask of 0 is NaN"
                ),
                observed=f"{event.weights[at]}; so for {int(wrong.sum())} tokens",
                where=batch.place(at, trained_tokens_of_sequence=int(expected.lengths[at[0]])),
                hint=(
                    "A mean over no token divides by 0; an exponential of a sum overflows before"
                    " it is clamped (inf * 0 is NaN). Bound the logarithm first."
                ),
            )
    if event.kept is not None and not np.isfinite(event.kept).all():
        at = first_place(~np.isfinite(event.kept))
        out.finding(
            "the mask is no finite number",
            expected="0 or 1",
            observed=f"{event.kept[at]}",
            where=batch.place(at),
            hint="A statistic of a sequence without trained tokens divides by 0.",
        )
    # of extreme ratios a loss may overflow by right: not every weight has a bound
    if event.purpose is Purpose.EXTREME or event.loss is None or np.isfinite(event.loss):
        return
    out.finding(
        "the loss of a batch with untrained sequences is no finite number",
        expected="a finite loss",
        observed=f"{event.loss}",
        where=batch.place(),
        hint="Divide by the number of trained tokens, at least 1.",
    )
