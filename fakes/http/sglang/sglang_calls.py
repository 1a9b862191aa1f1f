"""Requests of the fake SGLang server, read and checked, and its replies to ``/generate``.

The keys of a reply depend on how the call ended.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

from rollproof.core.records import EngineOutput, FinishReason, IntArray, Version
from rollproof.core.routes_encoding import as_int32, compact
from rollproof.core.sampling_masks import SamplingMask, is_greedy
from rollproof.fakes.http.engine_backend import CallSpec, EngineBackend
from rollproof.fakes.http.request_body import (
    BadRequest,
    field,
    token_ids,
    words_of,
)
from rollproof.fakes.http.request_limits import check_batch, check_prompts, check_texts
from rollproof.fakes.http.sampling_validation import check_sglang
from rollproof.fakes.http.serve_options import RoutesForm
from rollproof.fakes.http.supported_fields import refuse_unsupported

if TYPE_CHECKING:
    from rollproof.fakes.engine.inflight import InflightCall

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "SglangRequest",
    "finish_of",
    "meta_of",
    "native_chunk",
    "native_reply",
    "shown_version",
    "version_spans",
]

DEFAULT_MAX_TOKENS = 128
"""SGLang's own max_new_tokens for a request that has none."""
_SAMPLING = ("sampling_params",)
_SALTS = ("cache_salt", "extra_key")
_PER_PROMPT = ("return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path", *_SALTS)
"""Fields that have one value for all prompts of a batch, or a list with one for each."""


class SglangRequest:
    """A request to sample.

    Args:
        body: its fields, named as those of ``/generate``.
        prompts: token ids of each prompt.
        sampling: sampling parameters of each prompt.
        backend: the engine that it is for.
        listed: the reply is a list, also for one prompt.

    Raises:
        BadRequest: a value is wrong, or several do not go together.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        prompts: Sequence[tuple[int, ...]],
        sampling: Sequence[Mapping[str, Any]],
        backend: EngineBackend,
        *,
        listed: bool,
    ) -> None:
        self.prompts: Sequence[tuple[int, ...]] = prompts
        samples = field(sampling[0], "n", int, 1)
        if not 1 <= samples <= 256:
            raise BadRequest(f"n must be 1 to 256, not {samples}.")
        if any(field(parameters, "n", int, 1) != samples for parameters in sampling[1:]):
            raise BadRequest(
                "The parallel_sample_num should be the same for all samples in sample params."
            )
        self.samples: int = samples
        scored = any(
            isinstance(start, int) and start >= 0
            for start in _values(body.get("logprob_start_len", -1))
        )
        check_batch(prompts, samples, scored=scored)
        self.stream: bool = field(body, "stream", bool, False)
        self.listed: bool = listed or samples > 1
        self._rids = _rids(body.get("rid"), len(prompts), samples, backend.new_id)
        bodies = _split(body, len(prompts), _PER_PROMPT) if self.listed else [body]
        self._specs = [
            _call_spec(of_prompt, prompt, rid, parameters)
            for of_prompt, prompt, rid, parameters in zip(
                bodies, prompts, self._rids[::samples], sampling, strict=True
            )
        ]
        for number, parameters in enumerate(sampling):
            if not number or parameters is not sampling[number - 1]:
                check_sglang(parameters)
        for spec in self._specs:
            _check_length(spec, backend.max_length)
            _check_mask(spec, streamed=self.stream)
            if spec.adapter is not None and spec.adapter not in backend.engine.adapters:
                raise BadRequest(
                    f"The following requested LoRA adapters are not loaded: {spec.adapter}",
                    param="lora_path",
                )

    @property
    def max_tokens(self) -> int:
        """Most tokens of each sample of the first prompt."""
        return int(self._specs[0].max_tokens or 0)

    @classmethod
    def read(cls, body: Mapping[str, Any], backend: EngineBackend) -> SglangRequest:
        """Read the body of ``/generate``, with one prompt or a list of them."""
        refuse_unsupported(body, "sglang /generate")
        ids, text = body.get("input_ids"), body.get("text")
        if ids is None and text is None:
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        if text is not None:  # if a request has both, SGLang takes the text
            listed = isinstance(text, list)
            texts = text if isinstance(text, list) else [text]
            check_prompts(texts)
            check_texts(texts)
            prompts = [
                words_of(field({"text": prompt}, "text", str, ""), backend.vocab)
                for prompt in texts
            ]
        else:
            listed = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
            lists: list[Any] = ids if isinstance(ids, list) and listed else [ids]
            check_prompts(lists)
            prompts = [token_ids(prompt, "input_ids", backend.vocab) for prompt in lists]
        if not prompts:
            raise BadRequest("input_ids cannot be empty.")
        bodies = _split(body, len(prompts), _SAMPLING) if listed else [body]
        sampling = [field(of_prompt, "sampling_params", dict, {}) for of_prompt in bodies]
        return cls(body, prompts, sampling, backend, listed=listed)

    def specs(self) -> list[CallSpec]:
        """Return the engine calls, prompt by prompt and sample by sample."""
        specs = (self._specs[number // self.samples] for number in range(len(self._rids)))
        return [
            spec if spec.rid == rid else replace(spec, rid=rid)
            for spec, rid in zip(specs, self._rids, strict=True)
        ]


def _values(value: Any) -> Sequence[Any]:
    """Return the values of a field that has one for all prompts, or a list."""
    return value if isinstance(value, list) else [value]


def _split(body: Mapping[str, Any], prompts: int, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the body as it holds for each of several ``prompts``; fields of ``names`` may be lists
    with a value for each.
    """
    lists = {
        name: body[name]
        for name in names
        if isinstance(body.get(name), list) and (body[name] or name not in _SALTS)
    }
    for name, values in lists.items():
        if len(values) != prompts:
            raise BadRequest(
                f"The length of {name} must be that of the batch, {prompts}, not {len(values)}."
            )
        if name in _SALTS and None in values:  # in a list SGLang requires an empty text for none
            raise BadRequest(f"Every {name} should be a string.")
    if not lists:
        return [body] * prompts
    return [
        {**body, **{name: values[number] for name, values in lists.items()}}
        for number in range(prompts)
    ]


