"""Replies of vLLM and SGLang, in one piece or streamed, as outputs of engine calls.

What a reply does not say stays absent. A reply that does not say which tokens were sampled, or that
cannot be read, is an error: nothing may be concluded from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pybase64

from rollproof.core.contract import Contract, LayerAxis
from rollproof.core.number_arrays import INTEGERS, to_array
from rollproof.core.record_validation import validate_output
from rollproof.core.records import EngineOutput, FinishReason, IntArray, Span, Version
from rollproof.core.routes_encoding import from_described, from_npy, integer_type
from rollproof.core.sampling_masks import SamplingMask, as_sampling_mask
from rollproof.errors import SubjectError
from rollproof.recording.wire.sampling_calls import SamplingRequest, WireCall, token_array

__all__ = [
    "PartialOutput",
    "RefusedReply",
    "UnreadableReply",
    "label_of",
    "outputs_of",
    "streamed_outputs",
]

_UNLABELLED = "default"
"""The label that both engines show for weights to which nobody gave one."""
_REASONS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_NO_TOKENS = (
    "its reply has text and no token ids: have the client ask for them (vLLM: return_token_ids)"
)
_FLOATS = frozenset((float,))
_MAX_DIGITS = 19
"""Digits of 64 bits. Python refuses to read a number of more than 4300."""


class UnreadableReply(ValueError):
    """A reply of which it cannot be said what was sampled; the text says why."""


class RefusedReply(UnreadableReply):
    """A reply that says that the call failed, with a status that says that it did not."""


@dataclass(slots=True)
class PartialOutput:
    """What has arrived of the reply to one call.

    Attributes:
        tokens: its tokens.
        logprobs: their logprobs; ``None`` as soon as one of them has none.
        routes: as the reply has them, not decoded.
        routes_dtype: the type that the reply names.
        reason: the finish reason, as the reply has it; ``None``: it has not come.
        spans: version spans, as the reply has them.
        version: the version label.
        masks: sampling masks, in parts.
        trouble: why nothing may be concluded from it; ``""``: nothing is wrong.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    routes: Any = None
    routes_dtype: str = "int32"
    routes_start: int | None = None
    reason: Any = None
    spans: Sequence[Any] = ()
    version: Version = None
    cached_tokens: int | None = None
    masks: list[SamplingMask] = field(default_factory=list)
    trouble: str = ""

    def output(self, call: WireCall, contract: Contract | None) -> EngineOutput:
        """Return the output. Raises ``UnreadableReply``."""
        if self.trouble:
            raise UnreadableReply(self.trouble)
        name: Any = self.reason
        message = ""
        if isinstance(name, dict):
            name, message = name.get("type"), str(name.get("message") or "")
        native = "" if name is None else str(name)
        logprobs = self.logprobs
        if not call.logprobs or (logprobs is not None and len(logprobs) != len(self.tokens)):
            logprobs = None
        mask = SamplingMask.joined(self.masks) if self.masks else None
        output = EngineOutput(
            token_ids=tuple(self.tokens),
            logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float64),
            routes=self._routes(call, contract),
            routes_start=call.routes_start if self.routes_start is None else self.routes_start,
            finish_reason=_REASONS.get(native, FinishReason.ERROR),
            version=self.version,
            spans=tuple(_spans(self.spans)),
            cached_tokens=self.cached_tokens,
            native=native,
            message=message,
            # of some tokens alone it is not known of which
            sampling_mask=mask if mask is None or len(mask) == len(self.tokens) else None,
        )
        # a trace with a field that no trace can hold would be a damaged one from here on
        try:
            return validate_output(output, "the server")
        except SubjectError as error:
            raise UnreadableReply(str(error).removesuffix(".")) from error

    def _routes(self, call: WireCall, contract: Contract | None) -> IntArray | None:
        if self.routes is None or contract is None or not contract.has_routes:
            return None
        rows = len(call.prompt_ids or ()) + len(self.tokens) - 1 - call.routes_start
        try:
            return _decoded(self.routes, self.routes_dtype, contract, rows)
        except (KeyError, OverflowError, SubjectError, TypeError, ValueError) as error:
            raise UnreadableReply(f"its routes cannot be read: {error}") from error


def outputs_of(request: SamplingRequest, body: bytes) -> list[PartialOutput]:
    """Read a reply that came in one piece.

    Raises:
        UnreadableReply: it is none.
    """
    reply = _json(body)
    if request.form == "sglang":
        replies = reply if isinstance(reply, list) else [reply]
        outputs = [PartialOutput() for _ in replies]
        for output, part in zip(outputs, replies, strict=True):
            _take_sglang(output, part)
    else:
        outputs = _choices(request, [reply])
    if len(outputs) != len(request.calls):
        raise UnreadableReply(
            f"its reply has {len(outputs)} samples, and {len(request.calls)} were requested"
        )
    return outputs


