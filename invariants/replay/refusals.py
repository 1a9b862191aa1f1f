"""Checks on what a trainer must run, what it must refuse, and what must not be left after a
step.
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
from rollproof.invariants.replay.step_pairs import NEAR_TIE, unrepeated
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
"""Defects that leave open which row or layer belongs to what: executing some of the routes is a
guess.
"""


@replay_check(
    "replay.runs",
    promise="A well-formed step runs to its end.",
    exercised_by="steps run",
)
def replay_runs(view: StepView, out: Collector) -> None:
    """Report a well-formed step that failed. It is the first check of the family: if steps fail,
    the others cannot judge.
    """
    # Steps with bad routes, odd samples or raised failures may fail.
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
                "A trainer must accept every payload of the convention that it declares, in"
                " any order of modes. If it has another convention, declare that; raise"
                " UnsupportedStep for a step that it does not support."
            ),
        )


@replay_check(
    "replay.failures",
    promise="A failure within a step reaches its caller.",
    exercised_by="failures raised",
)
def replay_failures(view: StepView, out: Collector) -> None:
    """Check that a raised failure reaches the caller."""
    step = view.step
    if step.fail_at is None or view.outcome is None:
        return
    if view.outcome.skipped:
        out.absent(view.outcome.skipped)
        return
    # Ranks run the same schedule, but a pipeline stage may have fewer routers than another.
    reached = Counter(call.rank for call in view.calls if call.phase is step.fail_in)
    if view.outcome.error is None and max(reached.values(), default=0) <= step.fail_at:
        out.absent(
            f"the step has fewer {step.fail_in} calls of routers than the one in which the failure"
            " was to be raised"
        )
        return
    # A trainer may retry a failed step, and then results are right.
    if view.outcome.error is None and _ran_again(view):
        out.absent("the trainer ran the step again after the failure")
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
                " propagate, and clean up in a `finally`."
            ),
        )


def _ran_again(view: StepView) -> bool:
    """Return whether the router call in which the failure was raised came once more."""
    step = view.step
    for rank in {call.rank for call in view.calls}:
        calls = [call for call in view.calls if call.rank == rank and call.phase is step.fail_in][
            step.fail_at or 0 :
        ]
        if any(_same_rows(call, calls[0]) for call in calls[1:]):
            return True
    return False


def _same_rows(first: Routing, other: Routing) -> bool:
    equal = first.layer == other.layer and np.array_equal(first.samples, other.samples)
    return equal and np.array_equal(first.positions, other.positions)


@replay_check(
    "replay.residue",
    promise="Nothing of replay is left when a step has ended, by success, failure or evaluation.",
    needs="Residue events (the optional method `residue` of a ReplaySubject)",
    exercised_by=("steps", "failed steps", "evaluations"),
)
def replay_residue(view: StepView, out: Collector) -> None:
    """Report state that is left after a step."""
    if view.outcome is None or view.outcome.skipped or view.step.variant:
        return
    if view.residue is None:
        out.inapplicable(
            "the subject has no `residue` method: replay.aftermath judges by the next step"
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
    # Queues and modes often live in globals, which outlive a failed step (SkyRL#1908).
    remaining = {name: number for name, number in view.residue.left.items() if number}
    if remaining:
        after = {
            "failed steps": "a step that failed",
            "evaluations": "an evaluation",
            "steps": "a step",
        }[kind]
        out.finding(
            f"state of replay is left after {after}",
            expected="nothing: every count is 0",
            observed=listing(f"{number} {name}" for name, number in sorted(remaining.items())),
            where=view.place(),
            hint=(
                "It changes the next step: a queue that a forward-only pass filled feeds the"
                " next recompute (SkyRL#1908). Clear it in a `finally` around the step."
            ),
        )


@replay_check(
    "replay.input",
    promise="A step does not change its samples.",
    exercised_by="steps",
)
def replay_input(view: StepView, out: Collector) -> None:
    """Report samples that a step changed."""
    if view.outcome is None or view.outcome.skipped:
        return
    out.exercised("steps")
    if view.outcome.changed:
        out.finding(
            "a step changes its samples",
            expected="arrays as they were passed in",
            observed=f"changed: {listing(view.outcome.changed[:6])}",
            where=view.place(),
            hint=(
                "The same samples are used for the old-logprob pass and several epochs of"
                " updates: pad, cast and mask copies."
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
    promise="A router that replay cannot reach is refused, or replayed nevertheless.",
    exercised_by="unsupported routers",
    applies=_has_unsupported,
)
def replay_routers(view: StepView, out: Collector) -> None:
    """Check that an unsupported router is refused or replayed."""
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
    if wrong or not rows.with_target.any():
        with_target = int(rows.with_target.sum())
        out.finding(
            "an unsupported router is accepted",
            expected=f"an error for the router {view.step.variant!r}, or the targets executed",
            observed=(
                f"results; {share(wrong, with_target, 'row')} executed other experts"
                if with_target
                else "results; no router was seen"
            ),
            where=view.place(),
            hint=(
                "Fused, Sinkhorn, capacity and hash routers return before they read a target"
                " (Megatron moe_router_fusion): refuse such options if replay is on."
            ),
        )


@replay_check(
    "replay.targets",
    promise=(
        "Routes that cannot be targets are refused; what the contract tolerates is handled"
        " row by row."
    ),
    exercised_by=("bad routes refused", "bad routes handled"),
)
def replay_targets(view: StepView, out: Collector) -> None:
    """Check what becomes of routes that cannot be targets."""
    defect = view.step.defect
    if defect is None or view.outcome is None:
        return
    if view.outcome.skipped:
        out.absent(view.outcome.skipped)
        return
    if view.outcome.error is not None:
        out.exercised("bad routes refused")
        return
    if _was_unsound(view, out):
        return
    out.exercised("bad routes handled")
    problem = _mishandled(view)
    if defect not in _STRUCTURAL:
        problem = problem or _other_choice(view)
    # torch.gather accepts a smaller index without an error, so such payloads run and route wrongly.
    elif defect not in view.terms.tolerates:
        problem = problem or "results without an error"
    if problem is not None:
        out.finding(
            f"routes that are {defect} are accepted",
            expected="an error that names the sample"
            + (", or free rows" if defect not in _STRUCTURAL else ""),
            observed=problem,
            where=view.place(request=view.step.defective),
            hint=(
                "Check shapes, types and ids before anything is installed: torch.gather"
                " silently accepts a smaller index, and then rows have no experts (Megatron"
                " get_replay_topk). Declare in `tolerates` what is accepted by design."
            ),
        )


def _was_unsound(view: StepView, out: Collector) -> bool:
    """Return whether ordinary steps are already wrong, and report it: then an unusual step shows
    nothing about what is unusual.
    """
    name = unsound_before(view)
    if name is not None:
        out.absent(f"the ordinary step {name!r} executed other experts than its targets")
    return name is not None


def _mishandled(view: StepView) -> str | None:
    """Return what is wrong with the execution of a step with bad routes or another oddity."""
    rows = Executed.of(view, Phase.FORWARD)
    incomplete = ~rows.distinct
    if drops_padding(view):
        incomplete &= ~rows.dropped
    if incomplete.any():
        row = int(np.flatnonzero(incomplete)[0])
        affected = share(int(incomplete.sum()), len(rows.distinct), "row")
        return f"{affected} without top_k distinct experts, such as {rows.experts[row].tolist()}"
    # Nothing of a sample without a response enters the loss: its rows may be replayed or left
    # native (verl's R3 mask leaves them).
    counted = np.repeat(
        [bool(sample.response_ids) for sample in view.step.samples], view.targets.lengths
    )
    with_target = (
        rows.with_target & counted[np.where(rows.with_target, rows.place, 0)]
        if len(counted)
        else rows.with_target
    )
    wrong = int((rows.wrong & with_target).sum())
    return (
        f"{share(wrong, int(with_target.sum()), 'row')} with a valid target executed other experts"
        if wrong
        else None
    )


def _other_choice(view: StepView) -> str | None:
    """Return what a row without a target executed in the first MoE layer, if that is not the
    router's own choice.
    """
    native = native_choice(view)
    if (
        view.terms.free_rows is not FreeRows.NATIVE
        or view.terms.tolerance > NEAR_TIE
        or native is None
        or unrepeated(view)
    ):
        return None
    rows = Executed.of(view, Phase.FORWARD)
    own = np.sort(native[rows.place, 0], axis=1)
    free = (rows.place >= 0) & ~rows.with_target & (rows.column == 0) & (own >= 0).all(axis=1)
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
    """Check what becomes of unusual steps."""
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
    if _was_unsound(view, out):
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
                "Totals over samples, cumulative lengths and cursors must also be right for"
                " zero tokens; replayed ids do not depend on scores."
            ),
        )
