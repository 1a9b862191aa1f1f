"""One step of a Megatron trainer on one rank: its job, its run, and its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Purpose, Step
from rollproof.core.records import IntArray
from rollproof.core.router_spy import Spy, ids_of_map
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.megatron_model import Chunks
from rollproof.replay.megatron.megatron_setups import MegatronSetup
from rollproof.replay.megatron.microbatches import Batch, batches
from rollproof.replay.router_hooks import last_forward_hook

__all__ = ["Answer", "Job", "Recorded", "ReplayCode", "Run"]

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

    setup: MegatronSetup
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


class ReplayCode(Protocol):
    """Drives routing replay in one process.

    ``settings`` switch it on in a ``TransformerConfig``. ``start`` is called before a config is
    made with them, and ``check`` with the config before its model is built. In a step, ``before``
    and ``after`` are called around the forward pass of each microbatch and chunk, and ``end`` when
    the step is over, with ``done=False`` if it failed. ``left`` counts what is left of replay in
    this process.
    """

    @property
    def settings(self) -> Mapping[str, Any]: ...
    def start(self) -> None: ...
    def check(self, config: Any) -> None: ...
    def before(self, run: Run, number: int, chunk: int) -> None: ...
    def after(self, run: Run, number: int, chunk: int) -> None: ...
    def end(self, run: Run, *, done: bool) -> None: ...
    def left(self) -> dict[str, int]: ...


class Run:
    """One step on one rank; ``in_place`` is replayed in place of the samples' routes."""

    def __init__(
        self,
        setup: MegatronSetup,
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
        try:
            with ExitStack() as hooks:
                for layer, router in routers:
                    hooks.enter_context(last_forward_hook(router, self._watch(layer)))
                self._schedule()
            done = True
        finally:
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
