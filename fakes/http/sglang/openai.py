"""SGLang's OpenAI endpoints: completions and chats over the same calls.

Routes stand where SGLang puts them: in ``sglext`` of the reply, or in ``meta_info`` of the choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import EngineOutput
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.asgi import Answer, Asked, Ending, Events, Whole
from rollproof.fakes.http.engine_backend import Backing, Wanted
from rollproof.fakes.http.request_body import (
    BadRequest,
    dumped,
    field,
    text_of,
    token_ids,
    words_of,
)
from rollproof.fakes.http.routes_encoding import as_int32
from rollproof.fakes.http.sglang.sglang_calls import (
    UNLIMITED,
    SglangCall,
    finish_of,
    last_logprob,
    meta_of,
    shown_version,
)
from rollproof.fakes.http.supported_fields import FIELDS, refuse_unanswered

__all__ = ["OpenAI", "messages_text"]

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
    """The two endpoints of ``backing``."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing

    async def completions(self, asked: Asked) -> Answer:
        return await self._guarded(self._completions(asked))

    async def chat(self, asked: Asked) -> Answer:
        return await self._guarded(self._chat(asked))

    async def _guarded(self, work: Any) -> Answer:
        """SGLang words refusals here otherwise than for its own endpoints."""
        try:
            answer: Answer = await work
        except (BadRequest, BadCall) as error:
            malformed = isinstance(error, BadRequest) and error.malformed
            status = error.status if isinstance(error, BadRequest) else 400
            kind = "Bad Request" if malformed else "BadRequestError"
            return JSONResponse(
                {
                    "object": "error",
                    "message": str(error),
                    "type": kind,
                    "param": None,
                    "code": status,
                },
                status,
            )
        return answer

    async def _completions(self, asked: Asked) -> Answer:
        body = _body(asked)
        refuse_unanswered(body, FIELDS["sglang /v1/completions"])
        prompts, listed = self._prompts(body)
        if body.get("max_tokens") == 0:
            raise BadRequest("1 validation error: max_tokens must be at least 1.", malformed=True)
        asks = field(body, "logprobs", (int, bool), None) is not None
        call = self._call(body, prompts, logprobs=asks, default=16, listed=listed)
        if call.stream:
            return Events(self._stream(asked, body, call, _Completion()))
        return await self._whole(asked, body, call, _Completion())

    async def _chat(self, asked: Asked) -> Answer:
        body = _body(asked)
        refuse_unanswered(body, FIELDS["sglang /v1/chat/completions"])
        text = messages_text(body)
        given = body.get("input_ids")
        prompt = (
            words_of(text, self._backing.vocab)
            if given is None
            else token_ids(given, "input_ids", self._backing.vocab)
        )
        for name in ("return_meta_info", "return_token_ids", "return_prompt_token_ids"):
            if body.get(name) and body.get("stream"):
                raise BadRequest(f"{name} is not supported with streaming.")
        call = self._call(
            body,
            [prompt],
            logprobs=field(body, "logprobs", bool, False),
            default=self._room(prompt),
            listed=False,
        )
        if len(prompt) + call.max_tokens > self._backing.max_length:
            raise BadRequest(f"max_completion_tokens is too large: {call.max_tokens}.")
        if call.stream:
            return Events(self._stream(asked, body, call, _Chat()))
        return await self._whole(asked, body, call, _Chat())

    def _room(self, prompt: Sequence[int]) -> int:
        return min(UNLIMITED, max(1, self._backing.max_length - len(prompt)))

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], bool]:
        prompt = body.get("prompt")
        if prompt is None:
            raise BadRequest("1 validation error: prompt is required.", malformed=True)
        if not prompt or not isinstance(prompt, str | list):
            raise BadRequest("Prompt cannot be empty")
        vocab = self._backing.vocab
        if isinstance(prompt, str):
            return [words_of(prompt, vocab)], False
        if isinstance(prompt[0], str | list):
            return [
                words_of(one, vocab) if isinstance(one, str) else token_ids(one, "prompt", vocab)
                for one in prompt
            ], True
        return [token_ids(prompt, "prompt", vocab)], False

    def _call(
        self,
        body: Mapping[str, Any],
        prompts: list[tuple[int, ...]],
        *,
        logprobs: bool,
        default: int,
        listed: bool,
    ) -> SglangCall:
        sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        if body.get("seed") is not None:
            sampling["sampling_seed"] = body["seed"]
        budget = field(body, "max_completion_tokens", int, field(body, "max_tokens", int, default))
        native = {**body, "return_logprob": logprobs}
        asked = {**sampling, "max_new_tokens": budget, "n": field(body, "n", int, 1)}
        return SglangCall(native, prompts, [asked] * len(prompts), self._backing, listed=listed)

    async def _one(self, asked: Asked, wanted: Wanted) -> tuple[Wanted, EngineOutput, float]:
        begun = time.perf_counter()
        output = await self._backing.generate(asked, wanted, unique=True)
        return wanted, output, time.perf_counter() - begun

    async def _whole(
        self, asked: Asked, body: Mapping[str, Any], call: SglangCall, form: _Completion
    ) -> Answer:
        ended = await asyncio.gather(*(self._one(asked, wanted) for wanted in call.wanted()))
        choices = [form.choice(body, i, *one, self._backing) for i, one in enumerate(ended)]
        first, output, _ = ended[0]
        prompts = sum(len(prompt) for prompt in call.prompts)
        reply = {
            **form.envelope(body, first.rid),
            "choices": choices,
            "usage": _usage(prompts, sum(len(one[1].token_ids) for one in ended)),
            "metadata": _metadata(output, self._backing),
        }
        if output.routes is not None and not (form.meta and body.get("return_meta_info")):
            extension: dict[str, Any] = {"routed_experts": as_int32(output.routes).decode("ascii")}
            if call.samples > 1:
                extension["spec_tokens_details"] = []
            reply["sglext"] = extension
        return Whole(dumped(reply))

    async def _stream(
        self, asked: Asked, body: Mapping[str, Any], call: SglangCall, form: _Completion
    ) -> AsyncGenerator[bytes]:
        """Deltas; the reason comes with the last one, or in a chunk of its own, then routes, usage
        where asked, and the end mark.
        """
        ready: asyncio.Queue[tuple[int, Wanted, list[int], list[float]] | None] = asyncio.Queue()
        wanted_calls = list(call.wanted())
        told = [0] * len(wanted_calls)

        def hearing(number: int, wanted: Wanted) -> Any:
            def heard(running: InflightCall) -> None:
                if form.holds_last and len(running.ids) >= running.limit:
                    return
                told[number] = running.sampled
                logprob = [last_logprob(running, self._backing)] if wanted.logprobs else []
                ready.put_nowait((number, wanted, [running.ids[-1]], logprob))

            return heard

        tasks = [
            asyncio.ensure_future(
                self._backing.generate(
                    asked, wanted, stream=StreamMode.DELTA, heard=hearing(i, wanted), unique=True
                )
            )
            for i, wanted in enumerate(wanted_calls)
        ]
        everything = asyncio.ensure_future(asyncio.wait(tasks))
        everything.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            begun: set[int] = set()
            while (heard := await ready.get()) is not None:
                number, wanted, tokens, logprobs = heard
                if number not in begun:
                    begun.add(number)
                    for chunk in form.opening(body, wanted, number):
                        yield _event(chunk)
                yield _event(form.delta(body, wanted, number, tokens, logprobs))
            outputs = [task.result() for task in tasks]
            for i, (wanted, output) in enumerate(zip(wanted_calls, outputs, strict=True)):
                yield Ending(_event(form.closing(body, wanted, i, output, told[i])))
            first = wanted_calls[0]
            if outputs[0].routes is not None:
                routes = {"routed_experts": as_int32(outputs[0].routes).decode("ascii")}
                yield _event(
                    {**form.chunk(body, first), "choices": [], "usage": None, "sglext": routes}
                )
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = _usage(
                    sum(map(len, call.prompts)), sum(len(output.token_ids) for output in outputs)
                )
                if not form.meta:
                    del usage["prompt_tokens_details"]
                yield _event({**form.chunk(body, first), "choices": [], "usage": usage})
        except (BadCall, BadRequest) as error:
            told_error = {
                "object": "error",
                "message": str(error),
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
            yield _event({"error": told_error})
        except GeneratorExit:  # the client went away
            asked.abandoned = True
            raise
        finally:
            for wanted, task in zip(wanted_calls, tasks, strict=True):
                if not task.done():
                    await self._backing.engine.abort(wanted.rid)
            await asyncio.gather(*tasks, return_exceptions=True)
            await everything
        yield b"data: [DONE]\n\n"


class _Completion:
    """How a completion is written."""

    kind, part = "text_completion", "text_completion"
    meta = False
    holds_last = True
    """Whether the last token comes with the reason."""

    def envelope(self, body: Mapping[str, Any], rid: str) -> dict[str, Any]:
        return {
            "id": rid,
            "object": self.kind,
            "created": int(time.time()),
            "model": field(body, "model", str, "default"),
        }

    def chunk(self, body: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
        return {**self.envelope(body, wanted.rid), "object": self.part}

    def choice(
        self,
        body: Mapping[str, Any],
        index: int,
        wanted: Wanted,
        output: EngineOutput,
        taken: float,
        backing: Backing,
    ) -> dict[str, Any]:
        logprobs = (
            None if output.logprobs is None or not wanted.logprobs else output.logprobs.tolist()
        )
        echo = text_of(wanted.prompt) + " " if body.get("echo") else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + text_of(output.token_ids),
            "logprobs": self._logprobs(body, output.token_ids, logprobs),
        }
        choice |= _ending(output)
        if body.get("return_token_ids"):
            choice |= {"token_ids": list(output.token_ids), "prompt_token_ids": list(wanted.prompt)}
        return choice

    def opening(
        self, body: Mapping[str, Any], wanted: Wanted, index: int
    ) -> Iterable[dict[str, Any]]:
        return ()

    def delta(
        self,
        body: Mapping[str, Any],
        wanted: Wanted,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text_of(tokens) + " ",
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }
        if wanted.logprobs:
            choice["logprobs"] = self._logprobs(body, tokens, logprobs)
        if body.get("return_token_ids"):
            choice["token_ids"] = list(tokens)
        return {**self.chunk(body, wanted), "choices": [choice], "usage": None}

    def closing(
        self, body: Mapping[str, Any], wanted: Wanted, index: int, output: EngineOutput, told: int
    ) -> dict[str, Any]:
        tokens = output.token_ids[told:]
        logprobs = [] if output.logprobs is None else output.logprobs.tolist()[told:]
        chunk = self.delta(body, wanted, index, tokens, logprobs)
        chunk["choices"][0] |= _ending(output)
        return chunk

    def _logprobs(
        self, body: Mapping[str, Any], tokens: Sequence[int], logprobs: Sequence[float] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        words = [f"w{token}" for token in tokens]
        top = (
            [{word: value} for word, value in zip(words, logprobs, strict=True)]
            if (body.get("logprobs") or 0) > 0
            else []
        )
        return {
            "text_offset": [-1] * len(words),
            "token_logprobs": list(logprobs),
            "tokens": words,
            "top_logprobs": top,
        }


class _Chat(_Completion):
    """How a chat is written."""

    kind, part = "chat.completion", "chat.completion.chunk"
    meta = True
    holds_last = False

    def choice(
        self,
        body: Mapping[str, Any],
        index: int,
        wanted: Wanted,
        output: EngineOutput,
        taken: float,
        backing: Backing,
    ) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": text_of(output.token_ids),
            "reasoning_content": None,
            "tool_calls": None,
        }
        asked = output.logprobs is not None and wanted.logprobs
        logprobs = (
            _content(body, output.token_ids, output.logprobs.tolist())
            if asked and output.logprobs is not None
            else None
        )
        choice = {"index": index, "message": message, "logprobs": logprobs, **_ending(output)}
        if body.get("return_prompt_token_ids") or body.get("return_token_ids"):
            choice["prompt_token_ids"] = list(wanted.prompt)
        if body.get("return_token_ids"):
            choice["response_token_ids"] = list(output.token_ids)
        if body.get("return_meta_info"):
            meta = meta_of(wanted, output, taken, backing)
            if output.routes is not None:
                meta["routed_experts"] = as_int32(output.routes).decode("ascii")
            choice["meta_info"] = meta
        return choice

    def opening(
        self, body: Mapping[str, Any], wanted: Wanted, index: int
    ) -> Iterable[dict[str, Any]]:
        return (
            self._part(
                body, wanted, index, {"reasoning_content": None, "role": "assistant", "content": ""}
            ),
        )

    def delta(
        self,
        body: Mapping[str, Any],
        wanted: Wanted,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
    ) -> dict[str, Any]:
        content = _content(body, tokens, logprobs) if wanted.logprobs else None
        return self._part(
            body,
            wanted,
            index,
            {"reasoning_content": None, "content": text_of(tokens) + " "},
            logprobs=content,
        )

    def closing(
        self, body: Mapping[str, Any], wanted: Wanted, index: int, output: EngineOutput, told: int
    ) -> dict[str, Any]:
        return self._part(body, wanted, index, {"reasoning_content": None}, **_ending(output))

    def _part(
        self,
        body: Mapping[str, Any],
        wanted: Wanted,
        index: int,
        delta: Mapping[str, Any],
        **more: Any,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
            **more,
        }
        return {**self.chunk(body, wanted), "choices": [choice]}


def messages_text(body: Mapping[str, Any]) -> str:
    """The words of a chat's messages. Raises ``BadRequest``."""
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
    if not all(one is None or isinstance(one, str | list) for one in contents):
        raise BadRequest(
            "2 validation errors: content must be text, or a list of parts.",
            malformed=True,
            param="messages",
        )
    return " ".join(map(_words, contents))


def _words(content: Any) -> str:
    if isinstance(content, list):  # parts of a multimodal message: their texts count
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""


def _body(asked: Asked) -> dict[str, Any]:
    media = (asked.header("content-type") or "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise BadRequest(
            "1 validation error: Unsupported Media Type: Only 'application/json' is allowed",
            malformed=True,
        )
    body = asked.body(empty=False)
    for name, kind in (("model", str), ("stream_options", dict)):
        field(body, name, kind, None)
    return body


def _ending(output: EngineOutput) -> dict[str, Any]:
    finish = finish_of(output)
    return {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}


def _content(
    body: Mapping[str, Any], tokens: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    """The logprobs of a chat; where the best of each token are asked for, that of the sampled one."""
    own = [
        {"token": f"w{token}", "bytes": list(f"w{token}".encode()), "logprob": logprob}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {
        "content": [
            {**one, "top_logprobs": [one] if body.get("top_logprobs") else []} for one in own
        ]
    }


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
    }
    return {**usage, "prompt_tokens_details": None, "reasoning_tokens": 0}


def _metadata(output: EngineOutput, backing: Backing) -> dict[str, Any]:
    metadata: dict[str, Any] = {"weight_version": shown_version(output.version)}
    if backing.flavour.shows_spans:
        spans = [
            {"version": shown_version(span.version), "start": span.start, "end": span.end}
            for span in output.spans
        ]
        metadata["weight_versions"] = spans
    return metadata


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + dumped(chunk) + b"\n\n"
