"""Replies of a server that may say anything: read, or refused with what is wrong with them."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import orjson
import pytest

from rollproof.contracts.presets import contract_of
from rollproof.core.contract import Contract
from rollproof.recording.wire.sampling_calls import SamplingRequest, read_request
from rollproof.recording.wire.sampling_replies import (
    PartialOutput,
    UnreadableReply,
    outputs_of,
    streamed_outputs,
)

CONTRACT = replace(
    contract_of("slime", engine="sglang"),
    num_layers=1,
    moe_layers=(0,),
    num_experts=8,
    top_k=2,
)
SGLANG = read_request(
    "sglang",
    {"input_ids": [7], "return_logprob": True, "return_routed_experts": True},
    {},
)
VLLM = read_request("completions", {"prompt": [7], "logprobs": 1}, {})


def _sglang(**meta: Any) -> bytes:
    return orjson.dumps({"output_ids": [5], "meta_info": {"finish_reason": "length", **meta}})


def _choice(**choice: Any) -> bytes:
    return orjson.dumps({"choices": [{"token_ids": [5], "finish_reason": "length", **choice}]})


def _read(request: SamplingRequest, reply: bytes, contract: Contract | None = CONTRACT) -> Any:
    (partial,) = outputs_of(request, reply)
    return partial.output(request.calls[0], contract)


def _npy(header: str, data: bytes = b"") -> str:
    text = header.encode()
    return base64.b64encode(
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data
    ).decode()


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (SGLANG, _sglang(output_token_logprobs=[{}])),
        (SGLANG, _sglang(output_token_logprobs=[[]])),
        (VLLM, _choice(delta=[1])),
        (VLLM, _choice(message="w5")),
        (VLLM, _choice(meta_info=[1])),
        (VLLM, _choice(logprobs={"tokens": ["token_id:" + "9" * 5000]})),
    ],
)
def test_a_part_of_another_type_says_nothing(request_: SamplingRequest, reply: bytes) -> None:
    """The tokens of the reply are still read."""
    assert (5,) == _read(request_, reply).token_ids


@pytest.mark.parametrize(
    ("request_", "event"),
    [
        (SGLANG, {"index": "a", "meta_info": {}}),
        (SGLANG, {"index": None}),
        (SGLANG, {"index": [0]}),
        (VLLM, {"choices": [{"index": 0.5}]}),
        (VLLM, {"choices": [[]]}),
    ],
)
def test_a_place_of_another_type_is_refused(request_: SamplingRequest, event: Any) -> None:
    """It cannot be said whose sample such an event is about."""
    with pytest.raises(UnreadableReply, match="than were requested"):
        streamed_outputs(request_, [orjson.dumps(event)])


def test_a_label_is_a_number_or_a_text() -> None:
    """JSON's true is neither, although Python counts with it, and no trace can hold it."""
    spans = [{"start": 0, "end": 1, "version": True}]
    output = _read(SGLANG, _sglang(weight_version=True, weight_versions=spans))

    assert (None, [None]) == (output.version, [span.version for span in output.spans])


@pytest.mark.parametrize(
    ("routes", "dtype", "message"),
    [
        ("AAE=", "({", "is no type of whole numbers"),
        ("AAE=", "object", "is no type of whole numbers"),
        ("AAE=", "float16", "is no type of whole numbers"),
        ("AAE=", "uint8,uint8", "is no type of whole numbers"),
        ("!!", "uint8", "cannot be read"),
        ([[1e300]], "uint8", "cannot be read"),
        ([[["a"]]], "uint8", "cannot be read"),
        ({"shape": [10**12], "dtype": "uint8", "data": ""}, "uint8", "cannot be read"),
        ({"shape": "a", "dtype": "uint8", "data": "AAE="}, "uint8", "cannot be read"),
        ({"shape": [2], "dtype": {"names": []}, "data": "AAE="}, "uint8", "no type of whole"),
        (
            {"shape": [2], "dtype": "uint8", "data": "AAE="},
            "uint8",
            "routes must be integers",
        ),
        (_npy("{'descr': '|u1', 'fortran_order': False, 'shape': (10**12, 1, 2), }"), "", ".npy"),
        (
            _npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 1, 2), }"),
            "",
            "cannot be read",
        ),
        (_npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"0" * 8), "", "'|O'"),
        (_npy("(" * 300), "", "it is no .npy file"),
    ],
)
def test_routes_that_are_none_are_refused(routes: Any, dtype: str, message: str) -> None:
    """Whatever a server calls routes: it is an array of whole numbers with three axes."""
    reply = _sglang(routed_experts=routes, routed_experts_dtype=dtype)
    with pytest.raises(UnreadableReply, match=message):
        _read(SGLANG, reply)


