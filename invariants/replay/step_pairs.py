"""Replay laws: which earlier step a step must repeat, and how their results are compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from rollproof.core.events.replay import Action, Outcome
from rollproof.core.records import FloatArray
from rollproof.core.replay_contract import Recompute
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.replay.executed_rows import sound_rows
from rollproof.invariants.replay.steps import REFERENCE, StepView
from rollproof.judging.checks import Collector

__all__ = [
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


def differences(
    view: StepView, other: StepView, tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """What of two results is not alike: its name, what was expected, what was observed."""
    one, two = view.outcome, other.outcome
    assert one is not None and two is not None
    yield from loss_differences(one, two, tolerance)
    yield from gradient_differences(one, two, tolerance)


def same_loss(view: StepView, other: StepView) -> bool:
    """Whether two steps told a loss, and the same one."""
    one, two = view.outcome, other.outcome
    if one is None or two is None or one.loss is None or two.loss is None:
        return False
    return not list(loss_differences(one, two, view.terms.tolerance))


def loss_differences(
    one: Outcome, two: Outcome, tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """As ``differences``, of loss and logprobs."""
    if (
        one.loss is not None
        and two.loss is not None
        and not _alike(np.array([one.loss]), np.array([two.loss]), tolerance)
    ):
        yield "loss", repr(two.loss), repr(one.loss)
    for name in sorted(one.logprobs.keys() & two.logprobs.keys()):
        mine, theirs = one.logprobs[name], two.logprobs[name]
        if mine.shape != theirs.shape:
            yield f"logprobs of {name}", count(len(theirs), "logprob"), count(len(mine), "logprob")
        elif not _alike(mine, theirs, tolerance):
            worst = (
                int(np.nanargmax(np.abs(mine - theirs))) if np.isfinite(mine - theirs).any() else 0
            )
            yield (
                f"logprobs of {name}",
                f"{float(theirs[worst])!r} for response token {worst}",
                f"{float(mine[worst])!r}",
            )


def gradient_differences(
    one: Outcome, two: Outcome, tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """As ``differences``, of gradients: by the distance of their sketches, relative to their norms."""
    mine, theirs = sketches(one), sketches(two)
    if not mine or not theirs:
        return
    scale = max(
        (float(sketch[0]) for sketch in theirs.values() if np.isfinite(sketch[0])), default=0.0
    )
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            if float((mine if name in mine else theirs)[name][0]) == 0.0:
                # no gradient, and one of zeros: an expert that ran, for rows without a loss
                continue
            yield (
                f"gradient of {name}",
                "a gradient" if name in theirs else "none",
                "none" if name in theirs else "a gradient",
            )
            continue
        a, b = mine[name], theirs[name]
        if np.array_equal(a, b, equal_nan=True):
            continue
        away = _distance(a, b) / max(float(a[0]), float(b[0]), 1e-3 * scale, 1e-300)
        if not away <= tolerance:
            yield (
                f"gradient of {name}",
                f"norm {b[0]:.9g}",
                f"norm {a[0]:.9g}, at a relative distance of {away:.2g}",
            )


def sketches(outcome: Outcome) -> dict[str, FloatArray]:
    """All sketches that a step told, by name."""
    return {
        **outcome.gradients,
        **{f"the gate of layer {layer}": sketch for layer, sketch in outcome.gates.items()},
    }


def _distance(a: FloatArray, b: FloatArray) -> float:
    """An estimate of the norm of the difference of two gradients from their sketches."""
    return float(np.sqrt(np.mean((a[1:] - b[1:]) ** 2)))


def _alike(a: FloatArray, b: FloatArray, tolerance: float) -> bool:
    if tolerance == 0:
        return np.array_equal(a, b, equal_nan=True)
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


def unrepeated(view: StepView) -> str | None:
    """Why results of this trainer cannot be compared: two native steps differ, before which it did
    nothing but native ones.

    Looked at in every step; once learned, it holds for the rest of the trace.
    """
    other, before = view.same_as, takewhile(lambda one: one is not view, view.before.values())
    if (
        other is not None
        and "unrepeated" not in view.learned
        and all(_is_native(one) for one in (view, *before))
    ):
        found = (
            next(differences(view, other, view.terms.tolerance), None)
            if view.done and other.done
            else None
        )
        if found is not None:
            view.learned["unrepeated"] = (
                f"step {view.step.name!r} repeats {other.step.name!r} with nothing of replay"
                f" before, and its {found[0]} is {found[2]}, not {found[1]}: seed what is drawn at"
                " random, keep state that a step updates, or declare a tolerance"
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
    """Which promise it is that a step gives what an earlier one gave; ``None`` where it is held to
    none.
    """
    other = view.same_as
    if other is None:
        return None
    step = view.step
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
    """The step that a step of ``kind`` is held to; ``None``, which is told, where one of them has
    no results.
    """
    reason, other = unrepeated(view), view.same_as
    if other is None or kind_of(view) != kind:
        return None
    if reason is not None:
        out.absent(reason)
        return None
    for one in (view, other):
        if not one.done:
            out.absent(one.hindrance or f"step {one.step.name!r} ended with an error")
            return None
    return other


def comparable(view: StepView, other: StepView, out: Collector) -> bool:
    """Whether two steps told something that can be compared; where not, that is told."""
    one, two = view.outcome, other.outcome
    assert one is not None and two is not None
    losses = one.loss is not None and two.loss is not None
    if losses or one.logprobs.keys() & two.logprobs.keys() or (sketches(one) and sketches(two)):
        return True
    out.absent("the subject tells neither loss, logprobs nor gradients of such steps")
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
    """Tell of the differences of two steps together, the first one in full; ``hint`` is for steps
    whose rows are right.
    """
    if found:
        what, expected, observed = found[0]
        misled = next(
            (
                one.step.name
                for one in (view, other)
                if one.replays and one.regular and not sound_rows(one)
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
            expected=f"the {what} of step {other.step.name!r}: {expected}",
            observed=f"{observed}{more}",
            where=view.place(),
            hint=(
                hint
                if misled is None
                else (
                    f"Routers of step {misled!r} executed other experts than their targets: this"
                    " follows from it, see replay.forward and replay.assignments."
                )
            ),
        )
