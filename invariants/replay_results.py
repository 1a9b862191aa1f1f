"""Replay results: loss and gradients are a function of weights, samples, routes and action, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rollproof.checks import Check, Collector
from rollproof.contract import Contract
from rollproof.invariants.replay_rows import native_choice, sound_rows
from rollproof.invariants.replay_steps import REFERENCE, StepView, replay_check
from rollproof.invariants.wording import count, share
from rollproof.records import FloatArray
from rollproof.replay.contract import terms_of
from rollproof.replay.events import Action, Outcome
from rollproof.replay.terms import Recompute

__all__ = ["CHECKS", "same_loss"]

_LIKE_A_REFERENCE = 1e-3
"""The largest relative difference to a path that computes in another order."""
_SLOPE = 0.05
"""The largest relative difference of a gradient to a finite difference."""


def _differences(view: StepView, other: StepView, tolerance: float) -> Iterator[tuple[str, str, str]]:
    """What of two results is not alike: its name, what was expected, what was observed."""
    one, two = view.outcome, other.outcome
    assert one is not None and two is not None
    yield from _loss_differences(one, two, tolerance)
    yield from _gradient_differences(one, two, tolerance)


def same_loss(view: StepView, other: StepView) -> bool:
    """Whether two steps told a loss, and the same one."""
    one, two = view.outcome, other.outcome
    if one is None or two is None or one.loss is None or two.loss is None:
        return False
    return not list(_loss_differences(one, two, view.terms.tolerance))


def _loss_differences(one: Outcome, two: Outcome, tolerance: float) -> Iterator[tuple[str, str, str]]:
    if one.loss is not None and two.loss is not None and not _alike(np.array([one.loss]), np.array([two.loss]), tolerance):
        yield "loss", repr(two.loss), repr(one.loss)
    for name in sorted(one.logprobs.keys() & two.logprobs.keys()):
        mine, theirs = one.logprobs[name], two.logprobs[name]
        if mine.shape != theirs.shape:
            yield f"logprobs of {name}", count(len(theirs), "logprob"), count(len(mine), "logprob")
        elif not _alike(mine, theirs, tolerance):
            worst = int(np.nanargmax(np.abs(mine - theirs))) if np.isfinite(mine - theirs).any() else 0
            yield f"logprobs of {name}", f"{theirs[worst]!r} for response token {worst}", f"{mine[worst]!r}"


def _gradient_differences(one: Outcome, two: Outcome, tolerance: float) -> Iterator[tuple[str, str, str]]:
    mine, theirs = _sketches(one), _sketches(two)
    if not mine or not theirs:
        return
    scale = max((float(sketch[0]) for sketch in theirs.values() if np.isfinite(sketch[0])), default=0.0)
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            yield f"gradient of {name}", "a gradient" if name in theirs else "none", "none" if name in theirs else "a gradient"
            continue
        a, b = mine[name], theirs[name]
        if np.array_equal(a, b, equal_nan=True):
            continue
        away = _distance(a, b) / max(float(a[0]), float(b[0]), 1e-3 * scale, 1e-300)
        if not away <= tolerance:
            yield f"gradient of {name}", f"norm {b[0]:.9g}", f"norm {a[0]:.9g}, at a relative distance of {away:.2g}"


def _sketches(outcome: Outcome) -> dict[str, FloatArray]:
    return {**outcome.gradients, **{f"the gate of layer {layer}": sketch for layer, sketch in outcome.gates.items()}}


def _distance(a: FloatArray, b: FloatArray) -> float:
    """An estimate of the norm of the difference of two gradients from their sketches."""
    return float(np.sqrt(np.mean((a[1:] - b[1:]) ** 2)))


def _alike(a: FloatArray, b: FloatArray, tolerance: float) -> bool:
    if tolerance == 0:
        return np.array_equal(a, b, equal_nan=True)
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


def _kind(view: StepView) -> str | None:
    """Which promise it is that a step gives what an earlier one gave; ``None`` where it is held to none."""
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
    return "self" if step.action is Action.REPLAY and other.step.action is not Action.REPLAY else "aftermath"


def _pair(view: StepView, kind: str, out: Collector) -> StepView | None:
    """The step that a step of ``kind`` is held to; ``None``, which is told, where one of them has no results."""
    other = view.same_as
    if other is None or _kind(view) != kind:
        return None
    for one in (view, other):
        if not one.done:
            out.absent(one.hindrance or f"step {one.step.name!r} ended with an error")
            return None
    return other


def _compare(
    view: StepView,
    other: StepView,
    found: list[tuple[str, str, str]],
    out: Collector,
    *,
    title: str,
    hint: str,
) -> None:
    """Tell of the differences of two steps together, the first one in full."""
    if found:
        what, expected, observed = found[0]
        more = f"; {count(len(found) - 1, 'more value')} differ, among them the {found[-1][0]}" if len(found) > 1 else ""
        out.finding(
            title,
            expected=f"the {what} of step {other.step.name!r}: {expected}",
            observed=f"{observed}{more}",
            where=view.where(),
            hint=hint,
        )


@replay_check(
    "replay.self-loss",
    promise="Replaying what the routers chose, under the same weights, leaves loss and logprobs as they were.",
    exercised_by="self-replays",
)
def _self_loss(view: StepView, out: Collector) -> None:
    other = _pair(view, "self", out)
    if other is None or view.outcome is None or other.outcome is None:
        return
    if view.outcome.loss is None or other.outcome.loss is None:
        out.absent("the subject tells no loss")
        return
    out.exercised("self-replays")
    found = list(_loss_differences(view.outcome, other.outcome, view.terms.tolerance))
    _compare(
        view,
        other,
        found,
        out,
        title="self-replay changes the loss",
        hint="The same experts are executed, so gates, order of accumulation or dispatch differ: the gate values must be read from live "
        "scores, unbiased where a bias only serves selection, and normalised as in native routing. Where kernels are not deterministic, "
        "declare a tolerance.",
    )


@replay_check(
    "replay.self-gradients",
    promise="Replaying what the routers chose, under the same weights, leaves all gradients as they were.",
    exercised_by="self-replays",
)
def _self_gradients(view: StepView, out: Collector) -> None:
    other = _pair(view, "self", out)
    if other is None or view.outcome is None or other.outcome is None or not view.step.backward:
        return
    if not _sketches(view.outcome) or not _sketches(other.outcome):
        out.absent("the subject tells no gradients")
        return
    out.exercised("self-replays")
    found = list(_gradient_differences(view.outcome, other.outcome, view.terms.tolerance))
    _compare(
        view,
        other,
        found,
        out,
        title="self-replay changes gradients",
        hint="The selection is a constant, the gate values are not: gather them from live scores with their graph, and replay the same "
        "selection in the backward pass.",
    )


def _recomputes(contract: Contract) -> str | None:
    if set(terms_of(contract).recompute) <= {Recompute.NONE}:
        return "the contract declares no recompute"
    return None


def _law(
    id: str, kind: str, *, promise: str, counter: str, title: str, hint: str, applies: Callable[[Contract], str | None] | None = None
) -> Check:
    """A check that holds steps of one kind to the results of the steps that they must repeat."""

    @replay_check(id, promise=promise, exercised_by=counter, applies=applies)
    def law(view: StepView, out: Collector) -> None:
        other = _pair(view, kind, out)
        if other is None:
            return
        out.exercised(counter)
        _compare(view, other, list(_differences(view, other, view.terms.tolerance)), out, title=title, hint=hint)

    return law


_recomputed = _law(
    "replay.recompute-results",
    "recomputed",
    promise="Recomputing activations changes neither loss nor gradients, whatever was replayed before.",
    counter="recomputed steps",
    title="recompute changes the results",
    hint="The recompute must execute what the forward pass did: a target that was cleared or overwritten before the backward pass, or one "
    "left by an earlier step, gives wrong gradients without an error where checkpoints are reentrant (SkyRL#1908, verl#4101).",
    applies=_recomputes,
)

_aftermath = _law(
    "replay.aftermath",
    "aftermath",
    promise="What ran before (a replay, a failure, an evaluation, another mode) changes nothing in a step.",
    counter="steps repeated",
    title="a step gives other results than it did before",
    hint="Something of replay outlived a step: clear targets, queues and modes in a `finally`, after forward-only passes and "
    "evaluations too.",
)

_off = _law(
    "replay.off",
    "off",
    promise="With replay switched off a step gives what it gives without it, whether or not its samples have routes.",
    counter="steps with replay off",
    title="replay acts although it is switched off",
    hint="Nothing of replay may be read or registered when the option is off: verl#7106 was reverted because it asked an empty registry "
    "in jobs without replay.",
)


def _has_models(contract: Contract) -> str | None:
    terms = terms_of(contract)
    return None if terms.models or terms.mtp else "the contract names no models beside the policy, and no MTP layers"


@replay_check(
    "replay.models",
    promise="Models of other roles, and MTP layers, route by their own scores while the policy is replayed.",
    exercised_by=("passes of other models", "calls of MTP layers"),
    applies=_has_models,
)
def _models(view: StepView, out: Collector) -> None:
    _mtp(view, out)
    other = _pair(view, "models", out)
    if other is None:
        return
    out.exercised("passes of other models")
    found = list(_differences(view, other, view.terms.tolerance))
    model = view.step.model
    mine, theirs = ([call.experts for call in one.calls_of(model)] for one in (view, other))
    wrong = sum(not np.array_equal(a, b) for a, b in zip(mine, theirs, strict=False)) + abs(len(mine) - len(theirs))
    if wrong and view.terms.tolerance == 0:
        found.append(("choice of its routers", count(len(theirs), "call"), f"{share(wrong, max(len(mine), len(theirs)), 'call')} differ"))
    _compare(view, other, found, out, title=f"the {model} is replayed with the policy's routes", hint=_OTHERS)


def _mtp(view: StepView, out: Collector) -> None:
    """MTP layers of a self-replay choose what they choose in the native pass: their input is the same."""
    other = view.same_as
    if other is None or _kind(view) != "self" or not view.terms.mtp or not view.done or not other.done:
        return
    if not sound_rows(view):
        out.absent("the layers below executed other experts than in the native pass")
        return
    mine, theirs = (
        {(call.rank, call.microbatch, call.layer, call.phase): call.experts for call in one.calls_of("mtp")} for one in (view, other)
    )
    if not theirs:
        out.absent("the contract declares MTP layers, and no call of one was told")
        return
    out.exercised("calls of MTP layers", len(theirs))
    wrong = [key for key in theirs if key not in mine or not np.array_equal(mine[key], theirs[key])]
    if wrong:
        out.finding(
            "MTP layers are replayed with the policy's routes",
            expected="the routers' own choice, as in the native pass",
            observed=f"{share(len(wrong), len(theirs), 'call')} choose otherwise",
            where=view.where(layer=wrong[0][2], rank=wrong[0][0]),
            hint=_OTHERS,
        )


_OTHERS = (
    "Replay must be bound to the policy's routers: a global list holds those of every model that was built, and MTP layers count from 1 "
    "again (slime#1187, NeMo-RL#4083, NeMo-RL#3903)."
)


@replay_check(
    "replay.drift",
    promise="Under weights that route otherwise, replay changes the results.",
    exercised_by="drifted replays",
)
def _drift(view: StepView, out: Collector) -> None:
    other = view.differs_from
    if other is None or not view.regular:
        return
    for one in (view, other):
        if not one.done:
            out.absent(one.hindrance or f"step {one.step.name!r} ended with an error")
            return
    native = native_choice(view)
    if native is None:
        out.absent("what the routers choose by themselves is not known")
        return
    targets = view.targets
    moved = (np.sort(targets.experts, axis=2) != np.sort(native, axis=2)).any(axis=2) & targets.known
    # a row of the final token reaches no loss, so rerouting it alone need not show
    if moved.sum() < 0.05 * targets.known.sum():
        out.absent(f"only {share(int(moved.sum()), int(targets.known.sum()), 'row')} would route otherwise: the weights drift too little")
        return
    out.exercised("drifted replays")
    if not list(_differences(view, other, 0.0)):
        out.finding(
            "replay changes nothing",
            expected=f"other results than those of step {other.step.name!r}: {share(int(moved.sum()), int(targets.known.sum()), 'row')} "
            "have a target that is not the router's own choice",
            observed="the same loss, logprobs and gradients, bit for bit",
            where=view.where(),
            hint="Replay is a silent no-op: a flag that nobody reads, targets for routers that are not in use (verl#4567, verl#7340), or "
            "a fused router that returns before it looks at its target.",
        )


@replay_check(
    "replay.gate-gradients",
    promise="Under replay the gradient of every gate is alive, whatever is replayed.",
    exercised_by="gates",
)
def _gate_gradients(view: StepView, out: Collector) -> None:
    if not view.replays or not view.ordinary or not view.done or not view.step.backward or view.outcome is None:
        return
    if not view.outcome.gates:
        out.absent("the subject tells no gradients of its gates")
        return
    alive = _living(view)
    for layer, sketch in sorted(view.outcome.gates.items()):
        if layer not in alive:
            out.absent("no native step shows whether the gates have gradients at all (top_k of 1 with normalised weights has none)")
            continue
        out.exercised("gates")
        if not sketch[0] > 0:
            out.finding(
                "the gradient of a gate is dead",
                expected=f"a gradient, as in native steps (norm {alive[layer]:.3g})",
                observed=f"norm {sketch[0]:.3g}",
                where=view.where(layer=layer),
                hint="Gate values must be gathered from live scores of all experts: after a native top-k the others are zero, and with "
                "them the gates of a drifted replay (ISEEKYAN/Megatron-LM#49, #79); recorded scores have no graph.",
            )


def _living(view: StepView) -> dict[int, float]:
    """The norm of each gate's gradient in the native steps before, where there is one."""
    alive: dict[int, float] = {}
    for other in view.before.values():
        if other.done and other.outcome is not None and other.step.action is Action.NATIVE and other.step.model == "policy":
            alive |= {layer: float(sketch[0]) for layer, sketch in other.outcome.gates.items() if sketch[0] > 0}
    return alive


