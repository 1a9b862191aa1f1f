"""A rollout client over SGLang's HTTP: it resumes after aborts, repeats calls whose reply broke off, and reports its sample."""

from __future__ import annotations

import base64
import http.client
import json
import sys
import urllib.request
from typing import Any

import numpy as np

from rollproof import Request, Rollout
from rollproof.fakes.http.trace_client import Teller

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"


def call(body: dict[str, Any]) -> dict[str, Any]:
    """Make one call, and repeat it if its reply breaks off."""
    for _ in range(5):
        try:
            request = urllib.request.Request(
                f"{URL}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=10) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            print(f"{body['rid']}: {type(error).__name__}, called again")
    raise ConnectionError("five replies broke off, one after the other")


def rollout(request: Request) -> Rollout:
    """One sample, over as many calls as it takes; routes are ``(rows, layers, top_k)``, here 3 layers and 2 experts a token."""
    response: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    routes = np.empty((0, 3, 2), np.int32)
    reason = "abort"
    while reason == "abort":
        reply = call(
            {
                "rid": request.request_id,
                "input_ids": [*request.prompt_ids, *response],
                "sampling_params": {"max_new_tokens": (request.max_tokens or 0) - len(response)},
                "return_logprob": True,
                "return_routed_experts": True,
                "routed_experts_start_len": len(routes),  # only the rows that are not there yet
            }
        )
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        print(f"{request.request_id}: {len(reply['output_ids'])} tokens, {reason}")
        response += reply["output_ids"]
        logprobs += [one[0] for one in meta.get("output_token_logprobs", [])]
        versions += [
            span["version"]
            for span in meta["weight_versions"]
            for _ in range(span["start"], span["end"])
        ]
        if "routed_experts" in meta:
            new = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(
                -1, 3, 2
            )
            routes = np.concatenate([routes, new])
    return Rollout(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        response_ids=tuple(response),
        finish_reason=reason,
        logprobs=np.array(logprobs),
        routes=routes,
        token_versions=tuple(versions),
    )


if __name__ == "__main__":
    teller = Teller(URL)
    request = Request(request_id="r1", prompt_ids=(5, 6, 7, 8), max_tokens=8)
    teller.submit(request)  # before its first call
    teller.result(rollout(request))
