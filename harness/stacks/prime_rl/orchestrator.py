"""prime-rl's ``Dispatcher`` and ``WeightWatcher`` as a subject: from a task to the training sample,
and its span of policies.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import Contract, PartialOff, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.fakes.http.serve_options import RoutesForm
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks._support.subjects import StackOutput, StackSubject
from rollproof.stacks.prime_rl.upstream import PrimeRl
from rollproof.stacks.verifiers.rollout import MODEL, TrainRollout, branch_contract, reason_of

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["OrchestratorSubject"]

_ENV = "rollproof"
_UNLIMITED = 10_000
"""Episodes in flight, and steps off policy: nothing is held back or dropped for either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled(StackOutput):
    """The training sample of an episode, its policy span, and the reason that verifiers gave for
    the end of its last turn.
    """

    policy: Any
    finish: str | None


class OrchestratorSubject(StackSubject):
    """One request is a group of one episode, which the dispatcher sends to an environment, and
    which comes back over its wire.

    The environment is ours, and rolls out with verifiers' ``TrainClient``. Updates go the way of
    the watcher: a directory that the trainer has finished, then ``apply_policy_update`` with the
    requests of ``InferencePool.update_weights`` to every server.
    """

    def __init__(self, prime: PrimeRl) -> None:
        self._prime = prime

    def start(self, fleet: Fleet) -> None:
        """Make the servers, the dispatcher and the watcher."""
        prime = self._prime
        # prime-rl's servers keep what runs; a salt keeps the caches of policies apart.
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = False
        self._fleet = fleet
        self._http = HttpFleet(fleet, routes=RoutesForm.DESCRIBED)
        self._folder = Path(tempfile.mkdtemp(prefix="rollproof-prime-"))
        urls = list(self._http.urls.values())
        config = prime.shared.ClientConfig(
            base_url=self._http.router + "/v1", admin_base_url=urls, api_key_var="ROLLPROOF_NO_KEY"
        )
        # the pool makes a client for each address
        with without_certificates():
            pool = prime.client.InferencePool(config, MODEL, train_client_type="renderer")
        # dispatcher and watcher share it: the watcher raises its version
        policy = prime.types.Policy(version=fleet.case.first_version, model_name=MODEL)
        self._tasks = _TaskSource(prime)
        self._server = _EnvironmentServer(
            prime, TrainRollout(prime.verifiers, fleet, pool.train_client), self._tasks
        )
        self._dispatcher = prime.dispatcher.Dispatcher(
            train_envs=_Environments(prime, pool, self._server),
            eval_envs=None,
            train_source=self._tasks,
            eval_source=None,
            policy_pool=pool,
            policy=policy,
            progress=prime.types.Progress(),
            initial_max_inflight=_UNLIMITED,
            max_inflight_ceiling=None,
            tasks_per_minute=None,
            max_off_policy_steps=_UNLIMITED,
            run_id=_ENV,
            run_name=None,
        )
        self._watcher = prime.watcher.WeightWatcher(
            SimpleNamespace(output_dir=self._folder, max_steps=None),
            policy=policy,
            inference=pool,
            observers=[self._dispatcher],
            lora_name=None,
            ckpt_step=fleet.case.first_version,
        )
        self._pool = pool
        self._running = [
            asyncio.ensure_future(self._dispatcher.start()),
            asyncio.ensure_future(self._collect()),
        ]
        for task in self._running:
            task.add_done_callback(self._tasks.dispatcher_ended)
        # a branch of no tokens is no sample: the sink drops it
        self.contract: Contract = branch_contract(
            fleet, versions=Versions.BOUNDS, partial_off=PartialOff.DROPPED
        )

    async def rollout(self, request: Request) -> Sampled | None:
        """The sample; ``None`` if the episode has none to train on. Raises what the environment
        raised.
        """
        episode = await self._tasks.put(request)
        error = self._server.failed.pop(request.request_id, None)
        if error is not None:
            raise error
        (trace,) = episode.traces
        samples = self._prime.trajectories.trace_to_samples(trace, env_name=_ENV)
        if not samples:
            return None
        return Sampled(
            request=request,
            output=samples[-1],
            policy=episode.run.work.policy,
            finish=self._server.finished.pop(request.request_id),
        )

    async def update_weights(self, version: int | None) -> None:
        """Update as the watcher does when it sees a directory that is marked as stable. Raises what
        a server reports. The trainer numbers every update.
        """
        label = self._fleet.weights_of(None) if version is None else version
        step = self._folder / "broadcasts" / f"step_{label}"
        # the transfer itself is a request to each server: the directory is empty
        step.mkdir(parents=True)
        (step / "STABLE").touch()
        self._http.about(label)
        await self._watcher.apply_policy_update(label)

    def to_record(self, native: Sampled) -> Rollout:
        """A ``TrainingSample`` as a rollout."""
        sample, prompt = native.output, len(native.request.prompt_ids)
        ids, routes = as_tokens(sample.token_ids), sample.routed_experts
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            finish_reason=reason_of(native.finish),
            logprobs=as_logprobs(sample.logprobs[prompt:]),
            loss_mask=np.array(sample.mask[prompt:], dtype=np.int64),
            routes=(
                None
                if routes is None
                else as_routes(np.frombuffer(routes.data, dtype=routes.dtype).reshape(routes.shape))
            ),
            min_version=native.policy.start,
            max_version=native.policy.end,
        )

    async def stop(self) -> None:
        """Stop the dispatcher, close the clients, and remove the directories of the updates."""
        await self._dispatcher.stop()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._server.rollouts.close()
        for client in [*self._pool.admin_clients, *self._pool._router_clients]:
            await client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    def gauges(self) -> Mapping[str, float]:
        """What the dispatcher counts."""
        return {
            "prime-rl episodes in flight": float(self._dispatcher.current_inflight),
            "prime-rl groups": float(len(self._dispatcher.groups)),
        }

    async def _collect(self) -> None:
        """Return every episode to the rollout that waits for it, in place of prime-rl's sink."""
        while True:
            self._tasks.finish(await self._dispatcher.out_q.get())


