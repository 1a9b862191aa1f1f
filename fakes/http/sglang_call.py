"""SGLang's calls: a ``/generate`` request read and checked, and its reply, whose keys depend on how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollproof.fakes.http.backing import Backing, RoutesForm, Wanted
from rollproof.fakes.http.bodies import BadRequest, Uncaught, dumped, field, text_of, token_ids, words_of
from rollproof.fakes.http.wire import as_int32, compact
from rollproof.records import EngineOutput, FinishReason, Version

if TYPE_CHECKING:
    from rollproof.fakes.calls import EngineCall

__all__ = ["UNLIMITED", "SglangCall", "finish_of", "indexed", "last_logprob", "meta_of", "native_chunk", "native_reply", "shown_version"]

UNLIMITED = 128
"""SGLang's own max_new_tokens where a request states none."""


_SAMPLING = frozenset(
    (
        "max_new_tokens",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "beam_width",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
        "custom_params",
    )
)
"""The fields of SamplingParams of SGLang 0.5.21."""


def _check(sampling: Mapping[str, Any]) -> None:
    temperature, top_p = field(sampling, "temperature", (int, float), 1.0), field(sampling, "top_p", (int, float), 1.0)
    if not 0.0 <= temperature < float("inf"):
        raise BadRequest(f"temperature must be a non-negative finite number, got {temperature}.")
    if not 0.0 < top_p <= 1.0:
        raise BadRequest(f"top_p must be in (0, 1], got {top_p}.")


class SglangCall:
    """A request: its ``prompts``, and what holds for all of them. ``sampling`` is as SGLang names it. Raises ``BadRequest``."""

    def __init__(
        self, body: Mapping[str, Any], prompts: Sequence[tuple[int, ...]], sampling: Mapping[str, Any], backing: Backing, *, listed: bool
    ) -> None:
        self.prompts: Sequence[tuple[int, ...]] = prompts
        self.max_tokens: int = field(sampling, "max_new_tokens", int, UNLIMITED)
        samples = field(sampling, "n", int, 1)
        if not 1 <= samples <= 256:
            raise BadRequest(f"n must be 1 to 256, not {samples}.")
        self.samples: int = samples
        self.sampling: dict[str, Any] = {name: value for name, value in sampling.items() if name not in ("max_new_tokens", "n")}
        self.stream: bool = field(body, "stream", bool, False)
        self.logprobs: bool = field(body, "return_logprob", bool, False)
        self.routes: bool = field(body, "return_routed_experts", bool, False)
        self.routes_start: int = field(body, "routed_experts_start_len", int, 0)
        self.prompt_logprobs: int = field(body, "logprob_start_len", int, -1)
        self.top: int = field(body, "top_logprobs_num", int, 0)
        self.listed: bool = listed or samples > 1
        self.rids: list[str] = _rids(body.get("rid"), len(prompts), samples, backing.new_id)
        stray = sorted(set(self.sampling) - _SAMPLING)
        if stray:  # SGLang passes them on to a constructor, whose TypeError it does not catch
            raise Uncaught(f"sampling_params has {stray}")
        _check(self.sampling)
        for prompt in prompts:
            if not prompt:
                raise BadRequest("input_ids cannot be empty.")
            if self.logprobs and self.prompt_logprobs > len(prompt):
                raise BadRequest(f"logprob_start_len={self.prompt_logprobs} is higher than the number of input tokens {len(prompt)}.")
            if len(prompt) >= backing.max_length:
                raise BadRequest(
                    f"The input ({len(prompt)} tokens) is longer than the model's context length ({backing.max_length} tokens)."
                )
            if len(prompt) + self.max_tokens > backing.max_length:
                raise BadRequest(
                    f"Requested token count exceeds the model's maximum context length of {backing.max_length} tokens: {len(prompt)} "
                    f"tokens of input and {self.max_tokens} of completion."
                )

    @classmethod
    def read(cls, body: Mapping[str, Any], backing: Backing) -> SglangCall:
        """Read the body of ``/generate``: one prompt, or a list of them."""
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise BadRequest("Either text, input_ids or input_embeds should be provided, and only one of them.")
        sampling = field(body, "sampling_params", dict, {})
        if text is not None:
            texts = [field({"text": one}, "text", str, "") for one in text] if isinstance(text, list) else [field(body, "text", str, "")]
            return cls(body, [words_of(one, backing.vocab) for one in texts], sampling, backing, listed=isinstance(text, list))
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return cls(body, [token_ids(one, "input_ids", backing.vocab) for one in ids], sampling, backing, listed=True)
        return cls(body, [token_ids(ids, "input_ids", backing.vocab)], sampling, backing, listed=False)

    def wanted(self) -> Iterator[Wanted]:
        """The engine calls, prompt by prompt and sample by sample."""
        for number, rid in enumerate(self.rids):
            yield Wanted(
                prompt=self.prompts[number // self.samples],
                rid=rid,
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                routes=self.routes,
                logprobs=self.logprobs,
                routes_start=self.routes_start,
                prompt_logprobs=self.prompt_logprobs,
                top=self.top,
            )


def _rids(rid: Any, prompts: int, samples: int, new_id: Callable[[], str]) -> list[str]:
    """Handles as SGLang gives them: a list has one for each prompt; several samples of one get random ones."""
    if isinstance(rid, list):
        if len(rid) != prompts or not all(isinstance(one, str) and one for one in rid):
            raise BadRequest("rid must be a text, or a list of as many texts as there are prompts.")
        if len(set(rid)) < len(rid):
            raise BadRequest(f"Duplicate request IDs detected within the request: {sorted({one for one in rid if rid.count(one) > 1})}")
    elif rid is not None and not isinstance(rid, str):
        raise BadRequest("rid must be a text.", malformed=True)
    if samples > 1 or (rid is None):
        return [new_id() for _ in range(prompts * samples)]
    if isinstance(rid, str):
        return [rid] if prompts == 1 else [f"{rid}_{i}" for i in range(prompts)]
    return list(rid)


def meta_of(wanted: Wanted, output: EngineOutput, taken: float, backing: Backing, *, sent: int = 0, stamped: bool = True) -> dict[str, Any]:
    """``meta_info`` of a finished call, without its routes: the keys depend on how it ended, as SGLang's do."""
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
        meta["weight_versions"] = [{"version": shown_version(span.version), "start": span.start, "end": span.end} for span in output.spans]
    meta["cached_tokens_details"] = {"device": output.cached_tokens, "host": 0} if output.cached_tokens else None
    meta["dp_rank"] = None
    meta["e2e_latency"] = taken
    if stamped:
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def native_reply(wanted: Wanted, output: EngineOutput, taken: float, backing: Backing, *, sent: int = 0, stamped: bool = True) -> bytes:
    """The reply of ``/generate``; of a stream that tells only what is new, from token ``sent`` on. A stream is stamped once."""
    body: dict[str, Any] = {"text": text_of(output.token_ids[sent:])} if backing.options.tokenizer else {}
    body["output_ids"] = output.token_ids[sent:]
    body["meta_info"] = meta_of(wanted, output, taken, backing, sent=sent, stamped=stamped)
    text = dumped(body)
    return text if output.routes is None else with_routes(text, output, backing)


def with_routes(text: bytes, output: EngineOutput, backing: Backing) -> bytes:
    """Routes laid in at the end of ``meta_info``: base64 needs no escaping, and an encoder would look at each of its characters."""
    assert output.routes is not None
    if backing.options.routes is RoutesForm.COMPACT:
        data, name = compact(output.routes)
        return b"".join((text[:-2], b',"routed_experts":"', data, b'","routed_experts_dtype":"', name.encode("ascii"), b'"}}'))
    return b"".join((text[:-2], b',"routed_experts":"', as_int32(output.routes), b'"}}'))


def native_chunk(wanted: Wanted, call: EngineCall, logprobs: list[float], sent: int, backing: Backing) -> bytes:
    """An event of a stream before its last: all tokens so far, or those from ``sent`` on."""
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
        meta |= _logprobs(logprobs[sent:] if backing.options.incremental else logprobs, shown, wanted, backing)
        meta["output_token_logprobs_length"] = len(tokens)
    cached = call.cached or 0
    details = {"device": cached, "host": 0} if cached else None
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(tokens), "cached_tokens": cached, "cached_tokens_details": details}
    meta["dp_rank"] = None
    if not sent:
        meta["response_sent_to_client_ts"] = time.time()
    body: dict[str, Any] = {"text": text_of(shown)} if backing.options.tokenizer else {}
    return dumped({**body, "output_ids": shown, "meta_info": meta})


