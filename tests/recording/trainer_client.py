"""A rollout client over HTTP as a trainer has it, correct or with one fault."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np

from rollproof.core.contract import Contract
from rollproof.http_clients import httpx_hooks, rollout

__all__ = ["SGLANG", "VLLM", "Trainer"]

_SIZES: dict[str, Any] = {
    "num_layers": 3,
    "moe_layers": (0, 1, 2),
    "num_experts": 8,
    "top_k": 2,
    "layer_axis": "all",
    "filler": "none",
    "provenance": "as-sampled",
    "rows": "T-1",
}
SGLANG = Contract(
    **_SIZES,
    dtype="int32",
    resume="client",
    abort_surfaces=False,
    versions="token",
    logprobs="temperature-scaled",
    kv_policy="recompute",
)
VLLM = Contract(
    **_SIZES,
    dtype="uint8",
    resume="client",
    abort_surfaces=False,
    versions="token",
    logprobs="raw",
    kv_policy="recompute",
)


class Trainer:
    """Makes samples through the server at ``url``, and updates its weights.

    Args:
        url: the address to call.
        fault: ``""``, ``"routes twice"``, ``"stale tag"`` or ``"token lost"``.
        stream: whether replies are streamed.
    """

    def __init__(self, url: str, *, fault: str = "", stream: bool = False) -> None:
        self.url, self.fault, self.stream = url, fault, stream
        self.client = httpx.Client(event_hooks=httpx_hooks(), timeout=30, trust_env=False)
        self.control = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def close(self) -> None:
        self.client.close()
        self.control.close()

    def generate_sglang(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Make one sample over SGLang's own endpoint."""

        def call(
            tokens: list[int], rows: int
        ) -> tuple[list[int], str, list[float], Any, list[Any]]:
            body = {
                "input_ids": [*prompt_ids, *tokens],
                "sampling_params": {"max_new_tokens": max_tokens - len(tokens)},
                "return_logprob": True,
                "return_routed_experts": True,
                "routed_experts_start_len": rows,
                "stream": self.stream,
            }
            *_, reply = self._replies("/generate", body)
            meta = reply["meta_info"]
            raw = base64.b64decode(meta["routed_experts"]) if "routed_experts" in meta else b""
            routes = np.frombuffer(raw, np.int32).reshape(-1, 3, 2)
            logprobs = [pair[0] for pair in meta["output_token_logprobs"]]
            versions = _spread(meta["weight_versions"], len(logprobs))
            return reply["output_ids"], meta["finish_reason"]["type"], logprobs, routes, versions

        return self._generate(call, prompt_ids)

    def generate_vllm(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Make one sample over vLLM's own endpoint."""

        def call(
            tokens: list[int], rows: int
        ) -> tuple[list[int], str, list[float], Any, list[Any]]:
            body = {
                "token_ids": [*prompt_ids, *tokens],
                "sampling_params": {
                    "max_tokens": max_tokens - len(tokens),
                    "logprobs": 0,
                    "routed_experts_prompt_start": rows,
                },
                "stream": self.stream,
            }
            ids: list[int] = []
            logprobs: list[float] = []
            for reply in self._replies("/inference/v1/generate", body):
                (choice,) = reply["choices"]
                ids += choice["token_ids"]
                logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            routes = None
            if choice["routed_experts"] is not None:
                routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
            versions = _spread(choice["weight_versions"], len(ids))
            return ids, choice["finish_reason"], logprobs, routes, versions

        return self._generate(call, prompt_ids)

    def _generate(self, call: Callable[..., Any], prompt_ids: list[int]) -> dict[str, Any]:
        @rollout
        def one() -> dict[str, Any]:
            tokens: list[int] = []
            logprobs: list[float] = []
            versions: list[Any] = []
            routes, reason = None, "abort"
            while reason == "abort":
                rows = 0 if routes is None or self.fault == "routes twice" else len(routes)
                ids, reason, values, new, labels = call(tokens, rows)
                if self.fault == "token lost" and reason == "abort" and ids:
                    ids, values, labels = ids[:-1], values[:-1], labels[:-1]
                tokens += ids
                logprobs += values
                versions += labels
                if new is not None:
                    routes = new if routes is None else np.concatenate([routes, new])
            if self.fault == "stale tag":
                versions = [versions[0]] * len(versions)
            return {
                "prompt_ids": prompt_ids,
                "response_ids": tokens,
                "finish_reason": reason,
                "logprobs": logprobs,
                "routes": routes,
                "token_versions": tuple(versions),
            }

        return one()

    def _replies(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self.stream:
            yield self.client.post(self.url + path, json=body).raise_for_status().json()
            return
        with self.client.stream("POST", self.url + path, json=body) as reply:
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    break
                if line:
                    yield json.loads(line.removeprefix("data: "))

    def update_sglang(self, label: str) -> None:
        """Stop the engine, load weights under a label, and go on."""
        self._post("/pause_generation", {"mode": "abort"})
        self._post("/update_weights_from_disk", {"model_path": label, "weight_version": label})
        self._post("/continue_generation", {})

    def update_vllm(self, label: str) -> None:
        """Do the same with vLLM's endpoints, which publish the label on its own."""
        self._post("/pause?mode=abort", {})
        self._post("/update_weights", {"update_info": {"weight_dir": label}})
        self._post("/update_weight_version", {"new_version": label})
        self._post("/resume", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self.control.post(path, json=body).raise_for_status()


def _spread(spans: list[dict[str, Any]], length: int) -> list[Any]:
    versions: list[Any] = [None] * length
    for span in spans:
        for i in range(span["start"], min(span["end"], length)):
            versions[i] = None if span["version"] == "default" else span["version"]
    return versions
