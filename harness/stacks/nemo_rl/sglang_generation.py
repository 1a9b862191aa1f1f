"""NeMo-RL's ``SGLangGeneration`` and its rollouts, as a subject, on SGLang's HTTP server in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    KvPolicy,
    MissingLogprobs,
    ResumeBy,
    Rows,
    Sampling,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_tokens
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.nemo_rl.collector import message_rows
from rollproof.stacks.nemo_rl.environment import datum, environment
from rollproof.stacks.nemo_rl.upstream import NemoRl
from rollproof.stacks.nemo_rl.vllm_generation import Tokenizer, limits

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["SglangSubject"]

_ENDLESS = 10**6
_MANY = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The finished batch of one."""

    request: Request
    batch: Any


class SglangSubject:
    """One request is a batch of one, rolled out as ``run_async_multi_turn_rollout`` does it;
    weights are updated between rollouts.

    That is how NeMo-RL runs SGLang: its engines are colocated, and asleep while the trainer works.
    """

    contract: Contract

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def start(self, fleet: Fleet) -> None:
        """SGLang's servers behind their router, and NeMo-RL's HTTP client."""
        fleet.pause_mode = PauseMode.WAIT
        fleet.clear_cache = True
        self._fleet = fleet
        self._http = HttpFleet(fleet)
        self._client = self._nemo.sglang.HttpClient(None)
        self._rolling = 0
        self._turn = asyncio.Condition()
        self.contract = Contract(
            rows=Rows.NONE,
            resume=ResumeBy.NONE,
            versions=Versions.NONE,
            logprobs=fleet.flavour.logprobs,
            abort_surfaces=False,
            sampling=Sampling.OWN,
            kv_policy=KvPolicy.RECOMPUTE,
            missing_logprobs=MissingLogprobs.MASKED,
            loss_mask=True,
            multi_turn=True,
        )

    async def rollout(self, request: Request) -> Answer:
        """Between two updates. Raises what NeMo-RL raises."""
        async with self._turn:
            self._rolling += 1
        try:
            batch, _ = await self._nemo.rollouts._run_multi_turn_rollout_async(
                policy_generation=self._generation(request),
                input_batch=self._nemo.batched.BatchedDataDict(
                    {name: [value] for name, value in datum(request).items()}
                ),
                tokenizer=Tokenizer(eos_token_id=self._fleet.policy.eos_id),
                task_to_env=environment(self._nemo, self._fleet, request),
                max_seq_len=limits(request)[1] + 1,
                max_rollout_turns=_ENDLESS,
            )
        finally:
            async with self._turn:
                self._rolling -= 1
                self._turn.notify_all()
        return Answer(request=request, batch=batch)

    async def update_weights(self, version: int | None) -> None:
        """Once no rollout runs: nothing of NeMo-RL's is asked for tokens meanwhile."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._rolling)
            await self._fleet.sync(version)

    def to_record(self, native: Answer) -> Rollout:
        """The one row of the training batch, without padding."""
        request, batch = native.request, native.batch
        import torch

        batch["loss_multiplier"] = torch.tensor([1.0])
        rows, lengths = message_rows(self._nemo, batch, routes=False)
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
        )

    async def stop(self) -> None:
        """Close the client."""
        await self._client.aclose()

    def _generation(self, request: Request) -> Any:
        """A generation with the configuration of this request; ``context_length`` leaves room for
        one token that SGLang keeps free.
        """
        budget, total = limits(request)
        host, _, port = self._http.router.removeprefix("http://").partition(":")
        with without_certificates():
            self._client._get_client()
        generation = object.__new__(self._nemo.sglang.SGLangGeneration)
        generation.__dict__.update(
            sglang_cfg={
                "backend": "sglang",
                "use_async_rollouts": True,
                "max_new_tokens": budget,
                "temperature": request.sampling.get("temperature", 1.0),
                "top_p": request.sampling.get("top_p", 1.0),
                "_pad_token_id": PAD_ID,
                "sglang_cfg": {
                    "context_length": total + 1,
                    "sglang_server_config": {"sglang_server_concurrency": _MANY},
                },
            },
            router_ip=host,
            router_port=int(port),
            _http_client=self._client,
        )
        generation.shutdown = lambda: True  # asked for when it is collected
        return generation
