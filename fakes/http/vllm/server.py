"""The fake vLLM server: the endpoints that reinforcement learning uses, those of
``VLLM_SERVER_DEV_MODE=1`` among them.

The fake has no tokenizer: texts are words ``w5 w6``, one for each token. What SkyRL, prime-rl and
AReaL add is in ``extensions.py``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rollproof.core.records import EngineOutput
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import (
    EventStream,
    FakeServer,
    FinalEvent,
    OrjsonResponse,
    get,
    post,
    route,
)
from rollproof.fakes.http.request_body import (
    BadRequest,
    encode_json,
    field,
    is_json,
    json_body,
    token_ids,
    words_of,
)
from rollproof.fakes.http.request_limits import check_prompts, check_texts
from rollproof.fakes.http.sampling_validation import check_vllm_request
from rollproof.fakes.http.streams import EndedCall, SampledToken, stream_calls
from rollproof.fakes.http.supported_fields import refuse_unsupported
from rollproof.fakes.http.trace_endpoints import trace_routes
from rollproof.fakes.http.vllm import vllm_calls as replies
from rollproof.fakes.http.vllm.adapters import adapter_routes
from rollproof.fakes.http.vllm.control import Control
from rollproof.fakes.http.vllm.extensions import extension_routes
from rollproof.fakes.http.vllm.stream_parts import ChatPart, CompletionPart, Part, TokensPart
from rollproof.fakes.http.vllm.vllm_calls import VllmRequest

__all__ = ["vllm_app"]

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


def vllm_app(backend: EngineBackend) -> FakeServer:
    """Return the application before the engine of ``backend``."""
    sampling, control = _Sampling(backend), Control(backend)
    routes = [
        post("/inference/v1/generate", sampling.generate),
        post("/v1/completions", sampling.completions),
        post("/v1/chat/completions", sampling.chat),
        post("/pause", control.pause),
        post("/resume", control.resume),
        get("/is_paused", control.is_paused),
        post("/abort_requests", control.abort),
        post("/inference/v1/abort_requests", control.abort_by_id),
        post("/reset_prefix_cache", control.reset),
        post("/reset_mm_cache", control.nothing),
        post("/reset_encoder_cache", control.nothing),
        post("/sleep", control.sleep),
        post("/wake_up", control.wake_up),
        get("/is_sleeping", control.is_sleeping),
        post("/collective_rpc", control.collective_rpc),
        post("/init_weight_transfer_engine", control.init_transfer),
        post("/shutdown_weight_transfer_engine", control.message("Weight transfer shut down")),
        post("/start_weight_update", control.message("Weight update started")),
        post("/start_draft_weight_update", control.message("Draft weight update started")),
        post("/update_weights", control.update),
        post("/finish_weight_update", control.finish),
        post("/update_weight_version", control.relabel),
        get("/weight_info", control.weight_info),
        post("/weight_checker", control.check_weights),
        post("/tokenize", control.tokenize),
        post("/detokenize", control.detokenize),
        get("/metrics", control.metrics),
        get("/kv_event_sources", control.event_sources),
        get("/get_world_size", control.world_size),
        get("/server_info", control.server_info),
        get("/health", control.nothing),
        route("/ping", control.nothing, "GET", "POST"),
        get("/version", control.version),
        get("/load", control.load),
        get("/v1/models", control.models),
        *adapter_routes(backend),
        *extension_routes(backend),
        *trace_routes(backend),
    ]
    return FakeServer(routes, backend=backend, error_body=_error_body)


def _error_body(error: BadRequest) -> Mapping[str, Any]:
    if error.malformed:
        kind = "Bad Request"
    else:
        kind = "InternalServerError" if error.status >= 500 else "BadRequestError"
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.status}
    }


class _Sampling:
    """The endpoints that sample."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def generate(self, request: Request) -> Response:
        """Answer a prompt of tokens with tokens."""
        body = await self._body(request)
        prompt = field(body, "token_ids", list, None)
        if prompt is None:
            raise BadRequest(
                "1 validation error: token_ids is required.", malformed=True, param="body.token_ids"
            )
        if not prompt or any(type(token) is not int or token < 0 for token in prompt):
            raise BadRequest(
                "1 validation error: token_ids must hold ids, none negative.",
                malformed=True,
                param="body.token_ids",
            )
        ids = token_ids(prompt, "token_ids", self._backend.vocab)
        sampling = field(body, "sampling_params", dict, {})
        refuse_unsupported(body, "vllm /inference/v1/generate")
        refuse_unsupported(sampling, "vllm sampling_params")
        try:
            call = VllmRequest(
                request,
                body,
                [ids],
                sampling,
                self._backend,
                prefix="generate-tokens-",
                default=None,
            )
        except BadRequest as error:
            # that a prompt is too long is only found by the engine, when the stream has begun
            if body.get("stream") is True and len(ids) >= self._backend.max_length:
                return EventStream(_failed(error))
            raise
        if call.stream:
            return EventStream(self._stream(request, call, TokensPart(self._backend, call)))
        outputs = await self._backend.generate_all(request, call.specs())
        blank = dict.fromkeys(
            (
                "prompt_logprobs",
                "prompt_token_id_logprobs",
                "mm_placeholders",
                "metrics",
                *_TRANSFERS,
            )
        )
        head = {
            "request_id": call.id,
            "model": call.model,
            "created": int(time.time()),
            "usage": _usage(call, outputs),
        }
        choices = [
            replies.tokens_choice(call, i, output, self._backend)
            for i, output in enumerate(outputs)
        ]
        tail = {
            "prompt_token_ids": list(ids) if call.return_token_ids else None,
            "output_mode": "text" if call.text else "tokens",
            "choices": choices,
        }
        if call.prompt_logprobs:
            blank["prompt_logprobs"] = replies.prompt_logprobs(ids, self._backend)
        return OrjsonResponse({**head, **blank, **tail})

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        check_vllm_request(body)
        refuse_unsupported(body, "vllm /v1/completions")
        call = VllmRequest(
            request, body, self._prompts(body), body, self._backend, prefix="cmpl-", default=16
        )
        if call.stream:
            return EventStream(self._stream(request, call, CompletionPart(self._backend, call)))
        outputs = await self._backend.generate_all(request, call.specs())
        choices = [
            replies.completion_choice(call, i, spec.prompt, output, self._backend)
            for i, (spec, output) in enumerate(zip(call.specs(), outputs, strict=True))
        ]
        blank = {
            **dict.fromkeys(("service_tier", *_TRANSFERS, "metrics")),
            "system_fingerprint": replies.FINGERPRINT,
        }
        reply = {
            **replies.envelope(call, "text_completion"),
            "choices": choices,
            "usage": _usage(call, outputs),
        }
        return OrjsonResponse({**reply, **blank})

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        check_vllm_request(body)
        refuse_unsupported(body, "vllm /v1/chat/completions")
        # release 0.32 takes these ids in place of the messages
        if field(body, "kv_transfer_params", dict, {}).get("prompt_token_ids") is not None:
            raise BadRequest(
                "kv_transfer_params.prompt_token_ids is not supported by rollproof's fake server: a"
                " chat's prompt is its messages."
            )
        text = self._text(body)
        check_texts([text])
        ids = words_of(text, self._backend.vocab)
        call = VllmRequest(
            request, body, [ids], body, self._backend, prefix="chatcmpl-", default=None
        )
        if call.stream:
            return EventStream(self._stream(request, call, ChatPart(self._backend, call)))
        outputs = await self._backend.generate_all(request, call.specs())
        choices = [
            replies.chat_choice(call, i, output, self._backend) for i, output in enumerate(outputs)
        ]
        names = (
            "service_tier",
            "system_fingerprint",
            "prompt_logprobs",
            "prompt_text",
            "kv_transfer_params",
            "ec_transfer_params",
            "metrics",
        )
        reply = {
            **replies.envelope(call, "chat.completion"),
            "choices": choices,
            "usage": _usage(call, outputs),
        }
        values = {
            "prompt_token_ids": list(ids) if call.return_token_ids else None,
            "system_fingerprint": replies.FINGERPRINT,
        }
        return OrjsonResponse({**reply, **dict.fromkeys(names), **values})

    async def _body(self, request: Request) -> dict[str, Any]:
        # also without a body
        if not is_json(request.scope):
            raise BadRequest(
                "1 validation error: Only 'application/json' is allowed", malformed=True
            )
        try:
            return json_body(request, allow_empty=False)
        except BadRequest as error:
            raise BadRequest(f"1 validation error: {error}", malformed=True, param="body") from None

    def _prompts(self, body: Mapping[str, Any]) -> list[tuple[int, ...]]:
        prompt, vocab = body.get("prompt"), self._backend.vocab
        check_texts(prompt if isinstance(prompt, list) else [prompt])
        if isinstance(prompt, str):
            return [words_of(prompt, vocab)]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            check_prompts(prompt)
            return [
                words_of(text, vocab) if isinstance(text, str) else token_ids(text, "prompt", vocab)
                for text in prompt
            ]
        if prompt == []:
            raise BadRequest("You must pass at least one prompt")
        if not prompt:
            raise BadRequest(
                "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
            )
        return [token_ids(prompt, "prompt", vocab)]

    def _text(self, body: Mapping[str, Any]) -> str:
        messages = body.get("messages", ...)
        if messages is None:
            raise BadRequest("'NoneType' object is not iterable")
        if messages == []:
            raise BadRequest("Cannot apply chat template to an empty conversation.")
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise BadRequest(
                "1 validation error: messages must be a list of objects.",
                malformed=True,
                param="body.messages",
            )
        contents = [message.get("content") for message in messages]
        if not all(map(_is_content, contents)):
            raise BadRequest(
                "1 validation error: content must be text, or a list of parts.",
                malformed=True,
                param="body.messages",
            )
        kinds = {
            part.get("type", "text")
            for content in contents
            if isinstance(content, list)
            for part in content
            if isinstance(part, dict)
        }
        if not kinds <= {"text", "input_text"}:
            raise BadRequest(
                f"The model takes text alone, and the messages hold {sorted(map(str, kinds))}."
            )
        texts = [
            " ".join(map(_words, content)) if isinstance(content, list) else str(content or "")
            for content in contents
        ]
        return " ".join(texts)

    async def _stream(
        self, request: Request, call: VllmRequest, part: Part
    ) -> AsyncGenerator[bytes]:
        """Yield deltas, then usage if requested and the end mark; the last tokens of a choice come
        with its finish reason.
        """
        specs = call.specs()
        outputs: list[EngineOutput] = []
        events = stream_calls(request, specs, self._backend)
        try:
            for index in range(len(specs)):
                for chunk in part.opening(index):
                    yield _event(chunk)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, SampledToken):
                        yield _event(part.chunk(event.index, [event.token], event.logprobs, None))
                    else:
                        outputs.append(event.output)
                        # routes and versions come with this chunk alone. It is never left out: vLLM
                        # once omitted that of an abort, because it had no new tokens (vllm#47933)
                        yield FinalEvent(_event(_last_chunk(part, event)))
            if call.options.get("include_usage"):
                yield _event(part.usage(_usage(call, outputs)))
        except (BadCall, BadRequest) as error:
            yield _event(_error_body(BadRequest(str(error))))
        yield b"data: [DONE]\n\n"


def _last_chunk(part: Part, end: EndedCall) -> dict[str, Any]:
    return part.chunk(end.index, end.unsent_tokens, end.unsent_logprobs, end.output)


def _usage(call: VllmRequest, outputs: list[EngineOutput]) -> dict[str, Any]:
    sampled = sum(len(output.token_ids) for output in outputs)
    return replies.usage(sum(map(len, call.prompts)), sampled)


async def _failed(error: BadRequest) -> AsyncGenerator[bytes]:
    yield _event(_error_body(error))
    yield b"data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + encode_json(chunk) + b"\n\n"


def _is_content(value: Any) -> bool:
    """Return whether a message may hold ``value``: text, a list of texts and of parts that name
    their type, or nothing.
    """
    if not isinstance(value, list):
        return value is None or isinstance(value, str)
    return all(
        (
            isinstance(part.get("type", ""), str)
            if isinstance(part, dict)
            else part is None or isinstance(part, str)
        )
        for part in value
    )


def _words(part: Any) -> str:
    """Return the text of a part of a message."""
    return str((part.get("text") if isinstance(part, dict) else part) or "")
