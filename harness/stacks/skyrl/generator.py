"""SkyRL's ``SkyRLGymGenerator`` on SkyRL's own client, as a subject: rollouts of several turns with
an environment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollproof.core.contract import Contract, MissingLogprobs, Provenance, Rows
from rollproof.core.records import Request, Rollout, as_logprobs, as_routes, as_tokens
from rollproof.simulation.mutation_guard import lend
from rollproof.stacks._support.subjects import (
    StackOutput,
    StackSubject,
    record_turn,
    wants_routes,
)
from rollproof.stacks._support.tokenizer import spell
from rollproof.stacks.skyrl.inference_client import (
    SkyRLHost,
    reason_of,
    sampling_of,
    skyrl_contract,
)
from rollproof.stacks.skyrl.upstream import SkyRL

if TYPE_CHECKING:
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["GeneratorSubject"]

_MOST_TURNS = 64
_LONGEST = 1 << 16
"""Limits of the configuration that no case reaches: turns, and tokens of an input."""


class GeneratorSubject(StackSubject):
    """One request is one ``generate`` of a batch of one. SkyRL's limit holds for each turn: the
    request's budget.
    """

    def __init__(self, skyrl: SkyRL) -> None:
        self._skyrl = skyrl
        from rollproof.stacks.skyrl import environment

        self._environment = environment.NAME
        # the registry is one of the process, and refuses a name that it has
        if environment.NAME not in skyrl.gym.envs.registration.registry:
            skyrl.gym.register(environment.NAME, entry_point=environment.ENTRY)

    def start(self, fleet: Fleet) -> None:
        """Make the client of the fleet's servers, and the generator on it."""
        self._fleet = fleet
        self._host = SkyRLHost(fleet, self._skyrl)
        self._generator = self._make()
        self.contract: Contract = generator_contract(fleet, self._skyrl)

    async def rollout(self, request: Request) -> StackOutput:
        """Generate with an environment that gives the request's turns, and records them."""

        def record(turn: tuple[int, ...]) -> None:
            record_turn(self._fleet, request, turn)

        batch = {
            "prompts": [lend("prompt", [{"role": "user", "content": spell(request.prompt_ids)}])],
            "env_classes": [self._environment],
            "env_extras": [
                {"turns": request.turns, "eos": self._fleet.policy.eos_id, "record": record}
            ],
            "sampling_params": lend("sampling_params", sampling_of(request)),
            "trajectory_ids": None,
            "batch_metadata": None,
        }
        output = await self._generator.generate(batch, disable_tqdm=True)
        return StackOutput(request=request, output=output)

    async def update_weights(self, version: int | None) -> None:
        """Update by SkyRL's own procedure."""
        await self._host.update_weights(version)

    def to_record(self, native: StackOutput) -> Rollout:
        """A ``GeneratorOutput`` of one as a rollout."""
        output = native.output
        logprobs, routes = output["rollout_logprobs"], output["rollout_expert_indices"]
        return Rollout(
            request_id=native.request.request_id,
            prompt_ids=as_tokens(output["prompt_token_ids"][0], what="prompt_token_ids"),
            response_ids=as_tokens(output["response_ids"][0]),
            finish_reason=reason_of(output["stop_reasons"][0]),
            logprobs=None if logprobs is None else as_logprobs(logprobs[0]),
            loss_mask=np.array(output["loss_masks"][0], dtype=np.int64),
            routes=None if routes is None else as_routes(routes[0]),
        )

    async def stop(self) -> None:
        """Close the session."""
        await self._host.close()

    def _make(self) -> Any:
        config = self._skyrl.config
        longest = max(request.budget or _LONGEST for request in self._fleet.case.requests)
        generator = config.GeneratorConfig(
            max_turns=_MOST_TURNS,
            max_input_length=_LONGEST,
            # Each request states its own: what the configuration says must not decide (SkyRL#1868).
            sampling_params=config.SamplingParams(max_generate_length=longest, logprobs=None),
            inference_engine=config.InferenceEngineConfig(
                enable_return_routed_experts=wants_routes(self._fleet)
            ),
        )
        # no worker threads: environments are stepped in the loop
        gym = config.SkyRLGymConfig(max_env_workers=0)
        return self._skyrl.generator(generator, gym, self._host.client, self._host.tokenizer)


def generator_contract(fleet: Fleet, skyrl: SkyRL) -> Contract:
    """What the generator promises beyond its client: a loss mask, and logprobs of 0.0 on the
    environment's tokens.
    """
    return replace(
        skyrl_contract(fleet, skyrl),
        # SkyRL says: "for a prefix of its prompt and response tokens"
        # (skyrl/train/generators/base.py).
        rows=Rows.CAPTURED_PREFIX,
        loss_mask=True,
        multi_turn=True,
        missing_logprobs=MissingLogprobs.MASKED,
        # Until 0.3.0 the last turn's rows replace all: they come from a prefill of everything. Its
        # docstrings promise a turn's rows for what it generated, and not of which call.
        provenance=Provenance.AS_SAMPLED if skyrl.facts.keeps_rows else Provenance.LATEST_PREFILL,
    )
