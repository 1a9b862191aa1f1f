"""Requests of the fake vLLM server, read and checked, and the JSON objects of its replies.

Replies have every key that the server's models have, null if there is nothing, as vLLM sends them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from rollproof.core.records import EngineOutput, FinishReason, IntArray, Span
from rollproof.core.routes_encoding import as_described, as_npy
from rollproof.fakes.http.engine_backend import CallSpec, EngineBackend
from rollproof.fakes.http.request_body import BadRequest, field, header_of, text_of
from rollproof.fakes.http.request_limits import check_batch
from rollproof.fakes.http.sampling_validation import check_vllm, vllm_salt
from rollproof.fakes.http.serve_options import RoutesForm

__all__ = [
    "FINGERPRINT",
    "VllmRequest",
    "chat_choice",
    "completion_choice",
    "described",
    "echoed_logprobs",
    "envelope",
    "finish_of",
    "prompt_logprobs",
    "routes_of",
    "token_logprobs",
    "tokens_choice",
    "usage",
]

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
# vLLM's default of max_logprobs
_MAX_LOGPROBS = 20
FINGERPRINT = "vllm-fake"
"""The server's name of its build."""


class VllmRequest:
    """A request to sample.

    Args:
        request: the HTTP request.
        body: its fields.
        prompts: token ids of each prompt.
        sampling: the object that has the sampling parameters; it depends on the endpoint.
        backend: the engine that it is for.
        prefix: what the endpoint puts before the request's id to make the engine's.
        default: most tokens to sample if the request has no limit; ``None``: as many as fit.

    Raises:
        BadRequest: a value is wrong, or several do not go together.
    """

    def __init__(
        self,
        request: Request,
        body: Mapping[str, Any],
        prompts: Sequence[tuple[int, ...]],
        sampling: Mapping[str, Any],
        backend: EngineBackend,
        *,
        prefix: str,
        default: int | None,
    ) -> None:
        self.body: Mapping[str, Any] = body
        self.chat: bool = prefix == "chatcmpl-"
        self.prompts: Sequence[tuple[int, ...]] = prompts
        self.model: str = field(body, "model", str, "fake")
        self.adapter: str | None = backend.adapter_named(self.model)
        self.samples: int = field(sampling, "n", int, 1)
        if not 1 <= self.samples <= 256:
            raise BadRequest(f"n must be at least 1 and at most 256, got {self.samples}.")
        self.prompt_logprobs: bool = sampling.get("prompt_logprobs") is not None
        self.echo: bool = field(body, "echo", bool, False)
        check_batch(prompts, self.samples, scored=self.prompt_logprobs or self.echo)
        limit = field(
            sampling, "max_completion_tokens", int, field(sampling, "max_tokens", int, None)
        )
        # with max_tokens 0 vLLM samples one token all the same, and does not show it
        self.only_echo: bool = self.echo and limit == 0 and not self.chat
        limit = 1 if self.only_echo else limit
        check_vllm(sampling, self.samples, default if limit is None else limit)
        self.top_logprobs: int | None = _top_logprobs(
            sampling.get("logprobs"), sampling.get("top_logprobs")
        )
        self.return_token_ids: bool = field(body, "return_token_ids", bool, False)
        self.tokens_as_ids: bool = field(body, "return_tokens_as_token_ids", bool, False)
        self.stream: bool = field(body, "stream", bool, False)
        self.options: Mapping[str, Any] = field(body, "stream_options", dict, {})
        self.routes_start: int = field(
            sampling,
            "routed_experts_prompt_start",
            int,
            field(body, "routed_experts_prompt_start", int, 0),
        )
        self.sampling: dict[str, Any] = {
            name: sampling[name]
            for name in _SAMPLING
            if isinstance(sampling.get(name), int | float | str | bool)
        }
        self.sampling |= vllm_salt(body)
        longest = min(map(len, prompts), default=0)
        if not 0 <= self.routes_start <= longest:
            raise BadRequest(
                "routed_experts_prompt_start must be between 0 and the length of the prompt"
                f" ({longest}), got {self.routes_start}.",
                param="routed_experts_prompt_start",
            )
        self.text: bool = field(body, "output_mode", str, "tokens") == "text"
        self.id: str = prefix + (
            header_of(request.scope, "x-request-id")
            or field(body, "request_id", str, None)
            or backend.new_id()
        )
        self.max_tokens: list[int] = [
            self._budget(prompt, limit, default, backend.max_length) for prompt in prompts
        ]

    def _budget(
        self, prompt: tuple[int, ...], limit: int | None, default: int | None, max_length: int
    ) -> int:
        """Return how many tokens may be sampled after ``prompt``."""
        if not prompt:
            raise BadRequest(
                "The prompt is empty: it must contain at least one token.", param="prompt"
            )
        if len(prompt) >= max_length:
            raise BadRequest(
                f"This model's maximum context length is {max_length} tokens; the prompt has"
                f" {len(prompt)} tokens. Reduce its length.",
                param="input_tokens" if default is not None or self.chat else None,
            )
        room = max_length - len(prompt)
        if limit is None:
            return room if default is None else min(default, room)
        if limit < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
        return limit

    def specs(self) -> list[CallSpec]:
        """Return the engine calls, prompt by prompt and sample by sample; their handle is the
        request's id.
        """
        return [
            CallSpec(
                prompt=prompt,
                rid=self.id,
                max_tokens=budget,
                sampling=self.sampling,
                logprobs=self.top_logprobs is not None,
                routes_start=self.routes_start,
                adapter=self.adapter,
            )
            for prompt, budget in zip(self.prompts, self.max_tokens, strict=True)
            for _ in range(self.samples)
        ]


