"""Checks on gates: under replay the experts are fixed, and their weights are still the live
router's, with a gradient.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Action
from rollproof.core.trainer_contract import terms_of
from rollproof.invariants._shared.phrases import share
from rollproof.invariants.replay.executed_rows import native_choice, sound_rows
from rollproof.invariants.replay.step_pairs import (
    comparable,
    compare,
    differences,
    gradient_differences,
    loss_differences,
    pair_of,
    unrepeated,
)
from rollproof.invariants.replay.steps import REFERENCE, StepView, replay_check
from rollproof.judging.checks import Collector

__all__ = [
    "replay_drift",
    "replay_gate_gradients",
    "replay_gate_slope",
    "replay_reference",
]

_REFERENCE_TOLERANCE = 1e-3
"""The largest relative difference to a code path that computes in another order."""
_SLOPE_TOLERANCE = 0.05
"""The largest relative difference of a gradient to a finite difference."""
_NO_GRADIENT = (
    "no native step shows that the gates have gradients: if they are not trained, declare"
    " trains_gates=False"
)
_UNJUDGED = "without it, the router weights of replayed experts are compared with nothing"
_MIN_DIGITS = 4
"""A loss of at most this number of digits (bfloat16 has 2) resolves no slope."""


def _trains_gates(contract: Contract) -> str | None:
    return (
        None
        if terms_of(contract).trains_gates
        else "the contract declares trains_gates=False: gates have no gradient"
    )


def _has_choice(contract: Contract) -> str | None:
    return (
        "every row executes all experts: there is no other choice"
        if contract.top_k == contract.num_experts
        else None
    )


@replay_check(
    "replay.drift",
    promise="Under weights that choose other experts, replay changes the results.",
    exercised_by="drifted replays",
    applies=_has_choice,
)
def replay_drift(view: StepView, out: Collector) -> None:
    """Compare a replay under drifted weights with a native step."""
    other = view.differs_from
    if other is None or not view.regular:
        return
    for step in (view, other):
        if not step.done:
            out.absent(step.hindrance or f"step {step.step.name!r} ended with an error")
            return
    if not comparable(view, other, out):
        return
    native = native_choice(view)
    if native is None:
        out.absent("the routers' own choice is not known")
        return
    targets = view.targets
    rerouted = (
        (np.sort(targets.experts, axis=2) != np.sort(native, axis=2)).any(axis=2)
        & targets.known
        & (native >= 0).all(axis=2)
    )
    # A row of the final token reaches no loss, so rerouting only that need not show.
    if rerouted.sum() < 0.05 * targets.known.sum():
        out.absent(
            f"only {share(int(rerouted.sum()), int(targets.known.sum()), 'row')} would choose"
            " other experts: the weights drift too little"
        )
        return
    out.exercised("drifted replays")
    # Tolerance 0: any difference shows that replay did something.
    if not list(differences(view, other, 0.0)):
        out.finding(
            "replay changes nothing",
            expected=(
                f"other results than those of step {other.step.name!r}:"
                f" {share(int(rerouted.sum()), int(targets.known.sum()), 'row')} have a target"
                " that is not the router's own choice"
            ),
            observed="the same loss, logprobs and gradients, bit for bit",
            where=view.place(),
            hint=(
                "Replay is a silent no-op: an unread flag, targets for unused routers"
                " (verl#4567, verl#7340), or a fused router that returns before it reads its"
                " target."
            ),
        )


@replay_check(
    "replay.gate-gradients",
    promise="Under replay the gradient of every gate is alive, whatever is replayed.",
    exercised_by="gates",
    applies=_trains_gates,
)
def replay_gate_gradients(view: StepView, out: Collector) -> None:
    """Check that the gradient of every gate is not zero."""
    if not view.replays or not view.ordinary or not view.done or not view.step.backward:
        return
    assert view.outcome is not None
    norms, gates = _native_norms(view), view.outcome.gates
    # Gradients of gates are optional in an outcome: an adapter may not reach them. One that native
    # steps report and a replay does not is gone.
    if not gates and not norms:
        out.absent("the subject reports no gradients of its gates")
        return
    for layer in sorted({*gates, *norms}):
        if layer not in norms:
            out.absent(_NO_GRADIENT)
            continue
        out.exercised("gates")
        # After a native top-k the scores of other experts are zero, and so are the gates of a
        # drifted replay (ISEEKYAN/Megatron-LM#49).
        norm = float(gates[layer][0]) if layer in gates else None
        if norm is None or not norm > 0:
            out.finding(
                "the gradient of a gate is dead",
                expected=f"a gradient, as in native steps (norm {norms[layer]:.3g})",
                observed="none" if norm is None else f"norm {norm:.3g}",
                where=view.place(layer=layer),
                hint=(
                    "Gate values must be gathered from live scores of all experts: after a native"
                    " top-k the others are zero, and with them the gates of a drifted replay"
                    " (ISEEKYAN/Megatron-LM#49, #79); recorded scores have no graph."
                ),
            )


def _native_norms(view: StepView) -> dict[int, float]:
    """Return the norm of each gate's gradient in earlier native steps, if there is one."""
    norms: dict[int, float] = {}
    for other in view.before.values():
        if other.done and other.step.action is Action.NATIVE and other.step.model == "policy":
            assert other.outcome is not None
            norms |= {
                layer: float(sketch[0])
                for layer, sketch in other.outcome.gates.items()
                if sketch[0] > 0
            }
    return norms


