"""What the adapter drives of verifiers, and of its renderers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rollproof.stacks import Release, attributes, missing_dependency

__all__ = ["RELEASE", "Verifiers", "import_verifiers"]

RELEASE = Release(distribution="verifiers", versions=("0.4.0",), stack="verifiers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verifiers:
    """The imported classes. ``slot`` and ``pool`` are where its training client keeps renderers."""

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


def import_verifiers(version: str) -> Verifiers:
    """Import what the adapter drives (7 to 25 s). Raises ``StackError`` where something that it
    imports is missing.
    """
    try:
        client, pool, slot = attributes(
            "verifiers.v1.clients.train", "TrainClient", "ElasticRendererPool", "RendererSlot"
        )
        (client_config,) = attributes("verifiers.v1.configs.client", "TrainClientConfig")
        (chat,) = attributes("verifiers.v1.dialects", "ChatDialect")
        (prepare_turn,) = attributes("verifiers.v1.graph", "prepare_turn")
        trace, task, agent = attributes("verifiers.v1.trace", "Trace", "TraceTask", "AgentInfo")
        user, sampling = attributes("verifiers.v1.types", "UserMessage", "SamplingConfig")
        rendered, parsed = attributes("renderers.base", "RenderedTokens", "ParsedResponse")
    except ImportError as error:
        raise missing_dependency("verifiers", version, error, RELEASE) from error
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    return Verifiers(
        client=client,
        client_config=client_config,
        pool=pool,
        slot=slot,
        chat=chat,
        prepare_turn=prepare_turn,
        trace=trace,
        task=task,
        agent=agent,
        user=user,
        sampling=sampling,
        rendered=rendered,
        parsed=parsed,
    )
