"""The faces beside what the real servers answered (``record_sglang.py`` makes the recordings)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollproof.case import EngineOptions, Model
from rollproof.fakes.http.backing import ServeOptions
from rollproof.fakes.http.serving import serving
from tests.http.recording import ends

RECORDED = Path(__file__).parent / "recorded"
MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
OPTIONS = ServeOptions(
    flavour="sglang", model=MODEL, engine=EngineOptions(max_batch=8, step=0.001, prefix_cache=True), max_length=512, label="w0"
)
ALONE = (
    "generate",
    "generate_stream",
    "update_weight_version",
    "health",
    "loads",
    "errors",
    "get_weight_version",
    "flush_cache",
    "pause_continue",
    "abort",
)
"""Kinds whose exchanges are asked one after the other; chats the SGLang face does not have yet."""
UNLIKE = {
    ("/update_weights_from_disk", "/nowhere"): "the fake has no disk: every path is weights",
    ("/get_load", ""): "not an endpoint of 0.5.21",
}
TOLERATED = {
    "loads": {"decode_moments", "disaggregation", "memory", "queues", "total_prefill_busy_us", "total_prefill_uncached_tokens"},
    # a call that found a cached prefix says how much; whether it did depends on what ran before
    "": {"cached_tokens_details"},
}
"""Keys of deployments that the fake does not stand for."""


def exchanges() -> Iterator[Any]:
    """Every recorded exchange of one request that needs no other beside it."""
    for kind in ALONE:
        data = json.loads((RECORDED / f"sglang_{kind}.json").read_text())
        for number, exchange in enumerate(data["exchanges"]):
            request = exchange["request"]
            rid = str((request.get("body") or {}).get("rid", ""))
            if rid.startswith(("cut-", "held-")) or (kind == "flush_cache" and number == 1):
                continue  # how a call ended that something else cut short: tests/http/test_sglang_face.py
            if (request["path"], str((request.get("body") or {}).get("model_path", ""))) in UNLIKE:
                continue
            yield pytest.param(exchange, id=f"{kind}-{number}")


def shape(value: Any, skip: set[str]) -> Any:
    """Keys and kinds of values; of an array the kinds of its items."""
    if isinstance(value, Mapping):
        return {key: shape(item, skip) for key, item in value.items() if key not in skip}
    if isinstance(value, list):
        return sorted({json.dumps(shape(item, skip), sort_keys=True) for item in value})
    if isinstance(value, bool) or value is None:
        return str(value)
    return "number" if isinstance(value, int | float) else "text"


@pytest.mark.parametrize("exchange", list(exchanges()))
def test_a_request_is_answered_as_the_real_server_answered_it(exchange: Mapping[str, Any]) -> None:
    """Status, media type, keys and kinds of values are those that SGLang 0.5.21 sent."""
    request, real = exchange["request"], exchange["response"]

    async def ask() -> tuple[int, str, Any]:
        async with serving("sglang", OPTIONS) as (url, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
            reply = await client.request(request["method"], request["path"], json=request.get("body"))
            kind = (reply.headers.get("content-type") or "").partition(";")[0]
            if kind == "text/event-stream":
                lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
                return reply.status_code, kind, ends([line if line == "[DONE]" else json.loads(line) for line in lines])
            return reply.status_code, kind, reply.json() if kind == "application/json" else reply.text

    status, kind, body = asyncio.run(ask())
    skip = TOLERATED["loads" if request["path"] == "/v1/loads" else ""] | TOLERATED[""]
    assert (real["status"], real["content_type"]) == (status, kind if real["content_type"] else "")
    assert shape(real["body"], skip) == shape(body, skip)
