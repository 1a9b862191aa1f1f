"""The experts that the routers of a step executed, compared with their targets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.events.replay import Action, Phase
from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import count, ranges, share
from rollproof.invariants.replay.row_origins import Mismatches, explain_mismatches
from rollproof.invariants.replay.steps import StepView
from rollproof.judging.checks import Collector
from rollproof.judging.expected_rows import chosen_routes

__all__ = [
    "Executed",
    "drops_padding",
    "judge_rows",
    "native_choice",
    "sound_rows",
    "unsound_before",
]

_Places: TypeAlias = "npt.NDArray[np.int64]"
_TOO_MANY = -2
"""Marks a row that executed more than top_k experts; equals no target."""


@dataclass(frozen=True, eq=False)
class Executed:
    """All rows that the policy's routers saw in one phase of a step.

    view: The step.
    place: ``(rows,)``: the index of the token among all tokens of the step, -1 for padding.
    column: ``(rows,)``: the number of the MoE layer.
    rank: ``(rows,)``: the rank.
    experts: ``(rows, top_k)``: the executed ids.
    """

    view: StepView
    place: _Places
    column: _Places
    rank: _Places
    experts: IntArray

    @classmethod
    def of(cls, view: StepView, phase: Phase) -> Executed:
        """Return the rows of a phase, computed once.

        A row with more than top_k experts keeps the first ones and a mark that equals no target.
        """
        rows: Executed | None = view.cache.get(phase)
        if rows is None:
            rows = view.cache[phase] = cls._of(view, phase)
        return rows

    @classmethod
    def _of(cls, view: StepView, phase: Phase) -> Executed:
        top_k = view.contract.choice_count
        pieces = []
        for call in view.calls_of("policy", phase):
            column = view.targets.column(call.layer)
            if column is None:
                continue
            place = view.targets.places(call)
            pieces.append(
                (
                    place,
                    np.full(len(place), column),
                    np.full(len(place), call.rank),
                    _resized(call.experts, top_k),
                )
            )
        if not pieces:
            none = np.zeros(0, dtype=np.int64)
            return cls(view, none, none, none, np.zeros((0, top_k), dtype=np.int32))
        place, column_of, rank, experts = (
            np.concatenate([piece[i] for piece in pieces]) for i in range(4)
        )
        return cls(view, place, column_of, rank, experts)

    def mismatches(self, wrong: _Places) -> Mismatches:
        """Return the wrong rows with what may explain them."""
        view = self.view
        # Targets of earlier steps are candidates, since a queue may outlive its step.
        earlier = [
            (other.step.name, other.targets)
            for other in view.before.values()
            if other is not view and other.replays and other.regular
        ]
        return Mismatches(
            self.ordered[wrong],
            self.place[wrong],
            self.column[wrong],
            view.targets,
            native_choice(view),
            tuple(earlier),
        )

    @cached_property
    def ordered(self) -> IntArray:
        """The executed ids of each row, ascending: their order is not a promise."""
        return np.sort(self.experts, axis=1)

    @cached_property
    def distinct(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: whether the row executed top_k distinct experts in range."""
        inside = (self.ordered >= 0) & (self.ordered < self.view.contract.expert_count)
        return np.asarray(
            inside.all(axis=1) & (self.ordered[:, 1:] != self.ordered[:, :-1]).all(axis=1)
        )

    @cached_property
    def dropped(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: whether the row is padding that executed nothing."""
        return np.asarray((self.place < 0) & (self.ordered < 0).all(axis=1))

    @cached_property
    def with_target(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: whether the row has a target."""
        inside = self.place >= 0
        return (
            inside & self.view.targets.known[np.where(inside, self.place, 0), self.column]
            if len(self.place)
            else inside
        )

    @cached_property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: whether the row has a target and executed something else."""
        target = (
            np.sort(
                self.view.targets.experts[np.where(self.with_target, self.place, 0), self.column],
                axis=1,
            )
            if len(self.place)
            else self.ordered
        )
        return np.asarray(self.with_target & (self.ordered != target).any(axis=1))


def judge_rows(view: StepView, phase: Phase, counter: str, out: Collector) -> None:
    """Compare the rows of a phase with their targets, and report all wrong ones together."""
    rows = Executed.of(view, phase)
    # Rows without a target are free: the final token was never forwarded by the engine.
    with_target = int(rows.with_target.sum())
    if not with_target:
        out.absent(f"no row with a target was seen in a {phase} pass")
        return
    out.exercised(counter, with_target)
    wrong = np.flatnonzero(rows.wrong)
    if not len(wrong):
        return
    first = wrong[0]
    place, column = int(rows.place[first]), int(rows.column[first])
    sample, position = view.sample(place)
    layers = sorted(
        {view.targets.layers[int(column_of_row)] for column_of_row in rows.column[wrong]}
    )
    origin, hint = explain_mismatches(rows.mismatches(wrong))
    target = sorted(view.targets.experts[place, column].tolist())
    out.finding(
        "routers executed other experts than their target",
        expected=(
            f"experts {target} at position {position} of {sample.request_id} in layer"
            f" {view.targets.layers[column]}"
        ),
        observed=(
            f"{_describe_ids(rows.ordered[first])}; {share(len(wrong), with_target, 'row')}"
            f" wrong, in {count(len(layers), 'layer')} ({ranges(layers)}){origin}"
        ),
        where=view.place(
            request=sample.request_id,
            position=position,
            layer=view.targets.layers[column],
            rank=int(rows.rank[first]),
            recompute=str(view.step.recompute),
        ),
        hint=hint or _hint(view, phase),
    )


def _hint(view: StepView, phase: Phase) -> str:
    """Return what to examine if nothing shows where the rows come from."""
    # The forward pass was right, so the targets existed and were gone by the recompute.
    if phase is Phase.RECOMPUTE and sound_rows(view):
        return _GONE
    if not view.step.backward:
        return _FORWARD_ONLY
    return _FOLLOW


_GONE = (
    "The forward pass executed the targets: they were cleared, or those of another microbatch"
    " were installed, before the backward pass reached this layer; or the recompute calls"
    " another router. Keep them until the backward pass has ended (SkyRL#1908)."
)
_FORWARD_ONLY = (
    "Where replay.forward passes, training steps execute their targets: passes without a"
    " backward (old logprobs, evaluation) use another code path, which installs no targets or"
    " those of another batch."
)
_FOLLOW = (
    "Follow one row: what was installed, in which layer, for which microbatch, and whether"
    " the router read it. rollproof.ReplayLayoutConformance judges padding, packing and"
    " division over ranks separately and names what is wrong."
)


def sound_rows(view: StepView) -> bool:
    """Return whether the forward pass of a step executed its targets: only then do its results mean
    anything.
    """
    rows = Executed.of(view, Phase.FORWARD)
    return bool((rows.distinct | rows.dropped).all()) and not rows.wrong.any()


def drops_padding(view: StepView) -> bool:
    """Return whether padding executes no experts in native steps either: then it is masked by
    design.

    Once learned, it holds for the trace.
    """
    if "padding" not in view.learned:
        native = (
            step
            for step in (*view.before.values(), view)
            if step.step.action is Action.NATIVE and step.ordinary
        )
        padding = [
            call.experts[call.samples < 0] for step in native for call in step.calls_of("policy")
        ]
        if any(len(rows) for rows in padding):
            view.learned["padding"] = (
                "dropped" if all((rows < 0).all() for rows in padding) else "executed"
            )
    return view.learned.get("padding") == "dropped"


def unsound_before(view: StepView) -> str | None:
    """Return the name of an earlier ordinary step that replayed other experts than its targets, or
    ``None``.
    """
    earlier = (
        other
        for other in view.before.values()
        if other is not view and other.replays and other.ordinary
    )
    return next((other.step.name for other in earlier if not sound_rows(other)), None)


def native_choice(view: StepView) -> IntArray | None:
    """Return what the policy chose by itself for the same samples under the same weights in an
    earlier step, or ``None``.
    """
    for other in view.before.values():
        if (
            other is view
            or not other.done
            or other.step.action is Action.REPLAY
            or other.step.model != "policy"
            or not other.regular
        ):
            continue
        if (
            other.step.weights == view.step.weights
            and not other.step.nudge
            and not view.step.nudge
            and _same_tokens(other, view)
        ):
            # Several checks need the native choice of the same step.
            if "chosen" not in other.cache:
                other.cache["chosen"] = chosen_routes(
                    view.contract, other.step, list(other.calls_of("policy", Phase.FORWARD))
                )
            chosen: IntArray | None = other.cache["chosen"]
            if chosen is not None:
                return chosen
    return None


def _same_tokens(first: StepView, other: StepView) -> bool:
    return [sample.prompt_ids + sample.response_ids for sample in first.step.samples] == [
        sample.prompt_ids + sample.response_ids for sample in other.step.samples
    ]


def _describe_ids(executed: IntArray) -> str:
    """Return the executed ids ``(top_k,)`` of a row in words."""
    return (
        f"more than {len(executed)} experts"
        if _TOO_MANY in executed
        else f"experts {executed.tolist()}"
    )


def _resized(experts: IntArray, width: int) -> IntArray:
    if experts.shape[1] == width:
        return experts
    # A router with more than top_k choices executed something that no target can name.
    if experts.shape[1] > width:
        cut = experts[:, :width].copy()
        cut[:, 0] = _TOO_MANY
        return cut
    return np.concatenate(
        [experts, np.full((len(experts), width - experts.shape[1]), -1, dtype=experts.dtype)],
        axis=1,
    )
