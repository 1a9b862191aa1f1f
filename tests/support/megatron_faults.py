"""Faulty replays for a Megatron trainer, as they were published: megatron-core's own
``RouterReplay``, driven wrongly on real ranks.

The name of a setup says which one its ranks use: ``fault:Shifted``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.events.replay import Action
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import Recompute
from rollproof.layouts.mesh import Mesh
from rollproof.replay.megatron.megatron_trainer import MegatronTrainer
from rollproof.replay.megatron.rank_step import Answer, Job, Run
from rollproof.replay.megatron.rank_worker import _Worker
from rollproof.replay.megatron.replay_code import CoreReplay

__all__ = ["Unchecked", "faulty"]


class Shifted(CoreReplay):
    """Routes one row late: those of token p at the row of token p + 1 (slime#1045)."""

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        size = len(run.batches[number].samples)
        return {
            layer: np.roll(rows, size, axis=0)
            for layer, rows in super()._targets(run, number, chunk).items()
        }


class SwappedLayers(CoreReplay):
    """Layers in the opposite order."""

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        right = super()._targets(run, number, chunk)
        return dict(zip(right, reversed(list(right.values())), strict=True))


class BatchMajor(CoreReplay):
    """Rows sample by sample, as HF has them."""

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        size = len(run.batches[number].samples)
        return {
            layer: (
                np.ascontiguousarray(rows.reshape(-1, size, rows.shape[-1]).swapaxes(0, 1)).reshape(
                    rows.shape
                )
            )
            for layer, rows in super()._targets(run, number, chunk).items()
        }


class Contiguous(CoreReplay):
    """Each context rank takes one contiguous piece, where the model's rows are in a zigzag."""

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        batch = run.batches[number]
        layout, payloads = (
            replace(batch.layout, mesh=Mesh()),
            [sample.routes for sample in batch.samples if sample is not None],
        )
        targets = layout.targets(payloads, replace(run.rank, cp=0), 0, lengths=batch.lengths)
        return {layer: np.split(rows, run.setup.cp)[run.rank.cp] for layer, rows in targets.items()}


class LocalLayers(CoreReplay):
    """Layers counted from 0 on each pipeline rank."""

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        batch = run.batches[number]
        payloads = [sample.routes for sample in batch.samples if sample is not None]
        first = batch.layout.targets(
            payloads, replace(run.rank, pp=0), chunk, lengths=batch.lengths
        )
        return dict(zip(run.chunks.routers[chunk], first.values(), strict=True))


class ZeroPadded(CoreReplay):
    """Rows that have no route execute expert 0, top-k times (vllm and SGLang pad so)."""

    def _targets(self, run: Run, number: int, chunk: int) -> Mapping[int, IntArray]:
        batch = run.batches[number]
        ends = {
            tokens[-1]
            for sample in batch.samples
            if sample is not None and (tokens := sample.prompt_ids + sample.response_ids)
        }
        free = np.array([token < 0 or token in ends for token in batch.rows])
        return {
            layer: np.where(free[:, None], 0, rows)
            for layer, rows in super()._targets(run, number, chunk).items()
        }


class FirstMicrobatch(CoreReplay):
    """Targets of the first microbatch stay in place for all others."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        super().before(run, 0 if run.step.action is Action.REPLAY else number, chunk)


class NeverActs(CoreReplay):
    """Targets are installed and no action is set: native routing."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        super().before(run, number, chunk)
        if run.step.action is Action.REPLAY:
            RouterReplay.clear_global_router_replay_action()


class NoBackward(CoreReplay):
    """Recompute takes the target of the last forward: in a pipeline, another microbatch's."""

    def after(self, run: Run, number: int, chunk: int) -> None:
        if run.step.action is not Action.REPLAY:
            super().after(run, number, chunk)


class StaleQueue(CoreReplay):
    """Queues are emptied by the backward pass alone: after a forward-only pass the next recompute
    takes them (verl#4101).
    """

    def end(self, run: Run, *, done: bool) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_router_replay_action()
        if run.step.recompute is not Recompute.NONE:
            RouterReplay.clear_global_indices()


class LeftAfterFailure(CoreReplay):
    """Nothing is cleared where a step fails."""

    def end(self, run: Run, *, done: bool) -> None:
        if done:
            super().end(run, done=done)


class Killed(CoreReplay):
    """The last pipeline rank is killed in its second microbatch, while others wait for it."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        super().before(run, number, chunk)
        if number == 1 and run.rank.pp == run.setup.pp - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Raising(CoreReplay):
    """The last pipeline rank fails there."""

    def before(self, run: Run, number: int, chunk: int) -> None:
        super().before(run, number, chunk)
        if number == 1 and run.rank.pp == run.setup.pp - 1:
            raise ArithmeticError("this rank cannot count")


class Unchecked(MegatronTrainer):
    """Hands any routes to ``RouterReplay``, which looks at none."""

    def _check_routes(self, sample: Rollout) -> None:
        pass


FAULTS: Mapping[str, type[CoreReplay]] = {
    kind.__name__: kind for kind in CoreReplay.__subclasses__()
}


class _Faulty(_Worker):
    def __call__(self, job: Job) -> Answer:
        name = job.setup.name.removeprefix("fault:")
        if self._rank is None:
            super().__call__(replace(job, step=None))
        self._code = FAULTS[name]() if name in FAULTS else CoreReplay()
        return super().__call__(job)


def faulty(number: int, world_size: int) -> Any:
    """The task of the ranks."""
    return _Faulty(number)
