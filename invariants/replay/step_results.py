"""Checks on results: loss and gradients are a function of weights, samples, routes and action, and
of nothing else.
"""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.replay_contract import Recompute
from rollproof.core.trainer_contract import terms_of
from rollproof.invariants._shared.phrases import count, share
from rollproof.invariants.replay.executed_rows import sound_rows
from rollproof.invariants.replay.step_pairs import (
    comparable,
    compare,
    differences,
    gradient_differences,
    kind_of,
    loss_differences,
    pair_of,
    sketches,
    unrepeated,
)
from rollproof.invariants.replay.steps import StepView, replay_check
from rollproof.judging.checks import Collector

__all__ = [
    "replay_aftermath",
    "replay_models",
    "replay_off",
    "replay_recompute_results",
    "replay_self_gradients",
    "replay_self_loss",
]


@replay_check(
    "replay.self-loss",
    promise=(
        "Replaying what the routers chose, under the same weights, leaves loss and logprobs as they"
        " were."
    ),
    exercised_by="self-replays",
)
def replay_self_loss(view: StepView, out: Collector) -> None:
    """Compare the loss of a self-replay with that of the native step."""
    other = pair_of(view, "self", out)
    if other is None:
        return
    assert view.outcome is not None
    assert other.outcome is not None
    if view.outcome.loss is None or other.outcome.loss is None:
        out.absent("the subject reports no loss")
        return
    out.exercised("self-replays")
    changes = list(loss_differences(view.outcome, other.outcome, view.terms.tolerance))
    compare(
        view,
        other,
        changes,
        out,
        title="self-replay changes the loss",
        hint=(
            "The same experts are executed, so gates, order of accumulation or dispatch"
            " differ: the gate values must be read from live scores, without a bias that only"
            " serves selection, and normalised as in native routing. If kernels are not"
            " deterministic, declare a tolerance."
        ),
    )


@replay_check(
    "replay.self-gradients",
    promise=(
        "Replaying what the routers chose, under the same weights, leaves all gradients as they"
        " were."
    ),
    exercised_by="self-replays",
)
def replay_self_gradients(view: StepView, out: Collector) -> None:
    """Compare the gradients of a self-replay with those of the native step."""
    other = pair_of(view, "self", out)
    if other is None or not view.step.backward:
        return
    assert view.outcome is not None
    assert other.outcome is not None
    if not sketches(view.outcome) or not sketches(other.outcome):
        out.absent("the subject reports no gradients")
        return
    out.exercised("self-replays")
    changes = list(gradient_differences(view.outcome, other.outcome, view.terms.tolerance))
    compare(
        view,
        other,
        changes,
        out,
        title="self-replay changes gradients",
        hint=(
            "The selection is a constant, the gate values are not: gather them from live scores"
            " with their graph, and replay the same selection in the backward pass."
        ),
    )


def _recomputes(contract: Contract) -> str | None:
    if set(terms_of(contract).recompute) <= {Recompute.NONE}:
        return "the contract declares no recompute"
    return None


def _must_repeat(
    view: StepView, out: Collector, kind: str, counter: str, *, title: str, hint: str
) -> None:
    """Compare a step of ``kind`` with the earlier step that it must repeat."""
    other = pair_of(view, kind, out)
    if other is None or not comparable(view, other, out):
        return
    out.exercised(counter)
    changes = list(differences(view, other, view.terms.tolerance))
    compare(view, other, changes, out, title=title, hint=hint)


@replay_check(
    "replay.recompute-results",
    promise=(
        "Recomputing activations changes neither loss nor gradients, whatever was replayed before."
    ),
    exercised_by="recomputed steps",
    applies=_recomputes,
)
def replay_recompute_results(view: StepView, out: Collector) -> None:
    """Compare a step with recompute with one without."""
    # a recomputed self-replay repeats a native step: two things differ, and either may be at fault
    title, first = "recompute changes the results", ""
    if view.replays and view.same_as is not None and not view.same_as.replays:
        title = "self-replay with recompute changes the results"
        first = (
            "If self-replay changes them without recompute as well (replay.self-loss,"
            " replay.self-gradients), this follows from it. "
        )
    _must_repeat(
        view,
        out,
        "recomputed",
        "recomputed steps",
        title=title,
        hint=first
        + (
            "The recompute must execute what the forward pass did: a target that was cleared"
            " or overwritten before the backward pass, or one left by an earlier step, gives"
            " wrong gradients without an error if checkpoints are reentrant (SkyRL#1908,"
            " verl#4101)."
        ),
    )


