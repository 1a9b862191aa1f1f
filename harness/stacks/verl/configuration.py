"""verl's configuration for a case, and the contract of its client."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rollproof.core.contract import Contract, PartialOff, ResumeBy, Rows, Sampling, Versions
from rollproof.core.records import Request
from rollproof.stacks._support.subjects import ROOM, client_contract
from rollproof.stacks.verl.rollout_servers import CONVENTIONS, Lengths
from rollproof.stacks.verl.upstream import Verl

if TYPE_CHECKING:
    from rollproof.core.case import Case
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["MOST_TURNS", "PARSER", "config_of", "lengths_of", "verl_contract"]

PARSER = "rollproof-ids"
"""The tool format that the agent loops are configured with."""
MOST_TURNS = 4
"""``max_assistant_turns``: turns of the model after which a rollout ends."""


def lengths_of(case: Case, response: int | None) -> Lengths:
    """Lengths for requests whose configured response length is ``response`` (``None``: roomy).

    The prompt length also limits the answer of a tool (agent loops of 0.8.0 cut both to it), so it
    is that of the longest of either.
    """
    prompt = max(
        len(ids) for request in case.requests for ids in (request.prompt_ids, *request.turns)
    )
    length = ROOM if response is None else response
    # What the tools of any request add in all: the model has room for it.
    environment = max(sum(map(len, request.turns)) for request in case.requests)
    return Lengths(
        prompt=prompt,
        response=length,
        model=prompt + environment + 2 * max(length, _longest(case.requests)),
    )


def config_of(case: Case, verl: Verl, lengths: Lengths) -> Any:
    """The part of a trainer's configuration that the client and the agent loops read, as OmegaConf.

    Trainers since 0.9.0 have no ``async_training``: it is there only where the release needs it, or
    to switch partial rollout off.
    """
    # Its absence means on since 0.9.0.
    partial = case.partial if verl.facts.reads_async_training or not case.partial else None
    return _config(CONVENTIONS[case.flavour].name, lengths, partial)


@lru_cache(maxsize=256)
def _config(name: str, lengths: Lengths, partial: bool | None) -> Any:
    """The configuration, read-only."""
    # cached: OmegaConf takes longer to make one than a short case takes to run
    from omegaconf import OmegaConf

    turns = {
        "max_user_turns": None,
        "max_assistant_turns": MOST_TURNS,
        "max_parallel_calls": 1,
        "max_tool_response_length": 1 << 16,
        "tool_response_truncate_side": "middle",
        "format": PARSER,
    }
    rollout = {
        "name": name,
        "prompt_length": lengths.prompt,
        "response_length": lengths.response,
        "max_model_len": lengths.model,
        "full_determinism": False,
        "multi_turn": turns,
    }
    config: dict[str, Any] = {
        "actor_rollout_ref": {"rollout": rollout},
        "data": {
            "apply_chat_template_kwargs": {},
            "mm_processor_kwargs": {},
            "continuous_token": {"enable": False},
        },
    }
    if partial is not None:
        config["async_training"] = {"partial_rollout": partial}
    frozen = OmegaConf.create(config)
    OmegaConf.set_readonly(frozen, True)
    return frozen


def verl_contract(fleet: Fleet, **differs: Any) -> Contract:
    """What verl's client promises on the fleet's flavour."""
    # As sampled: a resumed sample keeps each segment's own routes (verl#6046). Tags are
    # ``min_global_steps`` and ``max_global_steps``.
    fields: dict[str, Any] = {
        "rows": Rows.FORWARDED,
        "abort_surfaces": not fleet.case.partial,
        "multimodal": True,
        "sampling": Sampling.FORWARDED,
        # an aborted sample comes out with its ``stop_reason``
        "partial_off": PartialOff.SURFACED,
    }
    return client_contract(
        fleet, resume=ResumeBy.CLIENT, versions=Versions.MIN_MAX, **{**fields, **differs}
    )


def _longest(requests: Iterable[Request]) -> int:
    return max((request.budget or 0) for request in requests)