def _call_spec(
    body: Mapping[str, Any], prompt: tuple[int, ...], rid: str, sampling: Mapping[str, Any]
) -> CallSpec:
    # Salts keep a prefix apart from others in the cache: parameters of the call. "" is none.
    salts = {name: field(body, name, str, None) for name in _SALTS if body.get(name)}
    parameters = {**sampling, **salts}
    parameters.pop("max_new_tokens", None)
    parameters.pop("n", None)
    return CallSpec(
        ids=body.get("text") is None,
        prompt=prompt,
        rid=rid,
        max_tokens=field(sampling, "max_new_tokens", int, DEFAULT_MAX_TOKENS),
        sampling=parameters,
        routes=field(body, "return_routed_experts", bool, False),
        logprobs=field(body, "return_logprob", bool, False),
        routes_start=field(body, "routed_experts_start_len", int, 0),
        prompt_logprobs=field(body, "logprob_start_len", int, -1),
        top_logprobs=field(body, "top_logprobs_num", int, 0),
        adapter=field(body, "lora_path", str, None) or None,
        sampling_mask=field(body, "return_sampling_mask", bool, False),
    )


def _check_length(spec: CallSpec, max_length: int) -> None:
    length = len(spec.prompt)
    if not length:
        raise BadRequest("input_ids cannot be empty.")
    if spec.logprobs and spec.prompt_logprobs > length:
        raise BadRequest(
            f"logprob_start_len={spec.prompt_logprobs} is higher than the number of input tokens"
            f" {length}."
        )
    if not 0 <= spec.routes_start <= length:
        raise BadRequest(
            f"routed_experts_start_len must be 0 to {length}, the number of input tokens, not"
            f" {spec.routes_start}."
        )
    if length >= max_length:
        raise BadRequest(
            f"The input ({length} tokens) is longer than the model's context length ({max_length}"
            " tokens)."
        )
    if length + (spec.max_tokens or 0) > max_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {max_length}"
            f" tokens: {length} tokens of input and {spec.max_tokens} of completion."
        )


