"""Known bugs of replay: targets that reach the wrong row, layer, rank or sample, or no router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollproof.core.events.replay import Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.fakes.known_bugs import replay_gates, replay_models, replay_passes
from rollproof.fakes.known_bugs._replay_planting import WRONG_ROWS, FallsBack, routers
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.moe_model import chosen
from rollproof.fakes.trainers.reference_trainers import (
    CapturedPrefix,
    DenseFirst,
    Interleaved,
    ManyExperts,
)
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch, ReplayRouter, TrainerPass
from rollproof.layouts import Alignment, Rank, Source

__all__ = ["BUGS"]


class _ReplayShifted(ReplayTrainer):
    def payload(self, sample: Rollout) -> IntArray:
        # labels are shifted by one, and routes are shifted with them
        return np.roll(super().payload(sample), 1, axis=0)


class _ReplayDenseLayerCounted(DenseFirst):
    """Routers count MoE layers; the payload has a column for the dense layer, too."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {
            layer: right[min(right)] if layer == min(right) else right[layer - 1] for layer in right
        }


class _ReplayZeroPadding(DenseFirst):
    """Replays padding: expert 0, top_k times."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        # equal ids collapse in the routing map, so these rows execute one expert
        return {
            layer: np.where(source.filled[:, None], target, 0) for layer, target in right.items()
        }


class _ReplayMaskDropped(CapturedPrefix):
    """Fills rows that were not captured with experts 0 to k - 1, and replays them."""

    def captured(self, microbatch: Microbatch, source: Source) -> npt.NDArray[np.bool_]:
        return source.filled


class _ReplayFallsBack(ReplayTrainer):
    """Installs targets for the first microbatch only; the others fall back to native routing."""

    def arm(self, run: TrainerPass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        if microbatch.number == 0:
            super().arm(run, microbatch, rank, chunk)

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        return routers(self, layers, FallsBack)


class _ReplayOrphanRouters(ReplayTrainer):
    """Builds the model twice, and installs targets in the routers of the first one."""

    def replayed(self) -> list[ReplayRouter]:
        self.orphans = self.make_routers(self.layout.moe)
        return list(self.orphans.values())

    def install(
        self,
        run: TrainerPass,
        microbatch: Microbatch,
        layer: int,
        number: int,
        target: IntArray,
        *,
        keep: bool,
    ) -> None:
        # routers register themselves in a list of the process, where orphans come first
        self.orphans[layer, number].install(target, keep=keep)


class _ReplayFlagUnread(ReplayTrainer):
    """Accepts the option, but no router reads its target."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        for router in self.registry:
            router.action = None

    def arm(self, run: TrainerPass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        """Install nothing."""


class _ReplayDispatchNative(ReplayTrainer):
    """Replaces the routing map, but dispatches by the ids of the live top-k."""

    def experts(
        self, run: TrainerPass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray
    ) -> FloatArray:
        return super().experts(run, layer, microbatch, x, self._own(run, layer, microbatch, x))

    def experts_backward(
        self, run: TrainerPass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray
    ) -> FloatArray:
        return super().experts_backward(
            run, layer, microbatch, x, self._own(run, layer, microbatch, x)
        )

    def _own(self, run: TrainerPass, layer: int, microbatch: Microbatch, x: FloatArray) -> IntArray:
        return chosen(
            run.model.scores(layer, run.model.mixed(microbatch.rows, x)), self.layout.top_k
        )


class _ReplayIdsInEightBits(ManyExperts):
    def payload(self, sample: Rollout) -> IntArray:
        # the model has 300 experts; astype wraps silently
        return super().payload(sample).astype(np.uint8)


class _ReplayAlignedOtherwise(DenseFirst):
    """Pads routes as without tensor parallelism: later ranks get the rows before theirs."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        other = replace(self.layout, alignment=Alignment(by=("tp",), constant=16))
        payloads = [self.payload(sample) for sample in microbatch.samples]
        rows = other.targets(payloads, rank, chunk, lengths=microbatch.lengths)
        captured = self.captured(microbatch, source)
        return {
            layer: np.where(captured[:, None], target[: len(source)], -1)
            for layer, target in rows.items()
        }


class _ReplayRemainderDropped(ReplayTrainer):
    """Assigns rows that do not divide over four sequence-parallel ranks to none."""

    def microbatch(self, number: int, samples: tuple[Rollout, ...], first: int) -> Microbatch:
        right = super().microbatch(number, samples, first)
        right.sources = [(rank, source[: len(source) // 4 * 4]) for rank, source in right.sources]
        return right

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        unsliced = self.layout.rows(microbatch.lengths, rank)
        return {
            layer: target[: len(source)]
            for layer, target in super().targets(step, microbatch, rank, unsliced, chunk).items()
        }


class _ReplaySamplesSorted(ReplayTrainer):
    """Balances samples by length, but not their routes."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        order = sorted(microbatch.samples, key=lambda sample: -sample.total)
        routes = [sample.routes for sample in order]
        width = [sample.total - 1 for sample in microbatch.samples]
        fitted = [
            _fitted(rows, count)
            for rows, count in zip(routes, width, strict=True)
            if rows is not None
        ]
        displaced = [
            replace(sample, routes=rows)
            for sample, rows in zip(microbatch.samples, fitted, strict=False)
        ]
        moved = self.microbatch(microbatch.number, tuple(displaced), microbatch.first)
        return super().targets(step, moved, rank, source, chunk)


class _ReplayBufferEnds(ReplayTrainer):
    """Copies the routes of a sample into a buffer of 16 rows; the router chooses for the others."""

    def captured(self, microbatch: Microbatch, source: Source) -> npt.NDArray[np.bool_]:
        return super().captured(microbatch, source) & (source.position < 16)


class _ReplaySecondChunkUnarmed(Interleaved):
    """Installs targets for the first chunk of each pipeline rank only."""

    def arm(self, run: TrainerPass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        if chunk == 0:
            super().arm(run, microbatch, rank, chunk)

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        return routers(self, layers, FallsBack)


def _fitted(rows: IntArray, count: int) -> IntArray:
    return np.concatenate([rows, rows[-1:].repeat(max(0, count - len(rows)), axis=0)])[:count]


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="replay-shifted",
        summary="The routes of every sample are one position late.",
        refs=("slime#1045", "slime#1052"),
        kind="replay",
        make=_ReplayShifted,
        only=("self-replay",),
        detected_by=("replay.forward", "replay.self-loss"),
        may_fail=WRONG_ROWS,
    ),
    KnownBug(
        id="replay-dense-layer-counted",
        summary=(
            "Routers count MoE layers, and read a payload that has a column for the dense "
            "layer too: every layer gets its neighbour's routes."
        ),
        refs=("verl#5037", "slime#819"),
        kind="replay",
        make=_ReplayDenseLayerCounted,
        only=("self-replay",),
        detected_by=("replay.forward", "replay.self-loss"),
        may_fail=WRONG_ROWS,
    ),
    KnownBug(
        id="replay-buffer-ends",
        summary="A buffer holds targets for 16 rows of a sample; later rows are not replayed.",
        refs=("cf. verl#7340",),
        kind="replay",
        make=_ReplayBufferEnds,
        only=("long samples",),
        detected_by=("replay.forward",),
    ),
    KnownBug(
        id="replay-zero-padding",
        summary="Rows of padding are replayed as expert 0, top_k times.",
        refs=("verl#4986", "verl#7524", "slime#822", "miles#1002"),
        kind="replay",
        make=_ReplayZeroPadding,
        only=("self-replay",),
        detected_by=("replay.assignments",),
    ),
    KnownBug(
        id="replay-mask-dropped",
        summary=(
            "Rows that were not captured are filled with experts 0 to k - 1, and replayed as "
            "if they were routes."
        ),
        refs=("SkyRL#1908", "cf. verl#6473"),
        kind="replay",
        make=_ReplayMaskDropped,
        only=("placement",),
        detected_by=("replay.free-rows",),
    ),
    KnownBug(
        id="replay-falls-back",
        summary=(
            "Only the first microbatch gets targets; the routers of the others silently fall back"
            " to native routing."
        ),
        refs=("verl router_replay_patch.py (0.9.1)",),
        kind="replay",
        make=_ReplayFallsBack,
        only=("drift", "placement"),
        detected_by=("replay.forward", "replay.installs"),
        may_fail=("replay.reference",),
    ),
    KnownBug(
        id="replay-orphan-routers",
        summary=("The model was built twice, and targets go to the routers of the first one."),
        refs=("verl#7340", "verl#4567", "miles#2570"),
        kind="replay",
        make=_ReplayOrphanRouters,
        only=("drift", "placement"),
        detected_by=("replay.forward", "replay.installs", "replay.drift"),
        may_fail=("replay.reference",),
    ),
    KnownBug(
        id="replay-flag-unread",
        summary="The option is accepted, but no router uses a target.",
        refs=("cf. verl#4567",),
        kind="replay",
        make=_ReplayFlagUnread,
        only=("drift", "placement"),
        detected_by=("replay.forward", "replay.drift"),
        may_fail=("replay.installs", "replay.reference"),
    ),
    KnownBug(
        id="replay-dispatch-native",
        summary=(
            "The routing map is replaced, and the tokens are dispatched by the ids of the "
            "live top-k."
        ),
        refs=("cf. ISEEKYAN/Megatron-LM#49",),
        kind="replay",
        make=_ReplayDispatchNative,
        only=("drift",),
        detected_by=("replay.drift", "replay.reference"),
    ),
    KnownBug(
        id="replay-ids-in-eight-bits",
        summary="Expert ids are stored in eight bits, with 300 experts.",
        refs=("verl#7407", "verl#5240", "ms-swift#9981"),
        kind="replay",
        make=_ReplayIdsInEightBits,
        only=("self-replay",),
        detected_by=("replay.forward", "replay.self-loss"),
        may_fail=WRONG_ROWS,
    ),
    KnownBug(
        id="replay-aligned-otherwise",
        summary=(
            "Routes are padded to another multiple than the tokens: each rank gets rows of "
            "other places."
        ),
        refs=("slime#1052",),
        kind="replay",
        make=_ReplayAlignedOtherwise,
        only=("self-replay",),
        detected_by=("replay.forward", "replay.self-loss"),
        may_fail=WRONG_ROWS,
    ),
    KnownBug(
        id="replay-remainder-dropped",
        summary=(
            "Rows that do not divide over the sequence-parallel ranks are assigned to none of them."
        ),
        refs=("cf. slime#1052",),
        kind="replay",
        make=_ReplayRemainderDropped,
        only=("self-replay",),
        detected_by=("replay.coverage",),
    ),
    KnownBug(
        id="replay-samples-sorted",
        summary="Samples are balanced by length, but their routes keep the old order.",
        refs=("SkyRL#1908",),
        kind="replay",
        make=_ReplaySamplesSorted,
        only=("self-replay",),
        detected_by=("replay.forward", "replay.self-loss"),
        may_fail=WRONG_ROWS,
    ),
    KnownBug(
        id="replay-second-chunk-unarmed",
        summary="With virtual stages, only the first chunk of each pipeline rank gets targets.",
        refs=("cf. NeMo-RL#2740", "cf. SkyRL#2078"),
        kind="replay",
        make=_ReplaySecondChunkUnarmed,
        only=("drift", "placement"),
        detected_by=("replay.forward", "replay.installs"),
        may_fail=("replay.reference",),
    ),
    *replay_passes.BUGS,
    *replay_gates.BUGS,
    *replay_models.BUGS,
)
