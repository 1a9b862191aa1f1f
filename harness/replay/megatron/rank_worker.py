"""One rank of a Megatron trainer: megatron-core's model and schedules, and a replay code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Purpose, Step
from rollproof.core.records import IntArray
from rollproof.core.router_spy import Spy, ids_of_map
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.cuda_stand_in import cpu_megatron, gpu_megatron
from rollproof.replay.megatron.megatron_model import Chunks, build, configuration, on_gpu, parallel
from rollproof.replay.megatron.megatron_setups import Setup
from rollproof.replay.megatron.microbatches import Batch, batches
from rollproof.replay.megatron.replay_code import ReplayCode, replay_code

__all__ = ["Answer", "Job", "Run", "worker"]

Recorded: TypeAlias = dict[tuple[int, int], dict[int, IntArray]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of every rank.

    Attributes:
        setup: the model and its division.
        episode: name of the model; another name gets a new model.
        step: the step to run; ``None`` counts what is left of replay.
        number: number of the weights.
        nudges: changes of gates by layer.
        in_place: replay what this rank recorded last, in place of the samples' routes.
        watch: report routers to the spy, which needs unique token ids.
    """

    setup: Setup
    episode: str
    step: Step | None = None
    number: int = 0
    nudges: tuple[tuple[int, float], ...] = ()
    in_place: bool = False
    watch: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of one rank.

    Attributes:
        rank: its place in the mesh.
        events: what the spy recorded.
        logprobs: ``(sample, position, value)`` of response tokens.
        gradients: ``{name: (axis, part)}``.
        recorded: ``{(microbatch, chunk): {layer: (rows, top_k)}}``.
        merged: recordings by index of the sample, if the replay code merges them itself.
        left: counts of what is left of replay.
    """

    rank: Rank
    events: list[Event] = field(default_factory=list)
    logprobs: list[tuple[int, int, float]] = field(default_factory=list)
    gradients: dict[str, tuple[int | None, npt.NDArray[Any]]] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=dict)
    merged: dict[int, IntArray] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)


def worker(number: int, world_size: int) -> Any:  # noqa: ARG001 - a task is called so
    """Return the function that does the jobs of one rank (a ``process_group.Task``)."""
    return _Worker(number)


class _Worker:
    """One rank. Its process serves one division of a model: Megatron makes its groups once."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._life = ExitStack()
        self._rank: Rank | None = None
        self._code: ReplayCode | None = None
        self._chunks: Chunks | None = None
        self._built: tuple[Any, ...] = ()
        self._weights: tuple[Any, ...] = ()
        self._recorded: Recorded = {}

    def __call__(self, job: Job) -> Answer:
        if self._rank is None:
            self._life.enter_context(gpu_megatron() if on_gpu() else cpu_megatron())
            if on_gpu():
                import torch

                # atomic sums flip near-ties from run to run; results must repeat to the last bit
                torch.use_deterministic_algorithms(True, warn_only=True)
            self._rank = self._life.enter_context(parallel(job.setup))
            self._code = replay_code(job.setup)
        if job.step is None:
            return Answer(rank=self._rank, left=self._code.left() if self._code else {})
        chunks = self._model(job, job.step)
        assert self._code is not None
        in_place = self._recorded if job.in_place else None
        answer = Run(
            job.setup,
            job.step,
            self._rank,
            chunks,
            Spy(job.step, self._number),
            self._code,
            in_place,
        ).run(watch=job.watch)
        self._recorded = answer.recorded or self._recorded
        return answer

    def _model(self, job: Job, step: Step) -> Chunks:
        assert self._rank is not None and self._code is not None
        # a router gets its RouterReplay when it is built, so a step without replay needs a new
        # model
        key = (job.episode, step.recompute, step.action is Action.OFF)
        if self._chunks is None or self._built != key:
            off = step.action is Action.OFF
            if self._built[:1] != key[:1]:
                self._recorded = {}  # those of another trainer
            if not off:
                self._code.start()
            config = configuration(job.setup, step.recompute, {} if off else self._code.settings)
            if not off:
                self._code.check(config)
            self._chunks = build(job.setup, config)
            self._built, self._weights = key, ()
        if self._weights != (job.number, job.nudges):
            self._chunks.load(job.setup, self._rank, job.number)
            for layer, size in job.nudges:
                self._chunks.nudge(layer, size)
            self._weights = (job.number, job.nudges)
        return self._chunks


