"""Routes in each form that servers send, read back to what the engine computed; and the private
endpoints of the stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.routes_encoding import from_described, from_flat, from_npy
from rollproof.fakes.http.serve_options import RoutesForm, ServeOptions
from tests.fakes.http.served import Served, served

PROMPT = [5, 6, 7, 8]


def options(server_kind: str, experts: int, **others: Any) -> ServeOptions:
    model = Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=experts, top_k=3, vocab=1000)
    return ServeOptions(
        flavour=server_kind, model=model, engine=EngineOptions(step=0.001), **others
    )


def expected(server: Served, tokens: list[int], start: int) -> Any:
    ids = [*PROMPT, *tokens]
    return server.do(
        lambda: server.backend.policy.routes_spans([(0, len(ids) - 1, 0)], ids, start, len(ids) - 1)
    )


def sglang(server: Served, start: int) -> tuple[list[int], dict[str, Any]]:
    body = {
        "input_ids": PROMPT,
        "return_routed_experts": True,
        "routed_experts_start_len": start,
        "sampling_params": {"max_new_tokens": 5},
    }
    reply = server.client.post("/generate", json=body).json()
    return reply["output_ids"], reply["meta_info"]


def vllm(server: Served, start: int, path: str = "/inference/v1/generate") -> tuple[list[int], Any]:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 5, "logprobs": 0, "routed_experts_prompt_start": start},
    }
    (choice,) = server.client.post(path, json=body).json()["choices"]
    return choice["token_ids"], choice["routed_experts"]


@pytest.mark.parametrize("experts", [8, 200, 256, 257, 60_000])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize(
    ("form", "names"), [(None, ("int32",)), (RoutesForm.COMPACT, ("uint8", "uint16"))]
)
def test_sglang_sends_flat_bytes_and_names_a_type_that_is_not_int32(
    experts: int, start: int, form: RoutesForm | None, names: tuple[str, ...]
) -> None:
    """Little-endian, without a shape; the compact type is the smallest that the ids of the reply
    need.
    """
    with served("sglang", options("sglang", experts, routes=form)) as server:
        tokens, meta = sglang(server, start)
        name = meta.get("routed_experts_dtype", "int32")
        rows = from_flat(meta["routed_experts"], 4, 3, name)
        np.testing.assert_array_equal(expected(server, tokens, start), rows)
    assert name in names
    assert (name == "uint16") == (form is RoutesForm.COMPACT and int(rows.max()) > 255)


FORMS: tuple[tuple[str, dict[str, Any], str, Callable[[Any], Any]], ...] = (
    ("vLLM's file", {}, "/inference/v1/generate", from_npy),
    (
        "prime-rl's object",
        {"routes": RoutesForm.DESCRIBED},
        "/inference/v1/generate",
        from_described,
    ),
    ("SkyRL's object", {}, "/skyrl/v1/generate", from_described),
    ("SkyRL 0.3's lists", {"nested_routes": True}, "/skyrl/v1/generate", np.array),
)


@pytest.mark.parametrize(("form", "others", "path", "read"), FORMS, ids=[form[0] for form in FORMS])
@pytest.mark.parametrize("start", [0, 2])
def test_vllm_and_the_stacks_on_it_send_shape_and_type(
    form: str, others: dict[str, Any], path: str, read: Callable[[Any], Any], start: int
) -> None:
    """Each form holds the same rows; prime-rl's says where they start."""
    with served("vllm", options("vllm", 300, **others)) as server:
        tokens, routes = vllm(server, start, path)
        np.testing.assert_array_equal(expected(server, tokens, start), read(routes))
    if form.startswith("prime-rl"):
        assert ["data", "shape", "dtype", "start"] == list(routes)
        assert start == routes["start"]
    if form == "SkyRL's object":
        assert ["data", "shape", "dtype"] == list(routes)


def test_areals_endpoints_abort_load_and_resume() -> None:
    """A pause ends what runs and lets nothing begin; an update is a pause, a load and a resume; the
    label is AReaL's own affair.
    """
    with served("vllm", options("vllm", 8)) as server:
        before = server.client.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
        ).json()
        for path in (
            "/areal_pause_generation",
            "/areal_set_update_weight_meta",
            "/areal_init_weights_update_group",
        ):
            assert server.client.post(path, json={}).json()["success"]
        assert {"is_paused": True} == server.client.get("/is_paused").json()
        assert server.client.post("/areal_update_weights", json={"model_path": "step-1"}).json()[
            "success"
        ]
        assert {"is_paused": False} == server.client.get("/is_paused").json()
        assert server.client.post("/areal_continue_generation").json()["success"]
        after = server.client.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
        ).json()
        assert {"weight_version": "default"} == server.client.get("/weight_info").json()
    assert before["choices"][0]["token_ids"] != after["choices"][0]["token_ids"]


def test_prime_rls_update_names_a_folder() -> None:
    """``weight_dir`` at the top of the body; the same folder again is the same weights."""
    with served("vllm", options("vllm", 8)) as server:
        assert {"status": "ok"} == server.client.post(
            "/update_weights", json={"weight_dir": "step-1"}
        ).json()
        assert 1 == server.do(lambda: server.backend.engine.version)
        server.client.post("/update_weights", json={"weight_dir": "step-2"})
        server.client.post("/update_weights", json={"weight_dir": "step-1"})
        assert 1 == server.do(lambda: server.backend.engine.version)