class _TaskSource:
    """The dispatcher's source of tasks, and the rollouts that wait for their episodes."""

    def __init__(self, prime: PrimeRl) -> None:
        self._prime = prime
        self._queue: list[Any] = []
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self.requests: dict[str, Request] = {}

    def put(self, request: Request) -> asyncio.Future[Any]:
        """Queue a request; return the future of its episode."""
        v1 = self._prime.v1
        task = v1.Task(v1.TaskData(name=request.request_id))
        self.requests[request.request_id] = request
        self._queue.append(self._prime.types.TaskRequest(env_name=_ENV, task=task, step=1))
        self._waiting[task.hash] = asyncio.get_running_loop().create_future()
        return self._waiting[task.hash]

    def next_task(self, *, step: int) -> Any:
        """The next task, which the dispatcher asks for."""
        return self._queue.pop(0) if self._queue else None

    def dispatcher_ended(self, task: asyncio.Task[None]) -> None:
        """Raise the dispatcher's error in all rollouts that wait."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    def finish(self, episode: Any) -> None:
        """Return an episode to its rollout, unless the rollout was cancelled."""
        waiting = self._waiting.pop(episode.task.hash)
        if not waiting.done():
            waiting.set_result(episode)


class _Environments:
    """``TrainEnvs`` with one environment: prime-rl's ``TrainEnv``, with a client of ours."""

    def __init__(self, prime: PrimeRl, pool: Any, client: Any) -> None:
        # made without its constructor: the environment is ours
        env = object.__new__(prime.envs.TrainEnv)
        env.config = SimpleNamespace(group_size=1, resolved_name=_ENV)
        env.generation_source = SimpleNamespace(uses_live_policy=True, pool=pool)
        env.sampling_args = {"temperature": 1.0, "logprobs": True}
        env._env_client = client
        self._env = env

    def __iter__(self) -> Any:
        return iter([self._env])

    def get(self, _name: str) -> Any:
        """The environment."""
        return self._env


class _EnvironmentServer:
    """An ``EnvClient`` with its server in this process: an episode is packed as the server does it,
    and unpacked as the client does.
    """

    def __init__(self, prime: PrimeRl, rollouts: TrainRollout, tasks: _TaskSource) -> None:
        self._prime, self._tasks = prime, tasks
        self.rollouts = rollouts
        self.failed: dict[str, Exception] = {}
        self.finished: dict[str, str | None] = {}

    async def run(
        self, *, task_data: Mapping[str, Any], client: Any, model: str, sampling: Any
    ) -> Any:
        """One episode; it has an error if the rollout fails."""
        import msgpack

        prime, request = self._prime, self._tasks.requests[task_data["name"]]
        v1, wire = prime.v1, prime.wire
        task = v1.Task(v1.TaskData.model_validate(task_data))
        trace_task = v1.TraceTask(type="Task", data=task.data, key=task.key, hash=task.hash)
        trace = prime.verifiers.trace(task=trace_task, agent=prime.verifiers.agent(config={}))
        try:
            fields = sampling.model_dump(exclude_none=True)
            self.finished[request.request_id] = await self.rollouts.run(trace, request, **fields)
            trace.ok = True
        except Exception as error:  # noqa: BLE001 - an environment server answers with the traces of failed rollouts, whatever failed
            self.failed[request.request_id] = error
            trace.errors.append(v1.Error(type=type(error).__name__, message=str(error)))
        trace.is_completed = True
        response = wire.RunResponse.model_construct(
            episode=v1.Episode(task=trace_task, ok=trace.ok, traces=[trace])
        )
        packed = msgpack.packb(
            response.model_dump(mode="python"),
            default=prime.encoding.msgpack_encoder,
            use_bin_type=True,
        )
        return wire.RunResponse.model_validate(msgpack.unpackb(packed, raw=False)).episode
