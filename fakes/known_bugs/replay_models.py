"""Known bugs of replay: other models, recordings, switches, and routes that must be refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof.core.events.replay import Action, Outcome, Phase, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.router_spy import Spy
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_trainers import (
    CapturedPrefix,
    DenseFirst,
    ManyExperts,
    Pipelined,
    RecordingTrainer,
)
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch, ReplayRouter, TrainerPass
from rollproof.layouts import Rank, Source
from rollproof.layouts.pipeline import Operation

__all__ = ["BUGS"]


class _ReplayCritic(ReplayTrainer):
    """Registers replay for the routers of every model; the critic has the policy's sizes."""

    role = "critic"

    def replayed(self) -> list[ReplayRouter]:
        return list(self.routers.values())

    def begin(self, step: Step) -> None:
        super().begin(step)
        if step.model == self.role and step.action is Action.REPLAY:
            for router in self.models[self.role][1].values():
                router.action = Action.REPLAY

    def operate(self, run: TrainerPass, rank: int, operation: Operation) -> None:
        replays = run.step.model == self.role and run.step.action is Action.REPLAY
        if replays and not operation.backward:
            self.arm(run, run.microbatches[operation.microbatch], rank, operation.chunk)
        super().operate(run, rank, operation)

    def end(self, step: Step) -> None:
        super().end(step)
        for router in self.models[self.role][1].values():
            router.clear()


class _ReplayTeacher(_ReplayCritic, CapturedPrefix):
    role = "teacher"


class _ReplayMtpAliased(ManyExperts):
    """MTP layers count from 0 again, so they get the targets of the first layer."""

    def replayed(self) -> list[ReplayRouter]:
        return list(self.routers.values())

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        # Megatron numbers layers of an MTP head from 1 again
        return {**right, self.layout.num_layers: right[0]}


class _ReplayRecordingNotGathered(Pipelined):
    """Uses the first sequence-parallel rank's recording for all, without a gather."""

    def recorded(self, run: TrainerPass) -> dict[str, IntArray]:
        for (layer, number), router in self.routers.items():
            first = self.routers[layer, number - number % self.layout.mesh.tp]
            router.recorded = list(first.recorded)
        return super().recorded(run)


class _ReplayRecordingChunks(Pipelined):
    """Joins stages rank by rank, as if there were no chunks."""

    def recorded(self, run: TrainerPass) -> dict[str, IntArray]:
        right = super().recorded(run)
        by_rank = [
            layer for chunks in self.layout.chunks() for layers in chunks for layer in layers
        ]
        return {name: rows[:, by_rank] for name, rows in right.items()}


class _ReplayRecordingMicrobatches(RecordingTrainer):
    """Takes recordings from a stack: the last microbatch comes first."""

    def recorded(self, run: TrainerPass) -> dict[str, IntArray]:
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


class _ReplayOffAsksRegistry(ReplayTrainer):
    """Runs replay code although the option is off, and finds no registered router."""

    def begin(self, step: Step) -> None:
        if step.action is Action.OFF:
            raise IndexError("list index out of range")
        super().begin(step)


class _ReplayOffByPresence(ReplayTrainer):
    """Replays a step if its samples have routes, whatever is configured."""

    def begin(self, step: Step) -> None:
        self._replays = (
            all(sample.routes is not None for sample in step.samples) and step.model == "policy"
        )
        super().begin(replace(step, action=Action.REPLAY) if self._replays else step)

    def work(self, step: Step, spy: Spy) -> Outcome:
        return super().work(replace(step, action=Action.REPLAY) if self._replays else step, spy)


class _ReplayFusedRouter(ReplayTrainer):
    """A fused router returns before it reads its target."""

    def variant(self, name: str) -> ReplayTrainer:
        # as Megatron's moe_router_fusion with Transformer Engine
        return super().variant(name) if name != "fused" else _Ignoring()


class _Ignoring(ReplayTrainer):
    def begin(self, step: Step) -> None:
        """Refuse nothing, and leave all routers native."""


class _ReplayTakesAnything(ReplayTrainer):
    """Cuts and pads routes with zeros until they fit."""

    def check(self, step: Step) -> None:
        """Check nothing."""

    def payload(self, sample: Rollout) -> IntArray:
        contract, routes = self.contract, super().payload(sample).astype(np.int64)
        fitted = np.zeros(
            (sample.total - 1, contract.route_layers, contract.top_k or 1), dtype=np.int64
        )
        rows, layers, columns = (min(a, b) for a, b in zip(fitted.shape, routes.shape, strict=True))
        fitted[:rows, :layers, :columns] = routes[:rows, :layers, :columns]
        # Megatron, too, takes short and narrow targets: its gather accepts a smaller index
        return fitted % self.layout.num_experts


class _ReplayWritesTargets(ReplayTrainer):
    """Writes filler into the routes of the sample."""

    def payload(self, sample: Rollout) -> IntArray:
        routes = super().payload(sample)
        routes[0] = np.sort(routes[0], axis=-1)[..., ::-1]
        routes[-1] = np.sort(routes[-1], axis=-1)
        return routes


