"""vLLM's server: the endpoints that reinforcement learning uses, those of
``VLLM_SERVER_DEV_MODE=1`` among them.

The fake has no tokenizer: texts are words ``w5 w6``, one a token. What SkyRL, prime-rl and AReaL
add is in ``private.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import EngineOutput
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.asgi import Answer, Asked, Ending, Endpoints, Events, Face, Whole
from rollproof.fakes.http.engine_backend import Backing, Wanted
from rollproof.fakes.http.request_body import BadRequest, dumped, field, token_ids, words_of
from rollproof.fakes.http.sampling_validation import check_vllm_request
from rollproof.fakes.http.sglang.sglang_calls import last_logprob
from rollproof.fakes.http.supported_fields import FIELDS, refuse_unanswered
from rollproof.fakes.http.trace_endpoints import told_endpoints
from rollproof.fakes.http.vllm import vllm_calls as written
from rollproof.fakes.http.vllm.control import Control
from rollproof.fakes.http.vllm.extensions import private_endpoints
from rollproof.fakes.http.vllm.stream_parts import ChatPart, CompletionPart, Part, TokensPart
from rollproof.fakes.http.vllm.vllm_calls import VllmCall

__all__ = ["vllm_app"]

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


def vllm_app(backing: Backing) -> Face:
    """The application; ``backing`` is its engine."""
    calls, control = _Calls(backing), Control(backing)
    endpoints: Endpoints = {
        "/inference/v1/generate": calls.generate,
        "/v1/completions": calls.completions,
        "/v1/chat/completions": calls.chat,
        "/pause": control.pause,
        "/resume": control.resume,
        "/is_paused": {"GET": control.is_paused},
        "/abort_requests": control.abort,
        "/inference/v1/abort_requests": control.abort_by_id,
        "/reset_prefix_cache": control.reset,
        "/reset_mm_cache": control.nothing,
        "/reset_encoder_cache": control.nothing,
        "/sleep": control.sleep,
        "/wake_up": control.wake_up,
        "/is_sleeping": {"GET": control.is_sleeping},
        "/collective_rpc": control.collective_rpc,
        "/init_weight_transfer_engine": control.init_transfer,
        "/shutdown_weight_transfer_engine": control.said("Weight transfer shut down"),
        "/start_weight_update": control.said("Weight update started"),
        "/start_draft_weight_update": control.said("Draft weight update started"),
        "/update_weights": control.update,
        "/finish_weight_update": control.finish,
        "/update_weight_version": control.relabel,
        "/weight_info": {"GET": control.weight_info},
        "/weight_checker": control.check_weights,
        "/tokenize": control.tokenize,
        "/detokenize": control.detokenize,
        "/metrics": {"GET": control.metrics},
        "/kv_event_sources": {"GET": control.event_sources},
        "/get_world_size": {"GET": control.world_size},
        "/server_info": {"GET": control.server_info},
        "/health": {"GET": control.health},
        "/ping": {"GET": control.health, "POST": control.health},
        "/version": {"GET": control.version},
        "/load": {"GET": control.load},
        "/v1/models": {"GET": control.models},
        **private_endpoints(backing),
        **told_endpoints(backing),
    }
    return Face(
        endpoints,
        wrong=_wrong,
        most=backing.options.max_body,
        faults=backing.faults,
        alive=lambda: backing.engine.alive,
    )


def _wrong(error: BadRequest) -> Mapping[str, Any]:
    kind = (
        "Bad Request"
        if error.malformed
        else "InternalServerError"
        if error.status >= 500
        else "BadRequestError"
    )
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.status}
    }


class _Calls:
    """The endpoints that sample."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing

    async def generate(self, asked: Asked) -> Answer:
        """Tokens in, tokens out."""
        body = self._body(asked)
        given = field(body, "token_ids", list, None)
        if given is None:
            raise BadRequest(
                "1 validation error: token_ids is required.", malformed=True, param="body.token_ids"
            )
        if not given or any(type(token) is not int or token < 0 for token in given):
            raise BadRequest(
                "1 validation error: token_ids must hold ids, none negative.",
                malformed=True,
                param="body.token_ids",
            )
        ids = token_ids(given, "token_ids", self._backing.vocab)
        sampling = field(body, "sampling_params", dict, {})
        refuse_unanswered(body, FIELDS["vllm /inference/v1/generate"])
        refuse_unanswered(sampling, FIELDS["vllm sampling_params"])
        try:
            call = VllmCall(
                asked, body, [ids], sampling, self._backing, prefix="generate-tokens-", default=None
            )
        except BadRequest as error:
            if (
                body.get("stream") is True and len(ids) >= self._backing.max_length
            ):  # found out only by the engine
                return Events(_failed(error))
            raise
        if call.stream:
            return Events(self._streamed(asked, call, TokensPart(self._backing, call)))
        outputs = await self._outputs(asked, call)
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
            "usage": self._usage(call, outputs),
        }
        choices = [
            written.tokens_choice(call, i, output, self._backing)
            for i, output in enumerate(outputs)
        ]
        tail = {
            "prompt_token_ids": list(ids) if call.token_ids else None,
            "output_mode": "text" if call.text else "tokens",
            "choices": choices,
        }
        if call.prompt_logprobs:
            blank["prompt_logprobs"] = written.prompt_logprobs(ids, self._backing)
        return _compact({**head, **blank, **tail})

    async def completions(self, asked: Asked) -> Answer:
        body = self._body(asked)
        check_vllm_request(body)
        refuse_unanswered(body, FIELDS["vllm /v1/completions"])
        call = VllmCall(
            asked, body, self._prompts(body), body, self._backing, prefix="cmpl-", default=16
        )
        if call.stream:
            return Events(self._streamed(asked, call, CompletionPart(self._backing, call)))
        outputs = await self._outputs(asked, call)
        wanted = call.wanted()
        choices = [
            written.completion_choice(call, i, one.prompt, output, self._backing)
            for i, (one, output) in enumerate(zip(wanted, outputs, strict=True))
        ]
        blank = {
            **dict.fromkeys(("service_tier", *_TRANSFERS, "metrics")),
            "system_fingerprint": written.FINGERPRINT,
        }
        reply = {
            **written.envelope(call, "text_completion"),
            "choices": choices,
            "usage": self._usage(call, outputs),
        }
        return _compact({**reply, **blank})

    async def chat(self, asked: Asked) -> Answer:
        body = self._body(asked)
        check_vllm_request(body)
        refuse_unanswered(body, FIELDS["vllm /v1/chat/completions"])
        if (field(body, "kv_transfer_params", dict, None) or {}).get(
            "prompt_token_ids"
        ) is not None:  # which 0.32 takes for the prompt
            raise BadRequest(
                "kv_transfer_params.prompt_token_ids is not answered by rollproof's fake: a chat's"
                " prompt is its messages."
            )
        ids = words_of(self._text(body), self._backing.vocab)
        call = VllmCall(asked, body, [ids], body, self._backing, prefix="chatcmpl-", default=None)
        if call.stream:
            return Events(self._streamed(asked, call, ChatPart(self._backing, call)))
        outputs = await self._outputs(asked, call)
        choices = [
            written.chat_choice(call, i, output, self._backing) for i, output in enumerate(outputs)
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
            **written.envelope(call, "chat.completion"),
            "choices": choices,
            "usage": self._usage(call, outputs),
        }
        given = {
            "prompt_token_ids": list(ids) if call.token_ids else None,
            "system_fingerprint": written.FINGERPRINT,
        }
        return _compact({**reply, **dict.fromkeys(names), **given})

    def _body(self, asked: Asked) -> dict[str, Any]:
        media = (asked.header("content-type") or "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise BadRequest(
                "1 validation error: Only 'application/json' is allowed", malformed=True
            )
        try:
            return asked.body(empty=False)
        except BadRequest as error:
            raise BadRequest(f"1 validation error: {error}", malformed=True, param="body") from None

    def _prompts(self, body: Mapping[str, Any]) -> list[tuple[int, ...]]:
        prompt, vocab = body.get("prompt"), self._backing.vocab
        if isinstance(prompt, str):
            return [words_of(prompt, vocab)]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            return [
                words_of(one, vocab) if isinstance(one, str) else token_ids(one, "prompt", vocab)
                for one in prompt
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
        words = [message.get("content") for message in messages]
        if not all(_is_content(one) for one in words):
            raise BadRequest(
                "1 validation error: content must be text, or a list of parts.",
                malformed=True,
                param="body.messages",
            )
        kinds = {
            part.get("type", "text")
            for one in words
            if isinstance(one, list)
            for part in one
            if isinstance(part, dict)
        }
        if not kinds <= {"text", "input_text"}:
            raise BadRequest(
                f"The model takes text alone, and the messages hold {sorted(map(str, kinds))}."
            )
        parts = [
            " ".join(map(_words, one)) if isinstance(one, list) else str(one or "") for one in words
        ]
        return " ".join(parts)

    def _usage(self, call: VllmCall, outputs: list[EngineOutput]) -> dict[str, Any]:
        return written.usage(
            sum(map(len, call.prompts)), sum(len(output.token_ids) for output in outputs)
        )

    async def _outputs(self, asked: Asked, call: VllmCall) -> list[EngineOutput]:
        wanted = call.wanted()
        if len(wanted) == 1:
            return [await self._backing.generate(asked, wanted[0])]
        return list(await asyncio.gather(*(self._backing.generate(asked, one) for one in wanted)))

    async def _streamed(self, asked: Asked, call: VllmCall, part: Part) -> AsyncGenerator[bytes]:
        """Deltas; the last tokens of a choice come with its reason, then usage where asked, and the
        end mark.
        """
        ready: asyncio.Queue[tuple[int, list[int], list[float]] | int] = asyncio.Queue()
        wanted = call.wanted()
        sent = [0] * len(wanted)

        def hearing(number: int, one: Wanted) -> Callable[[InflightCall], None]:
            def heard(running: InflightCall) -> None:
                if len(running.ids) < running.limit:
                    sent[number] = running.sampled
                    ready.put_nowait(
                        (
                            number,
                            [running.ids[-1]],
                            [last_logprob(running, self._backing)] if one.logprobs else [],
                        )
                    )

            return heard

        def ended(number: int) -> Callable[[object], None]:
            return lambda _: ready.put_nowait(number)

        tasks = [
            asyncio.ensure_future(
                self._backing.generate(asked, one, stream=StreamMode.DELTA, heard=hearing(i, one))
            )
            for i, one in enumerate(wanted)
        ]
        for i, task in enumerate(tasks):
            task.add_done_callback(ended(i))
        try:
            for i in range(len(wanted)):
                for chunk in part.opening(i):
                    yield _event(chunk)
            left = len(tasks)
            while left:
                told = await ready.get()
                if isinstance(told, int):
                    left -= 1
                    output = tasks[told].result()
                    logprobs = (
                        [] if output.logprobs is None else output.logprobs.tolist()[sent[told] :]
                    )
                    yield Ending(
                        _event(part.chunk(told, output.token_ids[sent[told] :], logprobs, output))
                    )
                else:
                    yield _event(part.chunk(*told, None))
            if call.options.get("include_usage"):
                yield _event(part.usage(self._usage(call, [task.result() for task in tasks])))
        except (BadCall, BadRequest) as error:
            yield _event(_wrong(BadRequest(str(error))))
        finally:
            if not all(task.done() for task in tasks):
                asked.abandoned = True
                await self._backing.engine.abort(call.id)
                await asyncio.gather(*tasks, return_exceptions=True)
        yield b"data: [DONE]\n\n"


async def _failed(error: BadRequest) -> AsyncGenerator[bytes]:
    yield _event(_wrong(error))
    yield b"data: [DONE]\n\n"


def _compact(body: Mapping[str, Any]) -> Whole:
    return Whole(dumped(body))


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + dumped(chunk) + b"\n\n"


def _is_content(value: Any) -> bool:
    """Whether a message may hold it: text, a list of texts and parts that say of which type they
    are, or nothing.
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
    """What a part of a message says."""
    return str((part.get("text") if isinstance(part, dict) else part) or "")