@replay_check(
    "replay.gate-slope",
    promise="The gradient of a gate is the slope of the replayed loss.",
    exercised_by="finite differences",
    applies=_trains_gates,
)
def replay_gate_slope(view: StepView, out: Collector) -> None:
    """Compare the gradient of a gate with a finite difference of the loss."""
    step, reason = view.step, unrepeated(view)
    if step.nudge >= 0 or not view.replays or step.nudge_layer is None:
        return
    if not view.done:
        _excuse(view, out, "nudge", "")
        return
    layer, size = step.nudge_layer, -step.nudge
    if reason is not None or layer not in _native_norms(view):
        out.absent(reason or _NO_GRADIENT)
        return
    up = next(
        (
            other
            for other in view.before.values()
            if other.step.nudge == size and other.step.nudge_layer == layer and other.done
        ),
        None,
    )
    base = next(
        (
            other
            for other in view.before.values()
            if other.done and other.step.backward and _same_request(other, view)
        ),
        None,
    )
    if up is None or base is None:
        out.absent("a step that the finite difference needs has no results")
        return
    assert base.outcome is not None
    assert up.outcome is not None
    assert view.outcome is not None
    if not all(sound_rows(other) for other in (up, base, view)):
        out.absent("the steps of the finite difference executed other experts than their targets")
        return
    sketch, high, low = base.outcome.gates.get(layer), up.outcome.loss, view.outcome.loss
    if sketch is None or high is None or low is None:
        out.absent("the subject reports no loss, or no gradients of its gates")
        return
    reported, bend = _averaged(sketch, up.outcome.gates.get(layer), view.outcome.gates.get(layer))
    # A central difference: the error is quadratic in the nudge.
    slope = (high - low) / (2 * size)
    # The loss of a bfloat16 trainer has two digits, which no small nudge changes.
    rounding = 2 * max(abs(high), abs(low)) * 10.0**-view.terms.float_digits / size
    allowed = (
        max(_SLOPE_TOLERANCE, view.terms.tolerance) * max(float(sketch[0]), abs(slope))
        + rounding
        + bend / 4
    )
    if rounding > 0.3 * max(float(sketch[0]), abs(slope)):
        reason = (
            f"a loss of {view.terms.float_digits} digits (float_digits) has too few for a finite"
            " difference"
        )
        (out.inapplicable if view.terms.float_digits <= _MIN_DIGITS else out.absent)(reason)
        return
    out.exercised("finite differences")
    if not abs(slope - reported) <= allowed:
        out.finding(
            "the gradient of a gate is not the slope of the loss",
            expected=(
                f"{slope:.6g} along the nudge of the gate (a central difference of the replayed"
                f" loss, +- {allowed:.2g})"
            ),
            observed=f"{reported:.6g}, on average over the nudge",
            where={**base.place(layer=layer)},
            hint=(
                "Gate values must keep their graph from live scores to output; recorded or"
                " detached scores, and a normalisation over other experts than the executed"
                " ones, break it. A loss that acts only in the backward pass (Megatron's"
                " auxiliary and z-losses) belongs into the reported loss, or must be off for"
                " this check; report gradients unclipped and unscaled."
            ),
        )


def _averaged(
    middle: npt.NDArray[np.float64],
    up: npt.NDArray[np.float64] | None,
    down: npt.NDArray[np.float64] | None,
) -> tuple[float, float]:
    """Return the gradient along the nudge, averaged by Simpson's rule, and its curvature."""
    if up is None or down is None:
        return float(middle[1]), 0.0
    # A loss is not straight within a nudge that its digits can resolve: on a small Megatron model
    # the gradient went from -17 to 58.
    ends = float(up[1]) + float(down[1])
    return (ends + 4 * float(middle[1])) / 6, abs(ends - 2 * float(middle[1])) / 6


def _same_request(base: StepView, view: StepView) -> bool:
    """Return whether a step replays the same routes of the same samples under the same weights,
    without a nudge.
    """
    if (
        not base.replays
        or not base.regular
        or base.step.nudge
        or base.step.weights != view.step.weights
    ):
        return False
    own, others = view.targets, base.targets
    return own.lengths == others.lengths and np.array_equal(own.experts, others.experts)


@replay_check(
    "replay.reference",
    promise=(
        "A replayed step under drifted weights gives the results of a code path that shares"
        " nothing with the replay code."
    ),
    exercised_by="steps compared",
)
def replay_reference(view: StepView, out: Collector) -> None:
    """Compare a replayed step with the subject's reference path."""
    if view.step.variant == REFERENCE and view.hindrance is not None:
        _excuse(view, out, "reference", f"; {_UNJUDGED}")
        return
    other = pair_of(view, "reference", out)
    if other is None or not comparable(view, other, out):
        return
    assert view.outcome is not None
    assert other.outcome is not None
    out.exercised("steps compared")
    # A reference may report more than the trainer: if it reports only gates, gates are compared.
    reference = view.outcome if other.outcome.gradients else replace(view.outcome, gradients={})
    tolerance = max(_REFERENCE_TOLERANCE, view.terms.tolerance)
    changes = [
        *loss_differences(other.outcome, reference, tolerance),
        *gradient_differences(other.outcome, reference, tolerance),
    ]
    compare(
        other,
        view,
        changes,
        out,
        title="replay gives other results than the reference",
        hint=(
            "The right experts are executed with the wrong gates or on the wrong rows: check"
            " normalisation, biases and scaling factors."
        ),
    )


def _excuse(view: StepView, out: Collector, method: str, unjudged: str) -> None:
    """Report why a step that needs an optional method was skipped: without the method there is
    nothing to judge.
    """
    reason = view.hindrance or f"step {view.step.name!r} ended with an error"
    if "the subject has no" in reason:
        out.inapplicable(f"{reason} (the optional method `{method}`){unjudged}")
    else:
        out.absent(reason)