class _ReplayEmptyMicrobatch(ReplayTrainer):
    """Lists targets for microbatches with samples only, and takes them by number: after an empty
    one, each gets the next one's.
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


class _ReplayNanScores(ReplayTrainer):
    """Drops targets with NaN scores in favour of expert 0."""

    def route(
        self, run: TrainerPass, microbatch: Microbatch, layer: int, x: FloatArray, phase: Phase
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


class _ReplayNarrowTarget(DenseFirst):
    """The target buffer has a column less than top_k, so the last expert of a row is repeated."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {
            layer: target[:, [*range(target.shape[1] - 1), 0]] for layer, target in right.items()
        }


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="replay-critic",
        summary=("Replay is registered for every model: the critic executes the policy's routes."),
        refs=("slime#1187",),
        kind="replay",
        make=_ReplayCritic,
        only=("model critic",),
        detected_by=("replay.models",),
    ),
    KnownBug(
        id="replay-teacher",
        summary="The teacher of a distillation executes the student's routes.",
        refs=("NeMo-RL#4083",),
        kind="replay",
        make=_ReplayTeacher,
        only=("model teacher",),
        detected_by=("replay.models",),
    ),
    KnownBug(
        id="replay-mtp-aliased",
        summary=("MTP layers count from 0 again, and execute the targets of the first layer."),
        refs=("NeMo-RL#3903",),
        kind="replay",
        make=_ReplayMtpAliased,
        only=("self-replay",),
        detected_by=("replay.models",),
        may_fail=("replay.installs", "replay.self-loss", "replay.self-gradients"),
    ),
    KnownBug(
        id="replay-recording-not-gathered",
        summary=(
            "Recordings of sequence-parallel ranks are not gathered: the rows of the first rank"
            " are used for all."
        ),
        refs=("verl#7106",),
        kind="replay",
        make=_ReplayRecordingNotGathered,
        only=("self-replay",),
        detected_by=("replay.recorded",),
        may_fail=("replay.self-loss", "replay.self-gradients"),
    ),
    KnownBug(
        id="replay-recording-chunks",
        summary="Recordings of pipeline ranks are joined rank by rank, as if there were no chunks.",
        refs=("verl#7106", "verl#7805"),
        kind="replay",
        make=_ReplayRecordingChunks,
        only=("switching",),
        detected_by=("replay.recorded",),
    ),
    KnownBug(
        id="replay-recording-microbatches",
        summary="Recordings are taken from a stack: the last microbatch comes first.",
        refs=("cf. verl#7805",),
        kind="replay",
        make=_ReplayRecordingMicrobatches,
        only=("switching",),
        detected_by=("replay.recorded",),
    ),
    KnownBug(
        id="replay-off-asks-registry",
        summary=("Replay code runs although the option is off, and finds no router registered."),
        refs=("verl#7106", "verl#7786"),
        kind="replay",
        make=_ReplayOffAsksRegistry,
        only=("switching",),
        detected_by=("replay.runs",),
    ),
    KnownBug(
        id="replay-off-by-presence",
        summary=(
            "Whether a step replays is decided by its samples: routes are replayed although the"
            " option is off."
        ),
        refs=("cf. verl#4973",),
        kind="replay",
        make=_ReplayOffByPresence,
        only=("switching",),
        detected_by=("replay.off",),
        may_fail=("replay.installs",),
    ),
    KnownBug(
        id="replay-fused-router",
        summary="A fused router is accepted, and returns before it reads its target.",
        refs=("cf. Megatron-LM moe_utils.py (moe_router_fusion)",),
        kind="replay",
        make=_ReplayFusedRouter,
        only=("router fused",),
        detected_by=("replay.routers",),
    ),
    KnownBug(
        id="replay-takes-anything",
        summary="Routes are cut, padded with zeros and wrapped until they fit.",
        refs=("Megatron-LM router_replay.py (0.16.1)", "verl agent_loop.py (0.9.1)"),
        kind="replay",
        make=_ReplayTakesAnything,
        only=("bad routes",),
        detected_by=("replay.targets",),
    ),
    KnownBug(
        id="replay-writes-targets",
        summary="Routes are rearranged in the arrays of the samples.",
        refs=("cf. verl#5519",),
        kind="replay",
        make=_ReplayWritesTargets,
        only=("self-replay",),
        detected_by=("replay.input",),
    ),
    KnownBug(
        id="replay-empty-microbatch",
        summary="After an empty microbatch, each of the others gets the targets of the next one.",
        refs=("cf. verl#6675",),
        kind="replay",
        make=_ReplayEmptyMicrobatch,
        only=("edges",),
        detected_by=("replay.edges",),
    ),
    KnownBug(
        id="replay-nan-scores",
        summary="If scores are NaN, targets are dropped in favour of expert 0.",
        refs=("cf. verl#7841",),
        kind="replay",
        make=_ReplayNanScores,
        only=("edges",),
        detected_by=("replay.edges",),
    ),
    KnownBug(
        id="replay-narrow-target",
        summary=(
            "The buffer of targets has a column less than top_k, so that each row has an expert"
            " twice."
        ),
        refs=("Megatron-LM router_replay.py (0.16.1)",),
        kind="replay",
        make=_ReplayNarrowTarget,
        only=("self-replay",),
        detected_by=("replay.assignments", "replay.forward"),
        may_fail=("replay.self-loss", "replay.self-gradients"),
    ),
)
