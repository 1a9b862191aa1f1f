"""Replay gates: under replay the experts are given, and their weights are still the live router's,
with a gradient.
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

_LIKE_A_REFERENCE = 1e-3
"""The largest relative difference to a path that computes in another order."""
_SLOPE = 0.05
"""The largest relative difference of a gradient to a finite difference."""
_NO_GRADIENT = (
    "no native step shows that the gates have gradients at all: where they are not trained, the"
    " contract declares trains_gates=False"
)
_FEW_DIGITS = 4
"""A loss of at most so many digits (bfloat16 has 2) resolves no slope."""


def _trains_gates(contract: Contract) -> str | None:
    return (
        None
        if terms_of(contract).trains_gates
        else "the contract declares trains_gates=False: gates have no gradient"
    )


def _chooses(contract: Contract) -> str | None:
    return (
        "every row executes all experts: there is no other choice"
        if contract.top_k == contract.num_experts
        else None
    )


@replay_check(
    "replay.drift",
    promise="Under weights that route otherwise, replay changes the results.",
    exercised_by="drifted replays",
    applies=_chooses,
)
def replay_drift(view: StepView, out: Collector) -> None:
    other = view.differs_from
    if other is None or not view.regular:
        return
    for one in (view, other):
        if not one.done:
            out.absent(one.hindrance or f"step {one.step.name!r} ended with an error")
            return
    if not comparable(view, other, out):
        return
    native = native_choice(view)
    if native is None:
        out.absent("what the routers choose by themselves is not known")
        return
    targets = view.targets
    moved = (
        (np.sort(targets.experts, axis=2) != np.sort(native, axis=2)).any(axis=2)
        & targets.known
        & (native >= 0).all(axis=2)
    )
    # a row of the final token reaches no loss, so rerouting it alone need not show
    if moved.sum() < 0.05 * targets.known.sum():
        out.absent(
            f"only {share(int(moved.sum()), int(targets.known.sum()), 'row')} would route"
            " otherwise: the weights drift too little"
        )
        return
    out.exercised("drifted replays")
    if not list(differences(view, other, 0.0)):
        out.finding(
            "replay changes nothing",
            expected=(
                f"other results than those of step {other.step.name!r}:"
                f" {share(int(moved.sum()), int(targets.known.sum()), 'row')} have a target that is"
                " not the router's own choice"
            ),
            observed="the same loss, logprobs and gradients, bit for bit",
            where=view.place(),
            hint=(
                "Replay is a silent no-op: a flag that nobody reads, targets for routers that are"
                " not in use (verl#4567, verl#7340), or a fused router that returns before it looks"
                " at its target."
            ),
        )


@replay_check(
    "replay.gate-gradients",
    promise="Under replay the gradient of every gate is alive, whatever is replayed.",
    exercised_by="gates",
    applies=_trains_gates,
)
def replay_gate_gradients(view: StepView, out: Collector) -> None:
    if (
        not view.replays
        or not view.ordinary
        or not view.done
        or not view.step.backward
        or view.outcome is None
    ):
        return
    if not view.outcome.gates:
        out.absent("the subject tells no gradients of its gates")
        return
    alive = _living(view)
    for layer, sketch in sorted(view.outcome.gates.items()):
        if layer not in alive:
            out.absent(_NO_GRADIENT)
            continue
        out.exercised("gates")
        if not sketch[0] > 0:
            out.finding(
                "the gradient of a gate is dead",
                expected=f"a gradient, as in native steps (norm {alive[layer]:.3g})",
                observed=f"norm {sketch[0]:.3g}",
                where=view.place(layer=layer),
                hint=(
                    "Gate values must be gathered from live scores of all experts: after a native"
                    " top-k the others are zero, and with them the gates of a drifted replay"
                    " (ISEEKYAN/Megatron-LM#49, #79); recorded scores have no graph."
                ),
            )


def _living(view: StepView) -> dict[int, float]:
    """The norm of each gate's gradient in the native steps before, where there is one."""
    alive: dict[int, float] = {}
    for other in view.before.values():
        if (
            other.done
            and other.outcome is not None
            and other.step.action is Action.NATIVE
            and other.step.model == "policy"
        ):
            alive |= {
                layer: float(sketch[0])
                for layer, sketch in other.outcome.gates.items()
                if sketch[0] > 0
            }
    return alive


