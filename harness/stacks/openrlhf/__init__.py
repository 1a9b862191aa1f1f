"""OpenRLHF, released and unmodified: its agent executors, on engines with the one method that they
call.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
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
from rollproof.core.events.rollout import Observation
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_tokens
from rollproof.errors import StackError
from rollproof.simulation.mutation_guard import lend
from rollproof.stacks import Found, Release, Stack, missing_dependency
from rollproof.stacks._support.part import Part
from rollproof.stacks._support.tokenizer import IdTokenizer, spell

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["RELEASE", "ExecutorSubject", "load"]

VERSIONS = ("0.11.2",)
RELEASE = Release(distribution="openrlhf", versions=VERSIONS, stack="openrlhf")
_TURNS = 3
_ROOM = 1024
"""A context length for requests that state no limit, in tokens."""


def load(found: Found) -> Stack:
    """Import OpenRLHF's executors. Raises ``StackError`` where they cannot be imported."""
    if found.line not in VERSIONS:
        raise StackError(
            f"openrlhf {found.line} is not in the table of known releases ({', '.join(VERSIONS)})."
        )
    try:
        agent = importlib.import_module("openrlhf.utils.agent")
    except ImportError as error:
        raise missing_dependency("openrlhf", found.version, error, RELEASE) from error
    parts = (
        Part(
            name="single-turn-executor",
            make=lambda: ExecutorSubject(agent, multi_turn=False),
            flavours=("vllm",),
        ),
        Part(
            name="multi-turn-executor",
            make=lambda: ExecutorSubject(agent, multi_turn=True),
            flavours=("vllm",),
            turns=_TURNS,
        ),
    )
    return Stack(name="openrlhf", version=found.version, parts={part.name: part for part in parts})


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an executor handed over for a request."""

    request: Request
    output: Mapping[str, Any]


class CallableTokenizer(IdTokenizer):
    """An ``IdTokenizer`` that is called as transformers' are."""

    def __call__(self, *, text: str, **_options: Any) -> dict[str, Any]:
        """``input_ids`` as a tensor ``(1, tokens)``."""
        import torch

        return {"input_ids": torch.tensor([self.encode(text)], dtype=torch.long)}


class _Params:
    """vLLM's ``SamplingParams`` as attributes; what is written to one is written to ``values``."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


class EngineActor:
    """OpenRLHF's engine actor as far as an executor calls it, over one engine of a fleet that the
    least loaded rule chooses.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """VLLM's ``RequestOutput`` with one completion."""
        sampling = dict(vars(sampling_params))
        limit, wanted = sampling.pop("max_tokens"), sampling.pop("logprobs")
        server = self._fleet.balancer.acquire()
        try:
            output = await self._fleet.servers[server].generate(
                prompt_ids=prompt_token_ids,
                max_tokens=limit,
                sampling=sampling,
                want_logprobs=wanted is not None,
                want_routes=False,
            )
        finally:
            self._fleet.balancer.release(server)
        values = [] if output.logprobs is None else output.logprobs.tolist()
        logprobs = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(output.token_ids, values, strict=False)
        ]
        completion = SimpleNamespace(
            token_ids=list(output.token_ids),
            text=spell(output.token_ids),
            logprobs=None if wanted is None else logprobs,
            finish_reason=str(output.finish_reason),
        )
        return SimpleNamespace(outputs=[completion])


class ExecutorSubject:
    """One request is one ``execute``. OpenRLHF configures the length of prompt and response
    together, the environment's tokens among it.
    """

    contract: Contract

    def __init__(self, agent: Any, *, multi_turn: bool) -> None:
        self._agent = agent
        self._multi_turn = multi_turn

    def start(self, fleet: Fleet) -> None:
        """An engine actor before the fleet."""
        self._fleet = fleet
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = True
        self._engine = EngineActor(fleet)
        self._tokenizer = CallableTokenizer(eos_token_id=fleet.policy.eos_id)
        self.contract = executor_contract(fleet, multi_turn=self._multi_turn)

    async def rollout(self, request: Request) -> Answer:
        """``execute``; the caller's sampling parameters are lent, so that a change to them is
        noticed.
        """
        limit = _ROOM if request.budget is None else request.budget
        given = {
            **request.sampling,
            "max_tokens": request.budget,
            "logprobs": 0 if request.want_logprobs else None,
        }
        lent = lend("sampling_params", given)
        params = _Params(lent)
        executor = (
            self._agent.MultiTurnAgentExecutor(self._instances(request))
            if self._multi_turn
            else self._agent.SingleTurnAgentExecutor()
        )
        output = await executor.execute(
            prompt=spell(request.prompt_ids),
            label=None,
            sampling_params=params,
            max_length=len(request.prompt_ids) + limit,
            hf_tokenizer=self._tokenizer,
            llm_engine=self._engine,
        )
        return Answer(request=request, output=copy(output))

    async def update_weights(self, version: int | None) -> None:
        """As ``PPOTrainerAsync.broadcast_to_vllm`` does it (pause in mode keep, broadcast, resume),
        without its Ray actors.
        """
        await self._fleet.sync(version, mode=PauseMode.KEEP, clear_cache=True)

    def to_record(self, native: Answer) -> Rollout:
        """The dictionary that an executor returns, as a rollout."""
        output = native.output
        tokens, prompt = (
            as_tokens(output["observation_tokens"], what="observation_tokens"),
            len(native.request.prompt_ids),
        )
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

    def stop(self) -> None:
        """Nothing to free."""

    def _instances(self, request: Request) -> Any:
        """An environment of OpenRLHF's that gives the request's turns after turns that end by
        themselves.
        """
        fleet, eos = self._fleet, str(self._tokenizer.eos_token_id)

        class Turns(self._agent.AgentInstanceBase):  # type: ignore[misc, name-defined]  # OpenRLHF's, known at run time only
            def __init__(self) -> None:
                self._left = list(request.turns)

            async def step(self, states: dict[str, Any], **_options: Any) -> dict[str, Any]:
                ended = states["action_text"].split()[-1:] == [eos]
                turn = self._left.pop(0) if ended and self._left else ()
                if turn:
                    fleet.recorder.record(
                        Observation(request_id=request.request_id, token_ids=turn)
                    )
                # executors join texts, and ids are words
                return {
                    "rewards": np.float64(0.0),
                    "environment_feedback": f" {spell(turn)}",
                    "done": not turn,
                }

        return Turns


def executor_contract(fleet: Fleet, *, multi_turn: bool) -> Contract:
    """What an executor promises: tokens, logprobs of 0.0 where the mask is 0, and whether the limit
    ended it.

    It never resumes (an update freezes requests in the engine) and has no word for an abort.
    Neither routes nor versions are in its result. The single-turn executor writes 0.0 for a logprob
    that is missing, under a mask of 1; engines are expected to give all.
    """
    contract = Contract(
        rows=Rows.NONE,
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        logprobs=fleet.flavour.logprobs,
        abort_surfaces=False,
        sampling=Sampling.FORWARDED,
        kv_policy=KvPolicy.RECOMPUTE,
        loss_mask=True,
        missing_logprobs=MissingLogprobs.NEVER,
    )
    return (
        replace(
            contract, multi_turn=True, missing_logprobs=MissingLogprobs.MASKED, finish_reason=False
        )
        if multi_turn
        else contract
    )