def streamed_outputs(request: SamplingRequest, events: Iterable[bytes]) -> list[PartialOutput]:
    """Read the events of a stream, as far as they came.

    Raises:
        UnreadableReply: they are none.
    """
    replies = [_json(event) for event in events if event != b"[DONE]"]
    refused = [reply for reply in replies if isinstance(reply, dict) and "error" in reply]
    if refused:
        raise RefusedReply(f"its stream says {str(refused[0]['error'])[:200]}")
    if request.form != "sglang":
        return _choices(request, replies)
    outputs = [PartialOutput() for _ in request.calls]
    for reply in replies:
        index = _object(reply).get("index", 0)
        if not isinstance(index, int) or not 0 <= index < len(outputs):
            raise UnreadableReply("its stream has more samples than were requested")
        _take_sglang(outputs[index], reply)
    return outputs


def _json(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise UnreadableReply(f"its reply is no JSON ({error})") from error


def _take_sglang(output: PartialOutput, reply: Any) -> None:
    """Add a reply of ``/generate``, or an event of its stream: all tokens so far, or the new ones
    (``incremental_streaming_output``).
    """
    meta = _object(reply).get("meta_info")
    if not isinstance(meta, dict):
        raise UnreadableReply("its reply has no meta_info")
    pairs = meta.get("output_token_logprobs")
    ids = reply.get("output_ids")
    if ids is None and isinstance(pairs, list):
        ids = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) > 1]
    tokens = token_array(ids)
    if tokens is None:
        output.trouble = _NO_TOKENS
        return
    count = meta.get("completion_tokens")
    # SGLang's own server has one mode for all streams, and does not name it in an event
    is_new = type(count) is int and count == len(output.tokens) + len(tokens) > len(tokens)
    if not is_new:
        output.tokens, output.logprobs = [], []
    output.tokens += tokens
    if output.logprobs is not None:
        values = _sglang_logprobs(pairs)
        output.logprobs = None if values is None else [*output.logprobs, *values]
    # a stop token may count and not be shown
    if type(count) is int and len(output.tokens) + 1 < count:
        output.trouble = "events of its stream that had some of its tokens are missing"
    masks = _masks(meta.get("output_token_sampling_mask"))
    if masks is not None:
        # an event has the masks of all tokens so far, or those of its own
        complete = len(masks) == len(output.tokens)
        output.masks = [masks] if complete else [*output.masks, masks]
    output.reason = meta.get("finish_reason", output.reason)
    output.version = label_of(meta.get("weight_version"))
    output.spans = meta.get("weight_versions") or ()
    cached = meta.get("cached_tokens")
    output.cached_tokens = cached if type(cached) is int else None
    if meta.get("routed_experts") is not None:
        output.routes = meta["routed_experts"]
        output.routes_dtype = str(meta.get("routed_experts_dtype") or "int32")


def _masks(value: Any) -> SamplingMask | None:
    """Return sampling masks: ids and offsets (vLLM), or a list of ids for each token (SGLang)."""
    if value is None:
        return None
    try:
        if not isinstance(value, dict):
            return as_sampling_mask(value)
        ids, offsets = (token_array(value.get(name)) for name in ("token_ids", "offsets"))
        if ids is None or offsets is None or not offsets or offsets[0] != 0:
            raise UnreadableReply("its sampling masks are no token_ids with offsets")
        return as_sampling_mask(SamplingMask.from_offsets(ids, offsets))
    except SubjectError as error:
        raise UnreadableReply(f"its sampling masks cannot be read: {error}") from error


def _sglang_logprobs(pairs: Any) -> list[float] | None:
    if not isinstance(pairs, list):
        return None
    try:
        values = [pair[0] for pair in pairs]
    except (IndexError, KeyError, TypeError):
        return None
    return _numbers(values)


def _choices(request: SamplingRequest, replies: Sequence[Any]) -> list[PartialOutput]:
    """Read replies in OpenAI's form, or the chunks of a stream."""
    outputs = [PartialOutput() for _ in request.calls]
    for reply in replies:
        choices = _object(reply).get("choices")
        if not isinstance(choices, list):
            raise UnreadableReply("its reply has no choices")
        for number, choice in enumerate(choices):
            index = choice.get("index", number) if isinstance(choice, dict) else None
            if not isinstance(index, int) or not 0 <= index < len(outputs):
                raise UnreadableReply("its reply has other choices than were requested")
            _take_choice(outputs[index], choice)
        extension = reply.get("sglext")
        if isinstance(extension, dict) and extension.get("routed_experts") is not None:
            outputs[0].routes = extension["routed_experts"]
    return outputs


