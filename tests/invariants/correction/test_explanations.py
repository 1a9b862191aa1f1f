"""Findings on corrections say what the subject computes instead, if that explains the result."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from rollproof.core.correction_terms import Metric
from rollproof.core.events.corrections import Purpose
from rollproof.corrections.expected_loss import ExpectedLoss
from rollproof.corrections.expected_metrics import ExpectedMetrics
from rollproof.judging.checks import Finding, Verdict
from tests.support.correction_script import SHAPE, Batch

_LEVELS = {
    "token": "the ratio of the token alone",
    "sequence": "the product over the sequence",
    "geometric": "the geometric mean over the sequence",
}


def _found(batch: Batch, check_id: str, purpose: Purpose, **fields: Any) -> Finding:
    result = batch.judged(check_id, purpose, **fields)
    assert (Verdict.FAIL, 1) == (result.verdict, result.found), result
    return result.findings[0]


@pytest.mark.parametrize(("declared", "level"), list(permutations(_LEVELS, 2)))
def test_the_ratio_of_another_level_is_named(declared: str, level: str) -> None:
    """And one of none is not."""
    batch = Batch(level=declared)
    weights = np.broadcast_to(Batch(level=level).weights, SHAPE)
    finding = _found(batch, "correction.weights", Purpose.FORMULA, weights=weights)
    assert finding.observed.endswith(f"; this is {_LEVELS[level]}")
    # close to it is it; three hundredths off is not
    for factor, named in ((1.02, True), (0.98, True), (1.05, False), (0.95, False)):
        finding = _found(batch, "correction.weights", Purpose.FORMULA, weights=weights * factor)
        assert named is finding.observed.endswith(f"; this is {_LEVELS[level]}")


def test_the_sequence_that_has_these_weights_is_named() -> None:
    """If all of them are its own."""
    batch = Batch()
    weights = batch.weights[[0, 2, 1]]
    finding = _found(batch, "correction.rows", Purpose.ROWS, weights=weights)
    assert {"case": "by hand", "sequence": 1, "token": 0} == dict(finding.where)
    assert finding.observed.endswith("; these are the weights of sequence 2")
    weights[1, 4] *= 1.5
    finding = _found(batch, "correction.rows", Purpose.ROWS, weights=weights)
    assert "these are the weights" not in finding.observed
    # the sequence itself explains nothing
    weights = batch.weights.copy()
    weights[0, 2] *= 1.5
    finding = _found(batch, "correction.rows", Purpose.ROWS, weights=weights)
    assert "these are the weights" not in finding.observed


_ONE = {
    "rollout": [[-3.0]],
    "old": [[-2.5]],
    "current": [[-1.25]],
    "mask": [[1]],
    "advantages": [[1.0]],
    "groups": [0],
    "versions": [[0]],
}
_LOGPROBS = {name: _ONE[name][0][0] for name in ("rollout", "old", "current")}  # type: ignore[index]


@pytest.mark.parametrize("declared", ["old/rollout", "current/rollout", "current/old"])
@pytest.mark.parametrize(("first", "second"), list(permutations(_LOGPROBS, 2)))
def test_the_ratio_of_another_pair_is_named(declared: str, first: str, second: str) -> None:
    """Its inverse as such; the declared one passes, and any other number has no name."""
    batch = Batch(dict(_ONE), pair=declared)
    ratio = float(np.exp(_LOGPROBS[first] - _LOGPROBS[second]))
    weights = np.array([[ratio]])
    result = batch.judged("correction.direction", Purpose.DIRECTION, weights=weights)
    assert {"weights of tokens with three different logprobs": 1} == dict(result.exercised)
    if f"{first}/{second}" == declared:
        assert Verdict.PASS is result.verdict
        return
    (finding,) = result.findings
    inverse = f"{second}/{first}" == declared
    assert (
        "the ratio is inverted" if inverse else "the ratio is of another pair of logprobs"
    ) == finding.title
    over = " over ".join(declared.split("/"))
    assert finding.expected.startswith(f"{over}: {batch.weights[0, 0]:.6g} (rollout -3, ")
    assert f"{ratio:.6g}: {first} over {second}" == finding.observed
    assert {"case": "by hand", "sequence": 0, "token": 0} == dict(finding.where)
    for factor, named in ((1.02, 1), (1.05, 0), (0.95, 0)):
        other = batch.judged("correction.direction", Purpose.DIRECTION, weights=weights * factor)
        assert named == other.found


def _uneven() -> np.ndarray:
    mask = np.ones(SHAPE, dtype=np.int64)
    mask[0, 2:] = 0
    mask[1, 4:] = 0
    return mask


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("tokens", "all places, masked ones too"),
        ("tokens", "all places, with 0 at masked ones"),
        ("tokens", "the sequences"),
        ("sequences", "the trained tokens of the batch"),
        ("tokens", ""),
    ],
)
def test_the_places_over_which_the_mean_is_1_are_named(declared: str, words: str) -> None:
    """Of sequences with two, four and five trained tokens."""
    mask = _uneven()
    batch = Batch({"mask": mask}, normalise=declared)
    raw = np.exp(batch.inputs.old - batch.inputs.rollout)
    alone = np.where(mask == 1, raw, 0.0)
    mean = {
        "all places, masked ones too": raw.mean(),
        "all places, with 0 at masked ones": alone.mean(),
        "the sequences": (alone.sum(axis=1) / mask.sum(axis=1)).mean(),
        "the trained tokens of the batch": raw[mask == 1].mean(),
        "": 3.0,
    }[words]
    weights = raw / mean
    for factor, named in ((1.0, True), (1.0008, True), (1.0012, False), (0.9988, False)):
        finding = _found(
            batch,
            "correction.normalisation",
            Purpose.NORMALISATION,
            weights=weights * factor,
        )
        suffix = f"; it is 1 over {words}" if named and words else "of 1 scope"
        assert finding.observed.endswith(suffix), finding.observed


@pytest.mark.parametrize(
    ("count", "name"),
    [(15, "all places"), (11, "the trained tokens"), (3, "the sequences"), (13, "")],
)
def test_the_number_that_a_loss_was_divided_by_is_named(count: int, name: str) -> None:
    """In place of the tokens that are left."""
    rejections = {"upper": 1.5}
    batch = Batch({"mask": _uneven()}, loss="reinforce", denominator="kept", rejections=rejections)
    left = int(batch.exact.kept.sum())
    assert left not in (3, 11, 13, 15)
    exact = ExpectedLoss(batch.exact).value
    assert exact is not None
    seen = exact[0] * left / count
    finding = _found(batch, "correction.loss", Purpose.LOSS, loss=seen, kept=batch.kept)
    assert "the loss is another one" == finding.title
    assert {"case": "by hand", "trained": 11, "left": left} == dict(finding.where)
    why = (
        f"; it fits a division by {name} ({count}) in place of the tokens left after rejection"
        if name
        else ""
    )
    assert f"{seen:.6g}{why}" == finding.observed
    zero = _found(batch, "correction.loss", Purpose.LOSS, loss=0.0, kept=batch.kept)
    assert "0" == zero.observed
    passing = batch.judged("correction.loss", Purpose.LOSS, loss=exact[0], kept=batch.kept)
    assert Verdict.PASS is passing.verdict


@pytest.mark.parametrize(
    ("metric", "factor", "words"),
    [
        ("effective-samples", 7 / 3, "divided by the 3 sequences, and not by the 7 trained tokens"),
        ("effective-samples", 7 / 2, "by the 2 sequences with trained tokens, and not by the 7"),
        ("ratio-mean", 7 / 15, "by the 15 places, padding and masked tokens among them, and not"),
        ("sequence-weights-mean", 2 / 3, "the 3 sequences, and not by the 2 sequences with"),
        ("ratio-mean", 1.01 * 7 / 3, "The mean is over other tokens than are trained"),
        ("weights-max", 7 / 3, "The mean is over other tokens than are trained"),
    ],
)
def test_the_count_by_which_a_number_is_divided_is_named(
    metric: str, factor: float, words: str
) -> None:
    """If it is the right number but for that count; a maximum is divided by none."""
    mask = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    batch = Batch({"mask": mask}, metrics={"number": metric})
    found = ExpectedMetrics(batch.exact).value(Metric(metric))
    assert found is not None
    finding = _found(
        batch, "correction.metrics", Purpose.METRICS, metrics={"number": factor * found[0]}
    )
    assert words in finding.hint
