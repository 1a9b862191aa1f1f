"""Known bugs of replay besides rows and gates: other models, recordings, what is switched off, and
what ought to be refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof.core.events.replay import Action, Phase, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.fakes.known_bugs._replay_planting import bug
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_trainers import (
    CapturedPrefix,
    DenseFirst,
    ManyExperts,
    Pipelined,
    Recording,
)
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch, Pass, Router
from rollproof.layouts import Rank, Source

__all__ = ["BUGS"]


class _CriticReplayed(ReplayTrainer):
    """Replay is registered for the routers of every model; the critic has the policy's sizes."""

    role = "critic"

    def replayed(self) -> list[Router]:
        return list(self.routers.values())

    def begin(self, step: Step) -> None:
        super().begin(step)
        if step.model == self.role and step.action is Action.REPLAY:
            for router in self.models[self.role][1].values():
                router.action = Action.REPLAY

    def operate(self, run: Pass, rank: int, operation: object) -> None:
        if (
            run.step.model == self.role
            and run.step.action is Action.REPLAY
            and not operation.backward
        ):  # type: ignore[attr-defined]
            self.arm(run, run.microbatches[operation.microbatch], rank, operation.chunk)  # type: ignore[attr-defined]
        super().operate(run, rank, operation)  # type: ignore[arg-type]

    def end(self, step: Step) -> None:
        super().end(step)
        for router in self.models[self.role][1].values():
            router.clear()


class _TeacherReplayed(_CriticReplayed, CapturedPrefix):
    role = "teacher"


class _MtpAliased(ManyExperts):
    """MTP layers count from 0 again, so they are given the targets of the first layer."""

    def replayed(self) -> list[Router]:
        return list(self.routers.values())

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {**right, self.layout.num_layers: right[0]}


class _FirstRankRecorded(Pipelined):
    """Recordings of sequence-parallel ranks are not gathered: the first rank's rows stand for all."""

    def recorded(self, run: Pass) -> dict[str, IntArray]:
        for (layer, number), router in self.routers.items():
            first = self.routers[layer, number - number % self.layout.mesh.tp]
            router.recorded = list(first.recorded)
        return super().recorded(run)


class _ChunksSwapped(Pipelined):
    """Stages are put together rank by rank, as if there were no chunks."""

    def recorded(self, run: Pass) -> dict[str, IntArray]:
        right = super().recorded(run)
        by_rank = [
            layer for chunks in self.layout.chunks() for layers in chunks for layer in layers
        ]
        return {name: rows[:, by_rank] for name, rows in right.items()}


class _MicrobatchesReversed(Recording):
    """Recordings are taken off a stack: the last microbatch comes first."""

    def recorded(self, run: Pass) -> dict[str, IntArray]:
        right = super().recorded(run)
        names = [
            sample.request_id for microbatch in run.microbatches for sample in microbatch.samples
        ]
        values = [
            right[sample.request_id]
            for microbatch in reversed(run.microbatches)
            for sample in microbatch.samples
        ]
        return dict(zip(names, values, strict=True))


class _AsksRegistryWhenOff(ReplayTrainer):
    """Replay code runs although the option is off, and finds no router registered."""

    def begin(self, step: Step) -> None:
        if step.action is Action.OFF:
            raise IndexError("list index out of range")
        super().begin(step)


class _RoutesDecide(ReplayTrainer):
    """A step replays where its samples have routes, whatever was configured."""

    def begin(self, step: Step) -> None:
        self._replays = (
            all(sample.routes is not None for sample in step.samples) and step.model == "policy"
        )
        super().begin(replace(step, action=Action.REPLAY) if self._replays else step)

    def work(self, step: Step, spy: object) -> object:  # type: ignore[override]
        return super().work(replace(step, action=Action.REPLAY) if self._replays else step, spy)  # type: ignore[arg-type]


class _FusedAccepted(ReplayTrainer):
    """A fused router returns before it looks at its target."""

    def variant(self, name: str) -> ReplayTrainer:
        return super().variant(name) if name != "fused" else _Ignoring()


class _Ignoring(ReplayTrainer):
    def begin(self, step: Step) -> None:
        """Nothing is refused, and no router replays."""


class _TakesAnything(ReplayTrainer):
    """Routes are cut and padded with zeros until they fit."""

    def check(self, step: Step) -> None:
        """Nothing is looked at."""

    def payload(self, sample: Rollout) -> IntArray:
        contract, routes = self.contract, super().payload(sample).astype(np.int64)
        fitted = np.zeros(
            (sample.total - 1, contract.route_layers, contract.top_k or 1), dtype=np.int64
        )
        rows, layers, columns = (min(a, b) for a, b in zip(fitted.shape, routes.shape, strict=True))
        fitted[:rows, :layers, :columns] = routes[:rows, :layers, :columns]
        return fitted % self.layout.num_experts


class _TargetsInPlace(ReplayTrainer):
    """Filler is written into the routes of the sample."""

    def payload(self, sample: Rollout) -> IntArray:
        routes = super().payload(sample)
        routes[0] = np.sort(routes[0], axis=-1)[..., ::-1]
        routes[-1] = np.sort(routes[-1], axis=-1)
        return routes


