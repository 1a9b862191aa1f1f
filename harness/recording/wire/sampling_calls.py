"""Requests to sample, of vLLM's and SGLang's endpoints, as engine calls."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import Scalar

__all__ = ["SAMPLING_PATHS", "SamplingRequest", "WireCall", "read_request", "token_array"]

SAMPLING_PATHS: Mapping[str, str] = {
    "/generate": "sglang",
    "/inference/v1/generate": "vllm",
    "/skyrl/v1/generate": "skyrl",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}
"""Paths that sample, and the form of their requests and replies."""
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters that change what is sampled; the others of an OpenAI request are not about it."""
_SALTS = ("cache_salt", "extra_key")
_SGLANG_TOKENS = 128
"""SGLang's ``max_new_tokens`` for a request without one."""
_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion without one, as OpenAI has it."""
_MAX_CALLS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class WireCall:
    """One engine call of a request; the fields are those of the event ``Call``.

    Attributes:
        prompt_ids: ``None`` if the request has text, which only the server's tokenizer can read.
        rid: the handle by which its client may abort it; ``""``: none that is known.
        stop_token_ids: further tokens that end the call.
    """

    prompt_ids: tuple[int, ...] | None
    rid: str = ""
    max_tokens: int | None = None
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    routes: bool = True
    logprobs: bool = False
    routes_start: int = 0
    stop_token_ids: tuple[int, ...] = ()
    sampling_mask: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """A request to sample.

    Attributes:
        form: a value of ``SAMPLING_PATHS``.
        calls: its calls, prompt by prompt and sample by sample.
        listed: whether the reply is a list (SGLang).
        stream: how the reply is streamed; ``None``: in one piece.
    """

    form: str
    calls: Sequence[WireCall]
    listed: bool = False
    stream: StreamMode | None = None


def read_request(form: str, body: Any, headers: Mapping[bytes, bytes]) -> SamplingRequest:
    """Read the body of a request to sample.

    Args:
        form: a value of ``SAMPLING_PATHS``.
        body: its JSON value.
        headers: those of the request.

    Raises:
        ValueError: it is no such request.
    """
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")  # noqa: TRY004 - as any unreadable request
    streams = body.get("stream") is True
    if form == "sglang":
        mode = StreamMode.CUMULATIVE if streams else None
        calls, listed = _sglang_calls(body)
        return SamplingRequest(form=form, calls=calls, listed=listed, stream=mode)
    mode = StreamMode.DELTA if streams else None
    return SamplingRequest(form=form, calls=_openai_calls(form, body, headers), stream=mode)


def _sglang_calls(body: Mapping[str, Any]) -> tuple[list[WireCall], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None:
        listed = isinstance(text, list)
        prompts: list[tuple[int, ...] | None] = [None] * (len(text) if listed else 1)
    else:
        listed = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        prompts = [*map(_tokens, ids)] if listed else [_tokens(ids)]  # type: ignore[arg-type]
    sampling = _each(body.get("sampling_params") or {}, len(prompts))
    samples = _whole(_mapping(sampling[0]).get("n"), 1)
    _check_count(len(prompts) * samples)
    rids = body.get("rid")
    handles = _each("" if rids is None or samples > 1 else rids, len(prompts))
    logprobs = _each(body.get("return_logprob", False), len(prompts))
    salts = {name: str(body[name]) for name in _SALTS if body.get(name)}
    calls = []
    for number, prompt in enumerate(prompts):
        parameters = _mapping(sampling[number])
        handle = handles[number]
        if isinstance(rids, str) and len(prompts) > 1 and samples == 1:
            # how SGLang names the prompts of a batch that came with one handle
            handle = f"{rids}_{number}"
        call = WireCall(
            prompt_ids=prompt,
            rid=handle if isinstance(handle, str) else "",
            max_tokens=_whole(parameters.get("max_new_tokens"), _SGLANG_TOKENS),
            sampling={
                **_scalars(
                    {
                        name: value
                        for name, value in parameters.items()
                        if name not in ("max_new_tokens", "n", "stop_token_ids")
                    }
                ),
                **salts,
            },
            routes=body.get("return_routed_experts") is True,
            logprobs=bool(logprobs[number]),
            routes_start=_whole(body.get("routed_experts_start_len"), 0),
            stop_token_ids=_stop_tokens(parameters),
            sampling_mask=body.get("return_sampling_mask") is True,
        )
        calls += [call] * samples
    return calls, listed or samples > 1


def _openai_calls(
    form: str, body: Mapping[str, Any], headers: Mapping[bytes, bytes]
) -> list[WireCall]:
    nested = form in ("vllm", "skyrl")
    parameters = _mapping(body.get("sampling_params") or {}) if nested else body
    prompts: list[tuple[int, ...] | None]
    if nested:
        prompts = [_tokens(body.get("token_ids"))]
    elif form == "chat":
        prompts = [_tokens(body["input_ids"]) if "input_ids" in body else None]
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompts = [_tokens(item) if isinstance(item, list) else None for item in prompt]
        else:
            prompts = [_tokens(prompt) if isinstance(prompt, list) else None]
    samples = _whole(parameters.get("n"), 1)
    _check_count(len(prompts) * samples)
    limit = parameters.get("max_completion_tokens", parameters.get("max_tokens"))
    default = _COMPLETION_TOKENS if form == "completions" else None
    header = headers.get(b"x-request-id", b"").decode("latin-1")
    rid = header or body.get("request_id") or body.get("rid") or ""
    start = parameters.get("routed_experts_prompt_start", body.get("routed_experts_prompt_start"))
    if start is None:
        start = body.get("routed_experts_start_len")
    logprobs = parameters.get("logprobs")
    chosen = {name: parameters[name] for name in _SAMPLING if parameters.get(name) is not None} | {
        name: str(body[name]) for name in _SALTS if body.get(name)
    }
    call_of = [
        WireCall(
            prompt_ids=prompt,
            rid=rid if isinstance(rid, str) else "",
            max_tokens=_whole(limit, default),
            sampling=_scalars(chosen),
            logprobs=logprobs is not None and logprobs is not False,
            routes_start=_whole(start, 0),
            stop_token_ids=_stop_tokens(parameters),
            # vLLM has no such field: it returns masks if it was started so
            sampling_mask=body.get("return_sampling_mask") is True,
        )
        for prompt in prompts
    ]
    return [call for call in call_of for _ in range(samples)]


def token_array(value: Any) -> array[int] | None:
    """Return a list of token ids of a request or a reply; ``None`` if it is none."""
    if not isinstance(value, list):
        return None
    try:
        # in C: a look at each token in Python takes ten times as long
        return array("q", value)
    except (TypeError, OverflowError):
        return None


def _tokens(value: Any) -> tuple[int, ...]:
    tokens = token_array(value)
    if tokens is None:
        raise ValueError("the prompt holds no token ids")
    return tuple(tokens)


def _whole(value: Any, default: Any) -> Any:
    # not isinstance: JSON's true is an int in Python
    return value if type(value) is int and value >= 0 else default


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _each(value: Any, count: int) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError("a list has another length than the batch")
        return value
    return [value] * count


def _check_count(count: int) -> None:
    if not 1 <= count <= _MAX_CALLS:
        raise ValueError(f"it asks for {count} samples")


def _stop_tokens(parameters: Mapping[str, Any]) -> tuple[int, ...]:
    value = parameters.get("stop_token_ids")
    return tuple(token for token in value if type(token) is int) if isinstance(value, list) else ()


def _scalars(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return parameters as a trace holds them: a list or an object as its JSON text."""
    return {
        name: value
        if isinstance(value, int | float | str | bool)
        else json.dumps(value, sort_keys=True)
        for name, value in values.items()
        if value is not None
    }