def last_logprob(call: EngineCall, backing: Backing) -> float:
    """Of the token that was sampled last."""
    last = len(call.ids) - 1
    return float(backing.policy.logprobs_spans([(last, last + 1, call.key)], call.ids, last, last + 1)[0])


def finish_of(output: EngineOutput) -> dict[str, Any]:
    """The ``finish_reason`` of SGLang's native replies."""
    if output.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason is FinishReason.STOP:
        return {"type": "stop", "matched": output.token_ids[-1] if output.token_ids else None}
    return {"type": "abort", "message": output.message or "Aborted", "status_code": None, "err_type": None}


def shown_version(label: Version) -> str:
    """A label as text: SGLang's are."""
    return "default" if label is None else str(label)


def indexed(data: bytes, index: int) -> bytes:
    """An event of a stream of several samples says whose it is."""
    return b'%s,"index":%d}' % (data[:-1], index)


def _logprobs(logprobs: Sequence[float], tokens: Sequence[int], wanted: Wanted, backing: Backing) -> dict[str, Any]:
    """Of the sampled tokens, and where they were asked for those of the prompt, and the best ones (here: the sampled token's alone)."""
    pairs = [(logprob, token, None) for logprob, token in zip(logprobs, tokens, strict=True)]
    meta: dict[str, Any] = {"input_token_logprobs": (), "output_token_logprobs": pairs, "output_token_logprobs_length": len(pairs)}
    start = wanted.prompt_logprobs
    given: list[tuple[float | None, int, None]] = []
    if start >= 0:
        given = [(value, token, None) for value, token in zip(_prompt_logprobs(wanted, backing), wanted.prompt, strict=True)]
        meta["input_token_logprobs"] = given[start:]
    if wanted.top:
        meta["input_top_logprobs"] = [None if value is None else [(value, token, None)] for value, token, _ in given[max(start, 0) :]]
        meta["output_top_logprobs"] = [[pair] for pair in pairs]
    return meta


def _prompt_logprobs(wanted: Wanted, backing: Backing) -> list[float | None]:
    """The first token has none."""
    return [None, *backing.policy.logprobs(backing.engine.version, wanted.prompt, 1).tolist()]