class _EmptySkipped(ReplayTrainer):
    """Targets are listed for microbatches with samples, and taken by number: after an empty one
    each gets the next one's.
    """

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        empty = any(not samples for samples in step.microbatches)
        return (
            {layer: np.roll(target, 1, axis=0) for layer, target in right.items()}
            if empty
            else right
        )


class _ScoresDecideNaN(ReplayTrainer):
    """Targets whose scores are NaN are dropped in favour of expert 0."""

    def route(
        self, run: Pass, microbatch: Microbatch, layer: int, x: FloatArray, phase: Phase
    ) -> IntArray:
        self._broken = bool(
            np.isnan(run.model.scores(layer, run.model.mixed(microbatch.rows, x))).any()
        )
        return super().route(run, microbatch, layer, x, phase)

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {layer: target * 0 for layer, target in right.items()} if step.weights < 0 else right


class _NarrowBuffer(DenseFirst):
    """The target buffer has a column less than top_k; the last expert of a row stands in it twice."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {
            layer: target[:, [*range(target.shape[1] - 1), 0]] for layer, target in right.items()
        }


BUGS: tuple[KnownBug, ...] = (
    bug(
        "replay-critic",
        "Replay is registered for every model: the critic executes the policy's routes.",
        ("slime#1187",),
        _CriticReplayed,
        "replay.models",
        episodes=("model critic",),
    ),
    bug(
        "replay-teacher",
        "The teacher of a distillation executes the student's routes.",
        ("NeMo-RL#4083",),
        _TeacherReplayed,
        "replay.models",
        episodes=("model teacher",),
    ),
    bug(
        "replay-mtp-aliased",
        "MTP layers count from 0 again, and execute the targets of the first layer.",
        ("NeMo-RL#3903",),
        _MtpAliased,
        "replay.models",
        also=("replay.installs", "replay.self-loss", "replay.self-gradients"),
    ),
    bug(
        "replay-recording-not-gathered",
        "Recordings of sequence-parallel ranks are not gathered: the rows of the first one stand"
        " for all.",
        ("verl#7106",),
        _FirstRankRecorded,
        "replay.recorded",
        also=("replay.self-loss", "replay.self-gradients"),
    ),
    bug(
        "replay-recording-chunks",
        "Recordings of pipeline ranks are put together rank by rank, as if there were no chunks.",
        ("verl#7106", "verl#7805"),
        _ChunksSwapped,
        "replay.recorded",
        episodes=("switching",),
    ),
    bug(
        "replay-recording-microbatches",
        "Recordings are taken off a stack: the last microbatch comes first.",
        ("cf. verl#7805",),
        _MicrobatchesReversed,
        "replay.recorded",
        episodes=("switching",),
    ),
    bug(
        "replay-off-asks-registry",
        "Replay code runs although the option is off, and finds no router registered.",
        ("verl#7106", "verl#7786"),
        _AsksRegistryWhenOff,
        "replay.runs",
        episodes=("switching",),
    ),
    bug(
        "replay-off-by-presence",
        "Whether a step replays is read off its samples: routes are replayed although the option is"
        " off.",
        ("cf. verl#4973",),
        _RoutesDecide,
        "replay.off",
        also=("replay.installs",),
        episodes=("switching",),
    ),
    bug(
        "replay-fused-router",
        "A fused router is accepted, and returns before it looks at its target.",
        ("cf. Megatron-LM moe_utils.py (moe_router_fusion)",),
        _FusedAccepted,
        "replay.routers",
        episodes=("router fused",),
    ),
    bug(
        "replay-takes-anything",
        "Routes are cut, padded with zeros and wrapped until they fit.",
        ("Megatron-LM router_replay.py (0.16.1)", "verl agent_loop.py (0.9.1)"),
        _TakesAnything,
        "replay.targets",
        episodes=("bad routes",),
    ),
    bug(
        "replay-writes-targets",
        "Routes are rearranged in the arrays of the samples.",
        ("cf. verl#5519",),
        _TargetsInPlace,
        "replay.input",
    ),
    bug(
        "replay-empty-microbatch",
        "After an empty microbatch, each of the others gets targets that are displaced.",
        ("cf. verl#6675",),
        _EmptySkipped,
        "replay.edges",
        episodes=("edges",),
    ),
    bug(
        "replay-nan-scores",
        "Where scores are NaN, targets are dropped in favour of expert 0.",
        ("cf. verl#7841",),
        _ScoresDecideNaN,
        "replay.edges",
        episodes=("edges",),
    ),
    bug(
        "replay-narrow-target",
        "The buffer of targets has a column less than top_k, and an expert stands in each row"
        " twice.",
        ("Megatron-LM router_replay.py (0.16.1)",),
        _NarrowBuffer,
        "replay.assignments",
        "replay.forward",
        also=("replay.self-loss", "replay.self-gradients"),
    ),
)
"""Known bugs of other models, recordings, modes and refusals."""
