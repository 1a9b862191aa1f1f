"""The fake vLLM server: its answers, and that the same fake engine computes them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import serving

MODEL = Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=300, top_k=3, vocab=1000)
OPTIONS = ServeOptions(
    flavour="vllm", model=MODEL, engine=EngineOptions(max_batch=4, step=0.002, prefix_cache=True)
)
PROMPT = [5, 6, 7, 8]
BODY = {"model": "m", "token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "logprobs": 0}}

Conversation = Callable[[httpx.AsyncClient, EngineBackend], Awaitable[Any]]


def converse_with(conversation: Conversation) -> Any:
    """Have a conversation with a server on loopback."""

    async def run() -> Any:
        async with (
            serving("vllm", OPTIONS) as (url, backend),
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            return await conversation(client, backend)

    return asyncio.run(run())


def _expected(backend: EngineBackend, ids: list[int]) -> Any:
    return backend.policy.routes_spans([(0, len(ids) - 1, 0)], ids, 0, len(ids) - 1)


def test_tokens_in_tokens_out() -> None:
    """``/inference/v1/generate`` gives ids, logprobs and a ``.npy`` of T - 1 rows; SkyRL's form the
    same rows with shape and dtype.
    """

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        own = (await client.post("/inference/v1/generate", json=BODY)).json()["choices"][0]
        skyrl = (await client.post("/skyrl/v1/generate", json=BODY)).json()["choices"][0]
        return own, skyrl, _expected(backend, [*PROMPT, *own["token_ids"]])

    own, skyrl, expected = converse_with(converse)
    np.testing.assert_array_equal(
        expected, np.load(io.BytesIO(base64.b64decode(own["routed_experts"])), allow_pickle=False)
    )
    sent = skyrl["routed_experts"]
    assert ["data", "shape", "dtype"] == list(sent)
    np.testing.assert_array_equal(
        expected,
        np.frombuffer(base64.b64decode(sent["data"]), sent["dtype"]).reshape(sent["shape"]),
    )
    assert own["token_ids"] == skyrl["token_ids"]
    assert (6, "length") == (len(own["logprobs"]["content"]), own["finish_reason"])


def test_completions_and_chats_are_the_same_calls() -> None:
    """The OpenAI endpoints answer with the fake's words, usage and, if requested, token ids."""

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        plain = await client.post(
            "/v1/completions",
            json={"model": "m", "prompt": PROMPT, "max_tokens": 3, "return_token_ids": True},
        )
        chat = await client.post(
            "/v1/chat/completions",
            json={
                "model": "m",
                "messages": [{"role": "user", "content": "w5 w6 w7 w8"}],
                "max_tokens": 3,
            },
        )
        return plain.json(), chat.json()

    plain, chat = converse_with(converse)
    assert (
        " ".join(f"w{token}" for token in plain["choices"][0]["token_ids"])
        == plain["choices"][0]["text"]
    )
    assert plain["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert (
        [4, 3, 7]
        == [plain["usage"][name] for name in counts]
        == [chat["usage"][name] for name in counts]
    )


@pytest.mark.parametrize(
    ("mode", "reason"), [("abort", "abort"), ("wait", "length"), ("keep", "length")]
)
def test_pause_modes_do_what_they_say(mode: str, reason: str) -> None:
    """``abort`` ends what runs, ``wait`` lets it end, ``keep`` freezes it; what comes meanwhile
    waits for the resume.
    """

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        long = {**BODY, "sampling_params": {"max_tokens": 200}}
        call = asyncio.ensure_future(client.post("/inference/v1/generate", json=long))
        for _ in range(2000):
            if backend.engine.progress() and max(backend.engine.progress().values()):
                break
            await asyncio.sleep(0.005)
        await client.post("/pause", params={"mode": mode, "clear_cache": "false"})
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        late = asyncio.ensure_future(
            client.post("/inference/v1/generate", json={**BODY, "token_ids": [9, 9]})
        )
        await asyncio.sleep(0.05)
        assert not late.done()
        await client.post("/resume")
        first, second = await call, await late
        return (
            first.json()["choices"][0]["finish_reason"],
            second.json()["choices"][0]["finish_reason"],
            backend.engine.paused,
        )

    assert (reason, "length", False) == converse_with(converse)


def test_an_update_changes_the_weights_that_answer() -> None:
    """After ``/update_weights`` the same prompt is answered by the next version; the same folder
    again is the same weights.
    """

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        answers = []
        for folder in (None, "step1", "step2", "step1"):
            if folder is not None:
                await client.post(
                    "/update_weights", json={"weight_dir": folder, "weight_version": folder}
                )
                await client.post("/reset_prefix_cache")
            answers.append(
                (await client.post("/inference/v1/generate", json=BODY)).json()["choices"][0][
                    "token_ids"
                ]
            )
        return answers, backend.engine.version, (await client.get("/weight_info")).json()

    (zero, item, two, again), version, info = converse_with(converse)
    assert len({tuple(zero), tuple(item), tuple(two)}) == 3
    assert item == again
    assert (1, {"weight_version": "step1"}) == (version, info)


def test_a_stream_ends_with_the_reason_and_the_mark() -> None:
    """Every token comes once, the reason with the last ones, then the end mark."""

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        body = {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 5,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            return [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]

    lines = converse_with(converse)
    parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "[DONE]" == lines[-1]
    assert 5 == sum(len(part["token_ids"]) for part in parts)
    assert [None] * (len(parts) - 1) + ["length"] == [part["finish_reason"] for part in parts]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/inference/v1/generate", {"token_ids": "a"}, 400, "token_ids must be list"),
        ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids must hold ids"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"n": 300}},
            400,
            "n must be at least 1 and at most 256",
        ),
        ("/v1/chat/completions", {"messages": "w5"}, 400, "messages must be a list"),
        ("/pause?mode=retract", {}, 400, "mode must be one of"),
        ("/collective_rpc", {}, 400, "Missing 'method'"),
        ("/update_weight_version", {}, 400, "new_version must be a text"),
        ("/generate", {}, 404, "Not Found"),
    ],
)
def test_wrong_requests_are_refused(
    path: str, body: dict[str, Any], status: int, words: str
) -> None:
    """Wrong bodies, values and paths get the status of their kind and a text that explains it."""

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        reply = await client.post(path, json=body)
        return reply.status_code, reply.text

    code, text = converse_with(converse)
    assert status == code
    assert words in text
