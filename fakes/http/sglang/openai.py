"""SGLang's OpenAI endpoints: completions and chats.

Routes are where SGLang has them: in ``sglext`` of the reply, or in ``meta_info`` of the choice.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollproof.core.records import EngineOutput
from rollproof.core.routes_encoding import as_int32
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.http.engine_backend import CallSpec, EngineBackend
from rollproof.fakes.http.fake_server import EventStream, FinalEvent, OrjsonResponse
from rollproof.fakes.http.request_body import (
    BadRequest,
    encode_json,
    field,
    is_json,
    json_body,
    text_of,
    token_ids,
    words_of,
)
from rollproof.fakes.http.request_limits import check_texts
from rollproof.fakes.http.sglang.sglang_calls import (
    DEFAULT_MAX_TOKENS,
    SglangRequest,
    finish_of,
    meta_of,
    shown_version,
    version_spans,
)
from rollproof.fakes.http.streams import EndedCall, SampledToken, stream_calls
from rollproof.fakes.http.supported_fields import refuse_unsupported

__all__ = ["OpenAI"]

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "ignore_eos",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class OpenAI:
    """The two endpoints on the engine of ``backend``."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def completions(self, request: Request) -> Response:
        return await self._guarded(self._completions(request))

    async def chat(self, request: Request) -> Response:
        return await self._guarded(self._chat(request))

    async def _guarded(self, answer: Awaitable[Response]) -> Response:
        """Refuse in the words of these endpoints: they differ from those of SGLang's own."""
        try:
            return await answer
        except (BadRequest, BadCall) as error:
            malformed = isinstance(error, BadRequest) and error.malformed
            status = error.status if isinstance(error, BadRequest) else 400
            kind = "Bad Request" if malformed else "BadRequestError"
            return JSONResponse(_error(str(error), kind, status), status)

    async def _completions(self, request: Request) -> Response:
        body = await _read(request)
        refuse_unsupported(body, "sglang /v1/completions")
        prompts, listed = self._prompts(body)
        if body.get("max_tokens") == 0:
            raise BadRequest("1 validation error: max_tokens must be at least 1.", malformed=True)
        logprobs = field(body, "logprobs", (int, bool), None) is not None
        call = self._sampling_request(body, prompts, logprobs=logprobs, default=16, listed=listed)
        return await self._answer(request, call, _Completion(body))

    async def _chat(self, request: Request) -> Response:
        body = await _read(request)
        refuse_unsupported(body, "sglang /v1/chat/completions")
        text, ids = _messages_text(body), body.get("input_ids")
        vocab = self._backend.vocab
        check_texts([text])
        prompt = words_of(text, vocab) if ids is None else token_ids(ids, "input_ids", vocab)
        for name in ("return_meta_info", "return_token_ids", "return_prompt_token_ids"):
            if body.get(name) and body.get("stream"):
                raise BadRequest(f"{name} is not supported with streaming.")
        room = max(1, self._backend.max_length - len(prompt))
        call = self._sampling_request(
            body,
            [prompt],
            logprobs=field(body, "logprobs", bool, False),
            default=min(DEFAULT_MAX_TOKENS, room),
            listed=False,
        )
        if len(prompt) + call.max_tokens > self._backend.max_length:
            raise BadRequest(f"max_completion_tokens is too large: {call.max_tokens}.")
        return await self._answer(request, call, _Chat(body))

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], bool]:
        """Return the token ids of each prompt, and whether there is a list of prompts."""
        prompt = body.get("prompt")
        if prompt is None:
            raise BadRequest("1 validation error: prompt is required.", malformed=True)
        if not prompt or not isinstance(prompt, str | list):
            raise BadRequest("Prompt cannot be empty")
        vocab = self._backend.vocab
        check_texts(prompt if isinstance(prompt, list) else [prompt])
        if isinstance(prompt, str):
            return [words_of(prompt, vocab)], False
        if isinstance(prompt[0], str | list):
            return [
                words_of(text, vocab) if isinstance(text, str) else token_ids(text, "prompt", vocab)
                for text in prompt
            ], True
        return [token_ids(prompt, "prompt", vocab)], False

    def _sampling_request(
        self,
        body: Mapping[str, Any],
        prompts: list[tuple[int, ...]],
        *,
        logprobs: bool,
        default: int,
        listed: bool,
    ) -> SglangRequest:
        """Return the request as SGLang's own endpoint would be sent it."""
        budget = field(body, "max_completion_tokens", int, field(body, "max_tokens", int, default))
        sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        # SGLang's own name of it: `seed` is OpenAI's
        if body.get("seed") is not None:
            sampling["sampling_seed"] = body["seed"]
        sampling |= {"max_new_tokens": budget, "n": field(body, "n", int, 1)}
        return SglangRequest(
            {**body, "return_logprob": logprobs},
            prompts,
            [sampling] * len(prompts),
            self._backend,
            listed=listed,
        )

    async def _answer(self, request: Request, call: SglangRequest, form: _Completion) -> Response:
        if call.stream:
            return EventStream(self._stream(request, call, form))
        started, specs = time.perf_counter(), call.specs()
        outputs = await self._backend.generate_all(request, specs, unique=True)
        seconds = time.perf_counter() - started
        choices = [
            form.choice(index, spec, output, seconds, self._backend)
            for index, (spec, output) in enumerate(zip(specs, outputs, strict=True))
        ]
        output = outputs[0]
        sampled = sum(len(output.token_ids) for output in outputs)
        reply = {
            **form.envelope(specs[0].rid),
            "choices": choices,
            "usage": _usage(sum(map(len, call.prompts)), sampled),
            "metadata": _metadata(output, self._backend),
        }
        # at the level of the response, and of its first choice only, as SGLang has it
        if output.routes is not None and not form.has_meta_info:
            extension: dict[str, Any] = {"routed_experts": as_int32(output.routes)}
            if call.samples > 1:
                extension["spec_tokens_details"] = []
            reply["sglext"] = extension
        return OrjsonResponse(reply)

    async def _stream(
        self, request: Request, call: SglangRequest, form: _Completion
    ) -> AsyncGenerator[bytes]:
        """Yield deltas, the ends of all calls, routes, usage if requested, and the end mark."""
        specs = call.specs()
        opened: set[int] = set()
        ends: list[EndedCall] = []
        events = stream_calls(request, specs, self._backend, unique=True, hold_last=form.holds_last)
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, SampledToken):
                        spec = specs[event.index]
                        if event.index not in opened:
                            opened.add(event.index)
                            for chunk in form.opening(spec, event.index):
                                yield _event(chunk)
                        yield _event(form.delta(spec, event.index, [event.token], event.logprobs))
                    else:
                        ends.append(event)
            # the ends come after all tokens, in the order of the samples
            ends.sort(key=lambda end: end.index)
            for end in ends:
                yield FinalEvent(_event(form.closing(specs[end.index], end)))
            chunk = form.chunk(specs[0])
            if ends[0].output.routes is not None:
                routes = {"routed_experts": as_int32(ends[0].output.routes)}
                yield _event({**chunk, "choices": [], "usage": None, "sglext": routes})
            if (form.body.get("stream_options") or {}).get("include_usage"):
                sampled = sum(len(end.output.token_ids) for end in ends)
                usage = _usage(sum(map(len, call.prompts)), sampled)
                if not form.is_chat:
                    del usage["prompt_tokens_details"]
                yield _event({**chunk, "choices": [], "usage": usage})
        except (BadCall, BadRequest) as error:
            yield _event({"error": _error(str(error), "BadRequestError", 400)})
        yield b"data: [DONE]\n\n"


