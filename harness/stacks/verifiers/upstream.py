"""The classes of verifiers, and of its renderers, that the adapter drives."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks._support.upstream import upstream
from rollproof.stacks.verifiers.release import RELEASE

__all__ = ["Verifiers", "import_verifiers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verifiers:
    """The imported classes. ``slot`` and ``pool`` are where its training client keeps renderers;
    ``prompt_limits`` is where those keep the longest prompt of a server's model.
    """

    client: Any
    client_config: Any
    pool: Any
    slot: Any
    chat: Any
    prepare_turn: Any
    trace: Any
    task: Any
    agent: Any
    user: Any
    sampling: Any
    rendered: Any
    parsed: Any
    prompt_limits: Any


def import_verifiers(version: str) -> Verifiers:
    """Import what the adapter drives (7 to 25 s). Raises ``StackError`` for a missing package."""
    classes = upstream(
        RELEASE,
        version,
        {
            "client": "verifiers.v1.clients.train:TrainClient",
            "pool": "verifiers.v1.clients.train:ElasticRendererPool",
            "slot": "verifiers.v1.clients.train:RendererSlot",
            "client_config": "verifiers.v1.configs.client:TrainClientConfig",
            "chat": "verifiers.v1.dialects:ChatDialect",
            "prepare_turn": "verifiers.v1.graph:prepare_turn",
            "trace": "verifiers.v1.trace:Trace",
            "task": "verifiers.v1.trace:TraceTask",
            "agent": "verifiers.v1.trace:AgentInfo",
            "user": "verifiers.v1.types:UserMessage",
            "sampling": "verifiers.v1.types:SamplingConfig",
            "rendered": "renderers.base:RenderedTokens",
            "parsed": "renderers.base:ParsedResponse",
            "prompt_limits": "renderers.client:_max_prompt_len_cache",
        },
    )
    # it logs a line a request
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return Verifiers(**classes)
