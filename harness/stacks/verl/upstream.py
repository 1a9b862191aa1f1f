"""What differs between the releases of verl, as data: where the classes live, what their
constructors need, what its servers return.

Every release so far has moved the resume client or changed its constructor, so a version that is
not in the table is refused rather than guessed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollproof.errors import StackError
from rollproof.stacks import Release, attributes, missing_dependency

__all__ = ["RELEASE", "VERSIONS", "RouteArray", "Verl", "VerlVersion", "import_verl"]


class RouteArray(StrEnum):
    """What verl's SGLang server hands over as ``routed_experts``."""

    TENSOR = "tensor"
    """The CPU tensor that SGLang's tokenizer manager returned."""
    NUMPY = "numpy"
    """Its ``.numpy()``, since verl#7158."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlVersion:
    """One release.

    ``client`` and ``balancer`` are ``module:class``; ``balancer_is_actor`` says that the class is
    already wrapped by ``ray.remote``, ``reads_async_training`` that the client needs
    ``config.async_training.partial_rollout`` to exist, ``pins_budget`` that it grants the
    configured response length where the caller states no limit. Of the servers:
    ``tags_empty_abort`` whether vLLM's answer to an abort before the first token carries
    ``global_steps``, ``reports_cached_tokens`` whether vLLM's carries the hits of the prefix cache,
    ``sglang_routes`` the type of SGLang's routes. ``dict_routes`` and ``padded_routes`` are the
    numpy types of the routes in the batches of ``as_dict`` and ``_postprocess``, ``unpads_on_cpu``
    whether padding can be taken away without flash-attn.
    """

    client: str
    balancer: str = "verl.workers.rollout.llm_server:GlobalRequestLoadBalancer"
    balancer_is_actor: bool = False
    reads_async_training: bool = False
    pins_budget: bool = True
    tags_empty_abort: bool = True
    reports_cached_tokens: bool = False
    sglang_routes: RouteArray = RouteArray.NUMPY
    dict_routes: str = "int16"
    padded_routes: str = "int16"
    unpads_on_cpu: bool = False


_LLM_SERVER = "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient"
VERSIONS: Mapping[str, VerlVersion] = {
    "0.8.0": VerlVersion(
        client=(
            "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerClient"
        ),
        balancer_is_actor=True,
        reads_async_training=True,
        pins_budget=False,
        tags_empty_abort=False,
        sglang_routes=RouteArray.TENSOR,
        dict_routes="int64",
        padded_routes="uint8|uint16|int16|int32|int64",
    ),
    "0.9.0": VerlVersion(client=_LLM_SERVER),
    "0.9.1": VerlVersion(
        client=_LLM_SERVER,
        balancer="verl.workers.rollout.router:GlobalRequestLoadBalancer",
        reports_cached_tokens=True,
        unpads_on_cpu=True,
    ),
}
RELEASE = Release(distribution="verl", versions=tuple(VERSIONS), stack="verl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verl:
    """The imported classes of one installed release, and its line of the table."""

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


def import_verl(version: str, line: str | None = None) -> Verl:
    """Import what the adapters drive (10 to 25 s), by ``line`` of the table (default: its own).

    Raises ``StackError`` for an unknown version or a missing dependency.
    """
    facts = VERSIONS.get(line or version)
    if facts is None:
        raise StackError(
            f"verl {version} is not in the table of known releases ({', '.join(VERSIONS)}). Run:\n "
            f" {RELEASE.install()}"
        )
    # said once per agent loop, and as it is meant: texts made of ids need no model's template
    logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").setLevel(logging.ERROR)
    try:
        loops = "verl.experimental.agent_loop."
        (client,) = attributes(*facts.client.split(":"))
        (balancer,) = attributes(*facts.balancer.split(":"))
        (token_output,) = attributes("verl.workers.rollout.replica", "TokenOutput")
        (tool_agent_loop,) = attributes(loops + "tool_agent_loop", "ToolAgentLoop")
        (single_turn,) = attributes(loops + "single_turn_agent_loop", "SingleTurnAgentLoop")
        tool_parser, function_call = attributes(loops + "tool_parser", "ToolParser", "FunctionCall")
        (tool_response,) = attributes("verl.tools.schemas", "ToolResponse")
        return Verl(
            version=version,
            facts=facts,
            client=client,
            balancer=(
                balancer.__ray_metadata__.modified_class if facts.balancer_is_actor else balancer
            ),
            token_output=token_output,
            tool_agent_loop=tool_agent_loop,
            single_turn_agent_loop=single_turn,
            agent_loop=importlib.import_module(loops + "agent_loop"),
            tool_parser=tool_parser,
            function_call=function_call,
            tool_response=tool_response,
            checkpoint=importlib.import_module("verl.checkpoint_engine.base"),
        )
    except ImportError as error:
        raise missing_dependency("verl", version, error, RELEASE) from error
