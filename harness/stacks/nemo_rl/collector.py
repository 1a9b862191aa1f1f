"""NeMo-RL's asynchronous GRPO, as a subject: trajectory collector, rollouts, replay buffer, and
weight updates in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, TagRead, Versions
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.errors import SubjectError
from rollproof.stacks._support.ray_actors import taken
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.nemo_rl.controller import Transfer, rollout_contract
from rollproof.stacks.nemo_rl.environment import datum, environment
from rollproof.stacks.nemo_rl.upstream import NemoRl, Ref
from rollproof.stacks.nemo_rl.vllm_generation import Tokenizer, limits, updatable, vllm_generation

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["CollectorSubject", "message_rows"]

_MANY = 10**6
_AGE = 10**3
"""``max_trajectory_age_steps``: a version's worth of prompts each, of which one at a time is
generated.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A group of one that the replay buffer holds, and the version that it was added with."""

    request: Request
    batch: Any
    version: int


class Threads:
    """``asyncio`` and ``threading`` for the collector: a thread that runs a coroutine to its end is
    a task of the running loop.
    """

    Lock: Any = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self.running: list[asyncio.Task[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """As ``asyncio.run`` in a thread of its own."""
        self.running.append(asyncio.ensure_future(work))

    def Thread(self, *, target: Callable[[], None], daemon: bool) -> Any:  # noqa: N802 - threading's name
        """A thread that is over as soon as it has started."""
        return _Started(target)

    def current_thread(self) -> None:
        """None that the collector knows."""


class CollectorSubject:
    """One request is a batch of one prompt, generated once; a batch is processed as the collector's
    thread does it.

    The collector's threads are tasks of one loop. It has one configuration: there is one collector
    for each request, all of which add to one replay buffer, and hear of every update.
    """

    contract: Contract

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def start(self, fleet: Fleet) -> None:
        """A replay buffer, and a generation whose weights are updated."""
        nemo = self._nemo
        self._fleet = fleet
        self._transfer = Transfer(fleet)
        self._generation = updatable(nemo, fleet, self._transfer.load)
        self._buffer = nemo.buffers.ReplayBufferImpl(
            max_size=_MANY, drop_incomplete_targets_on_restore=True
        )
        self._collectors: list[Any] = []
        self._version = 0
        self._labels: dict[int, int] = {0: fleet.case.first_version}
        self._one_update = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._threads = Threads()
        nemo.collector.asyncio = nemo.collector._threading = self._threads
        self.contract = collected_contract(fleet)

    async def rollout(self, request: Request) -> Answer:
        """``_process_batch`` until the group is in the buffer. Raises what the trainer raises where
        it asks for the collector's health.
        """
        await self._open.wait()
        collector = self._collector(request)
        self._collectors.append(collector)
        try:
            collector._process_batch(self._nemo.batched.BatchedDataDict(_columns(request)))
            if not self._threads.running:
                raise SubjectError("NeMo-RL's collector started no rollout.")
            await self._threads.running.pop()
            collector.check_health()
        finally:
            self._collectors.remove(collector)
        groups = self._buffer.trajectories
        place = next(
            i for i, group in enumerate(groups) if group["batch"]["request"] == [request.request_id]
        )
        version, batch = self._buffer.trajectory_versions[place], groups[place]["batch"]
        self._buffer._remove_indices([place])
        return Answer(request=request, batch=batch, version=version)

    async def update_weights(self, version: int | None) -> None:
        """As ``async_grpo_train`` does it after a step: each of these calls goes to an actor, and
        takes its time.
        """
        step, label = self._fleet.case.engine.step, self._transfer.meant(version)
        async with self._one_update:
            self._open.clear()
            self._tell("prepare_for_refit")
            await asyncio.sleep(step)
            self._transfer.label = label
            policy = SimpleNamespace(broadcast_weights_for_collective=lambda **_: [])
            with redirect_stderr(StringIO()):  # a worker prints the trace of a transfer that broke
                self._nemo.grpo.refit_policy_generation(policy, self._generation, False)
            self._version += 1
            self._labels[self._version] = label
            await asyncio.sleep(step)
            self._tell("set_weight_version", self._version)
            self._tell("resume_after_refit")
            self._open.set()

    def to_record(self, native: Answer) -> Rollout:
        """The one row of the training batch, without padding."""
        request, batch = native.request, native.batch
        rows, lengths = message_rows(self._nemo, batch, routes=request.want_routes)
        length, prompt = int(lengths[0]), len(request.prompt_ids)
        tokens = as_tokens(rows["input_ids"][0, :length].tolist(), what="input_ids")
        return Rollout(
            request_id=request.request_id,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            finish_reason=FinishReason.LENGTH if bool(batch["truncated"][0]) else FinishReason.STOP,
            logprobs=as_logprobs(
                rows["generation_logprobs"][0, prompt:length].numpy().astype(np.float64)
            ),
            loss_mask=rows["token_mask"][0, prompt:length].numpy().astype(np.int64),
            routes=as_routes(
                rows["routed_experts"][0, :length].numpy() if "routed_experts" in rows else None
            ),
            version=self._labels[native.version],
        )

    def stop(self) -> None:
        """The collector's module has its own modules back."""
        self._nemo.collector.asyncio, self._nemo.collector._threading = asyncio, threading

    def gauges(self) -> Mapping[str, float]:
        """Groups in NeMo-RL's replay buffer."""
        return {"nemo-rl replay buffer": float(self._buffer.size())}

    def _tell(self, deed: str, *arguments: Any) -> None:
        """All collectors, of which a run has one; its generation's caches are those of all."""
        for collector in self._collectors or [self._collector(self._fleet.case.requests[0])]:
            getattr(collector, deed)(*arguments)

    def _collector(self, request: Request) -> Any:
        nemo = self._nemo
        collector = object.__new__(taken(nemo.collector.AsyncTrajectoryCollector))
        options = nemo.grpo.AsyncGRPOConfig(
            enabled=True,
            max_trajectory_age_steps=_AGE,
            in_flight_weight_updates=True,
            recompute_kv_cache_after_weight_updates=True,
        )
        generation = vllm_generation(nemo, self._fleet, request)
        collector.__dict__.update(
            policy_generation=generation,
            tokenizer=Tokenizer(eos_token_id=self._fleet.policy.eos_id),
            task_to_env=environment(nemo, self._fleet, request),
            master_config=SimpleNamespace(
                env={},
                policy={
                    "generation": generation.cfg,
                    "max_total_sequence_length": limits(request)[1],
                },
            ),
            async_config=options,
            replay_buffer=_Handle(self._buffer),
            processor=None,
            current_weight_version=self._version,
            initial_weight_version=0,
            running=True,
            collection_failed=False,
            _deduplicate_multimodal_data=False,
            _debug_payload_metrics=False,
            _max_generation_failures=options.max_generation_failures,
            _num_prompts_per_step=_MANY,
            _num_generations_per_prompt=1,
            _max_rollout_turns=_MANY,
            _has_distillation_teachers=False,
            _generation_lead_steps=_AGE,
            _max_trajectory_age_steps=_AGE,
            _generating_targets=set(),
            _inflight_threads=set(),
            _threads_lock=threading.Lock(),
            _failure_lock=threading.Lock(),
            _generation_check_lock=threading.Lock(),
            _manual_pause_cleared=_set(),
            _refit_pause_cleared=_set(),
            _generation_limit_cleared=_set(),
            _efficiency_timer=nemo.collector.ThreadSafeTimer(context={}),
            _failure_count=0,
            _fatal_error_message=None,
        )
        return collector


