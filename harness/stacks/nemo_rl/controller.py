"""NeMo-RL's SingleController, as a subject: its rollout manager, its replay buffer, and its weight
synchronization.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    MissingLogprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import Request, Rollout
from rollproof.stacks._support.subjects import StackOutput, StackSubject, client_contract
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks._support.upstream import undecorated_class
from rollproof.stacks.nemo_rl.environment import datum, environment
from rollproof.stacks.nemo_rl.rows import rollout_of
from rollproof.stacks.nemo_rl.upstream import NemoRl
from rollproof.stacks.nemo_rl.vllm_generation import Tokenizer, limits, updatable, vllm_generation

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["ControllerSubject", "Transfer", "rollout_contract"]

_PARTITION = "train"
_UNLIMITED = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedGroup(StackOutput):
    """A committed prompt group of one: the trainer's columns of it, its slot's two weight versions,
    and whether it was truncated.
    """

    start: int
    end: int
    truncated: bool


class Threads:
    """``asyncio`` for the SingleController: work for a thread takes an engine's step before and one
    after it.
    """

    def __init__(self, step: float) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def to_thread(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Do ``work`` at once, in the middle of the time that it takes."""
        await asyncio.sleep(self._step)
        # a worker prints the traceback of a failed transfer
        with redirect_stderr(StringIO()):
            result = work(*arguments, **named)
        await asyncio.sleep(self._step)
        return result


class Transfer:
    """A weight transfer to the engines of a fleet. ``label`` is that of the running update: NeMo-RL
    numbers each, so all have labels.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.label: int = fleet.case.first_version

    def label_of(self, version: int | None) -> int:
        """The label of the weights of an update that is requested now."""
        return self._fleet.weights_of(None) if version is None else version

    def load(self, engine: FakeEngine) -> None:
        """Load the weights on an engine, in no time."""
        version = self._fleet.weights_of(self.label)
        engine.load_now(version, self.label, identity=version == engine.version)


class ControllerSubject(StackSubject):
    """One request is one prompt group of one generation, as ``_rollout_pump`` dispatches it.

    A run of NeMo-RL has one configuration, and no limit for a single request, so each request has a
    rollout manager of its own. They share the replay buffer and the data plane, which is NeMo-RL's
    reference implementation in memory.
    """

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def start(self, fleet: Fleet) -> None:
        """Make a controller without its Ray actors: its gate, its buffer, its counter of versions,
        and its synchronizer.
        """
        nemo = self._nemo
        self._fleet = fleet
        self._transfer = Transfer(fleet)
        self._plane = nemo.plane.NoOpDataPlaneClient()
        # `_UNLIMITED` rows: the partition never makes a producer wait
        self._plane.register_partition(_PARTITION, [], _UNLIMITED, ["train"])
        self._buffer = nemo.buffers.TQReplayBuffer(
            self._plane, _PARTITION, pad_value_dict={"token_ids": PAD_ID}
        )
        self._managers: list[Any] = []
        self._failures = nemo.controller_config.RolloutFailureConfig()
        settings = SimpleNamespace(recompute_kv_cache_after_weight_updates=False)
        generation = updatable(nemo, fleet, self._transfer.load)
        policy = SimpleNamespace(broadcast_weights_for_collective=lambda **_: [])
        # Made without its constructor: these are the fields that its methods read.
        self._controller = object.__new__(undecorated_class(nemo.controller.SingleControllerActor))
        self._controller.__dict__.update(
            _rollout_permitted=asyncio.Event(),
            _inflight_by_group_id={},
            _sampler=nemo.samplers.InOrderSampler(self._buffer, max_lookahead_versions=1),
            _trainer_version=0,
            _master_config=SimpleNamespace(env={}),
            _async_cfg=settings,
            _gen=generation,
            _weight_synchronizer=nemo.collective.CollectiveWeightSynchronizer(
                policy, generation, None, None
            ),
            _rollout_manager=SimpleNamespace(set_weight_version=self._publish),
        )
        self._controller._rollout_permitted.set()
        # no thread may run beside virtual time
        nemo.controller.asyncio = Threads(fleet.case.engine.step)
        self._labels: dict[int, int] = {0: fleet.case.first_version}
        self._version = 0
        self._update_lock = asyncio.Lock()
        self.contract: Contract = rollout_contract(fleet)

    async def rollout(self, request: Request) -> CommittedGroup | None:
        """Run ``generate_and_push`` once the gate is open, and fetch the group as the trainer does.

        ``None`` if NeMo-RL gave the prompt up, within its budget of failures.
        """
        await self._controller._rollout_permitted.wait()
        slot = _Slot(self._buffer)
        manager = self._manager(request, slot)
        self._managers.append(manager)
        try:
            outcome = await manager.generate_and_push(
                datum(request), inflight_registry=self._controller._inflight_by_group_id
            )
        finally:
            self._managers.remove(manager)
        if outcome is not self._nemo.manager.RolloutOutcome.COMMITTED:
            return None
        buffer = self._buffer
        index = buffer._group_ids.index(slot.group)
        meta, start, end = (
            buffer.meta_list[index],
            buffer.start_weight_list[index],
            buffer.end_weight_list[index],
        )
        columns = self._nemo.columns.read_columns(
            self._plane, meta, meta.fields, pad_value_dict={"input_ids": PAD_ID}
        )
        await buffer.remove([index], remove_in_dp=True)
        return CommittedGroup(
            request=request, output=columns, start=start, end=end, truncated=slot.truncated
        )

    async def update_weights(self, version: int | None) -> None:
        """Call ``_sync_weights`` after the trainer's count went up, one update after the other, as
        the train pump does.
        """
        label = self._transfer.label_of(version)
        async with self._update_lock:
            self._transfer.label = label
            self._controller._trainer_version += 1
            self._labels[self._controller._trainer_version] = label
            await self._controller._sync_weights()

    def to_record(self, native: CommittedGroup) -> Rollout:
        """The only row, without padding."""
        return rollout_of(
            native.request,
            native.output,
            int(native.output["input_lengths"][0]),
            truncated=native.truncated,
            min_version=self._labels[native.start],
            max_version=self._labels[native.end],
        )

    def stop(self) -> None:
        """Give the controller's module its ``asyncio`` back."""
        self._nemo.controller.asyncio = asyncio

    def gauges(self) -> Mapping[str, float]:
        """Groups in NeMo-RL's replay buffer, and rollouts that it could abort."""
        return {
            "nemo-rl replay buffer": float(self._buffer.size()),
            "nemo-rl in flight": float(len(self._controller._inflight_by_group_id)),
        }

    def _publish(self, version: int) -> None:
        self._version = version
        for manager in self._managers:
            manager.set_weight_version(version)

    def _manager(self, request: Request, slot: _Slot) -> Any:
        budget = self._failures
        manager = self._nemo.manager.RolloutManager(
            tokenizer=Tokenizer(eos_token_id=self._fleet.policy.eos_id),
            task_to_env=environment(self._nemo, self._fleet, request),
            num_generations_per_prompt=1,
            max_seq_len=limits(request)[1],
            max_rollout_turns=_UNLIMITED,
            policy_generation=vllm_generation(self._nemo, self._fleet, request),
            tq_buffer=slot,
            retry_policy=self._nemo.manager.RolloutRetryPolicy(
                max_infra_attempts=budget.max_infra_attempts_per_prompt,
                max_data_attempts=budget.max_data_attempts_per_prompt,
                max_gym_row_attempts=1,
                backoff_base_s=self._fleet.case.engine.step,
                max_backoff_s=budget.max_backoff_s,
            ),
        )
        manager.set_weight_version(self._version)
        return manager


