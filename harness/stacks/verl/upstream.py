"""The classes of verl that the adapters drive."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks import Found
from rollproof.stacks._support.upstream import undecorated_class, upstream
from rollproof.stacks.verl.release import RELEASE, VERSIONS, VerlVersion

__all__ = ["Verl", "import_verl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verl:
    """The imported classes of the installed release, and its line of the table."""

    version: str
    facts: VerlVersion
    client: Any
    balancer: Any
    token_output: Any
    tool_agent_loop: Any
    single_turn_agent_loop: Any
    agent_loop: Any
    tool_parser: Any
    function_call: Any
    tool_response: Any
    checkpoint: Any


def import_verl(found: Found) -> Verl:
    """Import what the adapters drive (10 to 25 s). Raises ``StackError`` for a missing package."""
    facts = VERSIONS[found.line]
    # It warns once per agent loop that texts made of ids need no model's template, which is so.
    logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").setLevel(logging.ERROR)
    loops = "verl.experimental.agent_loop."
    names = upstream(
        RELEASE,
        found.version,
        {
            "client": facts.client,
            "balancer": facts.balancer,
            "token_output": "verl.workers.rollout.replica:TokenOutput",
            "tool_agent_loop": loops + "tool_agent_loop:ToolAgentLoop",
            "single_turn_agent_loop": loops + "single_turn_agent_loop:SingleTurnAgentLoop",
            "tool_parser": loops + "tool_parser:ToolParser",
            "function_call": loops + "tool_parser:FunctionCall",
            "tool_response": "verl.tools.schemas:ToolResponse",
            "agent_loop": loops + "agent_loop",
            "checkpoint": "verl.checkpoint_engine.base",
        },
    )
    # an actor in 0.8.0
    names["balancer"] = undecorated_class(names["balancer"])
    return Verl(version=found.version, facts=facts, **names)
