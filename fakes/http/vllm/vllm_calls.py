"""vLLM's calls: requests of its three endpoints read and checked, and the JSON objects of their
replies.

Replies have every key that the server's models have, null where there is nothing, as vLLM sends
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollproof.core.records import EngineOutput, FinishReason, IntArray, Span
from rollproof.fakes.http.engine_backend import Backing, RoutesForm, Wanted
from rollproof.fakes.http.request_body import BadRequest, field, text_of
from rollproof.fakes.http.routes_encoding import as_described, as_npy
from rollproof.fakes.http.sampling_validation import check_vllm, vllm_salt

if TYPE_CHECKING:
    from rollproof.fakes.http.asgi import Asked

__all__ = [
    "FINGERPRINT",
    "VllmCall",
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

_KEPT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
)
_MOST_LOGPROBS = 20
FINGERPRINT = "vllm-fake"
"""What the server calls its build."""


class VllmCall:
    """A request: its ``prompts``, and what holds for all of them; ``sampling`` are its parameters,
    wherever the endpoint has them.

    ``prefix`` is what the endpoint puts before the request's id to make the engine's. Raises
    ``BadRequest``.
    """

    def __init__(
        self,
        asked: Asked,
        body: Mapping[str, Any],
        prompts: Sequence[tuple[int, ...]],
        sampling: Mapping[str, Any],
        backing: Backing,
        *,
        prefix: str,
        default: int | None,
    ) -> None:
        self.body: Mapping[str, Any] = body
        self.chat: bool = prefix == "chatcmpl-"
        self.prompts: Sequence[tuple[int, ...]] = prompts
        self.model: str = field(body, "model", str, "fake")
        self.samples: int = field(sampling, "n", int, 1)
        if not 1 <= self.samples <= 256:
            raise BadRequest(f"n must be at least 1 and at most 256, got {self.samples}.")
        limit = field(
            sampling, "max_completion_tokens", int, field(sampling, "max_tokens", int, None)
        )
        self.echo: bool = field(body, "echo", bool, False)
        self.echo_alone: bool = (
            self.echo and limit == 0 and not self.chat
        )  # one token is sampled all the same, and not shown
        limit = 1 if self.echo_alone else limit
        check_vllm(sampling, self.samples, default if limit is None else limit)
        self.top: int | None = _top(sampling.get("logprobs"), sampling.get("top_logprobs"))
        self.token_ids: bool = field(body, "return_token_ids", bool, False)
        self.as_ids: bool = field(body, "return_tokens_as_token_ids", bool, False)
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
            for name in _KEPT
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
        self.prompt_logprobs: bool = sampling.get("prompt_logprobs") is not None
        self.text: bool = field(body, "output_mode", str, "tokens") == "text"
        self.id: str = prefix + (
            asked.header("x-request-id") or field(body, "request_id", str, None) or backing.new_id()
        )
        self.max_tokens: list[int] = [
            self._budget(prompt, limit, default, backing.max_length) for prompt in prompts
        ]

    def _budget(
        self, prompt: tuple[int, ...], wanted: int | None, default: int | None, most: int
    ) -> int:
        if not prompt:
            raise BadRequest(
                "The prompt is empty: it must contain at least one token.", param="prompt"
            )
        if len(prompt) >= most:
            raise BadRequest(
                f"This model's maximum context length is {most} tokens; the prompt has"
                f" {len(prompt)} tokens. Reduce its length.",
                param="input_tokens" if default is not None or self.chat else None,
            )
        room = most - len(prompt)
        if wanted is None:
            return room if default is None else min(default, room)
        if wanted < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {wanted}.", param="max_tokens")
        return wanted

    def wanted(self) -> list[Wanted]:
        """The engine calls, prompt by prompt and sample by sample; all have the request's id as
        their handle.
        """
        return [
            Wanted(
                prompt=prompt,
                rid=self.id,
                max_tokens=budget,
                sampling=self.sampling,
                logprobs=self.top is not None,
                routes_start=self.routes_start,
            )
            for prompt, budget in zip(self.prompts, self.max_tokens, strict=True)
            for _ in range(self.samples)
        ]


def _top(logprobs: Any, top: Any) -> int | None:
    """How many logprobs a token gets beside its own; ``None``: no logprobs at all."""
    if logprobs is None or logprobs is False:
        return None
    if logprobs is True:
        return top if isinstance(top, int) else 0
    if not isinstance(logprobs, int) or not 0 <= logprobs <= _MOST_LOGPROBS:
        raise BadRequest(
            f"Requested sample logprobs must be 0 to {_MOST_LOGPROBS}, got {logprobs!r}.",
            param="logprobs",
        )
    return logprobs


def envelope(call: VllmCall, kind: str) -> dict[str, Any]:
    """The head of an OpenAI reply."""
    return {"id": call.id, "object": kind, "created": int(time.time()), "model": call.model}


def usage(prompt: int, sampled: int) -> dict[str, Any]:
    """Tokens counted."""
    counts = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
    }
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None}


def tokens_choice(
    call: VllmCall, index: int, output: EngineOutput, backing: Backing
) -> dict[str, Any]:
    """A choice of ``/inference/v1/generate``."""
    logprobs = None
    if call.top is not None and output.logprobs is not None:
        values = output.logprobs.tolist()
        form = (
            token_logprobs if backing.flavour.shows_spans else placeholder_logprobs
        )  # 0.26 still had the form of chats here
        logprobs = (
            chat_logprobs(call, output.token_ids, values, top=True)
            if call.text
            else form(output.token_ids, values)
        )
    return {
        **({"text": text_of(output.token_ids)} if call.text else {}),
        "index": index,
        "finish_reason": finish_of(output),
        "stop_reason": None,
        "token_ids": list(output.token_ids),
        "routed_experts": routes_of(output, backing),
        "sampling_mask": None,
        "weight_versions": spans_of(output, backing),
        "logprobs": logprobs,
    }


def token_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Logprobs with integer ids, those of the sampled tokens alone: the fake has no others."""
    own = [
        {"token_id": token, "logprob": logprob, "rank": 1}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": [{**one, "top_logprobs": [one]} for one in own]}


def placeholder_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """The same as releases up to 0.26 wrote them (prime-rl pins that one): ids as texts."""
    pairs = zip(tokens, logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def completion_choice(
    call: VllmCall, index: int, prompt: Sequence[int], output: EngineOutput, backing: Backing
) -> dict[str, Any]:
    """A choice of ``/v1/completions``."""
    shown = 0 if call.echo_alone else len(output.token_ids)
    text = text_of(output.token_ids[:shown])
    logprobs = None
    if call.top is not None and output.logprobs is not None:
        before = prompt if call.echo else ()
        logprobs = echoed_logprobs(
            call, before, output.token_ids[:shown], output.logprobs.tolist()[:shown], backing
        )
    echoed = (
        prompt_logprobs(prompt, backing)
        if call.prompt_logprobs or (call.echo and logprobs is not None)
        else None
    )
    return {
        "index": index,
        "text": f"{text_of(prompt)} {text}".rstrip() if call.echo else text,
        "logprobs": logprobs,
        "finish_reason": finish_of(output),
        "stop_reason": None,
        "token_ids": list(output.token_ids) if call.token_ids else None,
        "prompt_logprobs": echoed,
        "prompt_token_ids": list(prompt) if call.token_ids else None,
        "routed_experts": routes_of(output, backing),
    }


def echoed_logprobs(
    call: VllmCall,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    backing: Backing,
    offset: int = 0,
) -> dict[str, Any]:
    """The flat form of sampled tokens, with those of an echoed ``prompt`` before them, of which the
    first has none.
    """
    if not prompt:
        return completion_logprobs(call, tokens, logprobs, offset)
    values = backing.policy.logprobs(backing.engine.version, prompt, 1).tolist()
    flat = completion_logprobs(call, [*prompt, *tokens], [0.0, *values, *logprobs], offset)
    flat["token_logprobs"][0] = flat["top_logprobs"][0] = None
    return flat


def prompt_logprobs(prompt: Sequence[int], backing: Backing) -> list[Any]:
    """Logprobs of the prompt by token id; the first token has none."""
    values = backing.policy.logprobs(backing.engine.version, prompt, 1).tolist()
    told = [
        {str(token): {"logprob": value, "rank": 1, "decoded_token": f"w{token}"}}
        for token, value in zip(prompt[1:], values, strict=True)
    ]
    return [None, *told]


def completion_logprobs(
    call: VllmCall, tokens: Sequence[int], logprobs: Sequence[float], offset: int = 0
) -> dict[str, Any]:
    """The flat form: as texts, or as ``token_id:5`` where that was asked for."""
    words = [f"token_id:{token}" if call.as_ids else f"w{token}" for token in tokens]
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
    call: VllmCall, index: int, output: EngineOutput, backing: Backing
) -> dict[str, Any]:
    """A choice of ``/v1/chat/completions``."""
    blank = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    logprobs = None
    if call.top is not None and output.logprobs is not None:
        logprobs = chat_logprobs(call, output.token_ids, output.logprobs.tolist())
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": text_of(output.token_ids),
            **blank,
            "reasoning": None,
        },
        "logprobs": logprobs,
        "finish_reason": finish_of(output),
        "stop_reason": None,
        "token_ids": list(output.token_ids) if call.token_ids else None,
        "routed_experts": routes_of(output, backing),
    }