def _take_choice(output: PartialOutput, choice: Mapping[str, Any]) -> None:
    ids = choice.get("token_ids")
    ids = choice.get("response_token_ids") if ids is None else ids
    logprobs = choice.get("logprobs")
    if ids is None:
        ids = _ids_of_logprobs(logprobs)
    message = choice.get("delta") or choice.get("message")
    text = choice.get("text") or _object(message).get("content")
    tokens = token_array(ids)
    if tokens is not None:
        output.tokens += tokens
        values = _choice_logprobs(logprobs)
        if values is None or len(values) != len(tokens):
            output.logprobs = output.logprobs if not tokens else None
        elif output.logprobs is not None:
            output.logprobs += values
    elif text or logprobs:
        output.trouble = _NO_TOKENS
    reason = choice.get("finish_reason")
    if reason is not None:
        output.reason = reason
        # without any text or tokens nothing was sampled only if the reply says so by ids
        if ids is None and not output.tokens:
            output.trouble = _NO_TOKENS
    meta = _object(choice.get("meta_info"))
    for value in (choice.get("sampling_mask"), meta.get("output_token_sampling_mask")):
        masks = _masks(value)
        if masks is not None:
            output.masks.append(masks)
    for holder in (choice, meta):
        if holder.get("routed_experts") is not None:
            output.routes = holder["routed_experts"]
            output.routes_dtype = str(holder.get("routed_experts_dtype") or "int32")
        if holder.get("weight_versions"):
            output.spans = holder["weight_versions"]


def _ids_of_logprobs(logprobs: Any) -> list[int] | None:
    """Return token ids that stand in the logprobs: as numbers, or as ``token_id:5``."""
    if not isinstance(logprobs, dict):
        return None
    content, words = logprobs.get("content"), logprobs.get("tokens")
    if isinstance(content, list) and content:
        if all(isinstance(entry, dict) and type(entry.get("token_id")) is int for entry in content):
            return [entry["token_id"] for entry in content]
        words = [entry.get("token") if isinstance(entry, dict) else None for entry in content]
    if not isinstance(words, list) or not words:
        return None
    ids = [str(word).removeprefix("token_id:") for word in words]
    named = all(str(word).startswith("token_id:") for word in words)
    if not named or not all(name.isdecimal() and len(name) <= _MAX_DIGITS for name in ids):
        return None
    return [*map(int, ids)]


def _choice_logprobs(logprobs: Any) -> list[float] | None:
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    if isinstance(content, list):
        return _numbers([entry.get("logprob") for entry in content if isinstance(entry, dict)])
    values = logprobs.get("token_logprobs")
    return _numbers(values) if isinstance(values, list) else None


def _numbers(values: list[Any]) -> list[float]:
    """Return numbers, NaN in place of what is none."""
    if _FLOATS.issuperset(map(type, values)):
        return values
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def label_of(value: Any) -> Version:
    """Return the label of weights that a server names; ``None`` if it names none."""
    # not isinstance: JSON's true is an int in Python
    return value if type(value) in (int, str) and value != _UNLABELLED else None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _spans(spans: Sequence[Any]) -> Iterable[Span]:
    for span in spans if isinstance(spans, list | tuple) else ():
        if not isinstance(span, dict):
            continue
        start, end = span.get("start"), span.get("end")
        if type(start) is int and type(end) is int and 0 <= start < end:
            yield Span(start=start, end=end, version=label_of(span.get("version")))


def _decoded(routes: Any, dtype: str, contract: Contract, rows: int) -> IntArray:
    """Return routes in the form in which the reply has them, as ``(rows, layers, top_k)``."""
    if isinstance(routes, dict):
        return from_described(routes)
    if isinstance(routes, list):
        return to_array(routes, name="the list", rank=3, numbers=INTEGERS)
    if not isinstance(routes, str):
        raise TypeError(f"a {type(routes).__name__} is none of the forms that engines use")
    if routes.startswith("k05VTVBZ"):  # base64 of what a .npy file begins with
        return from_npy(routes)
    # without a shape: only the model says how many layers and experts there are
    flat = np.frombuffer(pybase64.b64decode(routes, validate=True), dtype=integer_type(dtype))
    sizes = {contract.route_layers, contract.layer_count, len(contract.routed_layers)}
    fitting = [
        layers
        for layers in sorted(sizes, reverse=contract.layer_axis is LayerAxis.ALL)
        if layers and not flat.size % (layers * contract.choice_count)
    ]
    exact = [
        layers for layers in fitting if flat.size == max(rows, 0) * layers * contract.choice_count
    ]
    if not fitting:
        raise ValueError(
            f"{flat.size} numbers do not fit {contract.route_layers} layers and top-"
            f"{contract.choice_count}, as the contract has it"
        )
    return flat.reshape(-1, (exact or fitting)[0], contract.choice_count)
