"""NeMo-RL's ``SGLangGeneration`` and its rollouts, as a subject, on SGLang's HTTP server in
memory.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract, MissingLogprobs, ResumeBy, Rows, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import Request, Rollout
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks._support.subjects import StackOutput, StackSubject, client_contract
from rollproof.stacks._support.tokenizer import PAD_ID
from rollproof.stacks.nemo_rl.environment import datum, environment
from rollproof.stacks.nemo_rl.rows import message_rows, rollout_of
from rollproof.stacks.nemo_rl.upstream import NemoRl
from rollproof.stacks.nemo_rl.vllm_generation import Tokenizer, limits

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["SglangSubject"]

_UNLIMITED = 10**6
"""Turns of a rollout: the environment ends it."""
_CONCURRENCY = 512
"""Calls at once: no request waits in NeMo-RL."""


class SglangSubject(StackSubject):
    """One request is a batch of one, rolled out as ``run_async_multi_turn_rollout`` does it;
    weights are updated between rollouts.

    That is how NeMo-RL runs SGLang: its engines are colocated, and asleep while the trainer works.
    """

    def __init__(self, nemo: NemoRl) -> None:
        self._nemo = nemo

    def start(self, fleet: Fleet) -> None:
        """Make SGLang's servers with their router, and NeMo-RL's HTTP client."""
        # colocated: the engines finish what runs, then sleep while the trainer works
        fleet.pause_mode = PauseMode.WAIT
        fleet.clear_cache = True
        self._fleet = fleet
        self._http = HttpFleet(fleet)
        self._client = self._nemo.sglang.HttpClient(None)
        self._running = 0
        self._idle = asyncio.Condition()
        self.contract: Contract = client_contract(
            fleet,
            rows=Rows.NONE,
            resume=ResumeBy.NONE,
            versions=Versions.NONE,
            missing_logprobs=MissingLogprobs.MASKED,
            loss_mask=True,
            multi_turn=True,
        )

    async def rollout(self, request: Request) -> StackOutput:
        """Roll out between two updates. Raises what NeMo-RL raises."""
        async with self._idle:
            self._running += 1
        try:
            batch, _ = await self._nemo.rollouts._run_multi_turn_rollout_async(
                policy_generation=self._generation(request),
                input_batch=self._nemo.batched.BatchedDataDict(
                    {name: [value] for name, value in datum(request).items()}
                ),
                tokenizer=Tokenizer(eos_token_id=self._fleet.policy.eos_id),
                task_to_env=environment(self._nemo, self._fleet, request),
                max_seq_len=limits(request)[1] + 1,
                max_rollout_turns=_UNLIMITED,
            )
        finally:
            async with self._idle:
                self._running -= 1
                self._idle.notify_all()
        return StackOutput(request=request, output=batch)

    async def update_weights(self, version: int | None) -> None:
        """Update once no rollout runs."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._running)
            await self._fleet.sync(version)

    def to_record(self, native: StackOutput) -> Rollout:
        """The only row of the training batch, without padding."""
        import torch

        batch = native.output
        batch["loss_multiplier"] = torch.tensor([1.0])
        rows, lengths = message_rows(self._nemo, batch, routes=False)
        return rollout_of(
            native.request, rows, int(lengths[0]), truncated=bool(batch["truncated"][0])
        )

    async def stop(self) -> None:
        """Close the client."""
        await self._client.aclose()

    def _generation(self, request: Request) -> Any:
        """A generation with the configuration of this request."""
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
                    # SGLang keeps one token free
                    "context_length": total + 1,
                    "sglang_server_config": {"sglang_server_concurrency": _CONCURRENCY},
                },
            },
            router_ip=host,
            router_port=int(port),
            _http_client=self._client,
        )
        # called by __del__
        generation.shutdown = lambda: True
        return generation