def _check_mask(spec: CallSpec, *, streamed: bool) -> None:
    if not spec.sampling_mask:
        return
    if streamed:
        raise BadRequest(
            "return_sampling_mask is not supported by rollproof's fake server for a stream.",
            param="return_sampling_mask",
        )
    top_k = spec.sampling.get("top_k")
    # top_p alone was admitted (sglang#33593) and taken back (sglang#35205)
    if not is_greedy(spec.sampling) and not (isinstance(top_k, int) and top_k > 0):
        raise BadRequest(
            "return_sampling_mask requires a finite top_k.", param="return_sampling_mask"
        )


def _rids(rid: Any, prompts: int, samples: int, new_id: Callable[[], str]) -> list[str]:
    """Return a handle for each call, as SGLang chooses them: a list has one for each prompt, and
    several samples of a prompt get random ones.
    """
    if isinstance(rid, list):
        if len(rid) != prompts or not all(isinstance(name, str) and name for name in rid):
            raise BadRequest("rid must be a text, or a list of as many texts as there are prompts.")
        if len(set(rid)) < len(rid):
            raise BadRequest(
                "Duplicate request IDs detected within the request:"
                f" {sorted(name for name, times in Counter(rid).items() if times > 1)}"
            )
    elif rid is not None and not isinstance(rid, str):
        raise BadRequest("rid must be a text.", malformed=True)
    if samples > 1 or (rid is None):
        return [new_id() for _ in range(prompts * samples)]
    if isinstance(rid, str):
        return [rid] if prompts == 1 else [f"{rid}_{i}" for i in range(prompts)]
    return list(rid)


def meta_of(
    spec: CallSpec,
    output: EngineOutput,
    seconds: float,
    backend: EngineBackend,
    *,
    sent: int = 0,
    stamped: bool = True,
) -> dict[str, Any]:
    """Return the ``meta_info`` of a finished call without routes; its keys depend on how it ended.

    Args:
        spec: the call.
        output: its reply.
        seconds: how long it took.
        backend: the engine.
        sent: tokens that earlier events of a stream had.
        stamped: include the time of sending; a stream has it once.
    """
    meta: dict[str, Any] = {"id": spec.rid, "finish_reason": finish_of(output)}
    # that reply is made in a place of its own, TokenizerManager._handle_abort_req
    ran = output.cached_tokens is not None  # a call that was aborted in the queue has no counts
    if ran:
        meta["prompt_tokens"] = len(spec.prompt)
    # the label at the moment of the reply (since 0.5.19 that of the last span): a call across an
    # update looks wholly new
    if ran or output.token_ids or backend.tags_empty_abort():
        meta["weight_version"] = shown_version(output.version)
    if ran:
        meta["num_retractions"] = 0
    if spec.logprobs and output.logprobs is not None:
        meta |= _logprobs(output.logprobs.tolist()[sent:], output.token_ids[sent:], spec, backend)
        meta["output_token_logprobs_length"] = len(output.token_ids)
    if output.sampling_mask is not None:
        meta |= _sampling_mask(output.sampling_mask)
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(output.token_ids)
    if ran:
        meta["cached_tokens"] = output.cached_tokens
    if backend.flavour.shows_spans:
        meta["weight_versions"] = version_spans(output)
    meta["cached_tokens_details"] = (
        {"device": output.cached_tokens, "host": 0} if output.cached_tokens else None
    )
    meta["dp_rank"] = None
    meta["e2e_latency"] = seconds
    if stamped:
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def native_reply(
    spec: CallSpec,
    output: EngineOutput,
    seconds: float,
    backend: EngineBackend,
    *,
    sent: int = 0,
    stamped: bool = True,
) -> dict[str, Any]:
    """Return the reply of ``/generate``, or the last event of a stream from token ``sent`` on."""
    body: dict[str, Any] = (
        {"text": backend.shown_text(output.token_ids[sent:], ids=spec.ids)}
        if backend.options.tokenizer
        else {}
    )
    body["output_ids"] = output.token_ids[sent:]
    meta = meta_of(spec, output, seconds, backend, sent=sent, stamped=stamped)
    # only the last chunk of a stream has them: SGLang fills routes when a request finishes
    if output.routes is not None:
        meta |= _routes(output.routes, backend)
    body["meta_info"] = meta
    return body


