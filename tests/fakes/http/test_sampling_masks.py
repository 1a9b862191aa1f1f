"""``return_sampling_mask`` of the fake SGLang server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from rollproof.core.events.rollout import Call, Reply
from rollproof.core.sampling_masks import SamplingMask
from tests.fakes.http.served import Served, served


@pytest.fixture(scope="module")
def sglang() -> Iterator[Served]:
    with served("sglang") as server:
        yield server


def _ask(server: Served, sampling: dict[str, Any], **body: Any) -> Any:
    parameters = {"max_new_tokens": 5, **sampling}
    return server.client.post(
        "/generate", json={"input_ids": [5, 6], "sampling_params": parameters, **body}
    )


def test_meta_info_has_the_ids_of_each_token(sglang: Served) -> None:
    """As lists that hold the token, next to its logprob among them."""
    reply = _ask(sglang, {"top_k": 20, "top_p": 0.9}, return_sampling_mask=True).json()
    meta = reply["meta_info"]
    masks = meta["output_token_sampling_mask"]
    assert 5 == len(masks) == len(reply["output_ids"])
    assert all(token in ids for token, ids in zip(reply["output_ids"], masks, strict=True))
    assert [-math.log(len(ids)) for ids in masks] == meta["output_token_sampling_logprobs"]
    call, answer = (
        [event for event in sglang.backend.recorder.events if isinstance(event, kind)][-1]
        for kind in (Call, Reply)
    )
    assert call.want_sampling_mask
    assert answer.output.sampling_mask.equal(SamplingMask.from_lists(masks)).all()


def test_greedy_masks_are_singletons(sglang: Served) -> None:
    """A greedy call needs no top_k."""
    reply = _ask(sglang, {"temperature": 0}, return_sampling_mask=True).json()
    masks = reply["meta_info"]["output_token_sampling_mask"]
    assert [[token] for token in reply["output_ids"]] == masks


def test_replies_have_masks_only_if_they_are_requested(sglang: Served) -> None:
    """A call that does not request them gets the reply that it always got."""
    assert "output_token_sampling_mask" not in _ask(sglang, {"top_k": 20}).json()["meta_info"]


@pytest.mark.parametrize(
    ("sampling", "body", "problem"),
    [
        ({"top_p": 0.9}, {}, "return_sampling_mask requires a finite top_k"),
        ({"top_k": 20}, {"stream": True}, "not supported by rollproof's fake server for a stream"),
        ({"top_k": 20}, {"return_sampling_mask": "yes"}, "return_sampling_mask"),
    ],
)
def test_masks_that_cannot_be_returned_are_refused(
    sglang: Served, sampling: dict[str, Any], body: dict[str, Any], problem: str
) -> None:
    """top_p alone does not bound a mask (sglang#35205). Errors of a stream are its events."""
    reply = _ask(sglang, sampling, **{"return_sampling_mask": True, **body})
    assert (200 if "stream" in body else 400) == reply.status_code
    assert problem in reply.text
