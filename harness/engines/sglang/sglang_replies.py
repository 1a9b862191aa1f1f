"""Convert SGLang's replies into records, by the declared contract.

Replies are those of ``Engine.async_generate`` and ``POST /generate``. In releases 0.5.8 to 0.5.23
``meta_info["routed_experts"]`` is base64 of little-endian integers in C order, without a shape:
int32, unless ``routed_experts_dtype`` names another type
(srt/state_capturer/routed_experts_wire.py of newer sources).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.engine_protocol import Piece
from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray, Span
from rollproof.errors import SubjectError

__all__ = ["NATIVE_REASONS", "joined", "output_of", "piece_of", "routes_of"]

NATIVE_REASONS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""``meta_info["finish_reason"]["type"]`` (srt/managers/schedule_batch.py)."""
_DTYPE = "int32"


def output_of(reply: Mapping[str, Any], contract: Contract, routes_start: int = 0) -> EngineOutput:
    """Convert a finished reply.

    Missing parts are ``None``; a logprob of another token than the returned one is NaN. Raises
    ``SubjectError`` for anything but a reply of SGLang, and for routes that do not fit the
    contract's layers and ``top_k``.
    """
    try:
        meta = reply["meta_info"]
        tokens = tuple(reply["output_ids"])
        reason = meta["finish_reason"]
        native = str(reason["type"])
        finish = NATIVE_REASONS[native]
    except (KeyError, TypeError) as error:
        raise SubjectError(
            f"This is not a finished reply of SGLang ({type(error).__name__}: {error}):"
            f" {str(reply)[:200]}"
        ) from error
    return EngineOutput(
        token_ids=tokens,
        logprobs=_logprobs(meta, tokens),
        routes=routes_of(meta, contract),
        routes_start=routes_start,
        finish_reason=finish,
        version=meta.get("weight_version"),
        spans=tuple(
            Span(start=span["start"], end=span["end"], version=span["version"])
            for span in meta.get("weight_versions") or ()
        ),
        cached_tokens=meta.get("cached_tokens"),
        native=native,
        message=str(reason.get("message") or ""),
    )


def joined(chunks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Join the chunks of an incremental stream (``incremental_streaming_output``) to one reply."""
    # tokens and their logprobs are cut into chunks (_INCREMENTAL_STREAMING_META_INFO_KEYS of
    # srt/managers/tokenizer_manager.py); the rest of the last chunk is that of the whole sequence
    last = chunks[-1]
    meta = dict(last["meta_info"])
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = [
            entry
            for chunk in chunks
            for entry in chunk["meta_info"].get("output_token_logprobs") or ()
        ]
    return {
        **last,
        "output_ids": [token for chunk in chunks for token in chunk["output_ids"]],
        "meta_info": meta,
    }


def routes_of(meta: Mapping[str, Any], contract: Contract) -> IntArray | None:
    """Return the routes ``(rows, layers, top_k)``, read-only; ``None`` if the reply has none."""
    text = meta.get("routed_experts")
    if text is None:
        return None
    if contract.top_k is None:
        raise SubjectError(
            "SGLang returned routes, but the contract declares none: reading them needs the model's"
            " layers and top_k."
        )
    try:
        flat = np.frombuffer(
            base64.b64decode(text, validate=True),
            dtype=np.dtype(meta.get("routed_experts_dtype", _DTYPE)),
        )
        return flat.reshape(-1, contract.route_layers, contract.top_k)
    except (binascii.Error, ValueError, TypeError) as error:
        raise SubjectError(
            f"SGLang's routes are not complete rows of {contract.route_layers} layers and"
            f" {contract.top_k} experts: {error}."
        ) from error


def piece_of(chunk: Mapping[str, Any], contract: Contract) -> Piece:
    """Convert one chunk of a streamed reply. By default each chunk repeats all tokens so far."""
    meta = chunk["meta_info"]
    routes = routes_of(meta, contract)
    return Piece(
        token_ids=tuple(chunk["output_ids"]),
        sampled=meta.get("completion_tokens", len(chunk["output_ids"])),
        rows=None if routes is None else len(routes),
        finished=meta.get("finish_reason") is not None,
        sample=chunk.get("index", 0),
    )


def _logprobs(meta: Mapping[str, Any], tokens: tuple[int, ...]) -> LogprobArray | None:
    """Return the logprobs ``(tokens,)`` of entries ``(logprob, token id, text or None)``."""
    entries = meta.get("output_token_logprobs")
    if entries is None:
        return None
    values = [
        entry[0] if place >= len(tokens) or entry[1] == tokens[place] else None
        for place, entry in enumerate(entries)
    ]
    return np.array(
        [np.nan if value is None else float(value) for value in values], dtype=np.float64
    )
