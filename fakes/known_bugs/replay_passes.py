"""Known bugs of replay: targets that a recompute, a later step or another mode finds or misses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rollproof.core.events.replay import Action, Outcome, Phase, Purpose, Step
from rollproof.core.records import FloatArray, IntArray
from rollproof.core.router_spy import Spy
from rollproof.fakes.known_bugs._replay_planting import RECOMPUTED, FallsBack, routers
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.moe_model import chosen
from rollproof.fakes.trainers.reference_trainers import Interleaved, RecordingTrainer
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch, ReplayRouter, TrainerPass

__all__ = ["BUGS"]


class _ReplayStaleQueue(ReplayTrainer):
    """Forward-only passes fill the queue of the backward pass, and do not empty it."""

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
        super().install(run, microbatch, layer, number, target, keep=True)

    def end(self, step: Step) -> None:
        for router in self.registry:
            router.action, router.target = None, None


class _ReplayClearedBeforeBackward(ReplayTrainer):
    """The context of the replay ends after the forward pass; a recompute then chooses by itself."""

    def head(self, run: TrainerPass, microbatch: Microbatch) -> None:
        super().head(run, microbatch)
        for router in self.registry:
            # torch notices it in non-reentrant checkpointing (CheckpointError), and not in the
            # reentrant one
            router.queue.clear()

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        return routers(self, layers, FallsBack)


class _LastQueued(ReplayRouter):
    """A router that recomputes with the newest target of its queue."""

    def take(self, phase: Phase) -> IntArray:
        return self.queue.pop() if phase is Phase.RECOMPUTE and self.queue else super().take(phase)


class _ReplayNewestRecomputed(RecordingTrainer):
    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        return routers(self, layers, _LastQueued)


class _OneSlot(ReplayRouter):
    """A router with one target for forward and recompute: the next microbatch overwrites it."""

    def install(self, target: IntArray, *, keep: bool) -> None:
        self.target, self.queue = target, deque([target] * 9 if keep else [])


class _ReplayOneSlot(Interleaved):
    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        return routers(self, layers, _OneSlot)


class _ReplayRecomputeNative(ReplayTrainer):
    """Replays the forward pass only."""

    def route(
        self, run: TrainerPass, microbatch: Microbatch, layer: int, x: FloatArray, phase: Phase
    ) -> IntArray:
        if phase is Phase.RECOMPUTE:
            for router in self.registry:
                router.action = None
        else:
            self.begin(run.step)
        return super().route(run, microbatch, layer, x, phase)


class _ReplayGivenTwice(ReplayTrainer):
    """Installs targets when the step begins and again for each microbatch: the queue has each
    twice.
    """

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
        for _ in range(2):
            super().install(run, microbatch, layer, number, target, keep=keep)


class _ReplayOldLogprobsNative(ReplayTrainer):
    """Computes old logprobs without the rollout's routes."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        if step.purpose is Purpose.OLD_LOGPROB:
            for router in self.registry:
                router.action = None

    def end(self, step: Step) -> None:
        super().end(step)


