"""Clients of SGLang's HTTP, as people write them: a loop that resumes after aborts, and the calls
of one library. Each fault is one of ``rollproof.fakes.known_bugs.http_replies``, written anew.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from rollproof import Contract
from rollproof.http_clients import (
    aiohttp_trace,
    httpx_async_hooks,
    httpx_hooks,
    requests_adapter,
    rollout,
)

CONTRACT = Contract(
    rows="T-1",  # type: ignore[arg-type]  # text, as users write it
    provenance="as-sampled",  # type: ignore[arg-type]
    resume="client",  # type: ignore[arg-type]
    abort_surfaces=False,
    versions="none",  # type: ignore[arg-type]
    logprobs="temperature-scaled",  # type: ignore[arg-type]
    layer_axis="all",  # type: ignore[arg-type]
    num_layers=3,
    moe_layers=(0, 1, 2),
    num_experts=8,
    top_k=2,
    filler="none",  # type: ignore[arg-type]
    dtype="int32",
    kv_policy="recompute",  # type: ignore[arg-type]
)


class Sample:
    """A sample that grows call by call."""

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        self.prompt_ids, self.max_tokens = list(prompt_ids), max_tokens
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.routes: list[Any] = []
        self.reason = "abort"

    def body(self) -> dict[str, Any]:
        return {
            "input_ids": [*self.prompt_ids, *self.tokens],
            "sampling_params": {"max_new_tokens": self.max_tokens - len(self.tokens)},
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": sum(map(len, self.routes)),
        }

    def rows(self, text: str) -> Any:
        return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, 3, 2)

    def ended(self, meta: Any) -> str:
        return str(meta["finish_reason"]["type"])

    def add(self, reply: Any) -> None:
        meta = reply["meta_info"]
        self.tokens += reply["output_ids"]
        self.logprobs += [logprob for logprob, *_ in meta["output_token_logprobs"]]
        if meta.get("routed_experts"):
            self.routes.append(self.rows(meta["routed_experts"]))
        self.reason = self.ended(meta)

    def delivered(self) -> dict[str, Any]:
        return {
            "prompt_ids": self.prompt_ids,
            "response_ids": self.tokens,
            "logprobs": self.logprobs,
            "routes": np.concatenate(self.routes) if self.routes else None,
            "finish_reason": self.reason,
        }


class SampleOfLayers(Sample):
    def rows(self, text: str) -> Any:
        rows = super().rows(text)
        return rows.reshape(3, len(rows), 2).transpose(1, 0, 2)


class SampleOfText(Sample):
    def ended(self, meta: Any) -> str:
        return "abort" if meta["finish_reason"] == "abort" else "stop"


class HttpxClient:
    """Calls, and calls again after a status of 500 or more."""

    sample: type[Sample] = Sample

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, event_hooks=httpx_hooks(), timeout=30)

    def close(self) -> None:
        self.http.close()

    @rollout
    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Any:
        sample = self.sample(prompt_ids, max_tokens)
        while sample.reason == "abort":
            self.step(sample)
        return sample.delivered()

    def step(self, sample: Sample) -> None:
        reply = self.http.post("/generate", json=sample.body())
        if reply.status_code < 500:
            sample.add(reply.json())


class StreamingClient(HttpxClient):
    """Reads streams of events that each have all tokens so far; makes a broken one again."""

    def step(self, sample: Sample) -> None:
        events: list[Any] = []
        try:
            with self.http.stream(
                "POST", "/generate", json={**sample.body(), "stream": True}
            ) as reply:
                events.extend(
                    json.loads(line.removeprefix("data: "))
                    for line in reply.iter_lines()
                    if line.startswith("data: {")
                )
        except httpx.TransportError:
            self.broken(sample, events)
            return
        if events[-1]["meta_info"]["finish_reason"] is not None:
            sample.add(self.joined(events))

    def joined(self, events: list[Any]) -> Any:
        return events[-1]

    def broken(self, sample: Sample, events: list[Any]) -> None:
        """Keep nothing of a broken stream."""


class RequestsClient(HttpxClient):
    """The same with requests."""

    def __init__(self, url: str) -> None:
        requests = pytest.importorskip("requests", reason="of the dependency group test")
        self.url, self.session = url, requests.Session()
        self.session.mount("http://", requests_adapter())

    def close(self) -> None:
        self.session.close()

    def step(self, sample: Sample) -> None:
        sample.add(self.session.post(f"{self.url}/generate", json=sample.body(), timeout=30).json())


class AsyncHttpxClient:
    """The same with tasks; the calls of a rollout have a task of their own."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, event_hooks=httpx_async_hooks(), timeout=30)

    async def post(self, body: Any) -> Any:
        return (await self.http.post("/generate", json=body)).json()

    async def close(self) -> None:
        await self.http.aclose()

    @rollout
    async def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Any:
        sample = Sample(prompt_ids, max_tokens)
        while sample.reason == "abort":
            sample.add(await asyncio.create_task(self.post(sample.body())))
        return sample.delivered()


class AiohttpClient(AsyncHttpxClient):
    """The same with aiohttp."""

    def __init__(self, url: str) -> None:
        aiohttp = pytest.importorskip("aiohttp", reason="of the dependency group test")
        self.url = url
        self.session = aiohttp.ClientSession(trace_configs=[aiohttp_trace()])

    async def post(self, body: Any) -> Any:
        async with self.session.post(f"{self.url}/generate", json=body) as reply:
            return await reply.json()

    async def close(self) -> None:
        await self.session.close()


class CumulativeAsDelta(StreamingClient):
    """wire-cumulative-as-delta: joins events that each have all tokens."""

    def joined(self, events: list[Any]) -> Any:
        last = events[-1]
        last["output_ids"] = [token for event in events for token in event["output_ids"]]
        last["meta_info"]["output_token_logprobs"] = [
            entry for event in events for entry in event["meta_info"]["output_token_logprobs"]
        ]
        return last


class CutStreamIsStop(StreamingClient):
    """wire-cut-stream-is-stop: takes a broken stream for the end of the model."""

    def broken(self, sample: Sample, events: list[Any]) -> None:
        events[-1]["meta_info"]["finish_reason"] = {"type": "stop"}
        sample.add(events[-1])


class RetryCountsBoth(StreamingClient):
    """wire-retry-counts-both: keeps the tokens of a broken stream, and makes the call again."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.kept: list[int] = []

    def broken(self, sample: Sample, events: list[Any]) -> None:
        self.kept = events[-1]["output_ids"]

    def joined(self, events: list[Any]) -> Any:
        kept, self.kept = self.kept, []
        return {**events[-1], "output_ids": [*kept, *events[-1]["output_ids"]]}


class LayersFirst(HttpxClient):
    """wire-layers-first: reads the buffer as (layers, rows, top_k)."""

    sample = SampleOfLayers


class ReasonAsText(HttpxClient):
    """wire-reason-object-as-text: compares the object with a word, and never sees an abort."""

    sample = SampleOfText
