"""``replay.gate-slope``: a gradient is the slope of the loss, within what rounding and curvature
explain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Outcome, Step
from rollproof.core.trace import Trace
from rollproof.core.trainer_contract import terms_of
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.replay.driver import record_replay
from rollproof.verification.traces import judge
from tests.support.replay_verdicts import CHECKS

_Gates: TypeAlias = "tuple[float, float, float] | None"
"""The sketch of the gradient of layer 0: its norm, along the nudge, along another direction."""
_SIZE = 0.25
_MIDDLE, _UP, _DOWN = "replay, drifted", "layer 0 nudged up", "layer 0 nudged down"


@pytest.fixture(scope="module")
def drift() -> Trace:
    """The steps of a reference trainer, with a nudge of the gate of layer 0 alone."""
    trace = record_replay(ReplayTrainer, only=["drift"])
    return trace.with_events(_of_one_layer(trace))


def _of_one_layer(trace: Trace) -> Iterator[Event]:
    nudged = True
    for event in trace.events:
        if isinstance(event, Step):
            nudged = event.nudge_layer in (None, 0)
        if nudged:
            yield (
                replace(event, nudge=_SIZE * float(np.sign(event.nudge)))
                if isinstance(event, Step)
                else event
            )


def _slope(
    drift: Trace,
    *,
    losses: tuple[float | None, float | None],
    gradient: _Gates,
    up: _Gates = None,
    down: _Gates = None,
    **terms: Any,
) -> CheckResult:
    """What the check says of the losses after a nudge up and down, and of gradients."""
    results = {_MIDDLE: (None, gradient), _UP: (losses[0], up), _DOWN: (losses[1], down)}

    def changed(event: Event) -> Event:
        if not isinstance(event, Outcome) or event.step not in results:
            return event
        loss, gates = results[event.step]
        return replace(event, loss=loss, gates={} if gates is None else {0: np.array(gates)})

    trace = drift.with_events([changed(event) for event in drift.events])
    contract = drift.header.contract
    contract = replace(contract, replay=replace(terms_of(contract), **terms))
    trace = replace(trace, header=replace(trace.header, contract=contract))
    return judge(trace, CHECKS)["replay.gate-slope"]


def _passes(result: CheckResult) -> bool:
    """Whether a comparison passed; if it was none, the test fails."""
    assert 1 == result.exercised["finite differences"], result
    assert result.verdict in (Verdict.PASS, Verdict.FAIL)
    return result.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("losses", "slope"),
    [((1.0, 0.5), 1), ((0.5, 1.0), -1), ((-0.5, -1.0), 1), ((-1.0, -0.5), -1)],
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_rounding_of_a_loss_is_allowed(
    drift: Trace, losses: tuple[float, float], slope: int, sign: int
) -> None:
    """A loss of two digits is off by 0.01 of the larger one, on both sides, over a nudge of 0.25:
    0.08, next to a twentieth of the slope.
    """
    near, far = slope + sign * 0.129, slope + sign * 0.131
    assert _passes(_slope(drift, losses=losses, gradient=(1, near, 7), float_digits=2))
    result = _slope(drift, losses=losses, gradient=(1, far, 7), float_digits=2)
    assert not _passes(result)
    (finding,) = result.findings
    assert "the gradient of a gate is not the slope of the loss" == finding.title
    assert (
        f"{slope} along the nudge of the gate (a central difference of the replayed loss, +- 0.13)"
        == finding.expected
    )
    assert f"{far:.6g}, on average over the nudge" == finding.observed
    assert {"episode": "drift", "step": _MIDDLE, "layer": 0} == dict(finding.where)


@pytest.mark.parametrize(
    ("norm", "tolerance", "allowed"),
    [(0.5, 0.0, 0.05), (1, 0.04, 0.05), (1, 0.2, 0.2), (4, 0.0, 0.2), (4, 0.1, 0.4)],
)
def test_a_share_of_the_norm_or_the_slope_is_allowed(
    drift: Trace, norm: float, tolerance: float, allowed: float
) -> None:
    """Of the larger of the two: a twentieth, or the tolerance of the contract."""
    for gap, passes in ((-0.99, True), (0.99, True), (-1.01, False), (1.01, False)):
        gradient = (norm, 1 + gap * allowed, 7)
        result = _slope(drift, losses=(1.0, 0.5), gradient=gradient, tolerance=tolerance)
        assert passes is _passes(result), (gap, result)


@pytest.mark.parametrize(
    ("slope", "passes"), [(1.7, True), (1.72, False), (1.31, True), (1.29, False)]
)
def test_a_gradient_that_bends_is_averaged(drift: Trace, slope: float, passes: bool) -> None:
    """By Simpson's rule: of 4, 1 and 1 it is 1.5, and a quarter of the bend 0.5 is allowed."""
    for ends in ((4, 1), (1, 4), (2.5, 2.5)):
        up, down = ((1.0, end, 9.0) for end in ends)
        result = _slope(
            drift, losses=(slope / 2, 0.0), gradient=(1, 1, 7), up=up, down=down, tolerance=0.0
        )
        assert passes is _passes(result)
        if not passes:
            assert "1.5, on average over the nudge" == result.findings[0].observed
    # of 4, 1 and -2 it is the one in the middle, and nothing bends
    straight: dict[str, Any] = {"up": (1.0, 4.0, 9.0), "down": (1.0, -2.0, 9.0)}
    for middle, passes in ((1.04, True), (1.06, False)):
        result = _slope(
            drift,
            losses=(middle / 2, 0.0),
            gradient=(1, 1, 7),
            **straight,
        )
        assert passes is _passes(result)


