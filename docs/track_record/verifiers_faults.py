"""Faults of verifiers: `python docs/track_record/verifiers_faults.py [NAME ...]`.

The server has a scripted reply, and the renderer knows one prompt.
"""

from __future__ import annotations

import base64
import json
import warnings
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from common import run

warnings.simplefilter("ignore")

from renderers.base import ParsedResponse, RenderedTokens
from verifiers.v1.clients import train
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, TurnTokens, UserMessage

VERSION = f"verifiers {version('verifiers')}:"


async def response(tokens: list[int], finish_reason: str) -> Any:
    """What ``TrainClient.get_response`` makes of a reply of prime-rl's server."""
    logprobs = {"content": [{"token": f"token_id:{t}", "logprob": -1.0} for t in tokens]}
    body = {
        "choices": [{"token_ids": tokens, "finish_reason": finish_reason, "logprobs": logprobs}]
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
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return await client.get_response(ChatDialect(), request, SamplingConfig(max_tokens=9))


def turn(
    trace: Any,
    messages: list[Any],
    prompt_ids: list[int],
    completion_ids: list[int],
    rows: list[int] | None,
) -> Any:
    """Commit a turn with the rows (one layer, top 1) that its engine call returned; return the
    model's message.
    """
    routes = None
    if rows is not None:
        data = base64.b64encode(bytes(rows))
        routes = {"data": data, "shape": [len(rows), 1, 1], "dtype": "uint8", "start": 0}
    spans: list[Any] = [(0, len(prompt_ids))]
    if len(messages) > 1:
        spans = [None] * (len(messages) - 1) + [(len(prompt_ids) - 1, len(prompt_ids))]
    unused = dict.fromkeys(
        (
            "renderer_prompt_ids",
            "is_content",
            "mm_placeholders",
            "mm_token_type_id_map",
            "sampling_mask",
        )
    )
    tokens = TurnTokens.model_construct(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_logprobs=[-1.0] * len(completion_ids),
        message_spans=spans,
        routed_experts=routes,
        bridged=False,
        **unused,
    )
    message = AssistantMessage(content=str(completion_ids))
    prepare_turn(trace, messages).commit(
        Response(id="", created=0, model="m", message=message, finish_reason="stop", tokens=tokens)
    )
    return message


async def abort() -> None:
    """A generation that the engine aborted is a turn like any other, and the agent gets the reason
    of a turn that ended by itself.
    """
    for reason in ("stop", "length", "abort"):
        out = await response([7, 8], reason)
        shown = out.raw["choices"][0]["finish_reason"]
        recorded = f"the engine says {reason!r}, the trace {out.finish_reason!r}"
        print(VERSION, f"{recorded}, the agent is told {shown!r}")


async def cut_turn() -> None:
    """The environment answers a turn that the engine aborted, and its tokens are trained on."""
    for reason in ("stop", "abort"):
        out = await response([7, 8], reason)
        trace = Trace(task=TraceTask(type="t", data={}), agent=AgentInfo(config={}))
        messages: list[Any] = [UserMessage(content="a")]
        prepare_turn(trace, messages).commit(out)
        messages += [out.message, UserMessage(content="b")]
        turn(trace, messages, [1, 2, 7, 8, 3], [9], None)
        branch = trace.branches[-1]
        trained = [int(sampled) for sampled in branch.sampled_mask]
        print(VERSION, f"turn 1 ended by {reason!r}: tokens {branch.token_ids}, mask {trained}")


def routes_gap() -> None:
    """After a turn that was aborted before its first token a conversation has no routes, though the
    next call returned them all.
    """
    for first in ([5], None):  # the rows of the first call; an abort in the queue has none
        trace = Trace(task=TraceTask(type="t", data={}), agent=AgentInfo(config={}))
        messages = [UserMessage(content="a")]
        message = turn(trace, messages, [1], [7] if first else [], first)
        ids, rows = ([1, 7, 2], [5, 6, 7]) if first else ([1, 2], [5, 6])
        turn(trace, [*messages, message, UserMessage(content="b")], ids, [8], rows)
        branch = trace.branches[-1]
        routes = "none"
        if branch.routed_experts is not None:
            shown = branch.routed_experts[:, 0, 0].tolist()
            routes = f"{shown} (the last one repeats the one before)"
        call = "a row" if first else "no rows"
        print(VERSION, f"first call: {call}; tokens {branch.token_ids}, routes {routes}")


if __name__ == "__main__":
    run(abort, cut_turn, routes_gap)
