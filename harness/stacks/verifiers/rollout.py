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
    LayerAxis,
    Logprobs,
    MissingLogprobs,
    PartialOff,
    Provenance,
    ResumeBy,
    Rows,
    Sampling,
    Versions,
)
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Observation
from rollproof.core.records import FinishReason, Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.fakes.http.engine_backend import RoutesForm
from rollproof.stacks._support.http_fleet import HttpFleet
from rollproof.stacks._support.httpx_client import without_certificates
from rollproof.stacks._support.tokenizer import spell
from rollproof.stacks.verifiers.renderer import IdRenderer
from rollproof.stacks.verifiers.upstream import Verifiers

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["MODEL", "Played", "Player", "RolloutSubject", "branch_contract", "reason_of"]

MODEL = "policy"
"""Not the name of what the servers serve: verifiers would keep the longest prompt of the first
case's server for all others.
"""
_ROOM = 1024
_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A rollout that was played: its trace, and the reason that verifiers gave for the end of its
    last turn.
    """

    request: Request
    trace: Any
    finish: str | None


class Player:
    """Plays a request with a ``TrainClient``: a turn is ``prepare_turn``, ``get_response``,
    ``commit``, as in the interception server.
    """

    def __init__(self, verifiers: Verifiers, fleet: Fleet, config: Any) -> None:
        self._verifiers, self._fleet = verifiers, fleet
        renderers = verifiers.pool(MODEL, None, multiplex=config.multiplex).renderers
        if not renderers:
            renderers.append(verifiers.slot(IdRenderer(verifiers)))
        with without_certificates():
            self._client = verifiers.client(config)

    async def play(self, trace: Any, request: Request, **sampling: Any) -> str | None:
        """All turns, into ``trace``; the reason that verifiers gives for the end of the last one.
        Raises what verifiers raises.

        ``sampling`` are fields of a ``SamplingConfig`` beside those of the request.
        """
        verifiers = self._verifiers
        messages = [verifiers.user(content=spell(request.prompt_ids))]
        left, waiting = request.budget or _ROOM, list(request.turns)
        while True:
            turn = verifiers.prepare_turn(trace, messages)
            asked = verifiers.sampling(**{**sampling, **request.sampling, "max_tokens": left})
            said = await self._client.get_response(
                verifiers.chat(), {"model": MODEL}, asked, session_id=request.request_id, turn=turn
            )
            turn.commit(said)
            left -= len(said.tokens.completion_ids)
            shown = said.raw["choices"][0]["finish_reason"]
            if shown != "stop" or not waiting or left - len(waiting[0]) < 1:
                finish: str | None = said.finish_reason
                return finish
            answer = waiting.pop(0)
            left -= len(answer)
            self._fleet.recorder.record(
                Observation(request_id=request.request_id, token_ids=answer)
            )
            messages = [*messages, said.message, verifiers.user(content=spell(answer))]

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


class RolloutSubject:
    """One request is a conversation.

    Weights are updated as prime-rl does it: the servers keep what runs, and their prefix cache too,
    which a salt isolates.
    """

    contract: Contract

    def __init__(self, verifiers: Verifiers) -> None:
        self._verifiers = verifiers

    def start(self, fleet: Fleet) -> None:
        """The servers, which answer as prime-rl's do, and a client before their router."""
        fleet.pause_mode = PauseMode.KEEP
        fleet.clear_cache = False
        self._fleet = fleet
        http = HttpFleet(fleet, routes=RoutesForm.DESCRIBED)
        config = self._verifiers.client_config(
            base_url=http.router + "/v1", api_key_var="ROLLPROOF_NO_KEY", renderer_model_name=MODEL
        )
        self._player = Player(self._verifiers, fleet, config)
        self.contract = branch_contract(fleet)

    async def rollout(self, request: Request) -> Played:
        """All turns. Raises what verifiers raises."""
        verifiers = self._verifiers
        trace = verifiers.trace(
            task=verifiers.task(type="rollproof", data={}), agent=verifiers.agent(config={})
        )
        return Played(request=request, trace=trace, finish=await self._player.play(trace, request))

    async def update_weights(self, version: int | None) -> None:
        """prime-rl's orchestrator does this; verifiers has no part in it."""
        await self._fleet.sync(version)

    def to_record(self, native: Played) -> Rollout:
        """The last branch, which is the training sample."""
        branch = native.trace.branches[-1]
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
        await self._player.close()


def reason_of(finish: str | None) -> FinishReason | None:
    """``finish`` is verifiers' word."""
    return None if finish is None else _REASONS.get(finish, FinishReason.ERROR)


def branch_contract(fleet: Fleet) -> Contract:
    """What verifiers promises: one row a token, the last one a repetition of the row before, until
    a further turn computes it.

    There is no tag of versions in a trace: prime-rl keeps the span of its policies beside it.
    """
    model = fleet.case.model
    return Contract(
        rows=Rows.ALL,
        final_row=Filler.PREVIOUS,
        resume=ResumeBy.ENGINE,
        versions=Versions.NONE,
        logprobs=Logprobs.RAW,
        abort_surfaces=True,
        partial_off=PartialOff.SURFACED,
        loss_mask=True,
        multi_turn=True,
        missing_logprobs=MissingLogprobs.MASKED,
        sampling=Sampling.OWN,
        kv_policy=KvPolicy.KEEP,
        layer_axis=LayerAxis.ALL,
        **model.sizes,
        filler=Filler.NONE,
        dtype="uint8|uint16",
        provenance=Provenance.AS_SAMPLED,
    )