@pytest.mark.parametrize("end", ["up", "down"])
def test_without_the_gradient_of_both_ends_the_middle_counts(drift: Trace, end: str) -> None:
    """One end alone says nothing of a bend."""
    lonely: dict[str, Any] = {end: (1.0, 9.0, 9.0)}
    for gradient, passes in ((1.04, True), (1.06, False)):
        result = _slope(
            drift,
            losses=(0.5, 0.0),
            gradient=(1, gradient, 7),
            **lonely,
        )
        assert passes is _passes(result)


@pytest.mark.parametrize(
    ("digits", "high", "norm", "verdict"),
    [
        (2, 3.6, 1, Verdict.PASS),
        (2, 5.0, 1, Verdict.NOT_APPLICABLE),
        (2, 5.0, 2, Verdict.PASS),
        (4, 360.0, 1, Verdict.PASS),
        (4, 500.0, 1, Verdict.NOT_APPLICABLE),
        (5, 3600.0, 1, Verdict.PASS),
        (5, 5000.0, 1, Verdict.UNKNOWN),
    ],
)
def test_a_loss_of_few_digits_shows_no_slope(
    drift: Trace, digits: int, high: float, norm: float, verdict: Verdict
) -> None:
    """If its rounding is more than 0.3 of the slope, or of the norm. By design if the type has
    four digits at most; else the loss is too large.
    """
    for losses, slope in (((high, high - 0.5), 1), ((high - 0.5, high), -1)):
        result = _slope(drift, losses=losses, gradient=(norm, slope, 7), float_digits=digits)
        assert verdict is result.verdict, result
        if verdict is not Verdict.PASS:
            assert (
                f"a loss of {digits} digits (float_digits) has too few for a finite difference"
                in result.reason
            )


def test_a_loss_of_zero_has_the_slope_zero(drift: Trace) -> None:
    """Without any advantage there is no loss, and no gradient: they agree, exactly."""
    assert _passes(_slope(drift, losses=(0.0, 0.0), gradient=(0, 0, 0)))


def test_what_is_not_a_number_is_no_slope(drift: Trace) -> None:
    """Neither of a gradient nor of a loss."""
    nan = float("nan")
    assert not _passes(_slope(drift, losses=(1.0, 0.5), gradient=(1, nan, 7)))
    assert not _passes(_slope(drift, losses=(nan, 0.5), gradient=(1, 1, 7)))


@pytest.mark.parametrize(
    ("losses", "gradient"),
    [((None, 0.5), (1, 1, 7)), ((1.0, None), (1, 1, 7)), ((1.0, 0.5), None)],
)
def test_without_a_loss_or_a_gradient_there_is_nothing_to_compare(
    drift: Trace, losses: tuple[float | None, float | None], gradient: _Gates
) -> None:
    """Whichever is missing."""
    result = _slope(drift, losses=losses, gradient=gradient)
    assert Verdict.UNKNOWN is result.verdict
    assert "the subject reports no loss, or no gradients of its gates" in result.reason


@pytest.mark.parametrize("step", [_UP, _MIDDLE])
def test_a_step_without_results_leaves_the_slope_open(drift: Trace, step: str) -> None:
    """The nudge up, or the step that the nudge begins at."""
    events = [
        replace(event, error="OutOfMemory")
        if isinstance(event, Outcome) and event.step == step
        else event
        for event in drift.events
    ]
    result = judge(drift.with_events(events), CHECKS)["replay.gate-slope"]
    assert Verdict.UNKNOWN is result.verdict
    assert "a step that the finite difference needs has no results" in result.reason
