"""The test file for an HTTP client: fake servers, a contract with the reason of every field, and a
stand-in that makes it pass until one's own client is in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollproof.contracts.presets import Promise
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.starters.rollouts import contract_source

__all__ = ["HTTP_ENGINES", "http_file"]

_SGLANG = """\
    body = {
        "input_ids": [*prompt_ids, *tokens],
        "sampling_params": {"max_new_tokens": max_tokens - len(tokens)},
        "return_logprob": True,
    }
    reply = post(f"{url}/generate", body)
    meta = reply["meta_info"]
    entries = meta["output_token_logprobs"]
    return reply["output_ids"], [entry[0] for entry in entries], meta["finish_reason"]["type"]
"""
_VLLM = """\
    body = {
        "token_ids": [*prompt_ids, *tokens],
        "sampling_params": {"max_tokens": max_tokens - len(tokens), "logprobs": 0},
    }
    (choice,) = post(f"{url}/inference/v1/generate", body)["choices"]
    entries = choice["logprobs"]["content"]
    return choice["token_ids"], [entry["logprob"] for entry in entries], choice["finish_reason"]
"""
_CALLS: Mapping[str, str] = MappingProxyType({"sglang": _SGLANG, "vllm": _VLLM})
HTTP_ENGINES = tuple(_CALLS)
"""The engines whose HTTP a written client speaks."""

_FILE = '''\
"""Does our HTTP client return what the engine sampled? rollproof serves a fake {engine}, aborts
calls and breaks connections, and compares what the client returns with what was sampled.

Run it with `pytest {file}`. It passes as it is, because a stand-in makes the samples:
put your own client in its place, at the marks (1) to (3).
"""

import http.client
import json
import urllib.request

import rollproof
from rollproof.http_clients import headers, rollout

# (1) What a sample promises its trainer. `rollproof contract fields` lists all values, also
# those for routed experts and for tags of weight versions.
CONTRACT = {contract}

# What happens to the rollouts, which are r1, r2, ... in the order of their first calls.
PLAN = {{
    "actions": [
        {{"do": "abort", "when": {{"request": "r1", "tokens": 2}}}},
        {{"do": "lose-reply", "when": {{"request": "r2", "tokens": 3}}}},
        {{"do": "sync", "when": {{"request": "r3", "tokens": 2}}}},  # new weights
    ],
}}


def post(url, body):
    # (2) Your HTTP client, with a hook of rollproof.http_clients in the place of
    # `headers(url)`: it says in which rollout a call is made. For instance
    #   httpx.Client(event_hooks=httpx_hooks())
    #   openai.OpenAI(http_client=openai_http_client())
    #   session.mount("http://", requests_adapter())
    #   aiohttp.ClientSession(trace_configs=[aiohttp_trace()])
    sent = {{"content-type": "application/json", **headers(url)}}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def call(url, prompt_ids, tokens, max_tokens):
    """Return the tokens of one call, their logprobs, and why it ended."""
{call}

@rollout  # (3) Your function that makes one sample, sync or async: what it returns is judged.
def generate(url, prompt_ids, max_tokens):
    tokens, logprobs, reason = [], [], "abort"
    while reason == "abort":
        try:
            new, scores, reason = call(url, prompt_ids, tokens, max_tokens)
        except (OSError, http.client.HTTPException):
            continue  # the reply was lost: call again
        tokens += new
        logprobs += scores
    # Fields of rollproof.Rollout; @rollout(to_record=...) reads another form.
    return {{
        "prompt_ids": prompt_ids,
        "response_ids": tokens,
        "logprobs": logprobs,
        "finish_reason": reason,
    }}


def test_our_client(rollproof_{engine}):
    fleet = rollproof_{engine}(CONTRACT, plan=PLAN)  # judged when the test ends
    for first in range(4):
        generate(fleet.url, [first, 11, 12], max_tokens=8)
'''


def http_file(engine: str, *, path: str) -> str:
    """Return the source of the test file.

    Args:
        engine: One of ``HTTP_ENGINES``.
        path: The path of the file, for the commands in its comments.
    """
    promises = {
        "rows": Promise("none", "no routed experts are recorded"),
        "resume": Promise("client", "an aborted call is sent again, with the tokens so far"),
        "versions": Promise("none", "a sample has no tag of the weights"),
        "logprobs": Promise(str(FLAVOURS[engine].logprobs), f"what {engine} returns by default"),
        "abort_surfaces": Promise(False, "no sample ends with an abort"),
        "kv_policy": Promise("recompute", "what is resumed after an update is prefilled again"),
    }
    return _FILE.format(
        file=path, engine=engine, contract=contract_source(promises), call=_CALLS[engine]
    )