def _top_logprobs(logprobs: Any, top: Any) -> int | None:
    """Return how many alternatives a token has; ``None``: there are no logprobs at all."""
    if logprobs is None or logprobs is False:
        return None
    if logprobs is True:
        return top if isinstance(top, int) else 0
    if not isinstance(logprobs, int) or not 0 <= logprobs <= _MAX_LOGPROBS:
        raise BadRequest(
            f"Requested sample logprobs must be 0 to {_MAX_LOGPROBS}, got {logprobs!r}.",
            param="logprobs",
        )
    return logprobs


def envelope(call: VllmRequest, kind: str) -> dict[str, Any]:
    """Return the head of an OpenAI reply."""
    return {"id": call.id, "object": kind, "created": int(time.time()), "model": call.model}


def usage(prompt: int, sampled: int) -> dict[str, Any]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def tokens_choice(
    call: VllmRequest, index: int, output: EngineOutput, backend: EngineBackend
) -> dict[str, Any]:
    """Return a choice of ``/inference/v1/generate``."""
    logprobs = None
    if call.top_logprobs is not None and output.logprobs is not None:
        values = output.logprobs.tolist()
        if call.text:
            logprobs = chat_logprobs(call, output.token_ids, values, top=True)
        elif backend.flavour.shows_spans:
            logprobs = token_logprobs(output.token_ids, values)
        else:  # 0.26 still had the form of chats here
            logprobs = placeholder_logprobs(output.token_ids, values)
    return {
        **({"text": backend.shown_text(output.token_ids, ids=True)} if call.text else {}),
        "index": index,
        "finish_reason": finish_of(output),
        "stop_reason": None,
        "token_ids": list(output.token_ids),
        "routed_experts": routes_of(output, backend),
        "sampling_mask": None,
        "weight_versions": spans_of(output, backend),
        "logprobs": logprobs,
    }