def native_chunk(
    spec: CallSpec,
    call: InflightCall,
    logprobs: list[float],
    sent: int,
    backend: EngineBackend,
    *,
    stamped: bool,
) -> dict[str, Any]:
    """Return an event of a stream before its last: all tokens so far, or those from ``sent`` on if
    the server streams only what is new.
    """
    tokens = call.ids[call.prompt_len :]
    shown = tokens[sent:] if backend.options.incremental else tokens
    meta: dict[str, Any] = {
        "id": spec.rid,
        "finish_reason": None,
        "prompt_tokens": len(spec.prompt),
        "weight_version": shown_version(backend.engine.label),
        "num_retractions": 0,
    }
    if spec.logprobs:
        meta |= _logprobs(
            logprobs[sent:] if backend.options.incremental else logprobs, shown, spec, backend
        )
        meta["output_token_logprobs_length"] = len(tokens)
    cached = call.cached or 0
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(tokens),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
    }
    meta["dp_rank"] = None
    if stamped:
        meta["response_sent_to_client_ts"] = time.time()
    body: dict[str, Any] = (
        {"text": backend.shown_text(shown, ids=spec.ids)} if backend.options.tokenizer else {}
    )
    return {**body, "output_ids": shown, "meta_info": meta}


def finish_of(output: EngineOutput) -> dict[str, Any]:
    """Return the ``finish_reason`` of SGLang's native replies."""
    if output.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason is FinishReason.STOP:
        return {"type": "stop", "matched": output.token_ids[-1] if output.token_ids else None}
    return {
        "type": "abort",
        "message": output.message or "Aborted",
        "status_code": None,
        "err_type": None,
    }


def version_spans(output: EngineOutput) -> list[dict[str, Any]]:
    """Return which weights sampled which tokens."""
    return [
        {"version": shown_version(span.version), "start": span.start, "end": span.end}
        for span in output.spans
    ]


def shown_version(label: Version) -> str:
    """Return a label as text: SGLang's labels are."""
    return "default" if label is None else str(label)


def _routes(routes: IntArray, backend: EngineBackend) -> dict[str, Any]:
    if backend.options.routes is not RoutesForm.COMPACT:
        return {"routed_experts": as_int32(routes)}
    data, dtype = compact(routes)
    return {"routed_experts": data, "routed_experts_dtype": dtype}


def _sampling_mask(mask: SamplingMask) -> dict[str, Any]:
    """Return the ids of each token, and its logprob among them: the coded policy draws all ids of a
    support alike.
    """
    ids, offsets = mask.token_ids.tolist(), mask.offsets.tolist()
    return {
        "output_token_sampling_mask": [ids[low:high] for low, high in pairwise(offsets)],
        "output_token_sampling_logprobs": [-math.log(count) for count in mask.counts.tolist()],
    }


def _logprobs(
    logprobs: Sequence[float], tokens: Sequence[int], spec: CallSpec, backend: EngineBackend
) -> dict[str, Any]:
    """Return the logprobs of the sampled tokens, and if requested those of the prompt and of the
    best alternatives, of which the fake has one: the sampled token.
    """
    # the text of a token is None without return_text_in_logprobs
    pairs = list(zip(logprobs, tokens, repeat(None, len(tokens)), strict=True))
    meta: dict[str, Any] = {
        "input_token_logprobs": (),
        "output_token_logprobs": pairs,
        "output_token_logprobs_length": len(pairs),
    }
    start = spec.prompt_logprobs
    prompt: list[tuple[float | None, int, None]] = []
    if start >= 0:
        values = backend.policy.logprobs(backend.engine.version, spec.prompt, 1).tolist()
        # the first token of a prompt has no logprob
        prompt = [
            (value, token, None) for value, token in zip([None, *values], spec.prompt, strict=True)
        ]
        meta["input_token_logprobs"] = prompt[start:]
    if spec.top_logprobs:
        meta["input_top_logprobs"] = [
            None if value is None else [(value, token, None)]
            for value, token, _ in prompt[max(start, 0) :]
        ]
        meta["output_top_logprobs"] = [[pair] for pair in pairs]
    return meta