class Run:
    """One step on one rank; ``in_place`` is replayed in place of the samples' routes."""

    def __init__(
        self,
        setup: Setup,
        step: Step,
        rank: Rank,
        chunks: Chunks,
        spy: Spy,
        code: ReplayCode,
        in_place: Recorded | None = None,
    ) -> None:
        self.setup = setup
        self.step = step
        self.code = code
        self.rank = rank
        self.chunks = chunks
        self.spy = spy
        self.in_place = in_place
        self.answer: Answer = Answer(rank=rank, events=spy.events)
        self.batches: list[Batch] = batches(setup, step, rank)
        self._running: tuple[int, bool] = (0, True)  # microbatch, and whether it is going forward

    def run(self, *, watch: bool = True) -> Answer:
        """Run the step; ``watch`` reports every router's output to the spy."""
        done = False
        routers = (
            [item for routers in self.chunks.routers for item in routers.items()] if watch else []
        )
        hooks = [router.register_forward_hook(self._watch(layer)) for layer, router in routers]
        try:
            self._schedule()
            done = True
        finally:
            for hook in hooks:
                hook.remove()
            if self.step.action is not Action.OFF:
                self.code.end(self, done=done)
        if self.step.backward:
            for part in self.chunks.parts:
                if part.tensor.grad is not None:
                    self.answer.gradients[part.name] = (
                        part.axis,
                        part.tensor.grad.float().cpu().numpy().copy(),
                    )
        return self.answer

    def _schedule(self) -> None:
        """Run Megatron's own schedule: without pipeline, 1F1B, or interleaved."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.chunks.models:
            model.train(self.step.purpose is Purpose.TRAIN)
            model.zero_grad()
        numbers = [iter(count()) for _ in self.chunks.models]
        samples, width = self.batches[0].ids.shape
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=numbers if self.setup.vpp > 1 else numbers[0],
            model=list(self.chunks.models) if self.setup.vpp > 1 else self.chunks.models[0],
            num_microbatches=len(self.batches),
            # of the complete sequence: Megatron divides it by cp itself
            seq_length=width * self.setup.cp,
            micro_batch_size=samples,
            forward_only=not self.step.backward,
        )

    def _forward_step(self, numbers: Iterator[int], model: Any) -> tuple[Any, Any]:
        """Run one microbatch through one chunk; the schedule calls it."""
        import torch

        number, chunk = next(numbers), self.chunks.models.index(model)
        batch = self.batches[number]
        self._running = (number, True)
        armed = self.step.action is not Action.OFF
        if armed:
            self.code.before(self, number, chunk)
        ids, positions, labels = (
            torch.from_numpy(array).to(self.chunks.device)
            for array in (batch.ids, batch.positions, batch.labels)
        )
        with torch.set_grad_enabled(self.step.backward):
            output = model(ids, positions, None, labels=labels)
        self._running = (number, False)
        if armed:
            self.code.after(self, number, chunk)
        if output.requires_grad:
            # under any schedule the backward pass of this microbatch and chunk begins here
            output.register_hook(lambda _: setattr(self, "_running", (number, False)))
        return output, lambda losses: self._loss(losses, batch)

    def _loss(self, losses: Any, batch: Batch) -> tuple[Any, Any, Any]:
        """Return the sum over response tokens, their number, and what the schedule returns."""
        import torch

        mask = torch.from_numpy(batch.predicted >= 0).to(losses.device)
        if self.rank.tp == 0:  # tensor ranks hold the same losses
            values = losses.detach().double().cpu().numpy()
            for sample, place in zip(*np.nonzero(batch.predicted >= 0), strict=True):
                self.answer.logprobs.append(
                    (
                        batch.numbers[sample],
                        int(batch.predicted[sample, place]),
                        -float(values[sample, place]),
                    )
                )
        total = (losses * mask).sum()
        return total, mask.sum().int(), total.detach()

    def _watch(self, layer: int) -> Any:
        """Return a forward hook of a router: its output is executed, forward and in recompute."""

        def report(_module: Any, _inputs: Any, output: Any) -> None:
            number, forward = self._running
            chosen = ids_of_map(output[1].cpu().numpy(), self.setup.top_k)
            with ExitStack() as stack:
                if not forward:
                    stack.enter_context(self.spy.recomputing())
                self.spy.routed(layer, chosen, tokens=self.batches[number].rows, microbatch=number)

        return report
