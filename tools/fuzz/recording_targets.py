"""What recorders take from a server, a client or a training loop that may say anything."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from rollproof.contracts.presets import contract_of
from rollproof.core.trace import Header
from rollproof.recording.live_trace import LiveTrace
from rollproof.recording.wire.exchange import Exchange, How, KeptReply
from rollproof.recording.wire.exchange_recorder import ExchangeRecorder
from rollproof.store import TraceReader
from tools.fuzz.mutations import Inputs, damaged_json, one_of
from tools.fuzz.target import Broken, Target

__all__ = ["RECORDINGS"]

_MAX_BODY = 1 << 16
_META = {
    "id": "r0",
    "finish_reason": {"type": "length", "length": 2},
    "completion_tokens": 2,
    "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None]],
    "weight_version": "1",
    "weight_versions": [{"start": 0, "end": 2, "version": "1"}],
    "cached_tokens": 1,
    "routed_experts": "AAECAwABAgM=",
    "routed_experts_dtype": "uint8",
}
_CHOICE = {
    "index": 0,
    "text": "w5 w6",
    "message": {"content": "w5"},
    "token_ids": [5, 6],
    "logprobs": {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-0.5, -1.5],
        "content": [{"token": "token_id:5", "logprob": -0.5, "token_id": 5}],
    },
    "finish_reason": "length",
    "routed_experts": {"shape": [1, 1, 2], "dtype": "uint8", "data": "AAE="},
    "meta_info": {"weight_versions": [{"start": 0, "end": 2, "version": 1}]},
}
_SGLANG = {
    "input_ids": [7, 8],
    "rid": "r0",
    "sampling_params": {"max_new_tokens": 2, "n": 1, "stop_token_ids": [3], "stop": ["a"]},
    "return_logprob": True,
    "return_routed_experts": True,
    "stream": True,
}
_OPENAI = {
    "prompt": [7, 8],
    "token_ids": [7, 8],
    "input_ids": [7, 8],
    "messages": [],
    "request_id": "r0",
    "max_tokens": 2,
    "n": 1,
    "logprobs": 1,
    "sampling_params": {"max_tokens": 2, "logprobs": 0},
    "cache_salt": "a",
}
_REPLIES: tuple[tuple[str, Any, Any], ...] = (
    ("/generate", _SGLANG, {"text": "w5", "output_ids": [5, 6], "meta_info": _META, "index": 0}),
    ("/generate", {**_SGLANG, "input_ids": [[7], [8]]}, [{"output_ids": [5], "meta_info": _META}]),
    ("/v1/completions", _OPENAI, {"choices": [_CHOICE], "sglext": {"routed_experts": "AAE="}}),
    ("/v1/chat/completions", _OPENAI, {"choices": [{**_CHOICE, "delta": {"content": "w5"}}]}),
    ("/inference/v1/generate", _OPENAI, {"choices": [_CHOICE]}),
    ("/update_weights_from_disk", {"weight_version": "2"}, {"success": True, "message": ""}),
    ("/update_weight_version", {"new_version": 2}, {"success": True}),
    ("/abort_request", {"rid": "r0", "abort_all": False}, {}),
    ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-r0"]}, {}),
    ("/pause_generation", {"mode": "retract"}, {}),
    ("/collective_rpc", {"method": "reload_weights"}, {"results": [None]}),
)


def _exchanges() -> Inputs:
    kinds = [
        damaged_json({"path": path, "body": body, "replies": [reply, reply], "how": "complete"})
        for path, body, reply in _REPLIES
    ]
    return one_of(*kinds)


def _contract() -> Any:
    contract = contract_of("slime", engine="sglang")
    return dataclasses.replace(contract, num_layers=1, moe_layers=(0,), num_experts=8, top_k=2)


def _record(values: Any, _: Any) -> None:
    """Record two exchanges, the second one streamed; the trace can be read to its end."""
    with tempfile.TemporaryDirectory() as folder:
        header = Header(subject="fuzz", contract=_contract(), profile="recorded")
        trace = LiveTrace(Path(folder), "t", header)
        recorder = ExchangeRecorder(trace, "sglang")
        path = values.get("path")
        replies = values.get("replies")
        for number, reply in enumerate(replies if isinstance(replies, list) else [replies]):
            exchange = Exchange(
                number=number,
                server_id="s0",
                method="POST",
                path=path if isinstance(path, str) else "/generate",
                query={},
                headers={},
                body=_json(values.get("body")),
                began=1.0,
            )
            recorder.begun(exchange)
            body = _json(reply)
            kind = "application/json"
            if number % 2:
                kind, body = "text/event-stream", b"data: " + body + b"\n\ndata: [DONE]\n\n"
            kept = KeptReply.begin(
                exchange, 200, {"content-type": kind}, _MAX_BODY, newest_only=False
            )
            kept.take(body)
            kept.finish()
            exchange.how, exchange.ended = _how(values.get("how")), 2.0
            recorder.ended(exchange)
        trace.close()
        _read_back(trace)


def _how(value: Any) -> How:
    return How(value) if value in [*How] and value != How.OPEN else How.COMPLETE


def _json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def _read_back(trace: LiveTrace) -> None:
    if trace.counts.failure:
        raise Broken(trace.counts.failure)
    for path in trace.paths:
        for _event in TraceReader(path):
            pass


RECORDINGS: dict[str, Target] = {"recorded-exchanges": Target(inputs=_exchanges, read=_record)}
