"""Findings on corrections are put at the first token that is wrong, and count the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.events.corrections import Purpose
from rollproof.judging.checks import Finding, Verdict
from tests.support.correction_script import SHAPE, Batch

_WRONG = ((1, 3), (2, 0))
"""Two places, of which the first has the larger number of its token."""
_AT = {"case": "by hand", "sequence": 1, "token": 3}


def _spoiled(values: np.ndarray, by: float) -> np.ndarray:
    values = values.copy()
    for at in _WRONG:
        values[at] *= by
    return values


def _written(values: np.ndarray, value: float) -> np.ndarray:
    values = values.copy()
    for at in _WRONG:
        values[at] = value
    return values


def _finding(batch: Batch, check_id: str, purpose: Purpose, **fields: Any) -> Finding:
    result = batch.judged(check_id, purpose, **fields)
    assert (Verdict.FAIL, 1) == (result.verdict, result.found), result
    return result.findings[0]


def _logprobs(batch: Batch) -> str:
    inputs, at = batch.inputs, _WRONG[0]
    return (
        f"rollout {inputs.rollout[at]:.6g}, old {inputs.old[at]:.6g},"
        f" current {inputs.current[at]:.6g}"
    )


@pytest.mark.parametrize(
    ("check_id", "purpose", "by", "title", "terms"),
    [
        ("weights", "formula", 1.5, "a weight does not follow the declared formula", {}),
        ("precision", "formula", 1.0002, "a weight is less exact than the declared type", {}),
        ("rows", "rows", 1.5, "a sequence has the weights of another one", {}),
        (
            "padding",
            "padding",
            1.5,
            "masked places change the weight of a trained token",
            {},
        ),
        (
            "bounds",
            "bounds",
            1.5,
            "a weight within the bounds is changed",
            {"upper": 3.0},
        ),
        (
            "bounds",
            "bounds",
            1.5,
            "a weight beyond a bound is not clamped to it",
            {"upper": 1.01},
        ),
    ],
)
def test_the_first_wrong_weight_is_shown(
    check_id: str, purpose: str, by: float, title: str, terms: dict[str, Any]
) -> None:
    """With its logprobs, what it should be, and how many others are wrong."""
    batch = Batch(**terms)
    weights = _spoiled(batch.weights, by)
    finding = _finding(batch, f"correction.{check_id}", Purpose(purpose), weights=weights)
    assert (title, _AT) == (finding.title, dict(finding.where))
    exact, seen = batch.weights[_WRONG[0]], weights[_WRONG[0]]
    digits = 9 if check_id == "precision" else 6
    assert finding.expected.startswith(f"{exact:.{digits}g}, within ")
    assert _logprobs(batch) in finding.expected
    assert finding.observed.startswith(f"{seen:.{digits}g}")
    assert "2 of 15" in finding.observed


def test_the_first_weight_that_is_no_number_is_shown() -> None:
    """Of a trained token, or of a masked one."""
    mask = np.ones(SHAPE, dtype=np.int64)
    mask[0] = 0
    batch = Batch({"mask": mask})
    weights = _written(batch.weights, np.nan)
    finding = _finding(batch, "correction.finite", Purpose.EMPTY_ROWS, weights=weights)
    assert "the weight of a trained token is no finite number" == finding.title
    assert {**_AT, "trained_tokens_of_sequence": 5} == dict(finding.where)
    assert f"{batch.weights[1, 3]:.6g} ({_logprobs(batch)})" == finding.expected
    assert "nan; so for 2 tokens" == finding.observed
    weights = batch.weights.copy()
    weights[0, 2] = weights[0, 4] = np.inf
    finding = _finding(batch, "correction.finite", Purpose.EMPTY_ROWS, weights=weights)
    assert "the weight of a masked token is no finite number" == finding.title
    assert (0, 2, 0) == tuple(
        finding.where[name] for name in ("sequence", "token", "trained_tokens_of_sequence")
    )
    assert "inf; so for 2 tokens" == finding.observed


def test_the_first_place_of_a_mask_that_is_no_number_is_shown() -> None:
    """Whichever number it is none of."""
    batch = Batch()
    for value in (np.nan, np.inf):
        kept = _written(batch.kept, value)
        finding = _finding(batch, "correction.finite", Purpose.EMPTY_ROWS, kept=kept)
        assert ("the mask is no finite number", _AT) == (finding.title, dict(finding.where))
        assert f"{value}" == finding.observed


def test_the_first_of_equal_logprobs_that_changes_something_is_shown() -> None:
    """Its weight, or its mask."""
    same = Batch().inputs.rollout
    batch = Batch({"old": same, "current": same})
    weights = _written(batch.weights, 1.25)
    finding = _finding(batch, "correction.identity", Purpose.IDENTITY, weights=weights)
    assert ("a weight of equal logprobs is not 1", _AT) == (finding.title, dict(finding.where))
    assert f"1 ({_logprobs(batch)})" == finding.expected
    assert finding.observed.startswith("1.25; so for 2 of 15 ")
    kept = _written(batch.kept, 0.0)
    finding = _finding(batch, "correction.identity", Purpose.IDENTITY, kept=kept)
    assert "a token on which all policies agree is rejected" == finding.title
    assert _AT == dict(finding.where)
    assert finding.observed.startswith("2 of 15 ")


def test_the_first_masked_place_that_counts_is_shown() -> None:
    """By its weight where 0 is declared, by the mask, and next to a trained one that is lost."""
    mask = _written(np.ones(SHAPE), 0).astype(np.int64)
    batch = Batch({"mask": mask}, masked="zero")
    weights = _written(batch.weights, 0.5)
    finding = _finding(batch, "correction.padding", Purpose.PADDING, weights=weights)
    assert ("the weight of a masked token is not 0", _AT) == (finding.title, dict(finding.where))
    assert "0.5; so for 2 tokens" == finding.observed
    kept = _written(batch.kept, 1.0)
    finding = _finding(batch, "correction.padding", Purpose.PADDING, kept=kept)
    assert "the mask trains a token that was masked" == finding.title
    assert (_AT, "mask 0") == (dict(finding.where), finding.expected)
    assert "mask 1; wrong for 2 tokens" == finding.observed
    batch = Batch(masked="zero")
    finding = _finding(batch, "correction.padding", Purpose.PADDING, kept=_written(batch.kept, 0.0))
    assert "masked places reject a trained token" == finding.title
    assert (_AT, "mask 1") == (dict(finding.where), finding.expected)


def _gradient(batch: Batch, gradient: np.ndarray) -> Finding | None:
    result = batch.judged("correction.gradient", Purpose.LOSS, loss_gradient=gradient)
    assert {"gradients of losses": 1} == dict(result.exercised)
    return next(iter(result.findings), None)


_LOSS: dict[str, Any] = {"loss": "reinforce", "arrays": "torch"}


def test_the_first_wrong_gradient_is_shown() -> None:
    """And whether its token is trained."""
    mask = np.ones(SHAPE, dtype=np.int64)
    mask[0, 0] = 0
    batch = Batch({"mask": mask}, **_LOSS)
    exact = batch.gradient()
    assert _gradient(batch, exact) is None
    finding = _gradient(batch, _spoiled(exact, 1.5))
    assert finding is not None
    assert ("the gradient of the loss is another one", {**_AT, "trained": True}) == (
        finding.title,
        dict(finding.where),
    )
    assert finding.observed.startswith(f"{1.5 * exact[1, 3]:.6g}; wrong for 2 of 15 ")
    leak = exact.copy()
    leak[0, 0] = 0.25
    finding = _gradient(batch, leak)
    assert finding is not None
    assert (0, 0, False) == tuple(finding.where[name] for name in ("sequence", "token", "trained"))


@pytest.mark.parametrize(
    ("factor", "spread", "wrong"),
    [(1.5, 0.0, 0), (1.5, 5e-4, 2), (1.5, 2e-3, 15), (1.0, 0.1, 2), (-1.0, 0.0, 15)],
)
def test_a_common_factor_of_a_gradient_is_left_to_the_loss(
    factor: float, spread: float, wrong: int
) -> None:
    """If all places have it, within a thousandth; a turned sign is none."""
    batch = Batch(**_LOSS)
    finding = _gradient(batch, _spoiled(batch.gradient() * factor, 1 + spread))
    if not wrong:
        assert finding is None
        return
    assert finding is not None
    assert f"wrong for {wrong} of 15 " in f"{finding.observed} "


@pytest.mark.parametrize("normalise", ["tokens", "sequences", "groups"])
def test_normalised_weights_without_a_mean_are_compared_as_they_are(normalise: str) -> None:
    """A NaN among right weights is correction.finite's to report, and makes no other one wrong."""
    batch = Batch(normalise=normalise)
    weights = batch.weights.copy()
    weights[2, 4] = np.nan
    result = batch.judged("correction.weights", Purpose.FORMULA, weights=weights)
    assert (Verdict.PASS, 14) == (result.verdict, sum(result.exercised.values())), result
    wrong = _spoiled(weights, 1.5)
    finding = _finding(batch, "correction.weights", Purpose.FORMULA, weights=wrong)
    assert _AT == dict(finding.where)
    assert "2 of 14" in finding.observed


