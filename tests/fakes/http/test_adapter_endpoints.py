"""Adapters of the fake servers: as vLLM 0.32 and SGLang 0.5.21 load, name, refuse and list them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollproof.core.case import Model
from rollproof.core.events.rollout import Call, Reply
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import Served, served

MODEL = Model(vocab=512)


@pytest.fixture
def vllm() -> Iterator[Served]:
    with served("vllm", ServeOptions(flavour="vllm", model=MODEL)) as server:
        yield server


@pytest.fixture
def sglang() -> Iterator[Served]:
    with served("sglang", ServeOptions(flavour="sglang", model=MODEL)) as server:
        yield server


def _post(server: Served, path: str, **body: object) -> tuple[int, str]:
    reply = server.client.post(path, json=body)
    return reply.status_code, reply.text


def _sampled_by(server: Served) -> list[tuple[str | None, int | str | None]]:
    """The adapter that each call named, and the weights that sampled it."""
    events = server.backend.recorder.events
    named = {event.call_id: event.adapter for event in events if isinstance(event, Call)}
    return [
        (named[event.call_id], event.true_tokens[0].version)
        for event in events
        if isinstance(event, Reply) and event.true_tokens
    ]


def _complete(server: Served, model: str) -> tuple[int, str]:
    return _post(server, "/v1/completions", model=model, prompt=[5, 6], max_tokens=1)


def test_vllm_serves_an_adapter_by_the_name_of_a_model(vllm: Served) -> None:
    """``/v1/load_lora_adapter`` adds it to the models; any other name is the base model's."""
    load = _post(vllm, "/v1/load_lora_adapter", lora_name="policy", lora_path="/a/1")
    assert (200, "Success: LoRA adapter 'policy' added successfully.") == load
    assert [200, 200] == [_complete(vllm, name)[0] for name in ("policy", "base")]
    assert [("policy", 1), (None, 0)] == _sampled_by(vllm)
    models = vllm.client.get("/v1/models").json()["data"]
    assert [("fake", None), ("policy", "fake")] == [
        (model["id"], model["parent"]) for model in models
    ]
    tokens = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}, "model": "policy"}
    assert 200 == _post(vllm, "/inference/v1/generate", **tokens)[0]
    assert ("policy", 1) == _sampled_by(vllm)[-1]


def test_vllm_refuses_a_name_in_use_unless_in_place(vllm: Served) -> None:
    """With ``load_inplace`` the next call has the new adapter."""
    _post(vllm, "/v1/load_lora_adapter", lora_name="policy", lora_path="/a/1")
    status, text = _post(vllm, "/v1/load_lora_adapter", lora_name="policy", lora_path="/a/2")
    assert 400 == status
    assert "'policy' has already been loaded" in text and "load_inplace" in text
    body = {"lora_name": "policy", "lora_path": "/a/2", "load_inplace": True}
    assert 200 == _post(vllm, "/v1/load_lora_adapter", **body)[0]
    _complete(vllm, "policy")
    assert [("policy", 2)] == _sampled_by(vllm)


def test_vllm_forgets_an_adapter(vllm: Served) -> None:
    """Calls and a second unload get 404."""
    _post(vllm, "/v1/load_lora_adapter", lora_name="policy", lora_path="/a/1")
    unload = _post(vllm, "/v1/unload_lora_adapter", lora_name="policy")
    assert (200, "Success: LoRA adapter 'policy' removed successfully.") == unload
    status, text = _complete(vllm, "policy")
    assert 404 == status and "The model `policy` does not exist." in text
    status, text = _post(vllm, "/v1/unload_lora_adapter", lora_name="policy")
    assert 404 == status and "'policy' cannot be found" in text


@pytest.mark.parametrize("body", [{}, {"lora_name": "policy"}, {"lora_path": "/a/1"}])
def test_vllm_needs_a_name_and_a_path(vllm: Served, body: dict[str, object]) -> None:
    """A load without one of them is refused, and so is an unload without a name."""
    status, text = _post(vllm, "/v1/load_lora_adapter", **body)
    assert 400 == status and "Both 'lora_name' and 'lora_path' must be provided." in text
    assert 400 == _post(vllm, "/v1/unload_lora_adapter")[0]


@pytest.mark.parametrize("path", ["/skyrl/v1/load_lora_adapter", "/load_lora_adapter"])
def test_stacks_replace_an_adapter_in_place(vllm: Served, path: str) -> None:
    """SkyRL's and prime-rl's own endpoints do."""
    for number in (1, 2):
        assert 200 == _post(vllm, path, lora_name="policy", lora_path=f"/a/{number}")[0]
    _complete(vllm, "policy")
    assert [("policy", 2)] == _sampled_by(vllm)


def test_sglang_serves_an_adapter_by_its_path_field(sglang: Served) -> None:
    """``lora_path`` names it, one for all prompts of a batch or one for each; "" is none."""
    status, text = _post(sglang, "/load_lora_adapter", lora_name="policy", lora_path="/a/1")
    assert 200 == status
    assert '"success":true' in text and '"loaded_adapters":{"policy":"/a/1"}' in text
    call = {"sampling_params": {"max_new_tokens": 1}}
    _post(sglang, "/generate", input_ids=[5, 6], lora_path="policy", **call)
    lists = {"input_ids": [[5, 6], [5, 7]], "lora_path": ["policy", ""]}
    assert 200 == _post(sglang, "/generate", **lists, **call)[0]
    assert [("policy", 1), ("policy", 1), (None, 0)] == sorted(_sampled_by(sglang), key=str)


def test_sglang_refuses_what_it_does_not_have_and_what_it_has(sglang: Served) -> None:
    """A call by an unknown adapter, a second load of a name, an unload of an unknown one."""
    call = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    status, text = _post(sglang, "/generate", lora_path="policy", **call)
    assert 400 == status and "LoRA adapters are not loaded: policy" in text
    _post(sglang, "/load_lora_adapter", lora_name="policy", lora_path="/a/1")
    status, text = _post(sglang, "/load_lora_adapter", lora_name="policy", lora_path="/a/2")
    assert 400 == status and '"success":false' in text and "already loaded" in text
    assert 200 == _post(sglang, "/unload_lora_adapter", lora_name="policy")[0]
    assert 400 == _post(sglang, "/unload_lora_adapter", lora_name="policy")[0]
    assert 400 == _post(sglang, "/load_lora_adapter", lora_name="policy")[0]
