"""ROLL's ``UserDefinedRolloutLoop``, router and SGLang worker, as a subject: an abort keeps the
tokens so far, and the request continues from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.fakes.engine.exceptions import EngineFailure, ServerDied
from rollproof.stacks._support.subjects import (
    StackOutput,
    StackSubject,
    budget_of,
    client_contract,
    sglang_meta_info,
    wants_routes,
)
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks._support.upstream import undecorated_class
from rollproof.stacks.roll.upstream import Roll

if TYPE_CHECKING:
    from rollproof.core.records import EngineOutput
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["LoopSubject", "TokenizerManager"]

_PADDED = 3
"""Padding before each prompt, in tokens: ROLL pads prompts on the left, and responses on the right.
"""
_DOMAIN = "rollproof"


class LoopSubject(StackSubject):
    """One request is one prompt with one response. An update lies between two steps: sampling is
    paused, weights are loaded, sampling resumes.

    Partial rollout is ROLL's asynchronous pipeline (``collect_unfinished``): without it an aborted
    prompt is dropped.
    """

    def __init__(self, roll: Roll) -> None:
        self._roll = roll

    async def start(self, fleet: Fleet) -> None:
        """Make ROLL's router over one worker a server, and a scheduler with the fields that the
        rollout's context reads.
        """
        roll = self._roll
        self._fleet = fleet
        # Made without its constructor: these are the fields that its methods read.
        manager = object.__new__(roll.router.RouterManager)
        workers = [_worker(roll, fleet, engine) for engine in fleet.servers.values()]
        router = roll.router.PromptAffinityRouter(
            router_manager=manager,
            workers=workers,
            model_path="",
            router_args=SimpleNamespace(max_running_requests=128),
        )
        manager.__dict__.update(
            strategy_name="sglang",
            tokenizer=SimpleNamespace(eos_token_id=fleet.policy.eos_id, pad_token_id=PAD_ID),
            router_cls=roll.router.PromptAffinityRouter,
            router=router,
            inflight_requests=set(),
            need_suspend=False,
            need_shutdown=False,
            suspend_notifier=asyncio.Event(),
            empty_notifier=asyncio.Event(),
        )
        await manager.initialize()
        self._manager = manager
        self._client = await roll.router.RouterManager.create_client(manager)
        self._scheduler = object.__new__(undecorated_class(roll.scheduler.DynamicSamplingScheduler))
        self._scheduler.__dict__.update(
            router_manager=manager,
            router_client=self._client,
            replay_buffer=SimpleNamespace(gc=list, begin=_begin, info=lambda: ""),
            running_tasks={},
            generate_timer={_DOMAIN: _Timer()},
            reward_timer={_DOMAIN: _Timer()},
            is_val=False,
            request_id="request",
            request_counter=0,
        )
        self._prompts = count()
        self._update_lock = asyncio.Lock()
        self.contract: Contract = loop_contract(fleet)

    async def rollout(self, request: Request) -> StackOutput | None:
        """``_generate_and_reward`` in a context of the prompt. ``None``: the prompt was dropped."""
        roll = self._roll
        budget = budget_of(request)
        length = len(request.prompt_ids) + _PADDED
        # as above
        context = object.__new__(roll.scheduler.RolloutContext)
        context.__dict__.update(
            _scheduler=self._scheduler,
            prompt_id=next(self._prompts),
            is_val=False,
            pipeline_config=None,
            sequence_length=length + budget,
            prompt_length=length,
            sampling_start_step=None,
            _in_do_generate_and_reward=False,
        )
        context.compute_rewards = _no_rewards(roll)
        loop = roll.loop.UserDefinedRolloutLoop()
        async with context.do_generate_and_reward(max_concurrency=1):
            samples = await loop._generate_and_reward_impl(
                context=context, req=self._data(request, length, budget), domain=_DOMAIN
            )
        return StackOutput(request=request, output=samples[0]) if samples else None

    async def update_weights(self, version: int | None) -> None:
        """Update as the pipeline does between two steps: ``pause_sampling``, the model update, and
        the ``resume`` of the next batch.

        Only ``pause_sampling`` keeps calls away from weights that change: SGLang itself is not
        paused.
        """
        # ROLL's updates are those of its steps: all are numbered
        label = self._fleet.weights_of(None) if version is None else version
        async with self._update_lock:
            await self._scheduler.pause_sampling()
            try:
                await self._model_update(label)
            finally:
                # if it fails ROLL's driver ends, and there is no next step
                self._manager.resume()

    async def _model_update(self, label: int) -> None:
        """Load the weights on every worker, which then clears its cache
        (``process_weights_after_loading``).
        """
        true = self._fleet.weights_of(label)
        alive = [engine for engine in self._fleet.servers.values() if engine.alive]
        loads = [engine.load(true, label, identity=true == engine.version) for engine in alive]
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            # a dead server takes part in no update, and is no reason to fail
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDied):
                raise outcome
        for engine in alive:
            if engine.alive:
                engine.reset_prefix_cache()

    def to_record(self, native: StackOutput) -> Rollout:
        """The row of the batch, without its padding."""
        batch, request = native.output.batch, native.request
        valid = batch["attention_mask"][0].bool().numpy()
        length, prompt = int(valid.sum()), len(request.prompt_ids)
        tokens = as_tokens(batch["input_ids"][0, :length].tolist(), what="input_ids")
        fields = set(batch.keys())
        logprobs = (
            batch["infer_logprobs"][0, prompt - 1 : length - 1]
            if "infer_logprobs" in fields
            else None
        )
        routes = batch["routed_experts"][0, :length].numpy() if "routed_experts" in fields else None
        return Rollout(
            request_id=request.request_id,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            finish_reason=None,
            logprobs=None if logprobs is None else as_logprobs(logprobs.numpy().astype(np.float64)),
            loss_mask=batch["response_mask"][0, prompt:length].numpy().astype(np.int64),
            routes=as_routes(routes),
        )

    def gauges(self) -> Mapping[str, float]:
        """Requests as ROLL's router counts them."""
        return {
            "roll in flight": float(self._manager.size()),
            "roll load": float(self._manager.router.size()),
        }

    def _data(self, request: Request, length: int, budget: int) -> Any:
        import torch

        ids = torch.tensor([[PAD_ID] * _PADDED + list(request.prompt_ids)])
        mask = torch.tensor([[0] * _PADDED + [1] * len(request.prompt_ids)])
        generation = {
            "max_new_tokens": budget,
            "temperature": request.sampling.get("temperature", 1.0),
            "top_p": request.sampling.get("top_p", 1.0),
            "top_k": request.sampling.get("top_k", -1),
            "repetition_penalty": 1.0,
            "num_return_sequences": 1,
            "stop_strings": None,
            "logprobs": 0 if request.want_logprobs else None,
        }
        return self._roll.protocol.DataProto.from_single_dict(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0),
            },
            meta_info={
                "generation_config": generation,
                "collect_unfinished": self._fleet.case.partial,
            },
        )


