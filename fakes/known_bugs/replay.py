"""Known bugs of replay: targets that reach the wrong row, layer, pass or model, that outlive their step, or that nobody reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollproof.fakes.known_bugs import replay_values
from rollproof.fakes.known_bugs.replay_planting import RECOMPUTED, WRONG_ROWS, bug
from rollproof.fakes.moe import chosen
from rollproof.fakes.replay_parts import Microbatch, Pass, Router
from rollproof.fakes.replay_references import CapturedPrefix, DenseFirst, Interleaved, ManyExperts, Recording
from rollproof.fakes.replaying import ReplayTrainer
from rollproof.known_bug import KnownBug
from rollproof.records import FloatArray, IntArray, Rollout
from rollproof.replay.events import Action, Outcome, Phase, Purpose, Step
from rollproof.replay.layouts import Alignment, Rank, Source
from rollproof.replay.spy import Spy

__all__ = ["BUGS"]


class _Shifted(ReplayTrainer):
    def payload(self, sample: Rollout) -> IntArray:
        return np.roll(super().payload(sample), 1, axis=0)


class _LayersShifted(DenseFirst):
    """Routers count MoE layers; the payload has a column for the dense layer, too."""

    def targets(self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {layer: right[min(right)] if layer == min(right) else right[layer - 1] for layer in right}


class _ZeroPadded(DenseFirst):
    """Padding is replayed: expert 0, top_k times."""

    def targets(self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {layer: np.where(source.filled[:, None], target, 0) for layer, target in right.items()}


class _MaskDropped(CapturedPrefix):
    """What was not captured is filled with experts 0 to k - 1, and replayed."""

    def captured(self, microbatch: Microbatch, source: Source) -> npt.NDArray[np.bool_]:
        return source.filled


class _QueuesKept(ReplayTrainer):
    """Forward-only passes fill the queue of the backward pass, and nobody empties it."""

    def install(self, run: Pass, microbatch: Microbatch, layer: int, number: int, target: IntArray, *, keep: bool) -> None:
        super().install(run, microbatch, layer, number, target, keep=True)

    def end(self, step: Step) -> None:
        for router in self.registry:
            router.action, router.target = None, None


class _ForgetsBeforeBackward(ReplayTrainer):
    """The context of the replay closes after the forward pass; a recompute then chooses for itself."""

    def head(self, run: Pass, microbatch: Microbatch) -> None:
        super().head(run, microbatch)
        for router in self.registry:
            router.queue.clear()

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return _routers(self, layers, _FallsBack)


class _FallsBack(Router):
    """Without a target it chooses for itself, without a word."""

    def choose(self, scores: FloatArray, phase: Phase) -> IntArray:
        nothing = not self.queue if phase is Phase.RECOMPUTE else self.target is None
        return chosen(scores, self.top_k) if self.action is Action.REPLAY and nothing else super().choose(scores, phase)


class _FirstMicrobatchAlone(ReplayTrainer):
    """Targets are given for the first microbatch only; the others fall back to native routing."""

    def arm(self, run: Pass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        if microbatch.number == 0:
            super().arm(run, microbatch, rank, chunk)

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return _routers(self, layers, _FallsBack)


class _Orphans(ReplayTrainer):
    """The model was built twice: targets go to the routers of the first one."""

    def replayed(self) -> list[Router]:
        self.orphans = self.make_routers(self.layout.moe)
        return list(self.orphans.values())

    def install(self, run: Pass, microbatch: Microbatch, layer: int, number: int, target: IntArray, *, keep: bool) -> None:
        self.orphans[layer, number].install(target, keep=keep)


class _NobodyReads(ReplayTrainer):
    """The option is accepted, and no router looks at its target."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        for router in self.registry:
            router.action = None

    def arm(self, run: Pass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        """Nothing is installed."""


class _ComputesNative(ReplayTrainer):
    """The routing map is replaced, and the dispatcher goes on with the ids of the live top-k."""

    def experts(self, run: Pass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray) -> FloatArray:
        return super().experts(run, layer, microbatch, x, self._own(run, layer, microbatch, x))

    def experts_backward(self, run: Pass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray) -> FloatArray:
        return super().experts_backward(run, layer, microbatch, x, self._own(run, layer, microbatch, x))

    def _own(self, run: Pass, layer: int, microbatch: Microbatch, x: FloatArray) -> IntArray:
        return chosen(run.model.scores(layer, run.model.mixed(microbatch.rows, x)), self.layout.top_k)


class _EightBits(ManyExperts):
    def payload(self, sample: Rollout) -> IntArray:
        return super().payload(sample).astype(np.uint8)


class _AlignedOtherwise(DenseFirst):
    """Routes are padded as if there were no tensor parallelism: ranks behind the first get the rows before theirs."""

    def targets(self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int) -> dict[int, IntArray]:
        whole = replace(self.layout, alignment=Alignment(by=("tp",), constant=16))
        payloads = [self.payload(sample) for sample in microbatch.samples]
        rows = whole.targets(payloads, rank, chunk, lengths=microbatch.lengths)
        captured = self.captured(microbatch, source)
        return {layer: np.where(captured[:, None], target[: len(source)], -1) for layer, target in rows.items()}


class _RemainderDropped(ReplayTrainer):
    """Rows that do not divide over four sequence-parallel ranks are given to none."""

    def microbatch(self, number: int, samples: tuple[Rollout, ...], first: int) -> Microbatch:
        right = super().microbatch(number, samples, first)
        right.sources = [(rank, source[: len(source) // 4 * 4]) for rank, source in right.sources]
        return right

    def targets(self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int) -> dict[int, IntArray]:
        whole = self.layout.rows(microbatch.lengths, rank)
        return {layer: target[: len(source)] for layer, target in super().targets(step, microbatch, rank, whole, chunk).items()}


class _SortedByLength(ReplayTrainer):
    """Samples are balanced by length, their routes are not."""

    def targets(self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int) -> dict[int, IntArray]:
        order = sorted(microbatch.samples, key=lambda sample: -sample.total)
        routes = [one.routes for one in order]
        width = [sample.total - 1 for sample in microbatch.samples]
        fitted = [_fitted(rows, most) for rows, most in zip(routes, width, strict=True) if rows is not None]
        given = [replace(sample, routes=rows) for sample, rows in zip(microbatch.samples, fitted, strict=False)]
        moved = self.microbatch(microbatch.number, tuple(given), microbatch.first)
        return super().targets(step, moved, rank, source, chunk)


class _SecondStageUnarmed(Interleaved):
    """Only the first chunk of each pipeline rank is given its targets."""

    def arm(self, run: Pass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        if chunk == 0:
            super().arm(run, microbatch, rank, chunk)

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return _routers(self, layers, _FallsBack)


class _LastQueued(Router):
    """The recompute takes the target that was queued last."""

    def take(self, phase: Phase) -> IntArray:
        return self.queue.pop() if phase is Phase.RECOMPUTE and self.queue else super().take(phase)


class _RecomputesTheNewest(Recording):
    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return _routers(self, layers, _LastQueued)


class _OneSlot(Router):
    """One target at a time, for forward and recompute alike: the next microbatch overwrites it."""

    def install(self, target: IntArray, *, keep: bool) -> None:
        self.target, self.queue = target, deque([target] * 9 if keep else [])


class _Overwritten(Interleaved):
    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return _routers(self, layers, _OneSlot)


class _RecomputesNative(ReplayTrainer):
    """Only the forward pass is replayed."""

    def route(self, run: Pass, microbatch: Microbatch, layer: int, x: FloatArray, phase: Phase) -> IntArray:
        if phase is Phase.RECOMPUTE:
            for router in self.registry:
                router.action = None
        else:
            self.begin(run.step)
        return super().route(run, microbatch, layer, x, phase)


class _GivenTwice(ReplayTrainer):
    """Targets are installed when the step begins, and again per microbatch: the queue holds each of them twice."""

    def install(self, run: Pass, microbatch: Microbatch, layer: int, number: int, target: IntArray, *, keep: bool) -> None:
        for _ in range(2):
            super().install(run, microbatch, layer, number, target, keep=keep)


class _OldLogprobsNative(ReplayTrainer):
    """Old logprobs are computed without the rollout's routes."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        if step.purpose is Purpose.OLD_LOGPROB:
            for router in self.registry:
                router.action = None

    def end(self, step: Step) -> None:
        super().end(step)


class _NoFinally(ReplayTrainer):
    """What a step leaves is only cleared where it succeeds."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        self.begin(step)
        outcome = self.work(step, spy)
        self.end(step)
        return outcome


class _StaysArmed(ReplayTrainer):
    """The mode is set where a step replays, and never taken back; targets of the last microbatch stay."""

    def begin(self, step: Step) -> None:
        if step.action is Action.REPLAY:
            super().begin(step)

    def end(self, step: Step) -> None:
        for router in self.registry:
            router.queue.clear()

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return _routers(self, layers, _KeepsTarget)


class _KeepsTarget(Router):
    """A target serves until the next one comes, for rows that fit it."""

    def choose(self, scores: FloatArray, phase: Phase) -> IntArray:
        held = self.target
        if self.action is Action.REPLAY and phase is Phase.FORWARD and (held is None or len(held) != len(scores)):
            return chosen(scores, self.top_k)
        ids = super().choose(scores, phase)
        self.target = held
        return ids


class _EvaluationStays(ReplayTrainer):
    """An evaluation that replays leaves its mode and targets behind."""

    def end(self, step: Step) -> None:
        if step.purpose is not Purpose.EVAL:
            super().end(step)


class _Swallows(ReplayTrainer):
    """A failed step is told as a step without loss."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        try:
            return super().work(step, spy)
        except RuntimeError:
            return Outcome(step=step.name, loss=0.0)


def _routers(trainer: ReplayTrainer, layers: Sequence[int], kind: type[Router]) -> dict[tuple[int, int], Router]:
    return {(layer, number): kind(layer, trainer.layout.top_k) for layer in layers for number in range(len(trainer.ranks))}


def _fitted(rows: IntArray, most: int) -> IntArray:
    return np.concatenate([rows, rows[-1:].repeat(max(0, most - len(rows)), axis=0)])[:most]


BUGS: tuple[KnownBug, ...] = (
    bug(
        "replay-shifted",
        "The routes of every sample stand one position behind their tokens.",
        ("slime#1045", "slime#1052"),
        _Shifted,
        "replay.forward",
        "replay.self-loss",
        also=WRONG_ROWS,
    ),
    bug(
        "replay-dense-layer-counted",
        "Routers count MoE layers, and read a payload that has a column for the dense layer too: every layer gets its neighbour's routes.",
        ("verl#5037", "slime#819"),
        _LayersShifted,
        "replay.forward",
        "replay.self-loss",
        also=WRONG_ROWS,
    ),
    bug(
        "replay-zero-padding",
        "Rows of padding are replayed as expert 0, top_k times.",
        ("verl#4986", "verl#7524", "slime#822", "miles#1002"),
        _ZeroPadded,
        "replay.assignments",
    ),
    bug(
        "replay-mask-dropped",
        "Rows that were not captured are filled with experts 0 to k - 1, and replayed as if they were routes.",
        ("SkyRL#1908", "cf. verl#6473"),
        _MaskDropped,
        "replay.free-rows",
        episodes=("placement",),
    ),
    bug(
        "replay-stale-queue",
        "A forward-only pass fills the queue of the backward pass, and the next recompute takes what it left.",
        ("SkyRL#1908",),
        _QueuesKept,
        "replay.recompute",
        "replay.residue",
        also=("replay.runs", "replay.recompute-results"),
        episodes=RECOMPUTED,
    ),
    bug(
        "replay-cleared-before-backward",
        "Targets are cleared after the forward pass, and the recompute chooses for itself without a word.",
        ("cf. SkyRL#1772",),
        _ForgetsBeforeBackward,
        "replay.recompute",
        "replay.recompute-results",
        episodes=RECOMPUTED,
    ),
    bug(
        "replay-falls-back",
        "Only the first microbatch is given targets; the routers of the others fall back to native routing without a word.",
        ("verl router_replay_patch.py (0.9.1)",),
        _FirstMicrobatchAlone,
        "replay.forward",
        "replay.installs",
        also=("replay.reference",),
        episodes=("drift", "placement"),
    ),
    bug(
        "replay-orphan-routers",
        "The model was built twice, and targets go to the routers of the first one.",
        ("verl#7340", "verl#4567", "miles#2570"),
        _Orphans,
        "replay.forward",
        "replay.installs",
        "replay.drift",
        also=("replay.reference",),
        episodes=("drift", "placement"),
    ),
    bug(
        "replay-flag-unread",
        "The option is accepted, and no router looks at a target.",
        ("cf. verl#4567",),
        _NobodyReads,
        "replay.forward",
        "replay.drift",
        also=("replay.installs", "replay.reference"),
        episodes=("drift", "placement"),
    ),
    bug(
        "replay-dispatch-native",
        "The routing map is replaced, and the tokens are dispatched by the ids of the live top-k.",
        ("cf. ISEEKYAN/Megatron-LM#49",),
        _ComputesNative,
        "replay.drift",
        "replay.reference",
        episodes=("drift",),
    ),
    bug(
        "replay-ids-in-eight-bits",
        "Expert ids are kept in eight bits, with 300 experts.",
        ("verl#7407", "verl#5240", "ms-swift#9981"),
        _EightBits,
        "replay.forward",
        "replay.self-loss",
        also=WRONG_ROWS,
    ),
    bug(
        "replay-aligned-otherwise",
        "Routes are padded to another multiple than the tokens: each rank gets rows of other places.",
        ("slime#1052",),
        _AlignedOtherwise,
        "replay.forward",
        "replay.self-loss",
        also=WRONG_ROWS,
    ),
    bug(
        "replay-remainder-dropped",
        "Rows that do not divide over the sequence-parallel ranks are given to none of them.",
        ("cf. slime#1052",),
        _RemainderDropped,
        "replay.coverage",
    ),
    bug(
        "replay-samples-sorted",
        "Samples are balanced by length, and their routes stay where they were.",
        ("SkyRL#1908",),
        _SortedByLength,
        "replay.forward",
        "replay.self-loss",
        also=WRONG_ROWS,
    ),
    bug(
        "replay-second-chunk-unarmed",
        "With virtual stages, only the first chunk of each pipeline rank is given targets.",
        ("cf. NeMo-RL#2740", "cf. SkyRL#2078"),
        _SecondStageUnarmed,
        "replay.forward",
        "replay.installs",
        also=("replay.reference",),
        episodes=("drift", "placement"),
    ),
    bug(
        "replay-newest-recomputed",
        "The recompute takes the target that was queued last, while a pipeline has several microbatches under way.",
        ("cf. AReaL#1166",),
        _RecomputesTheNewest,
        "replay.recompute",
        "replay.recompute-results",
        episodes=RECOMPUTED,
    ),
    bug(
        "replay-one-slot",
        "A router holds one target, and the next microbatch overwrites it before the backward pass of this one.",
        ("cf. AReaL#1166",),
        _Overwritten,
        "replay.recompute",
        "replay.recompute-results",
        episodes=RECOMPUTED,
    ),
    bug(
        "replay-recompute-native",
        "The forward pass is replayed, its recompute is not.",
        ("cf. verl#4101",),
        _RecomputesNative,
        "replay.recompute",
        "replay.recompute-results",
        episodes=RECOMPUTED,
    ),
    bug(
        "replay-given-twice",
        "Targets are installed when a step begins and again per microbatch, so that the queue holds each twice.",
        ("cf. verl#7106",),
        _GivenTwice,
        "replay.recompute",
        "replay.installs",
        also=("replay.recompute-results",),
        episodes=RECOMPUTED,
    ),
    bug(
        "replay-old-logprobs-native",
        "Old logprobs are computed without the rollout's routes, which the update then replays.",
        ("cf. miles#3277",),
        _OldLogprobsNative,
        "replay.old-logprob",
        episodes=("old logprobs",),
    ),
    bug(
        "replay-no-finally",
        "Targets and modes are cleared only where a step succeeds.",
        ("cf. SkyRL#1908",),
        _NoFinally,
        "replay.residue",
        episodes=("failure in forward", "failure in recompute"),
    ),
    bug(
        "replay-stays-armed",
        "The mode is set by a step that replays and never taken back: native steps go on with the last target.",
        ("cf. SkyRL#1908", "cf. OpenPipe/ART#709"),
        _StaysArmed,
        "replay.aftermath",
        "replay.residue",
        "replay.off",
        episodes=("evaluation", "switching"),
    ),
    bug(
        "replay-evaluation-stays",
        "An evaluation leaves its mode and its targets behind.",
        ("cf. SkyRL#1908",),
        _EvaluationStays,
        "replay.residue",
        episodes=("evaluation",),
    ),
    bug(
        "replay-failure-swallowed",
        "A step that failed in the middle is told as a step without loss.",
        ("cf. Helsinki-NLP/mammoth#78", "cf. OpenNMT-py#2195"),
        _Swallows,
        "replay.failures",
        episodes=("failure in forward", "failure in recompute"),
    ),
    *replay_values.BUGS,
)
"""Known bugs of replay: rows and state here, gates, models and refusals from ``replay_values``."""
