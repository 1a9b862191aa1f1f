"""Checks of what a weight may depend on: its sequence, trained tokens, its group."""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.correction_terms import MaskedWeights, Normalise
from rollproof.core.events.corrections import Purpose
from rollproof.core.records import FloatArray
from rollproof.corrections.rounding import ROUGH, SAFETY
from rollproof.invariants._shared.phrases import share
from rollproof.invariants.correction.corrected_batch import (
    CorrectedBatch,
    compare_weights,
    correction_check,
    first_place,
    follows_from_pair,
    has_weights,
)
from rollproof.judging.checks import Applies, Collector

__all__ = [
    "correction_groups",
    "correction_normalisation",
    "correction_padding",
    "correction_rows",
]


@correction_check(
    "correction.rows",
    Purpose.ROWS,
    promise="A sequence has the weights of its own tokens, whatever its place in the batch.",
    exercised_by="weights of sequences of equal length",
    applies=has_weights,
)
def correction_rows(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the weights of several sequences, and find whose a wrong one is."""
    expected = batch.expected.weights.value

    def explain(at: tuple[int, int]) -> str:
        seen = batch.unscaled[at[0]]
        for other, weights in enumerate(expected):
            if other != at[0] and (np.abs(seen - weights) <= ROUGH * weights).all():
                return f"; these are the weights of sequence {other}"
        return ""

    compare_weights(
        batch,
        out,
        "weights of sequences of equal length",
        batch.expected.trained,
        title="a sequence has the weights of another one",
        hint=(
            "Look at how a weight per sequence is spread over its tokens: `repeat` for"
            " `repeat_interleave`, a transpose, or an order that sorting by length changed."
        ),
        explain=explain,
    )


def _has_weights_or_mask(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is None or terms.weights or (terms.rejects and terms.rejects_mask):
        return None
    return "the contract declares neither weights nor a mask"


@correction_check(
    "correction.padding",
    Purpose.PADDING,
    promise=(
        "What masked places hold changes no weight and no mask of a trained token, and no masked"
        " token is trained."
    ),
    exercised_by=("weights next to masked places", "masks next to masked places"),
    applies=_has_weights_or_mask,
)
def correction_padding(batch: CorrectedBatch, out: Collector) -> None:
    """Compare weights and masks where masked places hold other logprobs."""
    event, expected = batch.event, batch.expected
    hint = (
        "A sum, a mean, a largest value or a normalisation includes places with mask 0: padding,"
        " tokens of the environment, or aborted samples. Mask before the sum, and count what is"
        " trained."
    )
    if event.weights is not None:
        compare_weights(
            batch,
            out,
            "weights next to masked places",
            expected.trained,
            title="masked places change the weight of a trained token",
            hint=hint,
        )
        hidden = ~expected.trained & (event.weights != 0)
        if batch.terms.masked is MaskedWeights.ZERO and hidden.any():
            at = first_place(hidden)
            out.finding(
                "the weight of a masked token is not 0",
                expected="0: the contract declares masked='zero'",
                observed=f"{event.weights[at]:.6g}; so for {int(hidden.sum())} tokens",
                where=batch.place(at),
                hint="Multiply by the mask, or declare masked='finite'.",
            )
    if event.kept is None:
        return
    # masked places are in it: rejection may not make one of them trained
    sure = ~expected.undecided
    out.exercised("masks next to masked places", int(sure.sum()))
    with np.errstate(invalid="ignore"):
        wrong = sure & ((event.kept != 0) != expected.kept)
    if wrong.any():
        at = first_place(wrong)
        title = (
            "masked places reject a trained token"
            if expected.trained[at]
            else "the mask trains a token that was masked"
        )
        if batch.other_pair is not None:
            title = "tokens are rejected by another pair of logprobs"
            hint = follows_from_pair(batch.other_pair[0])
        out.finding(
            title,
            expected=f"mask {int(expected.kept[at])}",
            observed=f"mask {event.kept[at]:g}; wrong for {int(wrong.sum())} tokens",
            where=batch.place(at),
            hint=hint,
        )


def _normalised_by(*kinds: Normalise) -> Applies:
    def applies(contract: Contract) -> str | None:
        terms = contract.correction
        if terms is None or terms.normalise in kinds:
            return None
        return has_weights(contract) or f"the contract declares normalise='{terms.normalise}'"

    return applies


@correction_check(
    "correction.normalisation",
    Purpose.NORMALISATION,
    promise=(
        "Normalised weights have a mean of 1 over the trained tokens, or over the sequences with"
        " trained tokens, and over nothing else."
    ),
    exercised_by="normalised batches",
    applies=_normalised_by(Normalise.TOKENS, Normalise.SEQUENCES),
)
def correction_normalisation(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the mean of the weights."""
    _compare_means(batch, out, "normalised batches", "the batch")


@correction_check(
    "correction.groups",
    Purpose.NORMALISATION,
    promise="Weights that are normalised by group have a mean of 1 in each group.",
    exercised_by="normalised groups",
    applies=_normalised_by(Normalise.GROUPS),
)
def correction_groups(batch: CorrectedBatch, out: Collector) -> None:
    """Compare the mean of the weights in each group."""
    _compare_means(batch, out, "normalised groups", "a group")


def _compare_means(batch: CorrectedBatch, out: Collector, counter: str, scope: str) -> None:
    expected, weights = batch.expected, batch.weights
    # one token that is kept or not moves the mean of its whole scope
    if expected.undecided.any() or not np.isfinite(weights[expected.trained]).all():
        return
    means = expected.scope_means(weights)
    exact = expected.scope_means(expected.weights.value)
    slack = SAFETY * expected.scope_means(expected.weights.error)
    out.exercised(counter, len(means))
    wrong = np.abs(means - exact) > np.maximum(slack, 8 * expected.unit)
    if not wrong.any():
        return
    first = int(np.flatnonzero(wrong)[0])
    out.finding(
        f"the weights of {scope} do not have a mean of 1",
        expected=f"a mean of {exact[first]:.6g} over {_words(batch.terms.normalise)}",
        observed=(
            f"a mean of {means[first]:.6g}; wrong for"
            f" {share(int(wrong.sum()), len(means), 'scope')}{_explained(batch, weights)}"
        ),
        where=batch.place(),
        hint=(
            "The mean is taken over other tokens: padding, masked tokens, untrained sequences, or"
            " those of other groups."
        ),
    )


def _words(normalise: Normalise) -> str:
    return {
        Normalise.TOKENS: "the trained tokens",
        Normalise.SEQUENCES: "the sequences with trained tokens",
        Normalise.GROUPS: "the trained tokens of the group",
    }.get(normalise, "")


def _explained(batch: CorrectedBatch, weights: FloatArray) -> str:
    """Say over what the mean is 1 instead."""
    trained = batch.expected.trained
    others = {
        "all places, masked ones too": float(weights.mean()),
        "all places, with 0 at masked ones": float(np.where(trained, weights, 0.0).mean()),
        "the trained tokens of the batch": float(weights[trained].mean()),
        "the sequences": float(
            (
                np.where(trained, weights, 0.0).sum(axis=1) / np.maximum(trained.sum(axis=1), 1)
            ).mean()
        ),
    }
    found = [name for name, mean in others.items() if abs(mean - 1) < 1e-3]
    return f"; it is 1 over {found[0]}" if found else ""