def test_a_common_factor_of_normalised_weights_is_no_other_formula() -> None:
    """correction.normalisation reports it, unless a weight is no number or in doubt."""
    batch = Batch(normalise="tokens")
    twice = batch.weights * 2
    result = batch.judged("correction.weights", Purpose.FORMULA, weights=twice)
    assert Verdict.PASS is result.verdict
    finding = _finding(batch, "correction.normalisation", Purpose.NORMALISATION, weights=twice)
    assert "the weights of the batch do not have a mean of 1" == finding.title
    assert finding.expected.startswith("a mean of 1 over the trained tokens")
    assert finding.observed.startswith("a mean of 2; wrong for ")
    twice[1, 1] = np.nan
    result = batch.judged("correction.normalisation", Purpose.NORMALISATION, weights=twice)
    assert ({}, ()) == (dict(result.exercised), result.findings)
    # the ratio of one token is the bound itself
    inputs = Batch().inputs
    old = inputs.old.copy()
    old[1, 1] = inputs.rollout[1, 1] + np.log(2.0)
    doubtful = Batch(
        {"old": old}, normalise="tokens", rejections={"upper": 2.0}, rejects_by="weights"
    )
    assert doubtful.exact.undecided[1, 1]
    result = doubtful.judged(
        "correction.normalisation", Purpose.NORMALISATION, weights=doubtful.weights * 2
    )
    assert ({}, ()) == (dict(result.exercised), result.findings)


def test_weights_of_a_rejected_batch_are_not_scaled_away() -> None:
    """All are 0, and so is their mean: no factor makes others right."""
    batch = Batch(normalise="tokens", rejections={"upper": 0.5}, rejects_by="weights")
    assert not batch.weights.any()
    assert Verdict.PASS is batch.judged("correction.weights", Purpose.FORMULA).verdict
    weights = _written(batch.weights, 1.0)
    finding = _finding(batch, "correction.weights", Purpose.FORMULA, weights=weights)
    assert _AT == dict(finding.where)
    assert finding.observed.startswith("1; wrong for 2 of 15 ")
