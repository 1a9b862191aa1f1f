"""SGLang's calls: a ``/generate`` request read and checked, and its reply, whose keys depend on how
it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from rollproof.core.records import EngineOutput, FinishReason, Version
from rollproof.fakes.http.engine_backend import Backing, RoutesForm, Wanted
from rollproof.fakes.http.request_body import (
    BadRequest,
    dumped,
    field,
    text_of,
    token_ids,
    words_of,
)
from rollproof.fakes.http.routes_encoding import as_int32, compact
from rollproof.fakes.http.sampling_validation import check_sglang
from rollproof.fakes.http.supported_fields import FIELDS, refuse_unanswered

if TYPE_CHECKING:
    from rollproof.fakes.engine.inflight import InflightCall

_FIELDS = FIELDS["sglang /generate"]

__all__ = [
    "UNLIMITED",
    "SglangCall",
    "finish_of",
    "indexed",
    "last_logprob",
    "meta_of",
    "native_chunk",
    "native_reply",
    "shown_version",
]

UNLIMITED = 128
"""SGLang's own max_new_tokens where a request states none."""


class SglangCall:
    """A request: its ``prompts``, and what holds for each of them. ``sampling`` are their
    parameters, as SGLang names them.

    Raises ``BadRequest``.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        prompts: Sequence[tuple[int, ...]],
        sampling: Sequence[Mapping[str, Any]],
        backing: Backing,
        *,
        listed: bool,
    ) -> None:
        self.prompts: Sequence[tuple[int, ...]] = prompts
        samples = field(sampling[0], "n", int, 1)
        if not 1 <= samples <= 256:
            raise BadRequest(f"n must be 1 to 256, not {samples}.")
        if len(sampling) > 1 and any(field(one, "n", int, 1) != samples for one in sampling):
            raise BadRequest(
                "The parallel_sample_num should be the same for all samples in sample params."
            )
        self.samples: int = samples
        self.stream: bool = field(body, "stream", bool, False)
        self.listed: bool = listed or samples > 1
        self.rids: list[str] = _rids(body.get("rid"), len(prompts), samples, backing.new_id)
        parts = _of_each(body, len(prompts)) if self.listed else [body]
        self._wanted: list[Wanted] = [
            _wanted(part, prompt, rid, one)
            for part, prompt, rid, one in zip(
                parts, prompts, self.rids[::samples], sampling, strict=True
            )
        ]
        for number, one in enumerate(sampling):
            if not number or one is not sampling[number - 1]:
                check_sglang(one)
        for wanted in self._wanted:
            _check_length(wanted, backing.max_length)

    @property
    def max_tokens(self) -> int:
        """What each sample of the first prompt may have."""
        return int(self._wanted[0].max_tokens or 0)

    @classmethod
    def read(cls, body: Mapping[str, Any], backing: Backing) -> SglangCall:
        """Read the body of ``/generate``: one prompt, or a list of them."""
        refuse_unanswered(body, _FIELDS)
        ids, text = body.get("input_ids"), body.get("text")
        if ids is None and text is None:
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        if text is not None:  # where there are both SGLang takes the text
            listed = isinstance(text, list)
            texts = (
                [field({"text": one}, "text", str, "") for one in text]
                if isinstance(text, list)
                else [field(body, "text", str, "")]
            )
            prompts = [words_of(one, backing.vocab) for one in texts]
        else:
            given = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
            listed = given is ids
            prompts = [token_ids(one, "input_ids", backing.vocab) for one in given]
        if not prompts:
            raise BadRequest("input_ids cannot be empty.")
        parts = _of_each(body, len(prompts), _SAMPLING) if listed else [body]
        return cls(
            body,
            prompts,
            [field(one, "sampling_params", dict, {}) for one in parts],
            backing,
            listed=listed,
        )

    def wanted(self) -> Iterator[Wanted]:
        """The engine calls, prompt by prompt and sample by sample."""
        for number, rid in enumerate(self.rids):
            one = self._wanted[number // self.samples]
            yield one if one.rid is rid else replace(one, rid=rid)


_SAMPLING = ("sampling_params",)
_SALTS = ("cache_salt", "extra_key")
_EACH = ("return_logprob", "logprob_start_len", "top_logprobs_num", *_SALTS)


def _of_each(
    body: Mapping[str, Any], prompts: int, names: Sequence[str] = _EACH
) -> list[Mapping[str, Any]]:
    """The body as it holds for each of several ``prompts``: of ``names`` it has one value for all
    of them, or a list.
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
        if name in _SALTS and None in values:  # of a list SGLang wants an empty text for none
            raise BadRequest(f"Every {name} should be a string.")
    return [
        {**body, **{name: values[number] for name, values in lists.items()}} if lists else body
        for number in range(prompts)
    ]


