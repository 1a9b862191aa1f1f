"""The reference in float64, against numbers that were computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rollproof.corrections import CorrectionTerms, FloatType, Metric, Rejection
from rollproof.corrections.expected_correction import ExpectedCorrection, Inputs
from rollproof.corrections.expected_loss import ExpectedLoss
from rollproof.corrections.expected_metrics import ExpectedMetrics
from rollproof.corrections.rounding import as_type, limits_of

# Two sequences of three places. Old over rollout: 2, 1/2 and masked; 4, 1, 1.
ROLLOUT = np.log([[0.25, 0.5, 0.5], [0.125, 0.5, 0.5]])
OLD = np.log([[0.5, 0.25, 0.9], [0.5, 0.5, 0.5]])
CURRENT = np.log([[0.5, 0.5, 0.1], [0.25, 0.5, 0.25]])
MASK = np.array([[1, 1, 0], [1, 1, 1]])


def expected(**terms: Any) -> ExpectedCorrection:
    inputs = Inputs(
        rollout=ROLLOUT,
        old=OLD,
        current=CURRENT,
        mask=MASK,
        advantages=np.array([[1.0] * 3, [-2.0] * 3]),
        groups=np.array([0, 1]),
        versions=np.array([[5, 3, -1], [3, 3, 1]]),
        current_version=5,
    )
    return ExpectedCorrection(CorrectionTerms(dtype=FloatType.FLOAT64, **terms), inputs)


@pytest.mark.parametrize(
    ("terms", "weights"),
    [
        ({}, [[2, 0.5, 0], [4, 1, 1]]),
        ({"upper": 3.0, "lower": 0.75}, [[2, 0.75, 0], [3, 1, 1]]),
        ({"level": "sequence"}, [[1, 1, 0], [4, 4, 4]]),
        ({"level": "geometric"}, [[1, 1, 0], [4 ** (1 / 3)] * 3]),
        ({"pair": "current/rollout"}, [[2, 1, 0], [2, 1, 0.5]]),
        ({"pair": "current/old"}, [[1, 2, 0], [0.5, 1, 0.5]]),
        ({"log_bound": math.log(2)}, [[2, 0.5, 0], [2, 1, 1]]),
        ({"normalise": "tokens"}, np.array([[2, 0.5, 0], [4, 1, 1]]) / 1.7),
        ({"normalise": "sequences"}, np.array([[2, 0.5, 0], [4, 1, 1]]) / 1.625),
        ({"normalise": "groups"}, [[1.6, 0.4, 0], [2, 0.5, 0.5]]),
        (
            {"rejections": Rejection(upper=3.0), "rejects_by": "weights"},
            [[2, 0.5, 0], [0, 1, 1]],
        ),
        # a token of version 5 keeps its rollout logprob, one of version 3 is half way, 1: 3/4
        (
            {"pair": "interpolated/rollout"},
            [[1, 1, 0], [2**0.5, 1, 0.5**0.75]],
        ),
    ],
)
def test_weights(terms: dict[str, Any], weights: Any) -> None:
    """Level, bounds, pair, normalisation and rejection, each alone."""
    found = expected(**terms).weights
    np.testing.assert_allclose(found.value, weights, rtol=1e-14)
    assert (found.error[MASK == 1] >= 0).all() and (found.error <= 1e-12).all()


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        ({"lower": 0.75}, [[1, 0, 0], [1, 1, 1]]),
        ({"upper": 3.0}, [[1, 1, 0], [0, 1, 1]]),
        ({"aggregate": "sum", "upper": 3.0}, [[1, 1, 0], [0, 0, 0]]),
        ({"aggregate": "mean", "upper": 1.5}, [[1, 1, 0], [0, 0, 0]]),
        ({"aggregate": "min", "lower": 0.75}, [[0, 0, 0], [1, 1, 1]]),
        ({"aggregate": "max", "upper": 3.0}, [[1, 1, 0], [0, 0, 0]]),
        ({"statistic": "k1", "upper": 0.5}, [[1, 0, 0], [1, 1, 1]]),
        ({"statistic": "log-ratio", "upper": 1.0}, [[1, 1, 0], [0, 1, 1]]),
        ({"statistic": "k2", "upper": 0.5}, [[1, 1, 0], [0, 1, 1]]),
        # k3 of 2, 1/2 and 4: 0.307, 0.193, 1.614
        ({"statistic": "k3", "upper": 0.25}, [[0, 1, 0], [0, 1, 1]]),
        ({"statistic": "tv", "upper": 0.3}, [[1, 1, 0], [0, 1, 1]]),
        ({"statistic": "probability-change", "lower": -0.1}, [[1, 0, 0], [1, 1, 1]]),
        # p 0.5, q 0.25: 0.144 (and the reverse 0.131); q 0.125: 0.321
        ({"statistic": "binary-kl", "upper": 0.2}, [[1, 1, 0], [0, 1, 1]]),
        ({"upper": 1.5, "advantages": "positive"}, [[0, 1, 0], [1, 1, 1]]),
        ({"upper": 1.5, "advantages": "negative"}, [[1, 1, 0], [0, 1, 1]]),
    ],
)
def test_rejection(rejection: dict[str, Any], kept: Any) -> None:
    """Each statistic and each aggregate, and the sign of the advantages."""
    found = expected(rejections=(rejection,))
    assert kept == found.kept.astype(int).tolist()
    assert not found.undecided.any()


def test_a_statistic_at_its_bound_is_undecided() -> None:
    """Rounding could put a ratio of 2 on either side of a bound of 2."""
    found = expected(rejections=Rejection(upper=2.0))
    assert [[True, False, False], [False, False, False]] == found.undecided.tolist()
    assert ExpectedMetrics(found).value(Metric.REJECTED_FRACTION) is None


@pytest.mark.parametrize(
    ("stale", "kept"),
    [("drop", [[1, 1, 0], [1, 1, 0]]), ("drop-sequence", [[1, 1, 0], [0, 0, 0]])],
)
def test_tokens_that_are_too_old(stale: str, kept: Any) -> None:
    """Only the last token is more than two versions old."""
    assert kept == expected(max_staleness=2, stale=stale).kept.astype(int).tolist()


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("weights-mean", 1.5),
        ("weights-max", 3),
        ("weights-min", 0.5),
        ("sequence-weights-mean", (1.25 + 5 / 3) / 2),
        ("sequence-weights-max", 5 / 3),
        ("sequence-weights-min", 1.25),
        ("effective-samples", 7.5**2 / (5 * (4 + 0.25 + 9 + 1 + 1))),
        ("clipped-fraction", 0.2),
        ("above-fraction", 0.2),
        ("rejected-fraction", 0.2),
        ("rejected-sequences", 0.5),
        ("ratio-mean", 1.7),
        ("k1-mean", -math.log(4) / 5),
        ("k3-mean", (1 - 0.5 + 3 - math.log(4)) / 5),
        ("log-ratio-abs-mean", math.log(16) / 5),
        ("log-ratio-abs-max", math.log(4)),
        ("first-perplexity", (8**0.5 + 2) / 2),
        ("second-perplexity", (8**0.5 + 32 ** (1 / 3)) / 2),
    ],
)
def test_metrics(metric: str, value: float) -> None:
    """Each number, over the five trained tokens or the two sequences."""
    found = expected(upper=3.0, rejections=Rejection(upper=3.0))
    exact = ExpectedMetrics(found).value(Metric(metric))
    assert exact is not None
    assert pytest.approx(value, rel=1e-13) == exact[0]
    assert exact[1] < 1e-12


def test_every_metric_is_tested() -> None:
    """The table above has all of them."""
    table = test_metrics.pytestmark[0].args[1]  # type: ignore[attr-defined]  # set by pytest
    assert set(Metric) == {name for name, _ in table}


# the sums over tokens: of -w * A * c, of -w * min(s A, clip(s) A), of -w * A
_SUMS = {
    "reinforce": (
        -(2 * math.log(0.5) + 0.5 * math.log(0.5))
        + 2 * (4 * math.log(0.25) + math.log(0.5) + math.log(0.25))
    ),
    # s: 1, 2 (clipped at 1.2), and 1/2, 1, 1/2 (clipped at 0.8 for a negative advantage)
    "ppo": -(2 * 1 + 0.5 * 1.2) + 2 * (4 * 0.8 + 1 + 0.8),
    "surrogate": -(2.5) + 2 * 6,
}


@pytest.mark.parametrize("loss", _SUMS)
@pytest.mark.parametrize(("aggregation", "count"), [("token-mean", 5), ("token-sum", 1)])
def test_losses(loss: str, aggregation: str, count: int) -> None:
    """The three losses, as a sum and as a mean."""
    exact = ExpectedLoss(expected(loss=loss, aggregation=aggregation)).value
    assert exact is not None
    assert pytest.approx(_SUMS[loss] / count, rel=1e-13) == exact[0]


def test_the_denominator_of_a_loss() -> None:
    """A rejected token leaves the sum; the count depends on what is declared."""
    left = -(2.5) + 2 * 2
    for denominator, count in (("response", 5), ("kept", 4)):
        found = expected(loss="surrogate", denominator=denominator, rejections=Rejection(upper=3.0))
        exact = ExpectedLoss(found).value
        assert exact is not None
        assert pytest.approx(left / count, rel=1e-13) == exact[0]
    rows = expected(
        loss="surrogate",
        aggregation="sequence-mean",
        denominator="kept",
        rejections=Rejection(upper=3.0),
    )
    exact = ExpectedLoss(rows).value
    assert exact is not None
    assert pytest.approx((-2.5 / 2 + 4 / 2) / 2, rel=1e-13) == exact[0]


def test_gradients_of_weights() -> None:
    """That of a ratio is the ratio; none flows where it is clamped, and in a sequence all share."""
    factors = np.array([[1.0, 10.0, 7.0], [1.0, 1.0, 1.0]])
    token = expected(pair="current/rollout", gradient="current", upper=1.5)
    assert [[0, 10, 0], [0, 1, 0.5]] == token.pulled(factors).round(12).tolist()
    row = expected(pair="current/rollout", gradient="current", level="sequence")
    assert [[22, 22, 0], [3, 3, 3]] == row.pulled(factors).round(12).tolist()
    mean = expected(pair="current/rollout", gradient="current", level="geometric")
    np.testing.assert_allclose([[5.5 * 2**0.5] * 2 + [0], [1] * 3], mean.pulled(factors))
    assert not expected(pair="current/rollout").pulled(factors).any()


def test_types_round_as_hardware_does() -> None:
    """bfloat16 keeps 8 bits, ties to even; torch rounds alike."""
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -2.3, 1e-3, np.nan])
    found = as_type(values, FloatType.BFLOAT16)
    assert [1.0, 1 + 2.0**-6] == found[:2].tolist()
    assert np.isnan(found[4])
    torch = pytest.importorskip("torch")
    drawn = -np.random.default_rng(0).exponential(3.0, 2000)
    for kind in FloatType:
        ours = as_type(drawn, kind)
        theirs = torch.from_numpy(drawn).to(torch.float32 if kind != "float64" else torch.float64)
        theirs = theirs.to(getattr(torch, kind)).double().numpy()
        if kind is FloatType.FLOAT16:  # torch rounds twice on the way
            np.testing.assert_allclose(ours, theirs, rtol=2 * limits_of(kind).unit)
        else:
            assert ours.tolist() == theirs.tolist()


def test_rounding_stays_within_its_bound() -> None:
    """Sums and exponentials of each type, of random tokens, are within the derived error; and the
    bound is no more than a few hundred times what occurs: torch sums 16-bit numbers in 32 bits.
    """
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(1)
    for kind in (FloatType.FLOAT32, FloatType.BFLOAT16, FloatType.FLOAT16):
        for level in ("token", "sequence", "geometric"):
            rollout = as_type(-random.exponential(1.0, (40, 30)), kind)
            old = as_type(np.minimum(rollout + random.normal(0, 0.05, rollout.shape), 0), kind)
            inputs = Inputs(
                rollout=rollout,
                old=old,
                current=old,
                mask=np.ones(old.shape, np.int64),
                advantages=np.ones(old.shape),
                groups=np.zeros(40, np.int64),
                versions=np.zeros(old.shape, np.int64),
            )
            terms = CorrectionTerms(level=level, dtype=kind, arrays="torch")  # type: ignore[arg-type]  # texts
            exact = ExpectedCorrection(terms, inputs).weights
            type_ = getattr(torch, kind)
            gap = torch.from_numpy(old).to(type_) - torch.from_numpy(rollout).to(type_)
            if level != "token":
                gap = gap.sum(1, keepdim=True) if level == "sequence" else gap.mean(1, keepdim=True)
            off = np.abs(gap.exp().double().numpy() - exact.value)
            assert (off <= exact.error).all()
            assert (off / exact.error).max() > 1 / 300
