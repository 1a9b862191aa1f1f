"""NeMo-RL's asynchronous GRPO, as a subject: trajectory collector, rollouts, replay buffer, and
weight updates in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract, KvPolicy, TagRead, Versions
from rollproof.core.records import Request, Rollout
from rollproof.errors import SubjectError
from rollproof.stacks._support.subjects import StackOutput, StackSubject
from rollproof.stacks._support.upstream import undecorated_class
from rollproof.stacks.nemo_rl.controller import Transfer, rollout_contract
from rollproof.stacks.nemo_rl.environment import datum, environment
from rollproof.stacks.nemo_rl.rows import message_rows, rollout_of
from rollproof.stacks.nemo_rl.upstream import NemoRl, Ref
from rollproof.stacks.nemo_rl.vllm_generation import Tokenizer, limits, updatable, vllm_generation

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["CollectorSubject"]

_UNLIMITED = 10**6
_AGE = 10**3
"""``max_trajectory_age_steps``: the prompts of so many versions are generated ahead, and none is
too old.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedGroup(StackOutput):
    """A group of one in the replay buffer, and the version that it was added with."""

    version: int


class Threads:
    """``asyncio`` and ``threading`` for the collector: a thread that runs a coroutine becomes a
    task of the running loop.
    """

    Lock: Any = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self.running: list[asyncio.Task[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start ``work`` as a task, where the collector's thread would run it."""
        self.running.append(asyncio.ensure_future(work))

    def Thread(self, *, target: Callable[[], None], daemon: bool) -> Any:  # noqa: N802 - threading's name
        """A thread that has ended when ``start`` returns."""
        return _EndedThread(target)

    def current_thread(self) -> None:
        """Not one of the collector's threads."""


class CollectorSubject(StackSubject):
    """One request is a batch of one prompt, generated once. A batch is processed as the collector's
    thread does it.

    The collector's threads are tasks of one loop. It has one configuration, so there is one
    collector for each request. All of them add to one replay buffer, and are notified of every
    update.
    """

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def start(self, fleet: Fleet) -> None:
        """Make a replay buffer, and a generation for weight updates."""
        nemo = self._nemo
        self._fleet = fleet
        self._transfer = Transfer(fleet)
        self._generation = updatable(nemo, fleet, self._transfer.load)
        self._buffer = nemo.buffers.ReplayBufferImpl(
            max_size=_UNLIMITED, drop_incomplete_targets_on_restore=True
        )
        self._collectors: list[Any] = []
        self._version = 0
        self._labels: dict[int, int] = {0: fleet.case.first_version}
        self._update_lock = asyncio.Lock()
        self._open_gate = asyncio.Event()
        self._open_gate.set()
        self._threads = Threads()
        nemo.collector.asyncio = nemo.collector._threading = self._threads
        self.contract: Contract = collected_contract(fleet)

    async def rollout(self, request: Request) -> CollectedGroup:
        """Run ``_process_batch`` until the group is in the buffer. Raises what the trainer's check
        of the collector's health raises.
        """
        await self._open_gate.wait()
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
        index = next(
            i for i, group in enumerate(groups) if group["batch"]["request"] == [request.request_id]
        )
        version, batch = self._buffer.trajectory_versions[index], groups[index]["batch"]
        # taken out as the trainer takes it: a group is trained on once
        self._buffer._remove_indices([index])
        return CollectedGroup(request=request, output=batch, version=version)

    async def update_weights(self, version: int | None) -> None:
        """Update as ``async_grpo_train`` does after a step. Each of these calls goes to an actor,
        and takes its time.
        """
        step, label = self._fleet.case.engine.step, self._transfer.label_of(version)
        async with self._update_lock:
            self._open_gate.clear()
            self._call_all("prepare_for_refit")
            await asyncio.sleep(step)
            self._transfer.label = label
            # The trainer's side of the transfer has no worker to wait for.
            policy = SimpleNamespace(broadcast_weights_for_collective=lambda **_: [])
            # a worker prints the traceback of a failed transfer
            with redirect_stderr(StringIO()):
                self._nemo.grpo.refit_policy_generation(policy, self._generation, False)
            self._version += 1
            self._labels[self._version] = label
            await asyncio.sleep(step)
            self._call_all("set_weight_version", self._version)
            self._call_all("resume_after_refit")
            self._open_gate.set()

    def to_record(self, native: CollectedGroup) -> Rollout:
        """The only row of the training batch, without padding."""
        batch, request = native.output, native.request
        rows, lengths = message_rows(self._nemo, batch, routes=request.want_routes)
        return rollout_of(
            request,
            rows,
            int(lengths[0]),
            truncated=bool(batch["truncated"][0]),
            version=self._labels[native.version],
        )

    def stop(self) -> None:
        """Give the collector's module its own modules back."""
        self._nemo.collector.asyncio, self._nemo.collector._threading = asyncio, threading

    def gauges(self) -> Mapping[str, float]:
        """Groups in NeMo-RL's replay buffer."""
        return {"nemo-rl replay buffer": float(self._buffer.size())}

    def _call_all(self, method: str, *arguments: Any) -> None:
        """Call a method of all collectors, of which a run of NeMo-RL has one."""
        # without a collector one is made: its generation clears the caches of all engines
        for collector in self._collectors or [self._collector(self._fleet.case.requests[0])]:
            getattr(collector, method)(*arguments)

    def _collector(self, request: Request) -> Any:
        nemo = self._nemo
        # Made without its constructor: these are the fields that its methods read.
        collector = object.__new__(undecorated_class(nemo.collector.AsyncTrajectoryCollector))
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
            _num_prompts_per_step=_UNLIMITED,
            _num_generations_per_prompt=1,
            _max_rollout_turns=_UNLIMITED,
            _has_distillation_teachers=False,
            _generation_lead_steps=_AGE,
            _max_trajectory_age_steps=_AGE,
            _generating_targets=set(),
            _inflight_threads=set(),
            _threads_lock=threading.Lock(),
            _failure_lock=threading.Lock(),
            _generation_check_lock=threading.Lock(),
            _manual_pause_cleared=_set_event(),
            _refit_pause_cleared=_set_event(),
            _generation_limit_cleared=_set_event(),
            _efficiency_timer=nemo.collector.ThreadSafeTimer(context={}),
            _failure_count=0,
            _fatal_error_message=None,
        )
        return collector


@dataclass(frozen=True, eq=False, slots=True)
class _EndedThread:
    """A thread that has ended when ``start`` returns."""

    start: Callable[[], None]

    def is_alive(self) -> bool:
        return False


class _Handle:
    """A Ray handle of the replay buffer."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._buffer, name)
        return SimpleNamespace(remote=lambda *arguments: Ref(method(*arguments)))


def collected_contract(fleet: Fleet) -> Contract:
    """What a row of the SingleController holds, but with one version: that of the collector when
    the batch was processed.

    Caches are invalidated after every update, which is an option of NeMo-RL's.
    """
    return rollout_contract(
        fleet,
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


def _set_event() -> threading.Event:
    """An event that has happened."""
    event = threading.Event()
    event.set()
    return event