def _wanted(
    body: Mapping[str, Any], prompt: tuple[int, ...], rid: str, sampling: Mapping[str, Any]
) -> Wanted:
    """What is asked for one prompt. Salts, which keep its prefix from others in the cache, are
    parameters of its calls; "" is none.
    """
    parameters = {
        **sampling,
        **{name: field(body, name, str, None) for name in _SALTS if body.get(name)},
    }
    parameters.pop("max_new_tokens", None)
    parameters.pop("n", None)
    return Wanted(
        prompt=prompt,
        rid=rid,
        max_tokens=field(sampling, "max_new_tokens", int, UNLIMITED),
        sampling=parameters,
        routes=field(body, "return_routed_experts", bool, False),
        logprobs=field(body, "return_logprob", bool, False),
        routes_start=field(body, "routed_experts_start_len", int, 0),
        prompt_logprobs=field(body, "logprob_start_len", int, -1),
        top=field(body, "top_logprobs_num", int, 0),
    )


def _check_length(wanted: Wanted, most: int) -> None:
    length = len(wanted.prompt)
    if not length:
        raise BadRequest("input_ids cannot be empty.")
    if wanted.logprobs and wanted.prompt_logprobs > length:
        raise BadRequest(
            f"logprob_start_len={wanted.prompt_logprobs} is higher than the number of input tokens"
            f" {length}."
        )
    if not 0 <= wanted.routes_start <= length:
        raise BadRequest(
            f"routed_experts_start_len must be 0 to {length}, the number of input tokens, not"
            f" {wanted.routes_start}."
        )
    if length >= most:
        raise BadRequest(
            f"The input ({length} tokens) is longer than the model's context length ({most}"
            " tokens)."
        )
    if length + (wanted.max_tokens or 0) > most:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {most} tokens:"
            f" {length} tokens of input and {wanted.max_tokens} of completion."
        )


def _rids(rid: Any, prompts: int, samples: int, new_id: Callable[[], str]) -> list[str]:
    """Handles as SGLang gives them: a list has one for each prompt; several samples of one get
    random ones.
    """
    if isinstance(rid, list):
        if len(rid) != prompts or not all(isinstance(one, str) and one for one in rid):
            raise BadRequest("rid must be a text, or a list of as many texts as there are prompts.")
        if len(set(rid)) < len(rid):
            raise BadRequest(
                "Duplicate request IDs detected within the request:"
                f" {sorted({one for one in rid if rid.count(one) > 1})}"
            )
    elif rid is not None and not isinstance(rid, str):
        raise BadRequest("rid must be a text.", malformed=True)
    if samples > 1 or (rid is None):
        return [new_id() for _ in range(prompts * samples)]
    if isinstance(rid, str):
        return [rid] if prompts == 1 else [f"{rid}_{i}" for i in range(prompts)]
    return list(rid)


def meta_of(
    wanted: Wanted,
    output: EngineOutput,
    taken: float,
    backing: Backing,
    *,
    sent: int = 0,
    stamped: bool = True,
) -> dict[str, Any]:
    """``meta_info`` of a finished call, without its routes: the keys depend on how it ended, as
    SGLang's do.
    """
    meta: dict[str, Any] = {"id": wanted.rid, "finish_reason": finish_of(output)}
    ran = output.cached_tokens is not None  # a call that was aborted in the queue has no counts
    if ran:
        meta["prompt_tokens"] = len(wanted.prompt)
    meta["weight_version"] = shown_version(output.version)
    if ran:
        meta["num_retractions"] = 0
    if wanted.logprobs and output.logprobs is not None:
        meta |= _logprobs(output.logprobs.tolist()[sent:], output.token_ids[sent:], wanted, backing)
        meta["output_token_logprobs_length"] = len(output.token_ids)
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(output.token_ids)
    if ran:
        meta["cached_tokens"] = output.cached_tokens
    if backing.flavour.shows_spans:
        meta["weight_versions"] = [
            {"version": shown_version(span.version), "start": span.start, "end": span.end}
            for span in output.spans
        ]
    meta["cached_tokens_details"] = (
        {"device": output.cached_tokens, "host": 0} if output.cached_tokens else None
    )
    meta["dp_rank"] = None
    meta["e2e_latency"] = taken
    if stamped:
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def native_reply(
    wanted: Wanted,
    output: EngineOutput,
    taken: float,
    backing: Backing,
    *,
    sent: int = 0,
    stamped: bool = True,
) -> tuple[bytes, ...]:
    """The reply of ``/generate``, in parts that follow each other; of a stream that tells only what
    is new, from token ``sent`` on.

    A stream is stamped once.
    """
    body: dict[str, Any] = (
        {"text": text_of(output.token_ids[sent:])} if backing.options.tokenizer else {}
    )
    body["output_ids"] = output.token_ids[sent:]
    body["meta_info"] = meta_of(wanted, output, taken, backing, sent=sent, stamped=stamped)
    text = dumped(body)
    return (text,) if output.routes is None else with_routes(text, output, backing)


