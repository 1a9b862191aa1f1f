"""Replay refusals: what a trainer must run, what it must refuse, and what must not be left when a
step has ended.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Phase, Purpose, Routing
from rollproof.core.replay_contract import Defect, FreeRows
from rollproof.core.trainer_contract import terms_of
from rollproof.invariants._shared.phrases import count, listing, share
from rollproof.invariants.replay.executed_rows import (
    Executed,
    drops_padding,
    native_choice,
    unsound_before,
)
from rollproof.invariants.replay.step_pairs import unrepeated
from rollproof.invariants.replay.steps import StepView, replay_check
from rollproof.judging.checks import Collector

__all__ = [
    "replay_edges",
    "replay_failures",
    "replay_input",
    "replay_residue",
    "replay_routers",
    "replay_runs",
    "replay_targets",
]

_STRUCTURAL = frozenset({Defect.SHORT, Defect.LONG, Defect.NARROW, Defect.WIDE, Defect.FEW_LAYERS})
"""Defects after which nobody can say which row or layer is whose: executing some of it is a guess."""


@replay_check(
    "replay.runs",
    promise="A well-formed step runs to its end.",
    exercised_by="steps run",
)
def replay_runs(view: StepView, out: Collector) -> None:  # noqa: N802 - the decorator makes a check of it
    """The first check of the family: where steps fail, the others have nothing to say."""
    if not view.ordinary or view.outcome is None:
        return
    if view.outcome.skipped:
        out.absent(view.outcome.skipped)
        return
    out.exercised("steps run")
    if view.outcome.error is not None:
        out.finding(
            "a well-formed step failed",
            expected=(
                f"results of a step with action {view.step.action}, purpose {view.step.purpose},"
                f" recompute {view.step.recompute}"
            ),
            observed=view.outcome.error,
            where=view.place(),
            hint=(
                "A trainer must take every payload of the convention that it declares, in any order"
                " of modes. If the convention is another one, declare that; what is not offered at"
                " all is told by raising UnsupportedStep."
            ),
        )


@replay_check(
    "replay.failures",
    promise="A failure within a step reaches its caller.",
    exercised_by="failures raised",
)
def replay_failures(view: StepView, out: Collector) -> None:
    step = view.step
    if step.fail_at is None or view.outcome is None:
        return
    if view.outcome.skipped:
        out.absent(view.outcome.skipped)
        return
    reached = Counter(call.rank for call in view.calls if call.phase is step.fail_in)
    if view.outcome.error is None and max(reached.values(), default=0) <= step.fail_at:
        out.absent(
            f"the step has fewer {step.fail_in} calls of routers than the one in which the failure"
            " was to be raised"
        )
        return
    if view.outcome.error is None and _ran_again(view):
        out.absent("the trainer ran the step once more after the failure")
        return
    out.exercised("failures raised")
    if view.outcome.error is None:
        out.finding(
            "a failure was swallowed",
            expected=(
                f"an error: one was raised in router call {step.fail_at} of the {step.fail_in} pass"
            ),
            observed="results, as if nothing had happened",
            where=view.place(),
            hint=(
                "A step that failed in the middle must not update weights: let the exception"
                " through, and clean up in a `finally`."
            ),
        )


def _ran_again(view: StepView) -> bool:
    """Whether the router call in which the failure was raised came once more."""
    step = view.step
    for rank in {call.rank for call in view.calls}:
        calls = [call for call in view.calls if call.rank == rank and call.phase is step.fail_in][
            step.fail_at or 0 :
        ]
        if any(_same_rows(call, calls[0]) for call in calls[1:]):
            return True
    return False


def _same_rows(one: Routing, other: Routing) -> bool:
    same = one.layer == other.layer and np.array_equal(one.samples, other.samples)
    return same and np.array_equal(one.positions, other.positions)


@replay_check(
    "replay.residue",
    promise="Nothing of replay is left when a step has ended, by success, failure or evaluation.",
    needs="Residue events (the optional method `residue` of a ReplaySubject)",
    exercised_by=("steps", "failed steps", "evaluations"),
)
def replay_residue(view: StepView, out: Collector) -> None:
    if view.outcome is None or view.outcome.skipped or view.step.variant:
        return
    if view.residue is None:
        out.inapplicable(
            "the subject has no `residue` method: replay.aftermath judges by what the next step"
            " does"
        )
        return
    kind = (
        "failed steps"
        if view.outcome.error
        else "evaluations"
        if view.step.purpose is Purpose.EVAL
        else "steps"
    )
    out.exercised(kind)
    left = {name: number for name, number in view.residue.left.items() if number}
    if left:
        after = {
            "failed steps": "a step that failed",
            "evaluations": "an evaluation",
            "steps": "a step",
        }[kind]
        out.finding(
            f"state of replay is left after {after}",
            expected="nothing: every count is 0",
            observed=listing(f"{number} {name}" for name, number in sorted(left.items())),
            where=view.place(),
            hint=(
                "What is left acts in the next step: a queue that a forward-only pass filled feeds"
                " the next recompute (SkyRL#1908). Clear in a `finally` around the step."
            ),
        )


@replay_check(
    "replay.input",
    promise="A step leaves the samples that it is given as they were.",
    exercised_by="steps",
)
def replay_input(view: StepView, out: Collector) -> None:
    if view.outcome is None or view.outcome.skipped:
        return
    out.exercised("steps")
    if view.outcome.changed:
        out.finding(
            "a step changes the samples that it is given",
            expected="arrays as they were handed in",
            observed=f"changed: {listing(view.outcome.changed[:6])}",
            where=view.place(),
            hint=(
                "The same samples serve the old-logprob pass and several epochs of updates: pad,"
                " cast and mask copies."
            ),
        )


def _has_unsupported(contract: Contract) -> str | None:
    return (
        None
        if terms_of(contract).unsupported
        else "the contract names no routers that must be refused"
    )


@replay_check(
    "replay.routers",
    promise="A router that replay cannot reach is refused, or is replayed after all.",
    exercised_by="unsupported routers",
    applies=_has_unsupported,
)
def replay_routers(view: StepView, out: Collector) -> None:
    if view.step.variant not in view.terms.unsupported or view.outcome is None:
        return
    if view.outcome.skipped:
        out.absent(view.outcome.skipped)
        return
    out.exercised("unsupported routers")
    if view.outcome.error is not None:
        return
    rows = Executed.of(view, Phase.FORWARD)
    wrong = int(rows.wrong.sum())
    if wrong or not rows.held.any():
        held = int(rows.held.sum())
        out.finding(
            "an unsupported router is accepted",
            expected=f"an error for the router {view.step.variant!r}, or the targets executed",
            observed=(
                f"results; {share(wrong, held, 'row')} executed other experts"
                if held
                else "results; no router was seen at work"
            ),
            where=view.place(),
            hint=(
                "Fused, Sinkhorn, capacity and hash routers return before they look at a target"
                " (Megatron moe_router_fusion): assert such options off where replay is"
                " switched on."
            ),
        )


@replay_check(
    "replay.targets",
    promise=(
        "Routes that are no targets are refused; what the contract tolerates is handled row by row."
    ),
    exercised_by=("bad routes refused", "bad routes handled"),
)
def replay_targets(view: StepView, out: Collector) -> None:
    defect = view.step.defect
    if defect is None or view.outcome is None:
        return
    if view.outcome.skipped:
        out.absent(view.outcome.skipped)
        return
    if view.outcome.error is not None:
        out.exercised("bad routes refused")
        return
    if _unsound(view, out):
        return
    out.exercised("bad routes handled")
    problem = _mishandled(view)
    if defect not in _STRUCTURAL:
        problem = problem or _replaced(view)
    elif defect not in view.terms.tolerates:
        problem = problem or "results, without a word"
    if problem is not None:
        out.finding(
            f"routes that are {defect} are accepted",
            expected="an error that names the sample"
            + (", or free rows" if defect not in _STRUCTURAL else ""),
            observed=problem,
            where=view.place(request=view.step.defective),
            hint=(
                "Shapes, types and ids must be looked at before anything is installed: torch.gather"
                " takes a smaller index without a word, and then rows have no experts (Megatron"
                " get_replay_topk). What is accepted by design is declared in `tolerates`."
            ),
        )


def _unsound(view: StepView, out: Collector) -> bool:
    """Whether ordinary steps are wrong already, which is told: then an unusual one says nothing
    about what is unusual.
    """
    name = unsound_before(view)
    if name is not None:
        out.absent(f"the ordinary step {name!r} executed other experts than its targets")
    return name is not None


def _mishandled(view: StepView) -> str | None:
    """What is wrong with how a step with bad routes, or another oddity, was executed."""
    rows = Executed.of(view, Phase.FORWARD)
    short = ~rows.distinct
    if drops_padding(view):
        short &= ~rows.dropped
    if short.any():
        bad = int(np.flatnonzero(short)[0])
        amount = share(int(short.sum()), len(rows.distinct), "row")
        return f"{amount} without top_k distinct experts, such as {rows.experts[bad].tolist()}"
    # nothing of a sample without a response enters the loss: its rows may be replayed or left
    # native (verl's R3 mask leaves them)
    counted = np.repeat(
        [bool(sample.response_ids) for sample in view.step.samples], view.targets.lengths
    )
    held = rows.held & counted[np.where(rows.held, rows.place, 0)] if len(counted) else rows.held
    wrong = int((rows.wrong & held).sum())
    return (
        f"{share(wrong, int(held.sum()), 'row')} with a valid target executed other experts"
        if wrong
        else None
    )


def _replaced(view: StepView) -> str | None:
    """What a row whose ids are no target executed in the first MoE layer, where that is not the
    router's own choice.
    """
    native = native_choice(view)
    if (
        view.terms.free_rows is not FreeRows.NATIVE
        or view.terms.tolerance > 0
        or native is None
        or unrepeated(view)
    ):
        return None
    rows = Executed.of(view, Phase.FORWARD)
    own = np.sort(native[rows.place, 0], axis=1)
    free = (rows.place >= 0) & ~rows.held & (rows.column == 0) & (own >= 0).all(axis=1)
    wrong = np.flatnonzero(free & (rows.ordered != own).any(axis=1))
    if not len(wrong):
        return None
    sample, position = view.sample(int(rows.place[wrong[0]]))
    return (
        f"experts {rows.ordered[wrong[0]].tolist()} at position {position} of {sample.request_id},"
        f" which are neither a target nor the router's own {own[wrong[0]].tolist()}"
    )


@replay_check(
    "replay.edges",
    promise=(
        "Unusual steps (no response, two tokens, an empty microbatch, NaN scores, no MoE layers)"
        " are handled or refused."
    ),
    exercised_by=("edges refused", "edges handled"),
)
def replay_edges(view: StepView, out: Collector) -> None:
    if not view.step.edge or view.outcome is None:
        return
    if view.outcome.skipped:
        if view.step.variant:
            out.inapplicable(view.outcome.skipped)
        else:
            out.absent(view.outcome.skipped)
        return
    if view.outcome.error is not None:
        out.exercised("edges refused")
        return
    if _unsound(view, out):
        return
    out.exercised("edges handled")
    problem = _mishandled(view)
    if problem is not None:
        out.finding(
            f"a step with {view.step.edge} is mishandled",
            expected="the targets executed, as in any other step, or an error",
            observed=f"{problem} ({count(len(view.calls), 'router call')})",
            where=view.place(),
            hint=(
                "Totals over samples, cumulative lengths and cursors must hold for zero tokens,"
                " too; replayed ids do not depend on scores."
            ),
        )