def token_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return logprobs with integer ids; the fake has no alternative but the token itself."""
    entries = [
        {"token_id": token, "logprob": logprob, "rank": 1}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}


def placeholder_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return them as releases up to 0.26 did, which prime-rl pins: ids as texts."""
    pairs = zip(tokens, logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def completion_choice(
    call: VllmRequest,
    index: int,
    prompt: Sequence[int],
    output: EngineOutput,
    backend: EngineBackend,
) -> dict[str, Any]:
    """Return a choice of ``/v1/completions``."""
    shown = 0 if call.only_echo else len(output.token_ids)
    text = backend.shown_text(output.token_ids[:shown], ids=call.return_token_ids)
    logprobs = None
    if call.top_logprobs is not None and output.logprobs is not None:
        before = prompt if call.echo else ()
        logprobs = echoed_logprobs(
            call, before, output.token_ids[:shown], output.logprobs.tolist()[:shown], backend
        )
    echoed = (
        prompt_logprobs(prompt, backend)
        if call.prompt_logprobs or (call.echo and logprobs is not None)
        else None
    )
    return {
        "index": index,
        "text": f"{text_of(prompt)} {text}".rstrip() if call.echo else text,
        "logprobs": logprobs,
        "finish_reason": finish_of(output),
        "stop_reason": None,
        "token_ids": list(output.token_ids) if call.return_token_ids else None,
        "prompt_logprobs": echoed,
        "prompt_token_ids": list(prompt) if call.return_token_ids else None,
        "routed_experts": routes_of(output, backend),
    }


def echoed_logprobs(
    call: VllmRequest,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    backend: EngineBackend,
    offset: int = 0,
) -> dict[str, Any]:
    """Return logprobs in the flat form; an echoed ``prompt`` comes before the sampled tokens, and
    its first token has none.
    """
    if not prompt:
        return completion_logprobs(call, tokens, logprobs, offset)
    values = backend.policy.logprobs(backend.engine.version, prompt, 1).tolist()
    flat = completion_logprobs(call, [*prompt, *tokens], [0.0, *values, *logprobs], offset)
    flat["token_logprobs"][0] = flat["top_logprobs"][0] = None
    return flat


def prompt_logprobs(prompt: Sequence[int], backend: EngineBackend) -> list[Any]:
    """Return logprobs of the prompt by token id; the first token has none."""
    values = backend.policy.logprobs(backend.engine.version, prompt, 1).tolist()
    entries = [
        {str(token): {"logprob": value, "rank": 1, "decoded_token": f"w{token}"}}
        for token, value in zip(prompt[1:], values, strict=True)
    ]
    return [None, *entries]


def completion_logprobs(
    call: VllmRequest, tokens: Sequence[int], logprobs: Sequence[float], offset: int = 0
) -> dict[str, Any]:
    """Return logprobs in the flat form: by words, or by ``token_id:5`` if the request says so."""
    words = [f"token_id:{token}" if call.tokens_as_ids else f"w{token}" for token in tokens]
    offsets = []
    for word in words:
        offsets.append(offset)
        offset += len(word)
    top = [{word: logprob} for word, logprob in zip(words, logprobs, strict=True)]
    return {
        "text_offset": offsets,
        "token_logprobs": list(logprobs),
        "tokens": words,
        "top_logprobs": top,
    }


def chat_choice(
    call: VllmRequest, index: int, output: EngineOutput, backend: EngineBackend
) -> dict[str, Any]:
    """Return a choice of ``/v1/chat/completions``."""
    blank = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    logprobs = None
    if call.top_logprobs is not None and output.logprobs is not None:
        logprobs = chat_logprobs(call, output.token_ids, output.logprobs.tolist())
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": backend.shown_text(output.token_ids, ids=call.return_token_ids),
            **blank,
            "reasoning": None,
        },
        "logprobs": logprobs,
        "finish_reason": finish_of(output),
        "stop_reason": None,
        "token_ids": list(output.token_ids) if call.return_token_ids else None,
        "routed_experts": routes_of(output, backend),
    }


def chat_logprobs(
    call: VllmRequest, tokens: Sequence[int], logprobs: Sequence[float], *, top: bool = False
) -> dict[str, Any]:
    """Return logprobs in the form of chats; with ``top`` each token has alternatives, of which the
    fake has one: the sampled token.
    """
    content = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        word = f"token_id:{token}" if call.tokens_as_ids else f"w{token}"
        entry = {"token": word, "logprob": logprob, "bytes": list(word.encode())}
        content.append({**entry, "top_logprobs": [entry] if top else []})
    return {"content": content}


def spans_of(output: EngineOutput, backend: EngineBackend) -> list[dict[str, Any]] | None:
    """Return which weights sampled which tokens, if the release shows it."""
    # outputs of 0.26 have no weight_versions; those of 0.32 have
    if not backend.flavour.shows_spans:
        return None
    return [_span(span) for span in output.spans]


def _span(span: Span) -> dict[str, Any]:
    return {"version": str(span.version), "start": span.start, "end": span.end}


def routes_of(output: EngineOutput, backend: EngineBackend) -> Any:
    """Return routes as a ``.npy`` file, or in prime-rl's form if the options say so; ``None`` if
    there are none.
    """
    if output.routes is None:
        return None
    if backend.options.routes is RoutesForm.DESCRIBED:
        # prime-rl has these two types only
        dtype = "uint8" if backend.policy.num_experts <= 256 else "uint16"
        return as_described(output.routes.astype(dtype), start=output.routes_start)
    # vLLM decodes with np.load: shape and dtype are in the file (uint8 up to 256 experts, then
    # uint16)
    return as_npy(output.routes)


def described(routes: IntArray) -> dict[str, Any]:
    """Return SkyRL's form: the smallest of uint8, int16 and int32 that fits, ``data`` first."""
    largest = int(routes.max()) if routes.size else 0
    dtype = "uint8" if largest <= 255 else "int16" if largest <= 32_767 else "int32"
    return as_described(routes.astype(dtype))


def finish_of(output: EngineOutput) -> str:
    """Return vLLM's name of the finish reason."""
    return {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}.get(
        output.finish_reason, "abort"
    )
