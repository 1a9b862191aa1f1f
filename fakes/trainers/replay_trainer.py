"""A correct trainer with routing replay, in small methods that known bugs override.

All ranks of its mesh run in one process: the model is computed once, on all rows of a microbatch,
and the router of each rank chooses for the rows that the rank would see. A router has one target
and a queue of targets for the recompute, like Megatron's ``RouterReplay``; microbatches run through
pipeline stages and chunks in the order of 1F1B, interleaved if there are chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract
from rollproof.core.events.replay import Action, Outcome, Phase, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.replay_contract import FreeRows, Installs, Recompute, ReplayMode
from rollproof.core.router_spy import Spy, UnsupportedStep
from rollproof.core.trainer_contract import trainer_contract
from rollproof.fakes.trainers.moe_model import MoeModel, chosen
from rollproof.fakes.trainers.trainer_parts import (
    Microbatch,
    ReplayRouter,
    TrainerPass,
    is_ready,
    outcome_of,
    plain_targets,
    problem_of,
    token_rows,
)
from rollproof.layouts import Layout, Rank, Source
from rollproof.layouts.pipeline import Operation, operations, schedule_table

__all__ = ["ReplayTrainer"]


class ReplayTrainer:
    """A ``ReplaySubject``; subclasses override the class attributes.

    layout: the model and the layout of its rows.
    mode: replay of a rollout's routes (R3) or of the trainer's own (R2).
    free_rows: what rows without a target execute.
    others: the models of other roles, next to the policy.
    normalised: divide the weights of a token's experts by their sum.
    mtp: the policy has a multi-token prediction layer.
    microbatches: microbatches of a step.
    width: the hidden size.
    parallel: the parallelism in words, for reports.
    """

    layout: ClassVar[Layout] = Layout(num_layers=3, num_experts=8, top_k=2)
    mode: ClassVar[ReplayMode] = ReplayMode.R3
    free_rows: ClassVar[FreeRows] = FreeRows.NATIVE
    others: ClassVar[tuple[str, ...]] = ("critic",)
    normalised: ClassVar[bool] = False
    mtp: ClassVar[bool] = False
    microbatches: ClassVar[int] = 2
    width: ClassVar[int] = 6
    parallel: ClassVar[str] = ""
    contract: Contract

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.contract = _contract(cls)

    def __init__(self) -> None:
        layout = self.layout
        extra = 1 if self.mtp else 0
        self.model: MoeModel = self.make_model(0, extra)
        self.ranks: list[Rank] = list(layout.mesh.row_ranks())
        layers = (*layout.moe, *range(layout.num_layers, layout.num_layers + extra))
        self.routers: dict[tuple[int, int], ReplayRouter] = self.make_routers(layers)
        # Megatron registers RouterReplay instances in a list, too; bugs put other routers there
        self.registry: list[ReplayRouter] = self.replayed()
        self.models: dict[str, tuple[MoeModel, dict[tuple[int, int], ReplayRouter]]] = {
            name: (self.make_model(number + 1, 0), self.make_routers(layout.moe))
            for number, name in enumerate(self.others)
        }
        self.ended: bool = True

    # ReplaySubject

    def run(self, step: Step, spy: Spy) -> Outcome:
        """Run one step: install targets microbatch by microbatch, and clear everything at the end,
        also after a failure.
        """
        # after a failed step, too: targets that stay would be replayed by the next step
        self.begin(step)
        try:
            return self.work(step, spy)
        finally:
            self.end(step)

    def set_weights(self, number: int) -> None:
        """Set the weights numbered ``number``."""
        self.model.set_weights(number)

    def nudge(self, layer: int, size: float) -> None:
        """Move the gate of a layer by ``size``."""
        self.model.nudge(layer, size)

    def residue(self) -> Mapping[str, int]:
        """Return what replay has left behind in the routers, by kind."""
        routers = [
            *self.routers.values(),
            *(router for _, routers in self.models.values() for router in routers.values()),
        ]
        return {
            "targets": sum(router.target is not None for router in routers),
            "targets for the recompute": sum(len(router.queue) for router in routers),
            "routers that are not native": sum(router.action is not None for router in routers),
            "recordings": sum(len(router.recorded) for router in routers),
        }

    def variant(self, name: str) -> ReplayTrainer:
        """Return a variant of the trainer. Raises ``UnsupportedStep`` for an unknown name."""
        if name == "no-moe-layers":
            return _Dense(type(self))()
        if name == "fused":
            return _Fused(type(self))()
        raise UnsupportedStep(f"there is no variant {name!r} of this trainer")

    def reference(self, step: Step) -> Outcome:
        """Compute the step sample by sample, without layout, microbatches, routers or queues."""
        scale = 1.0 / max(1, sum(len(sample.response_ids) for sample in step.samples))
        loss, gradients = 0.0, self.model.zeros()
        for sample in step.samples:
            targets = plain_targets(self.contract, sample)
            rows = token_rows((sample,))[0]
            inputs = [self.model.embed(rows)]
            executed: list[IntArray | None] = []
            for layer in range(self.model.layers):
                x = inputs[-1]
                if layer not in self.model.moe:
                    inputs.append(self.model.dense(layer, rows, x))
                    executed.append(None)
                    continue
                own = chosen(self.model.scores(layer, self.model.mixed(rows, x)), self.layout.top_k)
                ids = (
                    own
                    if layer not in targets
                    else np.where(targets[layer][:, :1] < 0, own, targets[layer])
                )
                inputs.append(self.model.sparse(layer, rows, x, ids))
                executed.append(ids)
            loss += self.model.loss(rows, inputs[-1], scale)[0]
            dx = self.model.loss_backward(rows, inputs[-1], scale, gradients)
            for layer in reversed(range(self.model.layers)):
                chosen_ids = executed[layer]
                if chosen_ids is None:
                    dx = self.model.dense_backward(layer, rows, inputs[layer], dx, gradients)
                else:
                    dx = self.model.sparse_backward(
                        layer, rows, inputs[layer], chosen_ids, dx, gradients
                    )
            self.model.embed_backward(rows, dx, gradients)
        return outcome_of(step, self.layout.moe, loss, {}, gradients)

    # Models and routers

    def make_model(self, seed: int, extra: int) -> MoeModel:
        """Return a model of the layout's sizes, with ``extra`` MTP layers at the end."""
        layout = self.layout
        return MoeModel(
            layers=layout.num_layers + extra,
            moe=(*layout.moe, *range(layout.num_layers, layout.num_layers + extra)),
            experts=layout.num_experts,
            top_k=layout.top_k,
            vocab=96,
            width=self.width,
            normalised=self.normalised,
            seed=seed,
        )

    def make_routers(self, layers: Sequence[int]) -> dict[tuple[int, int], ReplayRouter]:
        """Return one router for each layer and rank with rows, by layer and index of the rank."""
        return {
            (layer, number): ReplayRouter(layer, self.layout.top_k)
            for layer in layers
            for number in range(len(self.ranks))
        }

    def replayed(self) -> list[ReplayRouter]:
        """Return the replayed routers: those of the policy without its MTP layers."""
        return [
            router for (layer, _), router in self.routers.items() if layer < self.layout.num_layers
        ]

    # A step

    def begin(self, step: Step) -> None:
        """Check the routes, and set the action of the routers."""
        if step.action is Action.REPLAY:
            self.check(step)
        for router in self.registry:
            router.action = step.action if step.action in (Action.REPLAY, Action.RECORD) else None

    def end(self, step: Step) -> None:
        """Clear targets, queues and recordings."""
        for router in self.registry:
            router.clear()

    def check(self, step: Step) -> None:
        """Raise ``ValueError`` for routes that cannot be replayed."""
        for sample in step.samples:
            problem = problem_of(self.contract, sample)
            if problem:
                raise ValueError(f"{sample.request_id}: {problem}.")

    def work(self, step: Step, spy: Spy) -> Outcome:
        """Run the passes of a step on its model."""
        model, routers = (
            (self.model, self.routers) if step.model == "policy" else self.models[step.model]
        )
        scale = 1.0 / max(1, sum(len(sample.response_ids) for sample in step.samples))
        run = TrainerPass(
            step=step, spy=spy, model=model, routers=routers, scale=scale, gradients=model.zeros()
        )
        first = 0
        for number, samples in enumerate(step.microbatches):
            run.microbatches.append(self.microbatch(number, samples, first))
            first += len(samples)
        # recordings are read before `end` clears the routers
        self.pipeline(run)
        recorded = self.recorded(run) if step.action is Action.RECORD else {}
        return replace(
            outcome_of(step, self.layout.moe, run.loss, run.logprobs, run.gradients),
            recorded=recorded,
        )

    def microbatch(self, number: int, samples: tuple[Rollout, ...], first: int) -> Microbatch:
        """Return the rows of a microbatch, and which of them are on each rank."""
        rows, starts = token_rows(samples)
        lengths = [sample.total for sample in samples]
        prompts = [len(sample.prompt_ids) for sample in samples]
        sources = [(rank, self.layout.rows(lengths, rank, prompts=prompts)) for rank in self.ranks]
        return Microbatch(
            number=number, samples=samples, first=first, rows=rows, starts=starts, sources=sources
        )

    def pipeline(self, run: TrainerPass) -> None:
        """Run all microbatches through all stages: each pipeline rank in its own order, as soon as
        the inputs of an operation are ready.
        """
        mesh, count = self.layout.mesh, len(run.microbatches)
        todo = {rank: deque(self.order(run.step, rank, count)) for rank in range(mesh.pp)}
        done: set[tuple[int, int, bool]] = set()
        while any(todo.values()):
            for rank, waiting in todo.items():
                while waiting and is_ready(waiting[0], rank, mesh.pp, mesh.vpp, done):
                    operation = waiting.popleft()
                    self.operate(run, rank, operation)
                    done.add(
                        (operation.microbatch, operation.chunk * mesh.pp + rank, operation.backward)
                    )

    def order(self, step: Step, rank: int, count: int) -> Sequence[Operation]:
        """Return the operations of a pipeline rank, in order."""
        mesh = self.layout.mesh
        if step.backward:
            return operations(count, pp=mesh.pp, rank=rank, vpp=mesh.vpp, group=self.layout.group)
        # forward-only steps have no 1F1B: chunks take groups of microbatches in turn
        table = schedule_table(
            count, mesh.vpp, self.layout.group or (mesh.pp if mesh.vpp > 1 else None)
        )
        return [Operation(microbatch=microbatch, chunk=chunk) for microbatch, chunk in table]

    def operate(self, run: TrainerPass, rank: int, operation: Operation) -> None:
        """Run one microbatch through one chunk, forward or backward."""
        microbatch, mesh = run.microbatches[operation.microbatch], self.layout.mesh
        layers = self.layout.chunks()[rank][operation.chunk]
        last = rank == mesh.pp - 1 and operation.chunk == mesh.vpp - 1
        if last and self.mtp and run.step.model == "policy":
            layers = (*layers, self.layout.num_layers)
        if operation.backward:
            if last:
                microbatch.dx = run.model.loss_backward(
                    microbatch.rows, microbatch.x, run.scale, run.gradients
                )
            # the spy must know which pass a choice belongs to: recomputed rows are judged apart
            with run.spy.recomputing():
                for layer in reversed(layers):
                    self.layer_backward(run, microbatch, layer)
            if rank == 0 and operation.chunk == 0:
                run.model.embed_backward(microbatch.rows, microbatch.dx, run.gradients)
            return
        if rank == 0 and operation.chunk == 0:
            microbatch.x = run.model.embed(microbatch.rows)
        if run.step.action is Action.REPLAY and run.step.model == "policy":
            self.arm(run, microbatch, rank, operation.chunk)
        for layer in layers:
            self.layer_forward(run, microbatch, layer)
        if last:
            self.head(run, microbatch)

    def arm(self, run: TrainerPass, microbatch: Microbatch, rank: int, chunk: int) -> None:
        """Install the targets of a microbatch in the routers of one chunk."""
        # a forward-only pass has no recompute, so its targets must not enter the queue
        keep = run.step.backward and run.step.recompute is not Recompute.NONE
        for number, (place, source) in enumerate(microbatch.sources):
            for layer, target in self.targets(
                run.step, microbatch, replace(place, pp=rank), source, chunk
            ).items():
                self.install(run, microbatch, layer, number, target, keep=keep)

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
        """Install a target in one router."""
        run.routers[layer, number].install(target, keep=keep)
        run.spy.rank = number
        run.spy.installed(layer, microbatch=microbatch.number)

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        """Return the targets of a chunk's routers, by layer: ``(rows, top_k)``, -1 in free rows."""
        payloads = [self.payload(sample) for sample in microbatch.samples]
        targets: dict[int, IntArray] = {
            **self.layout.targets(payloads, rank, chunk, lengths=microbatch.lengths)
        }
        if self.free_rows is FreeRows.DUMMY:
            return targets
        # rows that the rollout did not capture are left to the router
        captured = self.captured(microbatch, source)
        return {layer: np.where(captured[:, None], target, -1) for layer, target in targets.items()}

    def captured(self, microbatch: Microbatch, source: Source) -> npt.NDArray[np.bool_]:
        """Return ``(rows,)``: whether a row of a rank has a target."""
        counts = [len(self.payload(sample)) for sample in microbatch.samples]
        return self.layout.captured(source, counts) if counts else np.zeros(len(source), dtype=bool)

    def payload(self, sample: Rollout) -> IntArray:
        """Return the captured rows of a sample, ``(rows, layers, top_k)``."""
        assert sample.routes is not None
        return sample.routes

    def layer_forward(self, run: TrainerPass, microbatch: Microbatch, layer: int) -> None:
        """Run one layer on one microbatch."""
        x = microbatch.inputs[layer] = microbatch.x
        if layer not in run.model.moe:
            microbatch.x = run.model.dense(layer, microbatch.rows, x)
            return
        ids = microbatch.executed[layer] = self.route(run, microbatch, layer, x, Phase.FORWARD)
        microbatch.x = self.experts(run, layer, microbatch, x, ids)

    def experts(
        self, run: TrainerPass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray
    ) -> FloatArray:
        """Run the experts ``ids`` on the rows ``x``."""
        return run.model.sparse(layer, microbatch.rows, x, ids)

    def layer_backward(self, run: TrainerPass, microbatch: Microbatch, layer: int) -> None:
        """Compute the gradient through one layer; with recompute, its router chooses again."""
        x, rows = microbatch.inputs[layer], microbatch.rows
        if layer not in run.model.moe:
            microbatch.dx = run.model.dense_backward(layer, rows, x, microbatch.dx, run.gradients)
            return
        # without recompute the backward pass uses the experts of the forward pass
        ids = microbatch.executed[layer]
        if run.step.recompute is not Recompute.NONE:
            ids = self.route(run, microbatch, layer, x, Phase.RECOMPUTE)
        microbatch.dx = self.experts_backward(run, layer, microbatch, x, ids)

    def experts_backward(
        self, run: TrainerPass, layer: int, microbatch: Microbatch, x: FloatArray, ids: IntArray
    ) -> FloatArray:
        """Compute the gradient of ``experts``."""
        return run.model.sparse_backward(
            layer, microbatch.rows, x, ids, microbatch.dx, run.gradients
        )

    def route(
        self, run: TrainerPass, microbatch: Microbatch, layer: int, x: FloatArray, phase: Phase
    ) -> IntArray:
        """Return the choices of all ranks' routers, put together: ``(rows, top_k)``."""
        scores = run.model.scores(layer, run.model.mixed(microbatch.rows, x))
        ids = np.zeros((len(scores), self.layout.top_k), dtype=np.int64)
        for number, (_, source) in enumerate(microbatch.sources):
            places = microbatch.places(source)
            seen = (
                np.where(places[:, None] >= 0, scores[places], 0.0)
                if len(scores)
                else np.zeros((len(places), self.layout.num_experts))
            )
            router = run.routers[layer, number]
            executed = router.choose(seen, phase)
            run.spy.rank = number
            run.spy.routed(
                layer,
                executed,
                samples=np.where(places >= 0, source.sample + microbatch.first, -1),
                positions=source.position,
                model="mtp" if layer >= self.layout.num_layers else run.step.model,
                microbatch=microbatch.number,
            )
            ids[places[places >= 0]] = executed[places >= 0]
        return ids

    def head(self, run: TrainerPass, microbatch: Microbatch) -> None:
        """Compute loss and logprobs of a microbatch."""
        loss, logprobs = run.model.loss(microbatch.rows, microbatch.x, run.scale)
        run.loss += loss
        start = 0
        for sample in microbatch.samples:
            run.logprobs[sample.request_id] = logprobs[start : start + len(sample.response_ids)]
            start += len(sample.response_ids)

    def recorded(self, run: TrainerPass) -> dict[str, IntArray]:
        """Return the recordings, merged over ranks, stages and microbatches, by request."""
        out: dict[str, IntArray] = {}
        for microbatch in run.microbatches:
            pieces: dict[tuple[Rank, int], dict[int, IntArray]] = {}
            for layer in self.layout.moe:
                pp, chunk, _ = self.layout.stage_of(layer)
                for number, (rank, _) in enumerate(microbatch.sources):
                    piece = run.routers[layer, number].recorded[microbatch.number]
                    pieces.setdefault((replace(rank, pp=pp), chunk), {})[layer] = piece
            merged = self.layout.merge(pieces, microbatch.lengths)
            out |= {
                sample.request_id: rows.astype(np.int16)
                for sample, rows in zip(microbatch.samples, merged, strict=True)
            }
        return out