@replay_check(
    "replay.gate-slope",
    promise="The gradient of a gate is the slope of the replayed loss.",
    exercised_by="finite differences",
)
def _gate_slope(view: StepView, out: Collector) -> None:
    step = view.step
    if step.nudge >= 0 or not view.replays or step.nudge_layer is None:
        return
    if not view.done:
        _excuse(view, out, "nudge")
        return
    layer, size = step.nudge_layer, -step.nudge
    up = next((one for one in view.before.values() if one.step.nudge == size and one.step.nudge_layer == layer and one.done), None)
    base = next((one for one in view.before.values() if one.done and one.step.backward and _same_ask(one, view)), None)
    if up is None or base is None or base.outcome is None or up.outcome is None or view.outcome is None:
        out.absent("a step that the finite difference needs has no results")
        return
    if not all(sound_rows(one) for one in (up, base, view)):
        out.absent("the steps of the finite difference executed other experts than their targets")
        return
    sketch, high, low = base.outcome.gates.get(layer), up.outcome.loss, view.outcome.loss
    if sketch is None or high is None or low is None:
        out.absent("the subject tells no loss, or no gradients of its gates")
        return
    slope = (high - low) / (2 * size)
    rounding = 2 * max(abs(high), abs(low)) * 10.0**-view.terms.float_digits / size
    allowed = max(_SLOPE, view.terms.tolerance) * max(float(sketch[0]), abs(slope)) + rounding
    if rounding > 0.3 * max(float(sketch[0]), abs(slope)):
        out.absent("the loss has too few digits for a finite difference")
        return
    out.exercised("finite differences")
    if not abs(slope - float(sketch[1])) <= allowed:
        out.finding(
            "the gradient of a gate is not the slope of the loss",
            expected=f"{slope:.6g} along the nudge of the gate (a central difference of the replayed loss, +- {allowed:.2g})",
            observed=f"{sketch[1]:.6g}",
            where={**base.where(layer=layer)},
            hint="Gate values must keep their graph from live scores to output; recorded or detached scores, and a normalisation over "
            "other experts than those that are executed, break it.",
        )