@replay_check(
    "replay.aftermath",
    promise=(
        "What ran before (a replay, a failure, an evaluation, another mode) changes nothing in a"
        " step."
    ),
    exercised_by="steps repeated",
)
def replay_aftermath(view: StepView, out: Collector) -> None:
    """Compare a step with an equal earlier one."""
    _must_repeat(
        view,
        out,
        "aftermath",
        "steps repeated",
        title="a step gives other results than it did before",
        hint=(
            "Something of replay outlived a step: clear targets, queues and modes in a"
            " `finally`, after forward-only passes and evaluations too."
        ),
    )


@replay_check(
    "replay.off",
    promise=(
        "With replay switched off a step gives the same results as without it, whether or not"
        " its samples have routes."
    ),
    exercised_by="steps with replay off",
)
def replay_off(view: StepView, out: Collector) -> None:
    """Compare a step with replay off with a native one."""
    _must_repeat(
        view,
        out,
        "off",
        "steps with replay off",
        title="replay acts although it is switched off",
        hint=(
            "Nothing of replay may be read or registered when the option is off: verl#7106"
            " was reverted because it read an empty registry in jobs without replay."
        ),
    )


def _has_models(contract: Contract) -> str | None:
    terms = terms_of(contract)
    return (
        None
        if terms.models or terms.mtp
        else "the contract names no models other than the policy, and no MTP layers"
    )


@replay_check(
    "replay.models",
    promise=(
        "Models of other roles, and MTP layers, route by their own scores while the policy is"
        " replayed."
    ),
    exercised_by=("passes of other models", "calls of MTP layers"),
    applies=_has_models,
)
def replay_models(view: StepView, out: Collector) -> None:
    """Compare passes of other models, and MTP layers, with native ones."""
    _mtp(view, out)
    other = pair_of(view, "models", out)
    if other is None or not comparable(view, other, out):
        return
    out.exercised("passes of other models")
    changes = list(differences(view, other, view.terms.tolerance))
    model = view.step.model
    own, others = ([call.experts for call in step.calls_of(model)] for step in (view, other))
    wrong = sum(not np.array_equal(a, b) for a, b in zip(own, others, strict=False)) + abs(
        len(own) - len(others)
    )
    if wrong and view.terms.tolerance == 0:
        changes.append(
            (
                "choice of its routers",
                count(len(others), "call"),
                f"{share(wrong, max(len(own), len(others)), 'call')} differ",
            )
        )
    compare(
        view,
        other,
        changes,
        out,
        title=f"the {model} is replayed with the policy's routes",
        hint=_OTHER_MODELS,
    )


def _mtp(view: StepView, out: Collector) -> None:
    """Compare the MTP layers of a self-replay with those of the native pass: their input is the
    same.
    """
    other = view.same_as
    if (
        other is None
        or kind_of(view) != "self"
        or not view.terms.mtp
        or not view.done
        or not other.done
    ):
        return
    reason = unrepeated(view) or (
        "the contract declares a tolerance: a near tie may be routed either way in two runs"
        if view.terms.tolerance > 0
        else None
    )
    if reason is not None:
        out.absent(reason)
        return
    if not sound_rows(view):
        out.absent("the layers below executed other experts than in the native pass")
        return
    own, others = (
        {
            (call.rank, call.microbatch, call.layer, call.phase): call.experts
            for call in step.calls_of("mtp")
        }
        for step in (view, other)
    )
    # NeMo-RL#3903 and slime#1187: MTP layers count from 1 again, and a global list of routers held
    # them too.
    if not others:
        out.absent("the contract declares MTP layers, and no call of one was reported")
        return
    out.exercised("calls of MTP layers", len(others))
    wrong = [key for key in others if key not in own or not np.array_equal(own[key], others[key])]
    if wrong:
        out.finding(
            "MTP layers are replayed with the policy's routes",
            expected="the routers' own choice, as in the native pass",
            observed=f"{share(len(wrong), len(others), 'call')} choose other experts",
            where=view.place(layer=wrong[0][2], rank=wrong[0][0]),
            hint=_OTHER_MODELS,
        )


_OTHER_MODELS = (
    "Replay must be bound to the policy's routers: a global list holds those of every model that"
    " was built, and MTP layers count from 1 again (slime#1187, NeMo-RL#4083, NeMo-RL#3903)."
)