class _ReplayNoFinally(ReplayTrainer):
    """Clears the state of a step only if the step succeeds."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        self.begin(step)
        outcome = self.work(step, spy)
        self.end(step)
        return outcome


class _ReplayStaysArmed(ReplayTrainer):
    """Sets the mode for a replayed step and never resets it; the last targets stay, too."""

    def begin(self, step: Step) -> None:
        if step.action is Action.REPLAY:
            super().begin(step)

    def end(self, step: Step) -> None:
        for router in self.registry:
            router.queue.clear()

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        return routers(self, layers, _KeepsTarget)


class _KeepsTarget(ReplayRouter):
    """A router that uses a target until the next one comes, for rows that fit it."""

    def choose(self, scores: FloatArray, phase: Phase) -> IntArray:
        previous = self.target
        if (
            self.action is Action.REPLAY
            and phase is Phase.FORWARD
            and (previous is None or len(previous) != len(scores))
        ):
            return chosen(scores, self.top_k)
        ids = super().choose(scores, phase)
        self.target = previous
        return ids


class _ReplayEvaluationStays(ReplayTrainer):
    """Leaves mode and targets of a replayed evaluation behind in the routers."""

    def end(self, step: Step) -> None:
        if step.purpose is not Purpose.EVAL:
            super().end(step)


class _ReplayFailureSwallowed(ReplayTrainer):
    """Reports a failed step as a step without loss."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        try:
            return super().work(step, spy)
        except RuntimeError:
            return Outcome(step=step.name, loss=0.0)


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="replay-stale-queue",
        summary=(
            "A forward-only pass fills the queue of the backward pass, and the next recompute"
            " takes its targets."
        ),
        refs=("SkyRL#1908",),
        kind="replay",
        make=_ReplayStaleQueue,
        only=RECOMPUTED,
        detected_by=("replay.recompute", "replay.residue"),
        may_fail=("replay.runs", "replay.recompute-results"),
    ),
    KnownBug(
        id="replay-cleared-before-backward",
        summary=(
            "Targets are cleared after the forward pass, and the recompute silently chooses by"
            " itself."
        ),
        refs=("cf. SkyRL#1772",),
        kind="replay",
        make=_ReplayClearedBeforeBackward,
        only=RECOMPUTED,
        detected_by=("replay.recompute", "replay.recompute-results"),
    ),
    KnownBug(
        id="replay-newest-recomputed",
        summary=(
            "The recompute takes the newest target of the queue, although a pipeline has several"
            " microbatches in flight."
        ),
        refs=("cf. AReaL#1166",),
        kind="replay",
        make=_ReplayNewestRecomputed,
        only=RECOMPUTED,
        detected_by=("replay.recompute", "replay.recompute-results"),
    ),
    KnownBug(
        id="replay-one-slot",
        summary=(
            "A router stores one target, and the next microbatch overwrites it before the"
            " backward pass of this one."
        ),
        refs=("cf. AReaL#1166",),
        kind="replay",
        make=_ReplayOneSlot,
        only=RECOMPUTED,
        detected_by=("replay.recompute", "replay.recompute-results"),
    ),
    KnownBug(
        id="replay-recompute-native",
        summary="The forward pass is replayed, but its recompute is not.",
        refs=("cf. verl#4101",),
        kind="replay",
        make=_ReplayRecomputeNative,
        only=RECOMPUTED,
        detected_by=("replay.recompute", "replay.recompute-results"),
    ),
    KnownBug(
        id="replay-given-twice",
        summary=(
            "Targets are installed when a step begins and again for each microbatch, so that the"
            " queue has each twice."
        ),
        refs=("cf. verl#7106",),
        kind="replay",
        make=_ReplayGivenTwice,
        only=RECOMPUTED,
        detected_by=("replay.recompute", "replay.installs"),
        may_fail=("replay.recompute-results",),
    ),
    KnownBug(
        id="replay-old-logprobs-native",
        summary=(
            "Old logprobs are computed without the rollout's routes, which the update then replays."
        ),
        refs=("cf. miles#3277",),
        kind="replay",
        make=_ReplayOldLogprobsNative,
        only=("old logprobs",),
        detected_by=("replay.old-logprob",),
    ),
    KnownBug(
        id="replay-no-finally",
        summary="Targets and modes are cleared only after a step that succeeds.",
        refs=("cf. SkyRL#1908",),
        kind="replay",
        make=_ReplayNoFinally,
        only=("failure in forward", "failure in recompute"),
        detected_by=("replay.residue",),
    ),
    KnownBug(
        id="replay-stays-armed",
        summary=(
            "The mode is set by a replayed step and never reset: native steps use the last target."
        ),
        refs=("cf. SkyRL#1908", "cf. OpenPipe/ART#709"),
        kind="replay",
        make=_ReplayStaysArmed,
        only=("evaluation", "switching"),
        detected_by=("replay.aftermath", "replay.residue", "replay.off"),
    ),
    KnownBug(
        id="replay-evaluation-stays",
        summary="An evaluation leaves its mode and its targets behind.",
        refs=("cf. SkyRL#1908",),
        kind="replay",
        make=_ReplayEvaluationStays,
        only=("evaluation",),
        detected_by=("replay.residue",),
    ),
    KnownBug(
        id="replay-failure-swallowed",
        summary="A step that failed in the middle is reported as a step without loss.",
        refs=("cf. Helsinki-NLP/mammoth#78", "cf. OpenNMT-py#2195"),
        kind="replay",
        make=_ReplayFailureSwallowed,
        only=("failure in forward", "failure in recompute"),
        detected_by=("replay.failures",),
    ),
)
