"""ROLL's ``UserDefinedRolloutLoop``, router and SGLang worker, as a subject: aborts keep what there
is, and requests go on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    MissingLogprobs,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Sampling,
    Versions,
)
from rollproof.core.records import EngineOutput, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.fakes.engine.exceptions import EngineFailure, ServerDied
from rollproof.stacks._support.ray_actors import taken
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.roll.upstream import Roll

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["LoopSubject", "TokenizerManager"]

_ROOM = 1024
"""``response_length`` for requests that state no limit, in tokens."""
_PADDED = 3
"""Tokens of padding before each prompt: ROLL pads prompts on the left, and answers on the right."""
_DOMAIN = "rollproof"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The one sample of a prompt."""

    request: Request
    sample: Any


class LoopSubject:
    """One request is one prompt with one answer; an update lies between two steps: sampling is
    paused, weights are loaded, it goes on.

    Partial rollout is ROLL's asynchronous pipeline (``collect_unfinished``): without it an aborted
    prompt is dropped.
    """

    contract: Contract

    def __init__(self, roll: Roll) -> None:
        self._roll = roll

    async def start(self, fleet: Fleet) -> None:
        """ROLL's router before one worker a server; a scheduler that has what the rollout's context
        asks of it.
        """
        roll = self._roll
        self._fleet = fleet
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
        self._scheduler = object.__new__(taken(roll.scheduler.DynamicSamplingScheduler))
        self._scheduler.__dict__.update(
            router_manager=manager,
            router_client=self._client,
            replay_buffer=SimpleNamespace(gc=list, begin=_begun, info=lambda: ""),
            running_tasks={},
            generate_timer={_DOMAIN: _Timer()},
            reward_timer={_DOMAIN: _Timer()},
            is_val=False,
            request_id="request",
            request_counter=0,
        )
        self._prompts = count()
        self._one_update = asyncio.Lock()
        self.contract = loop_contract(fleet)

    async def rollout(self, request: Request) -> Answer | None:
        """``_generate_and_reward`` in a context of the prompt. ``None``: the prompt was dropped."""
        roll = self._roll
        budget = _ROOM if request.budget is None else request.budget
        length = len(request.prompt_ids) + _PADDED
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
                context=context, req=self._asked(request, length, budget), domain=_DOMAIN
            )
        return Answer(request=request, sample=samples[0]) if samples else None

    async def update_weights(self, version: int | None) -> None:
        """As the pipeline does it between two steps: ``pause_sampling``, the model update, and the
        ``resume`` of the next batch.

        Only ``pause_sampling`` keeps calls away from weights that change: SGLang itself is not
        paused.
        """
        label = (
            self._fleet.weights_of(None) if version is None else version
        )  # ROLL's updates are those of its steps: all are numbered
        async with self._one_update:
            await self._scheduler.pause_sampling()
            try:
                await self._model_update(label)
            finally:  # where it fails ROLL's driver ends, and there is no next step
                self._manager.resume()

    async def _model_update(self, label: int) -> None:
        """Every worker receives the weights, and then forgets its cache
        (``process_weights_after_loading``).
        """
        true = self._fleet.weights_of(label)
        alive = [engine for engine in self._fleet.servers.values() if engine.alive]
        loads = [engine.load(true, label, identity=true == engine.version) for engine in alive]
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDied):
                raise outcome
        for engine in alive:
            if engine.alive:
                engine.reset_prefix_cache()

    def to_record(self, native: Answer) -> Rollout:
        """The row of the batch, without its padding."""
        batch, request = native.sample.batch, native.request
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

    def stop(self) -> None:
        """Nothing to free."""

    def gauges(self) -> Mapping[str, float]:
        """Requests as ROLL's router counts them."""
        return {
            "roll in flight": float(self._manager.size()),
            "roll load": float(self._manager.router.size()),
        }

    def _asked(self, request: Request, length: int, budget: int) -> Any:
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
        self._deeds: set[asyncio.Task[Any]] = set()
        self.rid_to_state: dict[str, None] = {}

    async def generate_request(self, asked: Any, _request: None) -> AsyncIterator[dict[str, Any]]:
        """One answer, the final one; as the engine within the process has it, routes are a tensor."""
        sampling = {
            name: value
            for name, value in asked.sampling_params.items()
            if name not in ("max_new_tokens", "n")
        }
        output = await self._engine.generate(
            prompt_ids=asked.input_ids,
            max_tokens=asked.sampling_params["max_new_tokens"],
            request_id=asked.rid,
            sampling=sampling,
            want_logprobs=asked.return_logprob,
            want_routes=asked.return_routed_experts,
        )
        yield {"output_ids": list(output.token_ids), "meta_info": _meta(output)}

    def abort_request(self, rid: str) -> None:
        """Sent, and not waited for."""
        task = asyncio.ensure_future(self._abort(rid))
        self._deeds.add(task)
        task.add_done_callback(self._deeds.discard)

    async def _abort(self, rid: str) -> None:
        with suppress(EngineFailure):
            await self._engine.abort(rid)


def _meta(output: EngineOutput) -> dict[str, Any]:
    meta: dict[str, Any] = {"finish_reason": {"type": str(output.finish_reason)}}
    if output.logprobs is not None:
        meta["output_token_logprobs"] = [
            (float(p), t, None) for p, t in zip(output.logprobs, output.token_ids, strict=True)
        ]
    if output.routes is not None:
        import torch

        meta["routed_experts"] = torch.tensor(output.routes.astype(np.int32))
    return meta


def _worker(roll: Roll, fleet: Fleet, engine: FakeEngine) -> Any:
    """A worker behind a handle of Ray's, with ROLL's strategy for SGLang."""
    strategy = object.__new__(roll.strategy.SgLangStrategy)
    strategy.model = SimpleNamespace(
        engine=SimpleNamespace(tokenizer_manager=TokenizerManager(engine))
    )
    strategy.enable_rollout_routing_replay = any(
        request.want_routes for request in fleet.case.requests
    )
    return SimpleNamespace(
        generate_request=SimpleNamespace(remote=strategy.generate_request),
        abort_requests=SimpleNamespace(remote=strategy.abort_requests),
    )


async def _begun(**_prompt: int) -> int:
    return 0


def _no_rewards(roll: Roll) -> Any:
    async def compute(*, req: Any, **_domain: str) -> Any:
        import torch

        return roll.protocol.DataProto.from_single_dict(
            {"response_level_rewards": torch.zeros(len(req.batch["input_ids"]))}
        )

    return compute


def loop_contract(fleet: Fleet) -> Contract:
    """What ROLL promises: a sample that goes on keeps its tokens and logprobs, and has a row of
    routes for each token, the last one zero.

    Versions are counted a prompt, by the step in which it began, and are not in a sample; nor is
    why it ended. Without partial rollout an aborted prompt is dropped.
    """
    model = fleet.case.model
    return Contract(
        rows=Rows.ALL,
        final_row=Filler.ZEROS,
        resume=ResumeBy.CLIENT,
        versions=Versions.NONE,
        logprobs=fleet.flavour.logprobs,
        abort_surfaces=False,
        finish_reason=False,
        sampling=Sampling.OWN,
        kv_policy=KvPolicy.RECOMPUTE,
        missing_logprobs=MissingLogprobs.NEVER,
        loss_mask=True,
        partial_off=PartialOff.DROPPED,
        layer_axis=LayerAxis.ALL,
        **model.sizes,
        filler=Filler.ZEROS,
        dtype="uint8|int16",
        provenance=Provenance.LATEST_PREFILL,
    )