def _contract(cls: type[ReplayTrainer]) -> Contract:
    layout = cls.layout
    return trainer_contract(
        num_layers=layout.num_layers,
        moe_layers=layout.moe,
        num_experts=layout.num_experts,
        top_k=layout.top_k,
        layer_axis=layout.layer_axis,
        rows=layout.held,
        dtype="uint8|int16|int32",
        mode=cls.mode,
        free_rows=cls.free_rows,
        vocab=96,
        recompute=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL),
        records=cls.mode is ReplayMode.R2,
        installs=Installs.PER_CALL,
        models=cls.others,
        mtp=cls.mtp,
        unsupported=("fused",),
        microbatches=cls.microbatches,
        float_digits=14,
        parallel=cls.parallel,
    )


ReplayTrainer.contract = _contract(ReplayTrainer)


def _Dense(base: type[ReplayTrainer]) -> type[ReplayTrainer]:  # noqa: N802 - it makes a class
    """Return the trainer on a model without MoE layers, which refuses to replay."""

    class Dense(base):  # type: ignore[misc, valid-type]
        def begin(self, step: Step) -> None:
            if step.action is Action.REPLAY:
                raise ValueError("The model has no MoE layers: there is nothing to replay.")

    return Dense


def _Fused(base: type[ReplayTrainer]) -> type[ReplayTrainer]:  # noqa: N802 - as above
    """Return the trainer with a fused router, which replay cannot reach."""

    class Fused(base):  # type: ignore[misc, valid-type]
        def begin(self, step: Step) -> None:
            if step.action is Action.REPLAY:
                raise ValueError("The fused router chooses on its own: switch it off to replay.")

    return Fused