class _Slot:
    """The replay buffer for one request: the group that was reserved last, and whether its sample
    was truncated.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.group = ""
        self.truncated = False

    def reserve(self, **options: Any) -> str:
        self.group = self._buffer.reserve(**options)
        return self.group

    async def commit(self, group_id: str, record: Any, **versions: int) -> Any:
        self.truncated = bool(record.completions[0].truncated)
        return await self._buffer.commit(group_id, record, **versions)

    async def remove_group(self, group_id: str) -> int:
        removed: int = await self._buffer.remove_group(group_id)
        return removed


def rollout_contract(fleet: Fleet, **differs: Any) -> Contract:
    """What a committed row holds: a row of routes for each token, that of the last one arange, and
    two versions that enclose its samplers.
    """
    # Rows that an engine did not return are -1, for which the trainer uses its own router: the fake
    # engines return all.
    fields: dict[str, Any] = {
        "final_row": Filler.ARANGE,
        "versions": Versions.BOUNDS,
        # updates are done in flight, and calls keep their KV, by default
        "kv_policy": KvPolicy.KEEP,
        "missing_logprobs": MissingLogprobs.MASKED,
        "loss_mask": True,
        "multi_turn": True,
        # The environment's last turn has arange, and so do the tokens before it that no call
        # forwarded.
        "filler": Filler.ARANGE,
        "dtype": "int8|int16|int32",
        # docs/guides/router-replay.md: a token's experts are the same in rollout and training
        "provenance": Provenance.AS_SAMPLED,
    }
    return client_contract(fleet, rows=Rows.ALL, resume=ResumeBy.ENGINE, **{**fields, **differs})
