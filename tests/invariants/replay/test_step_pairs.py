"""How the results of two steps are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rollproof.core.events.replay import Outcome
from rollproof.invariants.replay.step_pairs import gradient_differences, loss_differences

_NAN, _INF = float("nan"), float("inf")


def _gradients(**sketches: Sequence[float]) -> Outcome:
    arrays = {name: np.array(sketch, dtype=np.float64) for name, sketch in sketches.items()}
    return Outcome(step="s", gradients=arrays)


def _logprobs(*values: float) -> Outcome:
    return Outcome(step="s", logprobs={"r": np.array(values)})


@pytest.mark.parametrize(
    ("large", "distance"),
    [((1000, 1, 2), "0.5"), ((2000, 1, 2), "0.25"), ((_INF, 1, 2), "5"), ((_NAN, 1, 2), "5")],
)
def test_a_small_gradient_is_compared_with_the_largest(
    large: tuple[float, ...], distance: str
) -> None:
    """Relative to a thousandth of the largest finite norm, if its own is smaller."""
    own, others = (
        _gradients(large=large, small=(0.1, 1, 0)),
        _gradients(large=large, small=(0.05, 0.5, 0.5)),
    )
    assert [
        (
            "gradient of small",
            "norm 0.05",
            f"norm 0.1, at a relative distance of {distance}",
        )
    ] == list(gradient_differences(own, others, 0.2))
    assert [] == list(gradient_differences(own, others, float(distance)))


def test_without_a_finite_norm_a_gradient_is_compared_with_its_own() -> None:
    """A norm that is not a number gives no scale."""
    own, others = _gradients(a=(1e-6, 1, 1)), _gradients(a=(_NAN, 0, 0))
    (found,) = gradient_differences(own, others, 0.1)
    assert "norm 1e-06, at a relative distance of 1e+06" == found[2]


def test_the_largest_gradient_is_that_of_the_earlier_step() -> None:
    """A later one that has grown hides no difference, and neither does one that shrank."""
    own = _gradients(large=(1, 1), small=(0, 0.5))
    others = _gradients(large=(1000, 1), small=(0, 1))
    assert [("gradient of small", "norm 0", "norm 0, at a relative distance of 0.5")] == list(
        gradient_differences(own, others, 0.4)
    )
    assert [("gradient of small", "norm 0", "norm 0, at a relative distance of 5e+02")] == list(
        gradient_differences(others, own, 0.4)
    )


def test_a_gradient_of_zeros_may_be_missing_and_another_one_may_not() -> None:
    """Whichever of the two steps reports it, and whatever comes before it by name."""
    zeros, both = (0.0, 0.0, 0.0), (1.0, 0.5, 0.5)
    for more, lost in (((1.0, 0.0, 0.0), True), (zeros, False)):
        full, few = _gradients(a=zeros, b=more, c=both), _gradients(c=both)
        missing = [("gradient of b", "a gradient", "none")] * lost
        assert missing == list(gradient_differences(few, full, 0.0))
        surplus = [("gradient of b", "none", "a gradient")] * lost
        assert surplus == list(gradient_differences(full, few, 0.0))


def test_equal_gradients_hide_none_that_follows() -> None:
    """NaN at the same place is equal, too."""
    own = _gradients(a=(1, 2), b=(_NAN, _NAN), c=(1, 2))
    others = _gradients(a=(1, 2), b=(_NAN, _NAN), c=(1, 3))
    assert ["gradient of c"] == [found[0] for found in gradient_differences(own, others, 0.5)]
    lost = _gradients(a=(1, 2), b=(1, 2), c=(1, 2))
    assert ["gradient of b"] == [found[0] for found in gradient_differences(own, lost, 0.5)]


def test_without_gradients_of_both_steps_none_is_missing() -> None:
    """An adapter may not reach them in every step."""
    some, none = _gradients(a=(1, 2)), _gradients()
    assert [] == list(gradient_differences(some, none, 0.0))
    assert [] == list(gradient_differences(none, some, 0.0))


def test_the_distance_of_gradients_is_that_of_their_projections() -> None:
    """The root of the mean square, relative to the larger norm, without the norms themselves."""
    own, others = _gradients(a=(2, 1, 1)), _gradients(a=(4, 3, 3))
    for first, second in ((own, others), (others, own)):
        (found,) = gradient_differences(first, second, 0.49)
        assert found[2].endswith("at a relative distance of 0.5")
        assert [] == list(gradient_differences(first, second, 0.5))
    assert [] == list(gradient_differences(_gradients(a=(2, 1)), _gradients(a=(4, 1)), 0.0))


@pytest.mark.parametrize(
    ("own", "others", "token"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2.5, 4), (1, 2, 3), 2),
        ((1, 0, 3.5), (1, 2, 3), 1),
        ((_NAN, 2, 3), (_NAN, 2, 3), None),
        ((_NAN, 2, 4), (_NAN, 2, 3), 2),
        ((9, _NAN, 3), (1, 2, 3), 1),
        ((_NAN, 2, _NAN), (_NAN, 2, 3), 2),
        ((_INF, 2, 3), (_INF, 2, 3), None),
        ((_INF, 2, 4), (_INF, 2, 3), 2),
        ((1, 2, -_INF), (0, 2, _INF), 2),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_the_logprob_that_differs_by_the_largest_amount_is_shown(
    own: tuple[float, ...], others: tuple[float, ...], token: int | None, tolerance: float
) -> None:
    """It is one that differs: not a NaN or an infinite value that both steps have."""
    found = list(loss_differences(_logprobs(*own), _logprobs(*others), tolerance))
    if token is None:
        assert [] == found
        return
    shown = (f"{float(others[token])!r} for response token {token}", repr(float(own[token])))
    assert [("logprobs of r", *shown)] == found


def test_losses_and_logprobs_differ_beyond_the_tolerance() -> None:
    """Absolute or relative to the earlier value; without a tolerance by the last bit."""

    def names(first: float, second: float, tolerance: float) -> list[str]:
        own, others = (
            Outcome(step="s", loss=value, logprobs={"r": np.array([value])})
            for value in (first, second)
        )
        return [found[0] for found in loss_differences(own, others, tolerance)]

    both = ["loss", "logprobs of r"]
    assert [] == names(0.1, 0.1, 0.0)
    assert both == names(0.1, float(np.nextafter(0.1, 1)), 0.0)
    assert [] == names(1000.0, 1000.9, 1e-3)
    assert both == names(1000.0, 1001.1, 1e-3)
    assert [] == names(0.0, 0.0009, 1e-3)
    assert both == names(0.0, 0.0011, 1e-3)
    # a loss or logprobs of one step alone are no difference
    with_loss, with_logprobs = Outcome(step="s", loss=2.0), _logprobs(1.0)
    assert [] == list(loss_differences(with_loss, with_logprobs, 0.0))
    assert [] == list(loss_differences(with_logprobs, with_loss, 0.0))


def test_logprobs_of_another_number_are_counted() -> None:
    """And those of further samples are compared."""
    first = Outcome(step="s", logprobs={"a": np.zeros(1), "b": np.zeros(2), "c": np.ones(1)})
    second = Outcome(step="s", logprobs={"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(1)})
    assert [
        ("logprobs of a", "2 logprobs", "1 logprob"),
        ("logprobs of c", "0.0 for response token 0", "1.0"),
    ] == list(loss_differences(first, second, 0.0))