def chat_logprobs(
    call: VllmCall, tokens: Sequence[int], logprobs: Sequence[float], *, top: bool = False
) -> dict[str, Any]:
    """The form of chats; with ``top`` the best of each token are given, too (here: the sampled
    one).
    """
    content = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        word = f"token_id:{token}" if call.as_ids else f"w{token}"
        own = {"token": word, "logprob": logprob, "bytes": list(word.encode())}
        content.append({**own, "top_logprobs": [own] if top else []})
    return {"content": content}


def spans_of(output: EngineOutput, backing: Backing) -> list[dict[str, Any]] | None:
    """Weight-version spans, where the release shows them."""
    if not backing.flavour.shows_spans:
        return None
    return [_span(span) for span in output.spans]


def _span(span: Span) -> dict[str, Any]:
    return {"version": str(span.version), "start": span.start, "end": span.end}


def routes_of(output: EngineOutput, backing: Backing) -> Any:
    """Routes as a ``.npy`` file, or in prime-rl's form where the options demand it; ``None`` where
    there are none.
    """
    if output.routes is None:
        return None
    if backing.options.routes is RoutesForm.DESCRIBED:
        kind = "uint8" if backing.policy.num_experts <= 256 else "uint16"
        return as_described(output.routes.astype(kind), start=output.routes_start)
    return as_npy(output.routes)


def described(routes: IntArray) -> dict[str, Any]:
    """SkyRL's form: the smallest of uint8, int16 and int32 that fits, ``data`` first."""
    most = int(routes.max()) if routes.size else 0
    return as_described(
        routes.astype("uint8" if most <= 255 else "int16" if most <= 32_767 else "int32")
    )


def finish_of(output: EngineOutput) -> str:
    """The reason by vLLM's name."""
    return {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}.get(
        output.finish_reason, "abort"
    )