def test_routes_keep_their_order_and_bytes() -> None:
    """A .npy file may be in the order of Fortran, and say that its numbers are big-endian."""
    header = "{'descr': '>u2', 'fortran_order': True, 'shape': (1, 1, 2), }"
    reply = _sglang(routed_experts=_npy(header, b"\x00\x01\x00\x02"))

    assert [[[1, 2]]] == _read(SGLANG, reply).routes.tolist()


def test_a_partial_output_is_refused_with_its_trouble() -> None:
    """Nothing may be concluded from it."""
    with pytest.raises(UnreadableReply, match="no tokens"):
        PartialOutput(trouble="no tokens").output(SGLANG.calls[0], None)


def _masks(output: Any) -> list[tuple[int, ...]] | None:
    mask = output.sampling_mask
    return None if mask is None else [mask.ids_of(i) for i in range(len(mask))]


@pytest.mark.parametrize(
    ("request_", "reply", "masks"),
    [
        (SGLANG, _sglang(output_token_sampling_mask=[[9, 5]]), [(5, 9)]),
        (SGLANG, _sglang(), None),
        # of which token it is, nobody knows
        (SGLANG, _sglang(output_token_sampling_mask=[[9, 5], [1]]), None),
        (VLLM, _choice(sampling_mask={"token_ids": [9, 5], "offsets": [0, 2]}), [(5, 9)]),
        (VLLM, _choice(sampling_mask=None), None),
        (VLLM, _choice(meta_info={"output_token_sampling_mask": [[9, 5]]}), [(5, 9)]),
    ],
)
def test_sampling_masks_are_read_in_the_form_of_each_server(
    request_: SamplingRequest, reply: bytes, masks: Any
) -> None:
    """Lists by token (SGLang), ids with offsets (vLLM), or none."""
    assert masks == _masks(_read(request_, reply))


@pytest.mark.parametrize(
    "mask",
    [
        {"token_ids": [9, 5], "offsets": [0, 3]},
        {"token_ids": [9, 5], "offsets": [0, 2, 1]},
        {"token_ids": [9, 5], "offsets": [1, 2]},
        {"token_ids": "95", "offsets": [0, 2]},
        {},
        "95",
        5,
        [["a"]],
        [5],
    ],
)
def test_sampling_masks_of_another_form_are_refused(mask: Any) -> None:
    """The error says that the masks cannot be read."""
    with pytest.raises(UnreadableReply, match="sampling masks"):
        _read(VLLM, _choice(sampling_mask=mask))


def test_events_of_a_stream_join_their_sampling_masks() -> None:
    """SGLang repeats those of all tokens so far, or sends the new ones; vLLM sends the new ones."""

    def event(tokens: list[int], masks: list[list[int]], count: int) -> bytes:
        meta = {"completion_tokens": count, "output_token_sampling_mask": masks}
        return orjson.dumps({"output_ids": tokens, "meta_info": meta})

    expected = [(5,), (6, 9)]
    for events in (
        [event([5], [[5]], 1), event([5, 6], [[5], [6, 9]], 2)],
        [event([5], [[5]], 1), event([6], [[6, 9]], 2)],
    ):
        (partial,) = streamed_outputs(SGLANG, events)
        assert expected == _masks(partial.output(SGLANG.calls[0], CONTRACT))
    parts = (([5], [0, 1]), ([6, 9], [0, 2]))
    chunks = [
        orjson.dumps(
            {
                "choices": [
                    {"token_ids": ids[:1], "sampling_mask": {"token_ids": ids, "offsets": at}}
                ]
            }
        )
        for ids, at in parts
    ]
    (partial,) = streamed_outputs(VLLM, chunks)
    assert expected == _masks(partial.output(VLLM.calls[0], CONTRACT))


def test_a_call_says_that_it_requests_sampling_masks() -> None:
    """A check must not say that it did not."""
    body = {"input_ids": [7], "return_sampling_mask": True}
    assert [True] == [call.sampling_mask for call in read_request("sglang", body, {}).calls]
    assert [False] == [call.sampling_mask for call in SGLANG.calls]