class _Timer:
    @contextmanager
    def track(self) -> Iterator[None]:
        yield


class TokenizerManager:
    """SGLang's ``TokenizerManager`` over an engine of the fleet."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._aborts: set[asyncio.Task[Any]] = set()
        self.rid_to_state: dict[str, None] = {}

    async def generate_request(self, request: Any, _request: None) -> AsyncIterator[dict[str, Any]]:
        """One reply, the final one. Routes are a tensor, as in-process engines return them."""
        sampling = {
            name: value
            for name, value in request.sampling_params.items()
            if name not in ("max_new_tokens", "n")
        }
        output = await self._engine.generate(
            prompt_ids=request.input_ids,
            max_tokens=request.sampling_params["max_new_tokens"],
            request_id=request.rid,
            sampling=sampling,
            want_logprobs=request.return_logprob,
            want_routes=request.return_routed_experts,
        )
        yield {"output_ids": list(output.token_ids), "meta_info": _meta(output)}

    def abort_request(self, rid: str) -> None:
        """Send an abort without waiting for it."""
        task = asyncio.ensure_future(self._abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        with suppress(EngineFailure):
            await self._engine.abort(rid)


def _meta(output: EngineOutput) -> dict[str, Any]:
    meta = sglang_meta_info(output)
    if output.routes is not None:
        import torch

        meta["routed_experts"] = torch.tensor(output.routes.astype(np.int32))
    return meta


def _worker(roll: Roll, fleet: Fleet, engine: FakeEngine) -> Any:
    """The Ray handle of a worker with ROLL's strategy for SGLang."""
    # made without its constructor: its engine is one of the fleet
    strategy = object.__new__(roll.strategy.SgLangStrategy)
    strategy.model = SimpleNamespace(
        engine=SimpleNamespace(tokenizer_manager=TokenizerManager(engine))
    )
    strategy.enable_rollout_routing_replay = wants_routes(fleet)
    return SimpleNamespace(
        generate_request=SimpleNamespace(remote=strategy.generate_request),
        abort_requests=SimpleNamespace(remote=strategy.abort_requests),
    )


async def _begin(**_prompt: int) -> int:
    return 0


def _no_rewards(roll: Roll) -> Any:
    async def compute(*, req: Any, **_domain: str) -> Any:
        import torch

        return roll.protocol.DataProto.from_single_dict(
            {"response_level_rewards": torch.zeros(len(req.batch["input_ids"]))}
        )

    return compute


def loop_contract(fleet: Fleet) -> Contract:
    """What ROLL promises: a sample that is continued keeps its tokens and logprobs, and has a row
    of routes for each token, the last one zero.
    """
    return client_contract(
        fleet,
        rows=Rows.ALL,
        final_row=Filler.ZEROS,
        resume=ResumeBy.CLIENT,
        # Versions are counted per prompt, by the step in which it began, and are not in a sample;
        # nor is the reason of its end.
        versions=Versions.NONE,
        finish_reason=False,
        loss_mask=True,
        # without partial rollout an aborted prompt is dropped
        partial_off=PartialOff.DROPPED,
        filler=Filler.ZEROS,
        dtype="uint8|int16",
        # The page on router replay (docs_roll, router_replay.md, 2.3): the experts in training are
        # those of the sampled trajectory. The loop joins the rows of calls, if an abort gets there.
        provenance=Provenance.AS_SAMPLED,
    )
