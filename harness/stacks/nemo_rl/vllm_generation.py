"""NeMo-RL's ``VllmGeneration`` over its asynchronous vLLM worker, on fakes of vLLM's ``AsyncLLM``.

Generation and workers are NeMo-RL's. Between them is a worker group without Ray, and below the
workers the only class of vLLM's that they call. A worker's limits are its configuration, so there
is one generation for each request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollproof.core.records import Request
from rollproof.fakes.engine.exceptions import EngineFailure
from rollproof.stacks._support.subjects import budget_of, token_logprobs
from rollproof.stacks._support.tokenizer import PAD_ID, IdTokenizer
from rollproof.stacks.nemo_rl.upstream import NemoRl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["Tokenizer", "generation_config", "limits", "updatable", "vllm_generation"]

_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None}


class Tokenizer(IdTokenizer):
    """An ``IdTokenizer`` that is called as transformers' are."""

    def __call__(self, text: str, **_options: Any) -> Any:
        """``input_ids`` as a tensor ``(1, tokens)``."""
        import torch

        return SimpleNamespace(input_ids=torch.tensor([self.encode(text)], dtype=torch.long))


class AsyncLLM:
    """An engine of a fleet, as far as NeMo-RL's worker calls vLLM's ``AsyncLLM``. ``load`` loads
    the weights of the running update on an engine.
    """

    def __init__(self, engine: FakeEngine, *, routes: bool, load: Any = None) -> None:
        self._engine, self._routes, self._load = engine, routes, load

    async def generate(
        self, *, prompt: Mapping[str, Any], sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        """One ``RequestOutput``, the final one.

        The trace does not get ``request_id``, which is random; no abort uses it.
        """
        sampling = dict(vars(sampling_params))
        max_tokens, logprobs = sampling.pop("max_tokens"), sampling.pop("logprobs")
        output = await self._engine.generate(
            prompt_ids=prompt["prompt_token_ids"],
            max_tokens=max_tokens,
            sampling=sampling,
            want_logprobs=logprobs is not None,
            want_routes=self._routes,
        )
        completion = SimpleNamespace(
            token_ids=list(output.token_ids),
            logprobs=token_logprobs(output),
            finish_reason=str(output.finish_reason),
            routed_experts=output.routes,
        )
        yield SimpleNamespace(
            outputs=[completion], prompt_routed_experts=None, num_cached_tokens=None
        )

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[bool]:
        """Load weights, in no time, as a step of vLLM's engine core does it. Ignore other
        methods.
        """
        if method == "update_weights_from_collective":
            self._load(self._engine)
        return [True]

    async def reset_prefix_cache(self) -> bool:
        """Clear the cache unless a call holds blocks, as vLLM's block pool does
        (vllm/v1/core/block_pool.py).
        """
        if self._engine.in_flight:
            return False
        self._engine.reset_prefix_cache()
        return True


class WorkerGroup:
    """NeMo-RL's worker group without Ray: one worker for each server. Its methods run in the task
    that waits for them.
    """

    def __init__(self, nemo: NemoRl, workers: list[Any]) -> None:
        self.workers: list[Any] = workers
        self.dp_size: int = len(workers)
        self._nemo = nemo

    def get_dp_leader_worker_idx(self, shard: int) -> int:
        """The worker of a shard: each shard is one worker."""
        return shard

    def run_single_worker_single_data(
        self, *, method_name: str, worker_idx: int, **arguments: Any
    ) -> Any:
        """An asynchronous generator of references to a worker's results."""
        return self._streamed(
            getattr(self.workers[worker_idx], method_name)(**arguments), method_name
        )

    def run_all_workers_single_data(
        self, method_name: str, run_rank_0_only_axes: Any = None
    ) -> list[Any]:
        """A coroutine for each worker, for ``RayCalls.get``."""
        return [getattr(worker, method_name)() for worker in self.workers]

    async def _streamed(self, results: AsyncIterator[Any], name: str) -> AsyncIterator[Any]:
        try:
            async for result in results:
                yield _ready(result)
        except EngineFailure as error:
            # the caller of an actor sees its error as Ray wraps it
            raise self._nemo.vllm.ray.wrapped(name, error) from error


async def _ready(value: Any) -> Any:
    return value


def limits(request: Request) -> tuple[int, int]:
    """``max_new_tokens`` and the length of the whole sequence, in tokens."""
    budget = budget_of(request)
    return budget, len(request.prompt_ids) + budget


def generation_config(request: Request) -> dict[str, Any]:
    """``policy.generation`` of a run with only this request. NeMo-RL takes sampling parameters from
    its configuration.
    """
    budget, total = limits(request)
    return {
        **{name: request.sampling.get(name, default) for name, default in _SAMPLING.items()},
        "backend": "vllm",
        "max_new_tokens": budget,
        "stop_token_ids": None,
        "stop_strings": None,
        "_pad_token_id": PAD_ID,
        "colocated": {"enabled": False},
        "vllm_cfg": {"async_engine": True, "max_model_len": total},
        "vllm_kwargs": {"enable_return_routed_experts": request.want_routes},
    }


def vllm_generation(nemo: NemoRl, fleet: Fleet, request: Request) -> Any:
    """A ``VllmGeneration`` for ``request``, over all servers of ``fleet``."""
    cfg = generation_config(request)
    workers = [
        _worker(nemo, cfg, AsyncLLM(engine, routes=request.want_routes), fleet)
        for engine in fleet.servers.values()
    ]
    return _generation(nemo, cfg, workers)


def updatable(nemo: NemoRl, fleet: Fleet, load: Any) -> Any:
    """A ``VllmGeneration`` for weight updates: ``load(engine)`` is the transfer to an engine."""
    cfg = generation_config(fleet.case.requests[0])
    workers = [
        _worker(nemo, cfg, AsyncLLM(engine, routes=False, load=load), fleet)
        for engine in fleet.servers.values()
    ]
    return _generation(nemo, cfg, workers)


def _generation(nemo: NemoRl, cfg: dict[str, Any], workers: list[Any]) -> Any:
    # The constructor makes a worker group of Ray actors.
    generation = object.__new__(nemo.vllm.VllmGeneration)
    generation.__dict__.update(
        cfg=cfg,
        worker_group=WorkerGroup(nemo, workers),
        current_generate_dp_shard_idx=0,
        fleet_selector=None,
        fleet_monitor=None,
    )
    # called by __del__
    generation.shutdown = lambda: True
    return generation


def _worker(nemo: NemoRl, cfg: dict[str, Any], llm: AsyncLLM, fleet: Fleet) -> Any:
    # The constructor starts vLLM.
    worker = object.__new__(nemo.vllm_worker.VllmAsyncGenerationWorkerImpl)
    dtype = nemo.interfaces.resolve_routed_experts_dtype(fleet.case.model.num_experts)
    worker.__dict__.update(
        cfg=cfg, llm=llm, SamplingParams=SimpleNamespace, routed_experts_dtype=dtype
    )
    return worker
