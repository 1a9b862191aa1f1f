"""``cache_salt`` and ``extra_key``: calls that differ in them share no prefix, as with vLLM 0.32
and SGLang 0.5.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.events.rollout import Call, Reply
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import Served, served

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
ENGINE = EngineOptions(max_batch=8, step=0.0, prefix_cache=True)


@pytest.fixture
def sglang() -> Iterator[Served]:
    with served(
        "sglang", ServeOptions(flavour="sglang", model=MODEL, engine=ENGINE, max_length=512)
    ) as server:
        yield server


@pytest.fixture
def vllm() -> Iterator[Served]:
    with served(
        "vllm", ServeOptions(flavour="vllm", model=MODEL, engine=ENGINE, max_length=512)
    ) as server:
        yield server


def _cached(server: Served) -> list[int | None]:
    """Of each reply, in order."""
    return [
        event.output.cached_tokens
        for event in server.backend.recorder.events
        if isinstance(event, Reply)
    ]


def _complete(vllm: Served, path: str, body: dict[str, Any]) -> None:
    text = {
        "max_tokens": 1,
        "prompt": [5, 6, 7, 8],
        "messages": [{"role": "user", "content": "w5 w6 w7 w8"}],
    }
    tokens = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 1}}
    assert (
        200
        == vllm.client.post(
            path, json={**(tokens if path.startswith("/inference") else text), **body}
        ).status_code
    )


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"]
)
def test_a_salt_parts_the_prefix_cache_of_vllm(vllm: Served, path: str) -> None:
    """A prompt hits the cache under its own salt only; a call without one shares with none that has
    one.
    """
    for body in ({}, {}, {"cache_salt": "1"}, {"cache_salt": "2"}, {"cache_salt": "1"}):
        _complete(vllm, path, body)
    first, again, first_salt, second_salt, first_salt_again = _cached(vllm)
    assert (0, 0, 0) == (first, first_salt, second_salt)
    assert again
    assert again == first_salt_again
    calls = [
        event.sampling.get("cache_salt")
        for event in vllm.backend.recorder.events
        if isinstance(event, Call)
    ]
    assert [None, None, "1", "2", "1"] == calls


def test_a_salt_of_each_version_keeps_stale_kv_out(vllm: Served) -> None:
    """What prime-rl salts for: weights that change without a flush leave KV of the old ones behind,
    under the salt of these alone.
    """
    for salt in ("0", "1"):
        body = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 1}, "cache_salt": salt}
        assert 200 == vllm.client.post("/inference/v1/generate", json=body).status_code
        vllm.do(lambda: vllm.backend.engine.load_now(1, "w1"))
    body["cache_salt"] = "0"
    assert 200 == vllm.client.post("/inference/v1/generate", json=body).status_code
    rows = [event.true_rows for event in vllm.backend.recorder.events if isinstance(event, Reply)]
    assert [[0], [1], [0, "mixed"]] == [[span.version for span in spans or ()] for spans in rows]


@pytest.mark.parametrize("wrong", ["", 5, "a/b", "a@b", "a\\b", "a\0b", "x" * 129])
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_salts_that_vllm_refuses(vllm: Served, path: str, wrong: Any) -> None:
    """The salt reaches cache backends that name files by it."""
    body = {"prompt": [5], "token_ids": [5], "sampling_params": {}, "cache_salt": wrong}
    reply = vllm.client.post(path, json=body)
    assert (400, "cache_salt") == (reply.status_code, reply.json()["error"]["param"])


def test_salts_and_keys_part_the_prefix_cache_of_sglang(sglang: Served) -> None:
    """``cache_salt`` and ``extra_key`` hold prompt by prompt, and an empty one is none."""

    def cached(**body: Any) -> list[int]:
        requests = {"input_ids": [[5, 6, 7, 8]], "sampling_params": {"max_new_tokens": 1}, **body}
        return [
            reply["meta_info"]["cached_tokens"]
            for reply in sglang.client.post("/generate", json=requests).json()
        ]

    assert [0] == cached()
    assert [0] == cached(cache_salt="a")
    assert [0] == cached(extra_key="a")
    assert [0] == cached(cache_salt="a", extra_key="a")
    three = {"input_ids": [[5, 6, 7, 8]] * 3}
    first, second, third = cached(**three, cache_salt=["a", "b", ""])
    assert (0, first) == (second, third)
    assert first
    assert [first] == cached(extra_key=["a"], cache_salt="")
    chat = {"messages": [{"role": "user", "content": "w5 w6 w7 w8"}], "max_tokens": 1}
    for more in ({}, {"cache_salt": "c"}, {"cache_salt": "c"}):
        assert 200 == sglang.client.post("/v1/chat/completions", json={**chat, **more}).status_code
    assert [True, False, True] == [bool(count) for count in _cached(sglang)[-3:]]


@pytest.mark.parametrize("wrong", [{"extra_key": ["a"]}, {"extra_key": 5}, {"cache_salt": ["a"]}])
def test_salts_that_sglang_refuses(sglang: Served, wrong: dict[str, Any]) -> None:
    """One prompt has one text."""
    assert 400 == sglang.client.post("/generate", json={"input_ids": [5], **wrong}).status_code
    batch = {"input_ids": [[5], [6]], "extra_key": ["a"]}
    assert 400 == sglang.client.post("/generate", json=batch).status_code
