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

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    MissingLogprobs,
    Provenance,
    ResumeBy,
    Rows,
    Sampling,
    Versions,
)
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.stacks._support.ray_actors import taken
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.nemo_rl.environment import datum, environment
from rollproof.stacks.nemo_rl.upstream import NemoRl
from rollproof.stacks.nemo_rl.vllm_generation import Tokenizer, limits, updatable, vllm_generation

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["ControllerSubject", "Transfer", "rollout_contract"]

_PARTITION = "train"
_ENDLESS = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A committed prompt group of one: the trainer's columns of it, its slot's two weight versions,
    and whether it was truncated.
    """

    request: Request
    columns: Any
    start: int
    end: int
    truncated: bool


class Threads:
    """``asyncio`` for the SingleController: what it gives to a thread takes an engine's step before
    it, and one after it.
    """

    def __init__(self, step: float) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def to_thread(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """``work``, in no time, in the middle of the time that it takes."""
        await asyncio.sleep(self._step)
        with redirect_stderr(StringIO()):  # a worker prints the trace of a transfer that broke
            done = work(*arguments, **named)
        await asyncio.sleep(self._step)
        return done


class Transfer:
    """A weight transfer to the engines of a fleet, of the update that is about to be done. NeMo-RL
    numbers each, so all have labels.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.label: int = fleet.case.first_version

    def meant(self, version: int | None) -> int:
        """The label of the weights of an update that is asked for now."""
        return self._fleet.weights_of(None) if version is None else version

    def load(self, engine: FakeEngine) -> None:
        """What one engine receives, in no time."""
        true = self._fleet.weights_of(self.label)
        engine.load_now(true, self.label, identity=true == engine.version)


class ControllerSubject:
    """One request is one prompt group of one generation, as ``_rollout_pump`` dispatches it.

    A run of NeMo-RL has one configuration, and no bound on a single request: each has a rollout
    manager of its own. They share the replay buffer and the data plane, which is NeMo-RL's
    reference implementation in memory.
    """

    contract: Contract

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def start(self, fleet: Fleet) -> None:
        """A controller without its Ray actors: its gate, its buffer, its counter of versions, and
        its synchronizer.
        """
        nemo = self._nemo
        self._fleet = fleet
        self._transfer = Transfer(fleet)
        self._plane = nemo.plane.NoOpDataPlaneClient()
        self._plane.register_partition(_PARTITION, [], _ENDLESS, ["train"])
        self._buffer = nemo.buffers.TQReplayBuffer(
            self._plane, _PARTITION, pad_value_dict={"token_ids": PAD_ID}
        )
        self._managers: list[Any] = []
        self._failures = nemo.controller_config.RolloutFailureConfig()
        settings = SimpleNamespace(recompute_kv_cache_after_weight_updates=False)
        generation = updatable(nemo, fleet, self._transfer.load)
        policy = SimpleNamespace(broadcast_weights_for_collective=lambda **_: [])
        self._controller = object.__new__(taken(nemo.controller.SingleControllerActor))
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
            _rollout_manager=SimpleNamespace(set_weight_version=self._published),
        )
        self._controller._rollout_permitted.set()
        nemo.controller.asyncio = Threads(fleet.case.engine.step)
        self._labels: dict[int, int] = {0: fleet.case.first_version}
        self._version = 0
        self._one_update = asyncio.Lock()
        self.contract = rollout_contract(fleet)

    async def rollout(self, request: Request) -> Answer | None:
        """``generate_and_push`` once the gate is open, and the group as the trainer fetches it.
        ``None``: given up within a budget.
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
        place = self._buffer._group_ids.index(slot.group)
        buffer = self._buffer
        meta, start, end = (
            buffer.meta_list[place],
            buffer.start_weight_list[place],
            buffer.end_weight_list[place],
        )
        columns = self._nemo.columns.read_columns(
            self._plane, meta, meta.fields, pad_value_dict={"input_ids": PAD_ID}
        )
        await self._buffer.remove([place], remove_in_dp=True)
        return Answer(
            request=request, columns=columns, start=start, end=end, truncated=slot.truncated
        )

    async def update_weights(self, version: int | None) -> None:
        """``_sync_weights``, after the trainer's count went up; one after the other, as the train
        pump does them.
        """
        label = self._transfer.meant(version)
        async with self._one_update:
            self._transfer.label = label
            self._controller._trainer_version += 1
            self._labels[self._controller._trainer_version] = label
            await self._controller._sync_weights()

    def to_record(self, native: Answer) -> Rollout:
        """The one row, without padding."""
        columns, request = native.columns, native.request
        length, prompt = int(columns["input_lengths"][0]), len(request.prompt_ids)
        tokens = as_tokens(columns["input_ids"][0, :length].tolist(), what="input_ids")
        routes = (
            columns["routed_experts"][0, :length].numpy() if "routed_experts" in columns else None
        )
        return Rollout(
            request_id=request.request_id,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            finish_reason=FinishReason.LENGTH if native.truncated else FinishReason.STOP,
            logprobs=as_logprobs(
                columns["generation_logprobs"][0, prompt:length].numpy().astype(np.float64)
            ),
            loss_mask=columns["token_mask"][0, prompt:length].numpy().astype(np.int64),
            routes=as_routes(routes),
            min_version=self._labels[native.start],
            max_version=self._labels[native.end],
        )

    def stop(self) -> None:
        """The controller's module has its ``asyncio`` back."""
        self._nemo.controller.asyncio = asyncio

    def gauges(self) -> Mapping[str, float]:
        """Groups in NeMo-RL's replay buffer, and rollouts that it could abort."""
        return {
            "nemo-rl replay buffer": float(self._buffer.size()),
            "nemo-rl in flight": float(len(self._controller._inflight_by_group_id)),
        }

    def _published(self, version: int) -> None:
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
            max_rollout_turns=_ENDLESS,
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
    """The replay buffer, for one request: which group was reserved last, and what was committed to
    it.
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


def rollout_contract(fleet: Fleet) -> Contract:
    """What a committed row holds: a row of routes for each token, that of the last one arange; two
    versions that enclose its samplers.

    Updates are done in flight, and calls keep their KV (the default). Turns before the last get
    their routes from the last call; what the environment said last has arange, as have tokens
    before it whose forward no call did. (Rows that an engine did not return are -1, for which the
    trainer uses its own router: the fake engines return all.)
    """
    model = fleet.case.model
    return Contract(
        rows=Rows.ALL,
        final_row=Filler.ARANGE,
        resume=ResumeBy.ENGINE,
        versions=Versions.BOUNDS,
        logprobs=fleet.flavour.logprobs,
        abort_surfaces=False,
        sampling=Sampling.OWN,
        kv_policy=KvPolicy.KEEP,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        multi_turn=True,
        layer_axis=LayerAxis.ALL,
        **model.sizes,
        filler=Filler.ARANGE,
        dtype="int8|int16|int32",
        provenance=Provenance.LATEST_PREFILL,
    )
