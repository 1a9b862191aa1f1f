"""Odd but legal requests of batches and echoes, and sampling parameters out of range: as SGLang
0.5.21 and vLLM 0.32 take them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import Served, served

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
ENGINE = EngineOptions(max_batch=8, step=0.0, prefix_cache=False)
TWO = [[5, 6, 7], [9, 10]]


@pytest.fixture(scope="module")
def sglang() -> Iterator[Served]:
    with served(
        "sglang", ServeOptions(flavour="sglang", model=MODEL, engine=ENGINE, max_length=512)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def vllm() -> Iterator[Served]:
    with served(
        "vllm", ServeOptions(flavour="vllm", model=MODEL, engine=ENGINE, max_length=512)
    ) as server:
        yield server


def test_each_prompt_of_a_batch_has_its_own_parameters(sglang: Served) -> None:
    """Lists of sampling parameters and of logprob options apply prompt by prompt, several
    samples of one lie together.
    """
    lists = {
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        "return_logprob": [True, False],
        "logprob_start_len": [0, -1],
        "top_logprobs_num": [1, 0],
    }
    one_reply, other_reply = sglang.client.post(
        "/generate", json={"input_ids": TWO, "rid": ["a", "b"], **lists}
    ).json()
    assert ("a", 2, 3) == (
        one_reply["meta_info"]["id"],
        len(one_reply["output_ids"]),
        len(one_reply["meta_info"]["input_token_logprobs"]),
    )
    assert 2 == len(one_reply["meta_info"]["output_top_logprobs"])
    assert ("b", 3, False) == (
        other_reply["meta_info"]["id"],
        len(other_reply["output_ids"]),
        "output_token_logprobs" in other_reply["meta_info"],
    )
    several = [{"max_new_tokens": 1, "n": 2}, {"max_new_tokens": 2, "n": 2}]
    replies = sglang.client.post(
        "/generate", json={"text": ["w5", "w6"], "sampling_params": several}
    ).json()
    assert [1, 1, 2, 2] == [len(reply["output_ids"]) for reply in replies]


def test_text_counts_where_a_request_has_ids_too(sglang: Served) -> None:
    """SGLang takes the text then."""
    both = {"text": "w5 w6", "input_ids": [7], "sampling_params": {"max_new_tokens": 1}}
    assert 2 == sglang.client.post("/generate", json=both).json()["meta_info"]["prompt_tokens"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling_params": [{"max_new_tokens": 2}]},
        {"sampling_params": [{"n": 1}, {"n": 2}]},
        {"return_logprob": [True]},
        {"return_logprob": [1, 0]},
        {"input_ids": [5], "sampling_params": [{}]},
        {"input_ids": [], "text": []},
        {"sampling_params": {"top_k": 0}},
        {"sampling_params": {"min_p": 1.5}},
        {"sampling_params": {"frequency_penalty": -3}},
        {"sampling_params": {"repetition_penalty": 0}},
        {"sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}},
        {"sampling_params": [{}, {"top_p": 0}]},
    ],
)
def test_sglang_refuses_values_out_of_range(sglang: Served, wrong: dict[str, Any]) -> None:
    """Lists of another length than the batch, and values out of the ranges of
    ``SamplingParams.verify``.
    """
    assert 400 == sglang.client.post("/generate", json={"input_ids": TWO, **wrong}).status_code


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "high"}, "top_p"),
        ({"top_k": -5}, None),
        ({"min_p": 2}, None),
        ({"presence_penalty": 3}, None),
        ({"repetition_penalty": 0}, None),
        ({"min_tokens": 5}, None),
        ({"n": 2, "temperature": 0}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_vllm_refuses_values_out_of_range(
    vllm: Served, wrong: dict[str, Any], param: str | None
) -> None:
    """Values out of the ranges of ``SamplingParams``, and fields of a request that do not go
    together, named where vLLM names them.
    """
    reply = vllm.client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2, **wrong})
    assert (400, param) == (reply.status_code, reply.json()["error"]["param"])


@pytest.mark.parametrize(
    "odd",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"temperature": 0},
        {"min_tokens": 2},
        {"top_logprobs": 0},
        {"cache_salt": "3"},
        {"stream_options": {}},
    ],
)
def test_vllm_accepts_odd_values(vllm: Served, odd: dict[str, Any]) -> None:
    """The edges of the ranges."""
    assert (
        200
        == vllm.client.post(
            "/v1/completions", json={"prompt": [5, 6], "max_tokens": 2, **odd}
        ).status_code
    )


def test_an_echo_alone_scores_its_prompt(vllm: Served) -> None:
    """``echo`` with ``max_tokens`` of 0: the prompt's words and logprobs, and nothing that was
    sampled.
    """
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = vllm.client.post("/v1/completions", json=body).json()["choices"]
    assert ("w5 w6 w7", ["w5", "w6", "w7"]) == (choice["text"], choice["logprobs"]["tokens"])
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert all(value < 0 for value in others)
