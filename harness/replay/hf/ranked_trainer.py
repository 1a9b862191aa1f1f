"""The HF trainer on several processes, with a model wrapped by DDP or sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Outcome, Step
from rollproof.core.records import Rollout
from rollproof.core.router_spy import Spy, UnsupportedStep
from rollproof.errors import RollproofError, UsageError
from rollproof.replay.hf.hf_replay_trainer import HfTrainer, contract_of, loss_of
from rollproof.replay.hf.hf_setups import Setup
from rollproof.replay.hf.inputs import lay_out
from rollproof.replay.hf.passes import hf_replay
from rollproof.replay.process_group import RankError, Ranks

__all__ = ["WRAPS", "RankedHfTrainer", "hf_ranks", "worker"]

_KEYS = count()


def _ddp(model: Any, setup: Setup) -> Any:
    # or gradients go into other buckets after the first backward, where an all-reduce of more than
    # two sums in another order; reentrant checkpointing does not support it
    return DistributedDataParallel(model, find_unused_parameters=not setup.reentrant)


def _fsdp2(model: Any, setup: Setup) -> Any:
    mesh = init_device_mesh(setup.device, (distributed.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if setup.mixed
        else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


WRAPS: Mapping[str, Callable[[Any, Setup], Any]] = MappingProxyType({"ddp": _ddp, "fsdp2": _fsdp2})
"""How a model is wrapped, by the name in ``Setup.parallel``; each returns what the training loop
calls.
"""


def hf_ranks(limit_s: float = 120.0, *, cuda: bool = False) -> Ranks:
    """Return processes for ranked trainers, with ``cuda`` on a GPU each. Close them when done."""
    return Ranks(
        worker,
        preload=("rollproof.replay.hf.ranked_trainer", "transformers.models.auto.modeling_auto"),
        limit_s=limit_s,
        cuda=cuda,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A step of the trainer ``key`` with the weights ``number`` and ``nudges``."""

    setup: Setup
    key: int
    step: Step
    number: int
    nudges: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """The result of a rank. An error is a field, so that what the spy saw before is not lost."""

    events: list[Event] = field(default_factory=list)
    outcome: Outcome | None = None
    error: Exception | None = None
    left: Mapping[str, int] = field(default_factory=dict)


class RankedHfTrainer:
    """A ``ReplaySubject`` on ``world_size`` processes.

    Trainers may share ``ranks`` if one runs at a time. A microbatch is divided over the processes
    sample by sample; gradients are averaged, and the loss is scaled so that the average is the
    gradient of all samples.
    """

    def __init__(self, setup: Setup, ranks: Ranks, world_size: int = 2) -> None:
        if setup.parallel not in WRAPS:
            raise UsageError(f"Setup.parallel is {setup.parallel!r}; choose one of {list(WRAPS)}.")
        self.setup: Setup = setup
        self.contract: Any = contract_of(setup)
        self.world_size: int = world_size
        self._ranks = ranks
        self._key = next(_KEYS)
        self._number = 0
        self._nudges: tuple[tuple[int, float], ...] = ()
        self._left: Mapping[str, int] = {}

    def run(self, step: Step, spy: Spy) -> Outcome:
        """Run one step on all processes. Raises the exception of a rank."""
        if any(len(samples) % self.world_size for samples in step.microbatches):
            raise UnsupportedStep(
                f"a microbatch does not divide over {self.world_size} processes, and an idle one"
                " would block the others"
            )
        answers: list[_Answer] = self._call_ranks(step)
        self._left = answers[0].left
        for answer in answers:
            spy.extend(answer.events)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        outcomes = [answer.outcome for answer in answers if answer.outcome is not None]
        logprobs = {
            name: values for outcome in outcomes for name, values in outcome.logprobs.items()
        }
        return Outcome(
            step=step.name,
            loss=loss_of(step, logprobs),
            logprobs=logprobs,
            recorded={
                name: routes for outcome in outcomes for name, routes in outcome.recorded.items()
            },
            gradients=outcomes[0].gradients,
            gates=outcomes[0].gates,
        )

    def reference(self, step: Step) -> Outcome:
        """Run the step in this process alone, by formula."""
        if self.setup.mixed:
            raise UnsupportedStep(
                "the reference computes in float32, but these processes in bfloat16"
            )
        trainer = HfTrainer(self.setup)
        trainer.set_weights(self._number)
        for layer, size in self._nudges:
            trainer.nudge(layer, size)
        return trainer.reference(step, self.world_size)

    def set_weights(self, number: int) -> None:
        """See ``ReplaySubject``."""
        self._number, self._nudges = number, ()

    def nudge(self, layer: int, size: float) -> None:
        """See ``ReplaySubject``."""
        self._nudges = (*self._nudges, (layer, size))

    def residue(self) -> Mapping[str, int]:
        """Return what the last step left on the first rank."""
        return self._left

    def variant(self, name: str) -> Any:
        """See ``ReplaySubject``. Models are refused before any wrapper matters."""
        return HfTrainer(self.setup).variant(name)

    def _call_ranks(self, step: Step) -> list[Any]:
        job = _Job(
            setup=self.setup, key=self._key, step=step, number=self._number, nudges=self._nudges
        )
        try:
            return self._ranks.run(job, world_size=self.world_size)
        except RankError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from error
            raise


def worker(rank: int, world_size: int) -> Callable[[Any], _Answer]:
    """Return the function that does the jobs of one rank (a ``process_group.Task``)."""
    trainers: dict[tuple[Any, ...], _Share] = {}  # the last one only

    def work(job: _Job) -> _Answer:
        key = (job.setup, job.key)
        if key not in trainers:
            trainers.clear()
            trainers[key] = _Share(job.setup, rank, world_size)
        trainer = trainers[key]
        spy = Spy(job.step, rank)
        trainer.load(job.number, job.nudges)
        try:
            outcome = trainer.run(job.step, spy)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is its result
            # a wrapper that failed in the middle of a pass cannot go on: a trainer would restart
            # from a checkpoint
            trainers.clear()
            return _Answer(events=spy.events, error=error, left=trainer.residue())
        return _Answer(events=spy.events, outcome=outcome, left=trainer.residue())

    return work


class _Share(HfTrainer):
    """The trainer of one process."""

    def __init__(self, setup: Setup, rank: int, world_size: int) -> None:
        super().__init__(setup)
        self.called = WRAPS[setup.parallel](self.model, setup)
        self.scale = world_size
        self._rank = rank
        self._loaded: tuple[Any, ...] = (0, ())

    def load(self, number: int, nudges: tuple[tuple[int, float], ...]) -> None:
        """Set the weights, unless they are set."""
        if self._loaded == (number, nudges):
            return
        self.set_weights(number)
        for layer, size in nudges:
            self.nudge(layer, size)
        self._loaded = (number, nudges)

    def run(self, step: Step, spy: Spy) -> Outcome:
        """Run the step after all processes have accepted their routes."""
        # a process that refused its routes on its own would leave the others waiting
        refused: list[Exception | None] = [None] * self.scale
        distributed.all_gather_object(refused, self._refusal(step))
        for error in refused:
            if error is not None:
                raise error
        return super().run(step, spy)

    def _refusal(self, step: Step) -> Exception | None:
        if step.action is Action.REPLAY:
            try:
                for samples in step.microbatches:
                    if samples:
                        hf_replay(
                            self.model, lay_out(self.share(samples), self.setup.layout).routes()
                        )
            except RollproofError as error:
                return error
        return None

    def share(self, samples: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        return samples[self._rank :: self.scale]

    def assign(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)

    def full_value(self, value: torch.Tensor) -> torch.Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value