def with_routes(text: bytes, output: EngineOutput, backing: Backing) -> tuple[bytes, ...]:
    """Routes laid in at the end of ``meta_info``: base64 needs no escaping, and an encoder would
    look at each of its characters.
    """
    assert output.routes is not None
    if backing.options.routes is RoutesForm.COMPACT:
        data, name = compact(output.routes)
        return (
            text[:-2] + b',"routed_experts":"',
            data,
            b'","routed_experts_dtype":"%b"}}' % name.encode("ascii"),
        )
    return text[:-2] + b',"routed_experts":"', as_int32(output.routes), b'"}}'


def native_chunk(
    wanted: Wanted,
    call: InflightCall,
    logprobs: list[float],
    sent: int,
    backing: Backing,
    *,
    stamped: bool,
) -> bytes:
    """An event of a stream before its last: all tokens so far, or those from ``sent`` on. The first
    is stamped.
    """
    tokens = call.ids[call.prompt_len :]
    shown = tokens[sent:] if backing.options.incremental else tokens
    meta: dict[str, Any] = {
        "id": wanted.rid,
        "finish_reason": None,
        "prompt_tokens": len(wanted.prompt),
        "weight_version": shown_version(backing.engine.label),
        "num_retractions": 0,
    }
    if wanted.logprobs:
        meta |= _logprobs(
            logprobs[sent:] if backing.options.incremental else logprobs, shown, wanted, backing
        )
        meta["output_token_logprobs_length"] = len(tokens)
    cached = call.cached or 0
    details = {"device": cached, "host": 0} if cached else None
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(tokens),
        "cached_tokens": cached,
        "cached_tokens_details": details,
    }
    meta["dp_rank"] = None
    if stamped:
        meta["response_sent_to_client_ts"] = time.time()
    body: dict[str, Any] = {"text": text_of(shown)} if backing.options.tokenizer else {}
    return dumped({**body, "output_ids": shown, "meta_info": meta})


def last_logprob(call: InflightCall, backing: Backing) -> float:
    """Of the token that was sampled last."""
    last = len(call.ids) - 1
    return float(
        backing.policy.logprobs_spans([(last, last + 1, call.key)], call.ids, last, last + 1)[0]
    )


def finish_of(output: EngineOutput) -> dict[str, Any]:
    """The ``finish_reason`` of SGLang's native replies."""
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


def shown_version(label: Version) -> str:
    """A label as text: SGLang's are."""
    return "default" if label is None else str(label)


def indexed(data: bytes, index: int) -> bytes:
    """An event of a stream of several samples says whose it is."""
    return b'%s,"index":%d}' % (data[:-1], index)


def _logprobs(
    logprobs: Sequence[float], tokens: Sequence[int], wanted: Wanted, backing: Backing
) -> dict[str, Any]:
    """Of the sampled tokens, and where they were asked for those of the prompt, and the best ones
    (here: the sampled token's alone).
    """
    pairs = list(zip(logprobs, tokens, repeat(None, len(tokens)), strict=True))
    meta: dict[str, Any] = {
        "input_token_logprobs": (),
        "output_token_logprobs": pairs,
        "output_token_logprobs_length": len(pairs),
    }
    start = wanted.prompt_logprobs
    given: list[tuple[float | None, int, None]] = []
    if start >= 0:
        given = [
            (value, token, None)
            for value, token in zip(_prompt_logprobs(wanted, backing), wanted.prompt, strict=True)
        ]
        meta["input_token_logprobs"] = given[start:]
    if wanted.top:
        meta["input_top_logprobs"] = [
            None if value is None else [(value, token, None)]
            for value, token, _ in given[max(start, 0) :]
        ]
        meta["output_top_logprobs"] = [[pair] for pair in pairs]
    return meta


def _prompt_logprobs(wanted: Wanted, backing: Backing) -> list[float | None]:
    """The first token has none."""
    return [None, *backing.policy.logprobs(backing.engine.version, wanted.prompt, 1).tolist()]
