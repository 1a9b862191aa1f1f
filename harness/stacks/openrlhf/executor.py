"""OpenRLHF's agent executors, as subjects, on engines with the one method that they call."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    MissingLogprobs,
    ResumeBy,
    Rows,
    Sampling,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_tokens
from rollproof.simulation.mutation_guard import lend
from rollproof.stacks._support.subjects import (
    StackOutput,
    StackSubject,
    budget_of,
    client_contract,
    record_turn,
    token_logprobs,
)
from rollproof.stacks._support.tokenizer import IdTokenizer, spell

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["ExecutorSubject"]


class CallableTokenizer(IdTokenizer):
    """An ``IdTokenizer`` that is called as those of transformers are."""

    def __call__(self, *, text: str, **_options: Any) -> dict[str, Any]:
        """``input_ids`` as a tensor ``(1, tokens)``."""
        import torch

        return {"input_ids": torch.tensor([self.encode(text)], dtype=torch.long)}


class _Params:
    """vLLM's ``SamplingParams``: attributes that are read from and written to ``values``."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


class EngineActor:
    """OpenRLHF's engine actor, as far as an executor calls it: the least loaded engine answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """A ``RequestOutput`` of vLLM with one completion."""
        sampling = dict(vars(sampling_params))
        max_tokens, logprobs = sampling.pop("max_tokens"), sampling.pop("logprobs")
        server = self._fleet.balancer.acquire()
        try:
            output = await self._fleet.servers[server].generate(
                prompt_ids=prompt_token_ids,
                max_tokens=max_tokens,
                sampling=sampling,
                want_logprobs=logprobs is not None,
                want_routes=False,
            )
        finally:
            self._fleet.balancer.release(server)
        completion = SimpleNamespace(
            token_ids=list(output.token_ids),
            text=spell(output.token_ids),
            logprobs=None if logprobs is None else token_logprobs(output),
            finish_reason=str(output.finish_reason),
        )
        return SimpleNamespace(outputs=[completion])


class ExecutorSubject(StackSubject):
    """One request is one ``execute``. OpenRLHF configures one length for prompt and response
    together, the environment's tokens included.
    """

    def __init__(self, agent: Any, *, multi_turn: bool) -> None:
        self._agent = agent
        self._multi_turn = multi_turn

    def start(self, fleet: Fleet) -> None:
        """Put an engine actor in front of the fleet."""
        self._fleet = fleet
        # as PPOTrainerAsync pauses vLLM
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = True
        self._engine = EngineActor(fleet)
        self._tokenizer = CallableTokenizer(eos_token_id=fleet.policy.eos_id)
        self.contract: Contract = executor_contract(fleet, multi_turn=self._multi_turn)

    async def rollout(self, request: Request) -> StackOutput:
        """``execute``, with sampling parameters in which changes are noticed."""
        options = {
            **request.sampling,
            "max_tokens": request.budget,
            "logprobs": 0 if request.want_logprobs else None,
        }
        params = _Params(lend("sampling_params", options))
        executor = (
            self._agent.MultiTurnAgentExecutor(self._environment(request))
            if self._multi_turn
            else self._agent.SingleTurnAgentExecutor()
        )
        output = await executor.execute(
            prompt=spell(request.prompt_ids),
            label=None,
            sampling_params=params,
            max_length=len(request.prompt_ids) + budget_of(request),
            hf_tokenizer=self._tokenizer,
            llm_engine=self._engine,
        )
        return StackOutput(request=request, output=copy(output))

    async def update_weights(self, version: int | None) -> None:
        """Update as ``PPOTrainerAsync.broadcast_to_vllm`` does (pause in mode keep, broadcast,
        resume), without its Ray actors.
        """
        await self._fleet.sync(version, mode=PauseMode.KEEP, clear_cache=True)

    def to_record(self, native: StackOutput) -> Rollout:
        """The dictionary that an executor returns, as a rollout."""
        output = native.output
        tokens = as_tokens(output["observation_tokens"], what="observation_tokens")
        prompt = len(native.request.prompt_ids)
        mask = np.zeros(len(tokens), dtype=np.int64)
        for start, end in output["action_ranges"]:
            mask[start:end] = 1
        logprobs = output["rollout_log_probs"]
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            finish_reason=FinishReason.LENGTH if output["truncated"] else FinishReason.STOP,
            logprobs=None if logprobs is None else as_logprobs(logprobs[prompt:]),
            loss_mask=mask[prompt:],
        )

    def _environment(self, request: Request) -> Any:
        """A class of OpenRLHF environments that gives the request's turns, each after a turn of the
        model that ended by itself.
        """
        fleet, eos = self._fleet, str(self._tokenizer.eos_token_id)

        class Turns(self._agent.AgentInstanceBase):  # type: ignore[misc, name-defined]  # OpenRLHF's, known at run time only
            def __init__(self) -> None:
                self._left = list(request.turns)

            async def step(self, states: dict[str, Any], **_options: Any) -> dict[str, Any]:
                ended = states["action_text"].split()[-1:] == [eos]
                turn = self._left.pop(0) if ended and self._left else ()
                if turn:
                    record_turn(fleet, request, turn)
                return {
                    "rewards": np.float64(0.0),
                    # executors join texts, and ids are words
                    "environment_feedback": f" {spell(turn)}",
                    "done": not turn,
                }

        return Turns


def executor_contract(fleet: Fleet, *, multi_turn: bool) -> Contract:
    """What an executor promises: tokens, logprobs of 0.0 where the mask is 0, and whether the limit
    ended the response.
    """
    # The single-turn executor writes 0.0 for a missing logprob, under a mask of 1: engines are
    # expected to give all.
    differs = (
        {"multi_turn": True, "missing_logprobs": MissingLogprobs.MASKED, "finish_reason": False}
        if multi_turn
        else {}
    )
    return client_contract(
        fleet,
        rows=Rows.NONE,
        # It never resumes (an update freezes requests in the engine), and has no word for an abort.
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        sampling=Sampling.FORWARDED,
        loss_mask=True,
        **differs,
    )