@dataclass(frozen=True, eq=False, slots=True)
class _Started:
    """A thread that is over when ``start`` returns."""

    start: Callable[[], None]

    def is_alive(self) -> bool:
        return False


class _Handle:
    """The replay buffer behind a handle of Ray's."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._buffer, name)
        return SimpleNamespace(remote=lambda *arguments: Ref(method(*arguments)))


def message_rows(nemo: NemoRl, batch: Any, *, routes: bool) -> tuple[Any, Any]:
    """The training batch of ``async_grpo_train``, and its rows' lengths, by the functions that it
    calls.
    """
    nemo.rollouts.backfill_missing_routed_experts(batch["message_log"])
    nemo.grpo.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
    flat, lengths = nemo.messages.batched_message_log_to_flat_message(
        batch["message_log"],
        pad_value_dict={"token_ids": PAD_ID},
        make_sequence_length_divisible_by=8,
    )
    policy = {"precision": "float32", "router_replay": {"enabled": routes}}
    return nemo.grpo._build_async_grpo_train_data(flat, lengths, batch, policy), lengths


def collected_contract(fleet: Fleet) -> Contract:
    """As a row of the SingleController, but with one version: that of the collector when the batch
    was processed.

    Caches are told to be invalidated after every update, which is an option of NeMo-RL's.
    """
    return replace(
        rollout_contract(fleet),
        versions=Versions.SAMPLE,
        tag_read=TagRead.ADMISSION,
        kv_policy=KvPolicy.RECOMPUTE,
    )


def _columns(request: Request) -> dict[str, Any]:
    """A batch of one prompt."""
    import torch

    return {
        **{name: [value] for name, value in datum(request).items()},
        "loss_multiplier": torch.tensor([1.0]),
        "request": [request.request_id],
    }


def _set() -> threading.Event:
    """An event that has happened."""
    event = threading.Event()
    event.set()
    return event