class _Completion:
    """How a completion is written; ``body`` is the request."""

    kind, part = "text_completion", "text_completion"
    is_chat = False
    holds_last = True
    """Whether the last token comes with the finish reason."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    @property
    def has_meta_info(self) -> bool:
        """Whether a choice has ``meta_info``, with its routes."""
        return self.is_chat and bool(self.body.get("return_meta_info"))

    def envelope(self, rid: str) -> dict[str, Any]:
        return {
            "id": rid,
            "object": self.kind,
            "created": int(time.time()),
            "model": field(self.body, "model", str, "default"),
        }

    def chunk(self, spec: CallSpec) -> dict[str, Any]:
        return {**self.envelope(spec.rid), "object": self.part}

    def choice(
        self,
        index: int,
        spec: CallSpec,
        output: EngineOutput,
        seconds: float,
        backend: EngineBackend,
    ) -> dict[str, Any]:
        echo = text_of(spec.prompt) + " " if self.body.get("echo") else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + text_of(output.token_ids),
            "logprobs": self._logprobs(output.token_ids, _logprobs_of(spec, output)),
        }
        choice |= _ending(output)
        if self.body.get("return_token_ids"):
            choice["token_ids"] = list(output.token_ids)
            choice["prompt_token_ids"] = list(spec.prompt)
        return choice

    def opening(self, spec: CallSpec, index: int) -> Iterable[dict[str, Any]]:
        return ()

    def delta(
        self, spec: CallSpec, index: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text_of(tokens) + " ",
            "logprobs": self._logprobs(tokens, logprobs) if spec.logprobs else None,
            "finish_reason": None,
            "matched_stop": None,
        }
        if self.body.get("return_token_ids"):
            choice["token_ids"] = list(tokens)
        return {**self.chunk(spec), "choices": [choice], "usage": None}

    def closing(self, spec: CallSpec, end: EndedCall) -> dict[str, Any]:
        chunk = self.delta(spec, end.index, end.unsent_tokens, end.unsent_logprobs)
        chunk["choices"][0] |= _ending(end.output)
        return chunk

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        words = [f"w{token}" for token in tokens]
        top = []
        if (self.body.get("logprobs") or 0) > 0:
            top = [{word: value} for word, value in zip(words, logprobs, strict=True)]
        return {
            "text_offset": [-1] * len(words),
            "token_logprobs": list(logprobs),
            "tokens": words,
            "top_logprobs": top,
        }


class _Chat(_Completion):
    """How a chat is written."""

    kind, part = "chat.completion", "chat.completion.chunk"
    is_chat = True
    holds_last = False

    def choice(
        self,
        index: int,
        spec: CallSpec,
        output: EngineOutput,
        seconds: float,
        backend: EngineBackend,
    ) -> dict[str, Any]:
        body, logprobs = self.body, _logprobs_of(spec, output)
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": text_of(output.token_ids),
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": None if logprobs is None else self._content(output.token_ids, logprobs),
            **_ending(output),
        }
        if body.get("return_prompt_token_ids") or body.get("return_token_ids"):
            choice["prompt_token_ids"] = list(spec.prompt)
        if body.get("return_token_ids"):
            choice["response_token_ids"] = list(output.token_ids)
        if self.has_meta_info:
            meta = meta_of(spec, output, seconds, backend)
            if output.routes is not None:
                meta["routed_experts"] = as_int32(output.routes)
            choice["meta_info"] = meta
        return choice

    def opening(self, spec: CallSpec, index: int) -> Iterable[dict[str, Any]]:
        delta = {"reasoning_content": None, "role": "assistant", "content": ""}
        return (self._part(spec, index, delta),)

    def delta(
        self, spec: CallSpec, index: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any]:
        content = self._content(tokens, logprobs) if spec.logprobs else None
        delta = {"reasoning_content": None, "content": text_of(tokens) + " "}
        return self._part(spec, index, delta, logprobs=content)

    def closing(self, spec: CallSpec, end: EndedCall) -> dict[str, Any]:
        return self._part(spec, end.index, {"reasoning_content": None}, **_ending(end.output))

    def _part(
        self, spec: CallSpec, index: int, delta: Mapping[str, Any], **fields: Any
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
            **fields,
        }
        return {**self.chunk(spec), "choices": [choice]}

    def _content(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Return the logprobs; of the best alternatives the fake has the sampled token alone."""
        entries = [
            {"token": f"w{token}", "bytes": list(f"w{token}".encode()), "logprob": logprob}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        has_top = bool(self.body.get("top_logprobs"))
        return {
            "content": [{**entry, "top_logprobs": [entry] if has_top else []} for entry in entries]
        }


def _messages_text(body: Mapping[str, Any]) -> str:
    """Return the words of a chat's messages."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest(
            "1 validation error: messages must be a list.", malformed=True, param="messages"
        )
    if not messages:
        raise BadRequest("Messages cannot be empty.", param="messages")
    if any(
        not isinstance(message, dict) or message.get("role") not in _ROLES for message in messages
    ):
        raise BadRequest(
            f"2 validation errors: each message must have a role of {list(_ROLES)}.",
            malformed=True,
            param="messages",
        )
    contents = [message.get("content") for message in messages]
    if not all(content is None or isinstance(content, str | list) for content in contents):
        raise BadRequest(
            "2 validation errors: content must be text, or a list of parts.",
            malformed=True,
            param="messages",
        )
    return " ".join(map(_words, contents))


def _words(content: Any) -> str:
    if isinstance(content, list):  # a multimodal message: only the texts of its parts count
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""


async def _read(request: Request) -> dict[str, Any]:
    # also without a body
    if not is_json(request.scope):
        raise BadRequest(
            "1 validation error: Unsupported Media Type: Only 'application/json' is allowed",
            malformed=True,
        )
    body = json_body(request, allow_empty=False)
    for name, kind in (("model", str), ("stream_options", dict)):
        field(body, name, kind, None)
    return body


def _error(message: str, kind: str, status: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _ending(output: EngineOutput) -> dict[str, Any]:
    finish = finish_of(output)
    return {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}


def _logprobs_of(spec: CallSpec, output: EngineOutput) -> list[float] | None:
    return None if output.logprobs is None or not spec.logprobs else output.logprobs.tolist()


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _metadata(output: EngineOutput, backend: EngineBackend) -> dict[str, Any]:
    metadata: dict[str, Any] = {"weight_version": shown_version(output.version)}
    if backend.flavour.shows_spans:
        metadata["weight_versions"] = version_spans(output)
    return metadata


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + encode_json(chunk) + b"\n\n"
