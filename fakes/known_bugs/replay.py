"""Known bugs of replay, rows: targets that reach the wrong row, layer, rank or sample, or that
nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollproof.core.events.replay import Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.fakes.known_bugs import replay_gates, replay_models, replay_passes
from rollproof.fakes.known_bugs._replay_planting import WRONG_ROWS, FallsBack, bug, routers
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.moe_model import chosen
from rollproof.fakes.trainers.reference_trainers import (
    CapturedPrefix,
    DenseFirst,
    Interleaved,
    ManyExperts,
)
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch, Pass, Router
from rollproof.layouts import Alignment, Rank, Source

__all__ = ["BUGS"]


class _Shifted(ReplayTrainer):
    def payload(self, sample: Rollout) -> IntArray:
        return np.roll(super().payload(sample), 1, axis=0)


class _LayersShifted(DenseFirst):
    """Routers count MoE layers; the payload has a column for the dense layer, too."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {
            layer: right[min(right)] if layer == min(right) else right[layer - 1] for layer in right
        }


class _ZeroPadded(DenseFirst):
    """Padding is replayed: expert 0, top_k times."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {
            layer: np.where(source.filled[:, None], target, 0) for layer, target in right.items()
        }


class _MaskDropped(CapturedPrefix):
    """What was not captured is filled with experts 0 to k - 1, and replayed."""

    def captured(self, microbatch: Microbatch, source: Source) -> npt.NDArray[np.bool_]:
        return source.filled


class _FirstMicrobatchAlone(ReplayTrainer):
    """Targets are given for the first microbatch only; the others fall back to native routing."""

    def arm(self, run: Pass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        if microbatch.number == 0:
            super().arm(run, microbatch, rank, chunk)

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return routers(self, layers, FallsBack)


class _Orphans(ReplayTrainer):
    """The model was built twice: targets go to the routers of the first one."""

    def replayed(self) -> list[Router]:
        self.orphans = self.make_routers(self.layout.moe)
        return list(self.orphans.values())

    def install(
        self,
        run: Pass,
        microbatch: Microbatch,
        layer: int,
        number: int,
        target: IntArray,
        *,
        keep: bool,
    ) -> None:
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

    def experts(
        self, run: Pass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray
    ) -> FloatArray:
        return super().experts(run, layer, microbatch, x, self._own(run, layer, microbatch, x))

    def experts_backward(
        self, run: Pass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray
    ) -> FloatArray:
        return super().experts_backward(
            run, layer, microbatch, x, self._own(run, layer, microbatch, x)
        )

    def _own(self, run: Pass, layer: int, microbatch: Microbatch, x: FloatArray) -> IntArray:
        return chosen(
            run.model.scores(layer, run.model.mixed(microbatch.rows, x)), self.layout.top_k
        )


class _EightBits(ManyExperts):
    def payload(self, sample: Rollout) -> IntArray:
        return super().payload(sample).astype(np.uint8)


class _AlignedOtherwise(DenseFirst):
    """Routes are padded as if there were no tensor parallelism: ranks behind the first get the rows
    before theirs.
    """

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        whole = replace(self.layout, alignment=Alignment(by=("tp",), constant=16))
        payloads = [self.payload(sample) for sample in microbatch.samples]
        rows = whole.targets(payloads, rank, chunk, lengths=microbatch.lengths)
        captured = self.captured(microbatch, source)
        return {
            layer: np.where(captured[:, None], target[: len(source)], -1)
            for layer, target in rows.items()
        }


class _RemainderDropped(ReplayTrainer):
    """Rows that do not divide over four sequence-parallel ranks are given to none."""

    def microbatch(self, number: int, samples: tuple[Rollout, ...], first: int) -> Microbatch:
        right = super().microbatch(number, samples, first)
        right.sources = [(rank, source[: len(source) // 4 * 4]) for rank, source in right.sources]
        return right

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        whole = self.layout.rows(microbatch.lengths, rank)
        return {
            layer: target[: len(source)]
            for layer, target in super().targets(step, microbatch, rank, whole, chunk).items()
        }


class _SortedByLength(ReplayTrainer):
    """Samples are balanced by length, their routes are not."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        order = sorted(microbatch.samples, key=lambda sample: -sample.total)
        routes = [one.routes for one in order]
        width = [sample.total - 1 for sample in microbatch.samples]
        fitted = [
            _fitted(rows, most)
            for rows, most in zip(routes, width, strict=True)
            if rows is not None
        ]
        given = [
            replace(sample, routes=rows)
            for sample, rows in zip(microbatch.samples, fitted, strict=False)
        ]
        moved = self.microbatch(microbatch.number, tuple(given), microbatch.first)
        return super().targets(step, moved, rank, source, chunk)


class _SecondStageUnarmed(Interleaved):
    """Only the first chunk of each pipeline rank is given its targets."""

    def arm(self, run: Pass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        if chunk == 0:
            super().arm(run, microbatch, rank, chunk)

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], Router]:
        return routers(self, layers, FallsBack)


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
        "Routers count MoE layers, and read a payload that has a column for the dense layer too:"
        " every layer gets its neighbour's routes.",
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
        "Rows that were not captured are filled with experts 0 to k - 1, and replayed as if they"
        " were routes.",
        ("SkyRL#1908", "cf. verl#6473"),
        _MaskDropped,
        "replay.free-rows",
        episodes=("placement",),
    ),
    bug(
        "replay-falls-back",
        "Only the first microbatch is given targets; the routers of the others fall back to native"
        " routing without a word.",
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
        "Routes are padded to another multiple than the tokens: each rank gets rows of other"
        " places.",
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
    *replay_passes.BUGS,
    *replay_gates.BUGS,
    *replay_models.BUGS,
)
"""Known bugs of replay: rows here, the others from ``replay_passes``, ``replay_gates`` and
``replay_models``.
"""
