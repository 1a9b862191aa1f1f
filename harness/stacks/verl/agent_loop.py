"""verl's agent loops, ``ToolAgentLoop`` and ``SingleTurnAgentLoop``, on verl's own resume client,
as subjects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import Contract, MissingLogprobs, PartialOff, Rows
from rollproof.core.engine_contract import PauseMode
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.simulation.mutation_guard import lend
from rollproof.stacks._support.subjects import StackOutput, StackSubject, record_turn
from rollproof.stacks._support.tokenizer import IdTokenizer, spell
from rollproof.stacks.verl.configuration import MOST_TURNS, PARSER, verl_contract
from rollproof.stacks.verl.resume_client import VerlHost
from rollproof.stacks.verl.tool_dialogue import IdTool, parser_of
from rollproof.stacks.verl.upstream import Verl

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["AgentLoopSubject"]


class AgentLoopSubject(StackSubject):
    """One request is one ``run`` of an agent loop. ``multi_turn`` chooses ``ToolAgentLoop``, whose
    tool gives ``request.turns``.

    verl configures one length for the whole response, tools included: the request's budget.
    """

    def __init__(self, verl: Verl, *, multi_turn: bool) -> None:
        self._verl = verl
        self._loop_class = verl.tool_agent_loop if multi_turn else verl.single_turn_agent_loop
        self._multi_turn = multi_turn

    def start(self, fleet: Fleet) -> None:
        """Put verl's servers in front of the fleet's engines, and register the tool parser."""
        # as the client does
        fleet.pause_mode = PauseMode.ABORT
        fleet.clear_cache = True
        self._fleet = fleet
        self._host = VerlHost(fleet, self._verl, lambda request: request.budget)
        parser_of(self._verl.tool_parser, self._verl.function_call, PARSER)
        self.contract: Contract = loop_contract(fleet, multi_turn=self._multi_turn)

    async def rollout(self, request: Request) -> StackOutput:
        """Run the loop over the request's prompt."""
        tokenizer = IdTokenizer(
            request.turns if self._multi_turn else (), self._fleet.policy.eos_id
        )
        config = self._host.config(request)
        loops = self._verl.agent_loop
        loop = self._loop_class(
            trainer_config=loops.DictConfigWrap(config),
            server_manager=_ObservingClient(self._host.client(request), request, self._fleet),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=object,
            data_config=loops.DictConfigWrap(config.data),
            tools=loops.ToolListWrap([IdTool(tokenizer, self._verl.tool_response)]),
        )
        loop.loop = asyncio.get_running_loop()
        sampling = lend("sampling_params", {**request.sampling, "logprobs": request.want_logprobs})
        messages = lend("raw_prompt", [{"role": "user", "content": spell(request.prompt_ids)}])
        return StackOutput(request=request, output=await loop.run(sampling, raw_prompt=messages))

    async def update_weights(self, version: int | None) -> None:
        """Update as verl's checkpoint engine does, without its worker groups: the part
        checkpoint-manager has them.
        """
        await self._host.sync(version)

    def to_record(self, native: StackOutput) -> Rollout:
        """An ``AgentLoopOutput``, which has no reason of its end, as a rollout."""
        output = native.output
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=as_tokens(output.prompt_ids, what="prompt_ids"),
            response_ids=as_tokens(output.response_ids, what="response_ids"),
            finish_reason=None,
            logprobs=as_logprobs(output.response_logprobs),
            loss_mask=np.array(output.response_mask, dtype=np.int64),
            routes=as_routes(output.routed_experts),
            min_version=output.extra_fields.get("min_global_steps"),
            max_version=output.extra_fields.get("max_global_steps"),
        )

    def gauges(self) -> Mapping[str, float]:
        """Requests in flight, as the balancer counts them."""
        return self._host.gauges()


def loop_contract(fleet: Fleet, *, multi_turn: bool) -> Contract:
    """What an agent loop promises: what its client does, and a loss mask that is 0 for the
    environment's tokens.

    """
    return verl_contract(
        fleet,
        # A multi-turn loop records no rows after the last turn of the model, by design:
        # ``AgentLoopOutput.as_dict`` says so.
        rows=Rows.CAPTURED_PREFIX if multi_turn else Rows.FORWARDED,
        abort_surfaces=False,
        finish_reason=False,
        loss_mask=True,
        multi_turn=multi_turn,
        limits=RolloutLimits(turns=MOST_TURNS) if multi_turn else None,
        multimodal=False,
        missing_logprobs=MissingLogprobs.MASKED,
        # With partial rollout off "aborted samples will be dropped" (llm_server.py). The loop's
        # output has no field that could say that one was cut, so dropping is all that it can do.
        partial_off=PartialOff.DROPPED,
    )


class _ObservingClient:
    """verl's client as a loop sees it. It records the tokens that the loop added to the sequence
    since the last reply.
    """

    def __init__(self, client: Any, request: Request, fleet: Fleet) -> None:
        self._client = client
        self._request = request
        self._fleet = fleet
        self._sequence: list[int] | None = None

    async def generate(self, request_id: str, *, prompt_ids: list[int], **call: Any) -> Any:
        """Call ``generate`` of verl's client."""
        # A loop that changed earlier tokens has added nothing: that is for the checks to find.
        before = self._sequence
        if before is not None and prompt_ids[: len(before)] == before != prompt_ids:
            record_turn(self._fleet, self._request, tuple(prompt_ids[len(before) :]))
        output = await self._client.generate(request_id, prompt_ids=prompt_ids, **call)
        self._sequence = [*prompt_ids, *output.token_ids]
        return output
