"""verifiers' ``TrainClient`` and message graph, as a subject: the turns of a rollout, and the
branch that becomes a training sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    Logprobs,
    MissingLogprobs,
    PartialOff,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.fakes.http.serve_options import RoutesForm
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks._support.subjects import (
    ROOM,
    StackOutput,
    StackSubject,
    client_contract,
    record_turn,
)
from rollproof.stacks._support.tokenizer import spell
from rollproof.stacks.verifiers.renderer import IdRenderer
from rollproof.stacks.verifiers.upstream import Verifiers

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["MODEL", "TrainRollout", "VerifiersSubject", "branch_contract", "reason_of"]

MODEL = "policy"
"""Not the name of the model that the servers serve: verifiers would keep the longest prompt of the
first case's server for all others.
"""
_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTrace(StackOutput):
    """The trace of a rollout, and the reason that verifiers gave for the end of its last turn."""

    finish: str | None


class TrainRollout:
    """Rolls out requests with a ``TrainClient``: a turn is ``prepare_turn``, ``get_response`` and
    ``commit``, as in the interception server.
    """

    def __init__(self, verifiers: Verifiers, fleet: Fleet, config: Any) -> None:
        self._verifiers, self._fleet = verifiers, fleet
        renderers = verifiers.pool(MODEL, None, multiplex=config.multiplex).renderers
        # the pool is one of the process: the first case fills it
        if not renderers:
            renderers.append(verifiers.slot(IdRenderer(verifiers)))
        # Renderers asks once a process how long a prompt may be, which the first case alone would
        # show. This is the answer of servers that serve no such model.
        verifiers.prompt_limits[config.base_url.rstrip("/") + "/", MODEL] = None
        with without_certificates():
            self._client = verifiers.client(config)

    async def run(self, trace: Any, request: Request, **sampling: Any) -> str | None:
        """Commit all turns to ``trace``. Raises what verifiers raises.

        ``sampling`` are fields of a ``SamplingConfig`` in addition to those of the request.

        Returns:
            The reason that verifiers gives for the end of the last turn.
        """
        verifiers = self._verifiers
        messages = [verifiers.user(content=spell(request.prompt_ids))]
        budget, turns = request.budget or ROOM, list(request.turns)
        while True:
            turn = verifiers.prepare_turn(trace, messages)
            config = verifiers.sampling(**{**sampling, **request.sampling, "max_tokens": budget})
            response = await self._client.get_response(
                verifiers.chat(), {"model": MODEL}, config, session_id=request.request_id, turn=turn
            )
            turn.commit(response)
            budget -= len(response.tokens.completion_ids)
            shown = response.raw["choices"][0]["finish_reason"]
            # the environment answers only a turn that ended by itself, and only if room is left for
            # a reply
            if shown != "stop" or not turns or budget - len(turns[0]) < 1:
                finish: str | None = response.finish_reason
                return finish
            observation = turns.pop(0)
            budget -= len(observation)
            record_turn(self._fleet, request, observation)
            messages = [*messages, response.message, verifiers.user(content=spell(observation))]

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


class VerifiersSubject(StackSubject):
    """One request is a conversation.

    Weights are updated as prime-rl does it: the servers keep what runs, and their prefix cache too,
    which a salt isolates.
    """

    def __init__(self, verifiers: Verifiers) -> None:
        self._verifiers = verifiers

    def start(self, fleet: Fleet) -> None:
        """Make servers that answer as prime-rl's do, and a client of their router."""
        # prime-rl's servers keep what runs during an update
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = False
        self._fleet = fleet
        http = HttpFleet(fleet, routes=RoutesForm.DESCRIBED)
        config = self._verifiers.client_config(
            base_url=http.router + "/v1", api_key_var="ROLLPROOF_NO_KEY", renderer_model_name=MODEL
        )
        self._rollouts = TrainRollout(self._verifiers, fleet, config)
        self.contract: Contract = branch_contract(fleet)

    async def rollout(self, request: Request) -> FinishedTrace:
        """All turns. Raises what verifiers raises."""
        verifiers = self._verifiers
        trace = verifiers.trace(
            task=verifiers.task(type="rollproof", data={}), agent=verifiers.agent(config={})
        )
        finish = await self._rollouts.run(trace, request)
        return FinishedTrace(request=request, output=trace, finish=finish)

    async def update_weights(self, version: int | None) -> None:
        """Update the fleet: prime-rl's orchestrator does this, verifiers has no part in it."""
        await self._fleet.sync(version)

    def to_record(self, native: FinishedTrace) -> Rollout:
        """The last branch, which is the training sample."""
        branch = native.output.branches[-1]
        ids, prompt = as_tokens(branch.token_ids), len(native.request.prompt_ids)
        mask = np.array(branch.sampled_mask, dtype=np.int64)
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=ids[:prompt],
            response_ids=ids[prompt:],
            finish_reason=reason_of(native.finish),
            logprobs=as_logprobs(branch.logprobs[prompt:]),
            loss_mask=mask[prompt:],
            routes=as_routes(branch.routed_experts),
        )

    async def stop(self) -> None:
        """Close the client."""
        await self._rollouts.close()


def reason_of(finish: str | None) -> FinishReason | None:
    """The finish reason for ``finish``, verifiers' word."""
    return None if finish is None else _REASONS.get(finish, FinishReason.ERROR)


def branch_contract(fleet: Fleet, **differs: Any) -> Contract:
    """What verifiers promises: one route row a token. The last row repeats the one before it, until
    a further turn computes it.
    """
    fields: dict[str, Any] = {
        "final_row": Filler.PREVIOUS,
        # a trace has no tag: prime-rl keeps the span of its policies separately
        "versions": Versions.NONE,
        "logprobs": Logprobs.RAW,
        # Its ends are stop, length and tool_calls (v1/dialects/chat.py), and nothing promises to
        # resume: what an abort left is a turn like any other.
        "abort_surfaces": True,
        "partial_off": PartialOff.SURFACED,
        "loss_mask": True,
        "multi_turn": True,
        "missing_logprobs": MissingLogprobs.MASKED,
        "kv_policy": KvPolicy.KEEP,
        "dtype": "uint8|uint16",
    }
    return client_contract(fleet, rows=Rows.ALL, resume=ResumeBy.ENGINE, **{**fields, **differs})
