"""A rollout client over SGLang's HTTP: it resumes after aborts, and repeats calls whose reply broke off."""

from __future__ import annotations

import base64
import os
from typing import Any

import httpx
import numpy as np

from rollproof.http_clients import httpx_hooks, rollout

client = httpx.Client(event_hooks=httpx_hooks())


def call(body: dict[str, Any]) -> dict[str, Any]:
    """Make one call, and repeat it if its reply breaks off."""
    for _ in range(5):
        try:
            url = os.environ["ROLLPROOF_URL"]  # where the fake servers are
            reply: dict[str, Any] = client.post(f"{url}/generate", json=body).json()
            return reply
        except httpx.TransportError as error:
            print(f"{type(error).__name__}, called again")
    raise ConnectionError("five replies broke off, one after the other")


@rollout  # each call of this function is one request, and what it returns is the sample
def generate(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Make one sample, over as many calls as it takes, of a model with 3 layers and 2 experts a token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    routes = np.empty((0, 3, 2), np.int32)
    reason = "abort"
    while reason == "abort":
        reply = call(
            {
                "input_ids": [*prompt_ids, *tokens],
                "sampling_params": {"max_new_tokens": max_tokens - len(tokens)},
                "return_logprob": True,
                "return_routed_experts": True,
                "routed_experts_start_len": len(routes),  # only the rows that are not there yet
            }
        )
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        print(f"{len(reply['output_ids'])} tokens, {reason}")
        tokens += reply["output_ids"]
        logprobs += [one[0] for one in meta["output_token_logprobs"]]
        new = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        routes = np.concatenate([routes, new.reshape(-1, 3, 2)])
    return {
        "prompt_ids": prompt_ids,
        "response_ids": tokens,
        "finish_reason": reason,
        "logprobs": logprobs,
        "routes": routes,
    }


if __name__ == "__main__":
    generate([5, 6, 7, 8], max_tokens=8)
