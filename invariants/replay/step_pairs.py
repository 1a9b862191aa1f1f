"""Pairs of steps: which earlier step a step must repeat, and how their results are compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from rollproof.core.events.replay import Action, Outcome
from rollproof.core.records import FloatArray
from rollproof.core.replay_contract import Recompute
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.replay.executed_rows import sound_rows
from rollproof.invariants.replay.steps import REFERENCE, StepView
from rollproof.judging.checks import Collector

__all__ = [
    "NEAR_TIE",
    "comparable",
    "compare",
    "differences",
    "gradient_differences",
    "kind_of",
    "loss_differences",
    "pair_of",
    "same_loss",
    "sketches",
    "unrepeated",
]

NEAR_TIE = 1e-8
"""The largest tolerance under which routing is taken to repeat: scores of float64 that differ by
less are a tie about once in a hundred million rows.
"""


def differences(
    view: StepView, other: StepView, tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """Yield the differences of two results: name, expected, observed."""
    first, second = view.outcome, other.outcome
    assert first is not None
    assert second is not None
    yield from loss_differences(first, second, tolerance)
    yield from gradient_differences(first, second, tolerance)


def same_loss(view: StepView, other: StepView) -> bool:
    """Return whether two steps reported a loss, and the same one."""
    first, second = view.outcome, other.outcome
    if first is None or second is None or first.loss is None or second.loss is None:
        return False
    return not list(loss_differences(first, second, view.terms.tolerance))


def loss_differences(
    first: Outcome, second: Outcome, tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """Yield the ``differences`` of loss and logprobs."""
    if (
        first.loss is not None
        and second.loss is not None
        and _differing(np.array([first.loss]), np.array([second.loss]), tolerance).any()
    ):
        yield "loss", repr(second.loss), repr(first.loss)
    for name in sorted(first.logprobs.keys() & second.logprobs.keys()):
        own, others = first.logprobs[name], second.logprobs[name]
        if own.shape != others.shape:
            yield f"logprobs of {name}", count(len(others), "logprob"), count(len(own), "logprob")
            continue
        wrong = _differing(own, others, tolerance)
        if not wrong.any():
            continue
        # a NaN in one of the two is further off than any number
        with np.errstate(invalid="ignore"):
            distance = np.nan_to_num(np.abs(own - others), nan=np.inf)
        worst = int(np.where(wrong, distance, -np.inf).argmax())
        yield (
            f"logprobs of {name}",
            f"{float(others[worst])!r} for response token {worst}",
            f"{float(own[worst])!r}",
        )


def gradient_differences(
    first: Outcome, second: Outcome, tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """Yield the ``differences`` of gradients: by the distance of their sketches, relative to their
    norms.
    """
    own, others = sketches(first), sketches(second)
    if not own or not others:
        return
    # Tiny gradients are compared relative to the largest one, else rounding would count.
    scale = max(
        (float(sketch[0]) for sketch in others.values() if np.isfinite(sketch[0])), default=0.0
    )
    for name in sorted({*own, *others}):
        if name not in own or name not in others:
            if float((own if name in own else others)[name][0]) == 0.0:
                # No gradient, or one of zeros: an expert that ran only for rows without a loss.
                continue
            yield (
                f"gradient of {name}",
                "a gradient" if name in others else "none",
                "none" if name in others else "a gradient",
            )
            continue
        x, y = own[name], others[name]
        # Bit-identical results are the rule for deterministic trainers, and need no tolerance.
        if np.array_equal(x, y, equal_nan=True):
            continue
        distance = _distance(x, y) / max(float(x[0]), float(y[0]), 1e-3 * scale, 1e-300)
        if not distance <= tolerance:
            yield (
                f"gradient of {name}",
                f"norm {y[0]:.9g}",
                f"norm {x[0]:.9g}, at a relative distance of {distance:.2g}",
            )


def sketches(outcome: Outcome) -> dict[str, FloatArray]:
    """Return all sketches that a step reported, by name."""
    return {
        **outcome.gradients,
        **{f"the gate of layer {layer}": sketch for layer, sketch in outcome.gates.items()},
    }


def _distance(x: FloatArray, y: FloatArray) -> float:
    """Estimate the norm of the difference of two gradients from their sketches."""
    return float(np.sqrt(np.mean((x[1:] - y[1:]) ** 2)))


def _differing(x: FloatArray, y: FloatArray, tolerance: float) -> npt.NDArray[np.bool_]:
    return np.asarray(~np.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True))


def unrepeated(view: StepView) -> str | None:
    """Return why results of this trainer cannot be compared: two native steps differ although only
    native ones came before.

    It is checked in every step; once learned, it holds for the rest of the trace.
    """
    other, before = view.same_as, takewhile(lambda step: step is not view, view.before.values())
    if (
        other is not None
        and "unrepeated" not in view.learned
        and all(_is_native(step) for step in (view, *before))
    ):
        found = (
            next(differences(view, other, view.terms.tolerance), None)
            if view.done and other.done
            else None
        )
        if found is not None:
            view.learned["unrepeated"] = (
                f"step {view.step.name!r} repeats {other.step.name!r} without any replay"
                f" before it, and its {found[0]} is {found[2]}, not {found[1]}: seed random"
                " numbers, restore state that a step updates, or declare a tolerance"
            )
    return view.learned.get("unrepeated")


def _is_native(view: StepView) -> bool:
    step = view.step
    return (
        step.action is Action.NATIVE
        and view.ordinary
        and step.model == "policy"
        and step.recompute is Recompute.NONE
    )


def kind_of(view: StepView) -> str | None:
    """Return which promise requires a step to repeat an earlier one, or ``None``."""
    other = view.same_as
    if other is None:
        return None
    step = view.step
    # The reference path shares nothing with the replay code, so it is its own kind of pair.
    if step.variant == REFERENCE:
        return "reference"
    if not view.regular or step.fail_at is not None:
        return None
    if step.model != "policy":
        return "models"
    if step.recompute is not Recompute.NONE and other.step.recompute is Recompute.NONE:
        return "recomputed"
    if step.action is Action.OFF:
        return "off"
    return (
        "self"
        if step.action is Action.REPLAY and other.step.action is not Action.REPLAY
        else "aftermath"
    )


def pair_of(view: StepView, kind: str, out: Collector) -> StepView | None:
    """Return the step that a step of ``kind`` must repeat; if one of them has no results, report it
    and return ``None``.
    """
    reason, other = unrepeated(view), view.same_as
    if other is None or kind_of(view) != kind:
        return None
    if reason is not None:
        out.absent(reason)
        return None
    for step in (view, other):
        if not step.done:
            out.absent(step.hindrance or f"step {step.step.name!r} ended with an error")
            return None
    return other


def comparable(view: StepView, other: StepView, out: Collector) -> bool:
    """Return whether two steps reported something that can be compared; if not, report it."""
    first, second = view.outcome, other.outcome
    assert first is not None
    assert second is not None
    losses = first.loss is not None and second.loss is not None
    if (
        losses
        or first.logprobs.keys() & second.logprobs.keys()
        or (sketches(first) and sketches(second))
    ):
        return True
    out.absent("the subject reports neither loss nor logprobs nor gradients of such steps")
    return False


def compare(
    view: StepView,
    other: StepView,
    found: list[tuple[str, str, str]],
    out: Collector,
    *,
    title: str,
    hint: str,
) -> None:
    """Report the differences of two steps together, the first one in full; ``hint`` is for steps
    with right rows.
    """
    if found:
        name, expected, observed = found[0]
        wrong_step = next(
            (
                step.step.name
                for step in (view, other)
                if step.replays and step.regular and not sound_rows(step)
            ),
            None,
        )
        more = (
            f"; {count(len(found) - 1, 'more value')} differ, among them the {found[-1][0]}"
            if len(found) > 1
            else ""
        )
        out.finding(
            title,
            expected=f"the {name} of step {other.step.name!r}: {expected}",
            observed=f"{observed}{more}",
            where=view.place(),
            hint=(
                hint
                if wrong_step is None
                else (
                    f"Routers of step {wrong_step!r} executed other experts than their"
                    " targets, and this follows from it: see replay.forward and"
                    " replay.assignments."
                )
            ),
        )
