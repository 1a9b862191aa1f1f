"""Stand-ins for the scripts beside this one: verifiers' training client on a scripted answer, with a renderer that knows one prompt."""

from __future__ import annotations

import json
import warnings
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")

from renderers.base import ParsedResponse, RenderedTokens
from verifiers.v1.clients import train
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

VERSION = f"verifiers {version('verifiers')}:"


async def response(tokens: list[int], finish_reason: str) -> Any:
    """What ``TrainClient.get_response`` makes of an answer of prime-rl's server."""
    content = [{"token": f"token_id:{token}", "logprob": -1.0} for token in tokens]
    body = {
        "choices": [
            {"token_ids": tokens, "finish_reason": finish_reason, "logprobs": {"content": content}}
        ]
    }

    async def post(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(content=json.dumps(body).encode())

    async def get(*_: Any, **__: Any) -> Any:
        return {}

    prompt = RenderedTokens(token_ids=[1, 2], message_indices=[0, 0], message_roles=["user"])
    renderer = SimpleNamespace(
        render=lambda *_, **__: prompt,
        get_stop_token_ids=list,
        parse_response=lambda *_, **__: ParsedResponse("text"),
    )
    train.ElasticRendererPool("m", None, multiplex=8).renderers[:] = [train.RendererSlot(renderer)]
    client = train.TrainClient.__new__(train.TrainClient)  # its constructor makes an HTTP client
    client.config = SimpleNamespace(renderer_model_name="m", renderer=None, multiplex=8)
    client.client = SimpleNamespace(post=post, get=get, base_url="http://127.0.0.1:1/v1")
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return await client.get_response(ChatDialect(), asked, SamplingConfig(max_tokens=9))


def new_trace() -> Any:
    """An empty trace of verifiers."""
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    return Trace(task=TraceTask(type="t", data={}), agent=AgentInfo(config={}))


def turn(
    trace: Any,
    messages: list[Any],
    prompt_ids: list[int],
    completion_ids: list[int],
    rows: list[int] | None,
) -> Any:
    """Commit a turn whose engine call returned ``rows`` (one layer, top 1), as ``prepare_turn`` and ``commit`` do it; returns the answer."""
    import base64

    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import AssistantMessage, Response, TurnTokens

    data = base64.b64encode(bytes(rows or []))
    routes = (
        None
        if rows is None
        else {"data": data, "shape": [len(rows), 1, 1], "dtype": "uint8", "start": 0}
    )
    spans = (
        [None] * (len(messages) - 1) + [(len(prompt_ids) - 1, len(prompt_ids))]
        if len(messages) > 1
        else [(0, len(prompt_ids))]
    )
    tokens = TurnTokens.model_construct(
        prompt_ids=prompt_ids, completion_ids=completion_ids, completion_logprobs=[-1.0] * len(completion_ids), message_spans=spans,
        routed_experts=routes, renderer_prompt_ids=None, bridged=False, is_content=None, mm_placeholders=None, mm_token_type_id_map=None,
        sampling_mask=None,
    )  # fmt: skip
    answer = AssistantMessage(content=str(completion_ids))
    prepare_turn(trace, messages).commit(
        Response(id="", created=0, model="m", message=answer, finish_reason="stop", tokens=tokens)
    )
    return answer
