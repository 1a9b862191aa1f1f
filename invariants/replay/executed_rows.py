"""Replay rows: what the routers executed beside what they ought to have, and where rows that are
wrong came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.events.replay import Action, Phase
from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import count, ranges, share
from rollproof.invariants.replay.row_origins import Strays, told_origin
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
"""Stands in a row that executed more than top_k experts; equals no target."""


@dataclass(frozen=True, eq=False)
class Executed:
    """All rows that the policy's routers saw in one phase of a step.

    ``place``, ``column`` and ``rank`` are ``(rows,)``, ``experts`` is ``(rows, top_k)``. ``place``
    is the index of the token among all tokens of the step (-1: padding), ``column`` the number of
    the MoE layer.
    """

    view: StepView
    place: _Places
    column: _Places
    rank: _Places
    experts: IntArray

    @classmethod
    def of(cls, view: StepView, phase: Phase) -> Executed:
        """The rows of a phase, computed once; rows wider than top_k keep their first ids and a mark
        that equals no target.
        """
        found: Executed | None = view.kept.get(phase)
        if found is None:
            found = view.kept[phase] = cls._of(view, phase)
        return found

    @classmethod
    def _of(cls, view: StepView, phase: Phase) -> Executed:
        top_k = view.contract.top_k or 1
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
                    _of_width(call.experts, top_k),
                )
            )
        if not pieces:
            none = np.zeros(0, dtype=np.int64)
            return cls(view, none, none, none, np.zeros((0, top_k), dtype=np.int32))
        place, column_of, rank, experts = (
            np.concatenate([piece[i] for piece in pieces]) for i in range(4)
        )
        return cls(view, place, column_of, rank, experts)

    def strays(self, wrong: _Places) -> Strays:
        """The wrong rows, and what may explain them."""
        view = self.view
        earlier = [
            (other.step.name, other.targets)
            for other in view.before.values()
            if other is not view and other.replays and other.regular
        ]
        return Strays(
            self.ordered[wrong],
            self.place[wrong],
            self.column[wrong],
            view.targets,
            native_choice(view),
            tuple(earlier),
        )

    @cached_property
    def ordered(self) -> IntArray:
        """The executed ids of each row, ascending: their order is no promise."""
        return np.sort(self.experts, axis=1)

    @cached_property
    def distinct(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: which rows executed top_k distinct experts in range."""
        inside = (self.ordered >= 0) & (self.ordered < (self.view.contract.num_experts or 1))
        return np.asarray(
            inside.all(axis=1) & (self.ordered[:, 1:] != self.ordered[:, :-1]).all(axis=1)
        )

    @cached_property
    def dropped(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: which rows are padding that executed nothing."""
        return np.asarray((self.place < 0) & (self.ordered < 0).all(axis=1))

    @cached_property
    def held(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: which rows have a target."""
        inside = self.place >= 0
        return (
            inside & self.view.targets.known[np.where(inside, self.place, 0), self.column]
            if len(self.place)
            else inside
        )

    @cached_property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """``(rows,)``: which rows with a target executed something else."""
        target = (
            np.sort(
                self.view.targets.experts[np.where(self.held, self.place, 0), self.column], axis=1
            )
            if len(self.place)
            else self.ordered
        )
        return np.asarray(self.held & (self.ordered != target).any(axis=1))


def judge_rows(view: StepView, phase: Phase, counter: str, out: Collector) -> None:
    """Compare the rows of a phase with their targets: counts those compared, and tells of all wrong
    ones together.
    """
    rows = Executed.of(view, phase)
    held = int(rows.held.sum())
    if not held:
        out.absent(f"no row with a target was seen in a {phase} pass")
        return
    out.exercised(counter, held)
    wrong = np.flatnonzero(rows.wrong)
    if not len(wrong):
        return
    first = wrong[0]
    place, column = int(rows.place[first]), int(rows.column[first])
    sample, position = view.sample(place)
    layers = sorted({view.targets.layers[int(one)] for one in rows.column[wrong]})
    words, hint = told_origin(rows.strays(wrong))
    target = sorted(view.targets.experts[place, column].tolist())
    out.finding(
        "routers executed other experts than their target",
        expected=(
            f"experts {target} at position {position} of {sample.request_id} in layer"
            f" {view.targets.layers[column]}"
        ),
        observed=(
            f"{_told_ids(rows.ordered[first])}; {share(len(wrong), held, 'row')} wrong, in"
            f" {count(len(layers), 'layer')} ({ranges(layers)}){words}"
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
    """What to look at where nothing tells where the rows come from."""
    if phase is Phase.RECOMPUTE and sound_rows(view):
        return _GONE
    if not view.step.backward:
        return _FORWARD_ONLY
    return _FOLLOW


_GONE = (
    "The forward pass executed the targets: they were cleared, or those of another microbatch were"
    " installed, before the backward pass came to this layer; or what recomputes calls another"
    " router. Keep them until the backward pass has ended (SkyRL#1908)."
)
_FORWARD_ONLY = (
    "Where replay.forward passes, training steps execute their targets: passes without a backward"
    " (old logprobs, evaluation) go another way, on which none is installed, or are served another"
    " batch's."
)
_FOLLOW = (
    "Follow one row: what was installed, in which layer, for which microbatch, and whether the"
    " router read it. How routes are padded, packed and divided over ranks can be judged on its"
    " own, and is then named: rollproof.ReplayLayoutConformance."
)


def sound_rows(view: StepView) -> bool:
    """Whether the forward pass of a step executed its targets: only then do its results, or what it
    does beside, mean anything.
    """
    rows = Executed.of(view, Phase.FORWARD)
    return bool((rows.distinct | rows.dropped).all()) and not rows.wrong.any()


def drops_padding(view: StepView) -> bool:
    """Whether padding executes no experts in native steps, too: then it is masked by design. Once
    learned, it holds for the trace.
    """
    if "padding" not in view.learned:
        native = (
            one
            for one in (*view.before.values(), view)
            if one.step.action is Action.NATIVE and one.ordinary
        )
        padding = [
            call.experts[call.samples < 0] for one in native for call in one.calls_of("policy")
        ]
        if any(len(rows) for rows in padding):
            view.learned["padding"] = (
                "dropped" if all((rows < 0).all() for rows in padding) else "executed"
            )
    return view.learned.get("padding") == "dropped"


def unsound_before(view: StepView) -> str | None:
    """The name of an ordinary step before that replayed other experts than its targets; ``None``
    where there is none.
    """
    before = (
        other
        for other in view.before.values()
        if other is not view and other.replays and other.ordinary
    )
    return next((other.step.name for other in before if not sound_rows(other)), None)


def native_choice(view: StepView) -> IntArray | None:
    """What the policy chose by itself for the same samples under the same weights, in an earlier
    step; ``None`` where there is none.
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
            if "chosen" not in other.kept:
                other.kept["chosen"] = chosen_routes(
                    view.contract, other.step, list(other.calls_of("policy", Phase.FORWARD))
                )
            found: IntArray | None = other.kept["chosen"]
            if found is not None:
                return found
    return None


def _same_tokens(one: StepView, other: StepView) -> bool:
    return [sample.prompt_ids + sample.response_ids for sample in one.step.samples] == [
        sample.prompt_ids + sample.response_ids for sample in other.step.samples
    ]


def _told_ids(executed: IntArray) -> str:
    """The executed ids ``(top_k,)`` of a row in words."""
    return (
        f"more than {len(executed)} experts"
        if _TOO_MANY in executed
        else f"experts {executed.tolist()}"
    )


def _of_width(experts: IntArray, width: int) -> IntArray:
    if experts.shape[1] == width:
        return experts
    if experts.shape[1] > width:
        cut = experts[:, :width].copy()
        cut[:, 0] = _TOO_MANY
        return cut
    return np.concatenate(
        [experts, np.full((len(experts), width - experts.shape[1]), -1, dtype=experts.dtype)],
        axis=1,
    )