@replay_check(
    "replay.gate-slope",
    promise="The gradient of a gate is the slope of the replayed loss.",
    exercised_by="finite differences",
    applies=_trains_gates,
)
def replay_gate_slope(view: StepView, out: Collector) -> None:
    step, reason = view.step, unrepeated(view)
    if step.nudge >= 0 or not view.replays or step.nudge_layer is None:
        return
    if not view.done:
        _excuse(view, out, "nudge")
        return
    layer, size = step.nudge_layer, -step.nudge
    if reason is not None or layer not in _living(view):
        out.absent(reason or _NO_GRADIENT)
        return
    up = next(
        (
            one
            for one in view.before.values()
            if one.step.nudge == size and one.step.nudge_layer == layer and one.done
        ),
        None,
    )
    base = next(
        (
            one
            for one in view.before.values()
            if one.done and one.step.backward and _same_ask(one, view)
        ),
        None,
    )
    if (
        up is None
        or base is None
        or base.outcome is None
        or up.outcome is None
        or view.outcome is None
    ):
        out.absent("a step that the finite difference needs has no results")
        return
    if not all(sound_rows(one) for one in (up, base, view)):
        out.absent("the steps of the finite difference executed other experts than their targets")
        return
    sketch, high, low = base.outcome.gates.get(layer), up.outcome.loss, view.outcome.loss
    if sketch is None or high is None or low is None:
        out.absent("the subject tells no loss, or no gradients of its gates")
        return
    told, bend = _averaged(sketch, up.outcome.gates.get(layer), view.outcome.gates.get(layer))
    slope = (high - low) / (2 * size)
    rounding = 2 * max(abs(high), abs(low)) * 10.0**-view.terms.float_digits / size
    allowed = (
        max(_SLOPE, view.terms.tolerance) * max(float(sketch[0]), abs(slope)) + rounding + bend / 4
    )
    if rounding > 0.3 * max(float(sketch[0]), abs(slope)):
        few = (
            f"a loss of {view.terms.float_digits} digits (float_digits) has too few for a finite"
            " difference"
        )
        (out.inapplicable if view.terms.float_digits <= _FEW_DIGITS else out.absent)(few)
        return
    out.exercised("finite differences")
    if not abs(slope - told) <= allowed:
        out.finding(
            "the gradient of a gate is not the slope of the loss",
            expected=(
                f"{slope:.6g} along the nudge of the gate (a central difference of the replayed"
                f" loss, +- {allowed:.2g})"
            ),
            observed=f"{told:.6g}, on average over the nudge",
            where={**base.place(layer=layer)},
            hint=(
                "Gate values must keep their graph from live scores to output; recorded or detached"
                " scores, and a normalisation over other experts than those that are executed,"
                " break it. A loss that acts in the backward pass alone (Megatron's auxiliary and"
                " z-losses) belongs into the loss that is told, or is switched off for this;"
                " gradients are told unclipped and unscaled."
            ),
        )


def _averaged(
    middle: npt.NDArray[np.float64],
    up: npt.NDArray[np.float64] | None,
    down: npt.NDArray[np.float64] | None,
) -> tuple[float, float]:
    """The gradient along the nudge, averaged over it by Simpson's rule, and how far it bends.

    A loss is not straight within a nudge that its digits can resolve: on a small Megatron model the
    gradient went from -17 to 58.
    """
    if up is None or down is None:
        return float(middle[1]), 0.0
    ends = float(up[1]) + float(down[1])
    return (ends + 4 * float(middle[1])) / 6, abs(ends - 2 * float(middle[1])) / 6


def _same_ask(one: StepView, view: StepView) -> bool:
    """Whether a step replays the same routes of the same samples under the same weights, without a
    nudge.
    """
    if (
        not one.replays
        or not one.regular
        or one.step.nudge
        or one.step.weights != view.step.weights
    ):
        return False
    mine, theirs = view.targets, one.targets
    return mine.lengths == theirs.lengths and np.array_equal(mine.experts, theirs.experts)


@replay_check(
    "replay.reference",
    promise=(
        "A replayed step under drifted weights gives what a path gives that shares nothing with the"
        " replay code."
    ),
    exercised_by="steps compared",
)
def replay_reference(view: StepView, out: Collector) -> None:
    if view.step.variant == REFERENCE and view.outcome is not None and view.outcome.skipped:
        _excuse(view, out, "reference")
        return
    other = pair_of(view, "reference", out)
    if other is None or not comparable(view, other, out):
        return
    assert view.outcome is not None and other.outcome is not None
    out.exercised("steps compared")
    # A reference may tell more: who tells of gates alone is compared by gates.
    reference = view.outcome if other.outcome.gradients else replace(view.outcome, gradients={})
    tolerance = max(_LIKE_A_REFERENCE, view.terms.tolerance)
    found = [
        *loss_differences(other.outcome, reference, tolerance),
        *gradient_differences(other.outcome, reference, tolerance),
    ]
    compare(
        other,
        view,
        found,
        out,
        title="replay gives other results than the reference",
        hint=(
            "The right experts are executed with the wrong gates, or on the wrong rows: look at the"
            " normalisation, at biases, at scaling factors."
        ),
    )


def _excuse(view: StepView, out: Collector, method: str) -> None:
    """A step that an optional method is needed for was skipped: where the subject has none, there
    is nothing to decide.
    """
    reason = view.hindrance or "it ended with an error"
    if "the subject has no" in reason:
        out.inapplicable(f"{reason} (the optional method `{method}`)")
    else:
        out.absent(reason)
