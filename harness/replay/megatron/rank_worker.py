"""One rank of a Megatron trainer: megatron-core's model and schedules, and a replay code."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rollproof.core.events.replay import Action, Step
from rollproof.core.router_spy import Spy
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.cuda_stand_in import cpu_megatron, gpu_megatron
from rollproof.replay.megatron.megatron_model import Chunks, build, configuration, on_gpu, parallel
from rollproof.replay.megatron.rank_step import Answer, Job, Recorded, ReplayCode, Run
from rollproof.replay.megatron.replay_code import replay_code

__all__ = ["worker"]


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