def _same_ask(one: StepView, view: StepView) -> bool:
    """Whether a step replays the same routes of the same samples under the same weights, without a nudge."""
    if not one.replays or not one.regular or one.step.nudge or one.step.weights != view.step.weights:
        return False
    mine, theirs = view.targets, one.targets
    return mine.lengths == theirs.lengths and np.array_equal(mine.experts, theirs.experts)


@replay_check(
    "replay.reference",
    promise="A replayed step under drifted weights gives what a path gives that shares nothing with the replay code.",
    exercised_by="steps compared",
)
def _reference(view: StepView, out: Collector) -> None:
    if view.step.variant == REFERENCE and view.outcome is not None and view.outcome.skipped:
        _excuse(view, out, "reference")
        return
    other = _pair(view, "reference", out)
    if other is None:
        return
    out.exercised("steps compared")
    found = list(_differences(other, view, max(_LIKE_A_REFERENCE, view.terms.tolerance)))
    _compare(
        other,
        view,
        found,
        out,
        title="replay gives other results than the reference",
        hint="The right experts are executed with the wrong gates, or on the wrong rows: look at the normalisation, at biases, at scaling "
        "factors.",
    )


def _excuse(view: StepView, out: Collector, method: str) -> None:
    """A step that an optional method is needed for was skipped: where the subject has none, there is nothing to decide."""
    reason = view.hindrance or "it ended with an error"
    if "the subject has no" in reason:
        out.inapplicable(f"{reason} (the optional method `{method}`)")
    else:
        out.absent(reason)


CHECKS: tuple[Check, ...] = (
    _self_loss,
    _self_gradients,
    _recomputed,
    _gate_gradients,
    _gate_slope,
    _reference,
    _drift,
    _aftermath,
    _off,
    _models,
)
