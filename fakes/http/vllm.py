"""vLLM's server: the endpoints that reinforcement learning uses (those of ``VLLM_SERVER_DEV_MODE=1`` among them), and what SkyRL,
prime-rl and AReaL add to it. Fields were read in the sources of vLLM 0.26 to 0.32; no running server was compared yet.

The fake has no tokenizer: texts are words ``w5 w6``, one a token.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollproof.fakes.failures import BadCall, TransferFailed
from rollproof.fakes.http.application import BadRequest, application, body_of, field, text_of, token_ids, words_of
from rollproof.fakes.http.backing import Backing
from rollproof.fakes.http.wire import as_described, as_npy
from rollproof.records import EngineOutput, FinishReason, IntArray
from rollproof.trace import PauseMode

__all__ = ["vllm_app"]

_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.WAIT, "keep": PauseMode.KEEP}
_UNLIMITED = 16
"""vLLM's own max_tokens where a request states none."""


def vllm_app(backing: Backing) -> Starlette:
    """The application; ``backing`` is its engine."""
    face = _Face(backing)
    posts = {
        "/inference/v1/generate": face.generate,
        "/skyrl/v1/generate": face.generate,
        "/v1/completions": face.completions,
        "/v1/chat/completions": face.chat,
        "/pause": face.pause,
        "/resume": face.resume,
        "/abort_requests": face.abort,
        "/inference/v1/abort_requests": face.abort,
        "/reset_prefix_cache": face.reset,
        "/sleep": face.sleep,
        "/wake_up": face.done,
        "/collective_rpc": face.collective_rpc,
        "/init_weight_transfer_engine": face.done,
        "/start_weight_update": face.done,
        "/update_weights": face.update,
        "/finish_weight_update": face.done,
        "/update_weight_version": face.relabel,
        "/areal_pause_generation": face.pause_all,
        "/areal_continue_generation": face.resume,
    }
    gets = {
        "/health": face.health,
        "/is_paused": face.is_paused,
        "/weight_info": face.weight_info,
        "/get_world_size": face.world_size,
        "/version": face.version,
        "/v1/models": face.models,
    }
    return application(posts, gets, {}, wrong=_wrong)


def _wrong(error: BadRequest) -> Mapping[str, Any]:
    return {"error": {"message": str(error), "type": "BadRequestError", "param": None, "code": error.status}}


class _Face:
    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._engine = backing.engine

    async def generate(self, request: Request) -> Response:
        """Tokens in, tokens out: vLLM's own endpoint, and SkyRL's with routes as bytes with shape and dtype."""
        body = await self._body(request)
        call = _Call(body, token_ids(body.get("token_ids"), "token_ids", self._vocab), field(body, "sampling_params", dict, {}), request)
        outputs = await self._outputs(call)
        described = request.url.path.startswith("/skyrl")
        choices = [self._tokens_choice(call, i, output, described=described) for i, output in enumerate(outputs)]
        return _compact({"request_id": call.rid, "choices": choices, "prompt_logprobs": None})

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        prompt = body.get("prompt")
        ids = words_of(prompt, self._vocab) if isinstance(prompt, str) else token_ids(prompt, "prompt", self._vocab)
        call = _Call(body, ids, body, request)
        if call.stream:
            return StreamingResponse(self._stream(call), media_type="text/event-stream")
        outputs = await self._outputs(call)
        choices = [self._completion_choice(call, i, output) for i, output in enumerate(outputs)]
        return _compact(self._envelope(call, "text_completion", choices, outputs))

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        messages = field(body, "messages", list, [])
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("messages must be a list of objects with role and content.")
        ids = words_of(" ".join(str(message.get("content") or "") for message in messages), self._vocab)
        call = _Call(body, ids, body, request)
        if call.stream:
            raise BadRequest("This fake streams /v1/completions, not chats.", 501)
        outputs = await self._outputs(call)
        choices = [
            {
                **self._completion_choice(call, i, output, text=False),
                "message": {"role": "assistant", "content": text_of(output.token_ids), "tool_calls": []},
            }
            for i, output in enumerate(outputs)
        ]
        return _compact(self._envelope(call, "chat.completion", choices, outputs))

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in _MODES:
            raise BadRequest(f"mode must be one of {list(_MODES)}, not {mode!r}.")
        clear = request.query_params.get("clear_cache", "true").lower() not in ("false", "0")
        await self._engine.pause(_MODES[mode], clear_cache=clear)
        return JSONResponse({"status": "paused"})

    async def pause_all(self, request: Request) -> Response:
        """AReaL's own: ends what runs, and lets nothing begin."""
        await self._engine.pause(PauseMode.ABORT, clear_cache=False)
        return JSONResponse({"success": True, "message": "Generation paused and all requests aborted."})

    async def resume(self, request: Request) -> Response:
        await self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._engine.paused})

    async def abort(self, request: Request) -> Response:
        body = await self._body(request)
        wanted = field(body, "request_ids", (list, str), [])
        for rid in [wanted] if isinstance(wanted, str) else wanted or ["*"]:
            await self._engine.abort(str(rid))
        return Response(status_code=200)

    async def reset(self, request: Request) -> Response:
        self._engine.reset_prefix_cache()
        return Response(status_code=200)

    async def sleep(self, request: Request) -> Response:
        self._engine.reset_prefix_cache()
        return Response(status_code=200)

    async def collective_rpc(self, request: Request) -> Response:
        body = await self._body(request)
        method = field(body, "method", str, None)
        if method is None:
            raise BadRequest("Missing 'method' in request body")
        if "weight" in method and method != "get_weights":
            arguments = field(body, "kwargs", dict, {})
            await self._load(arguments.get("weights_path") or arguments.get("weight_dir"), None)
        return JSONResponse({"results": [None]})

    async def update(self, request: Request) -> Response:
        body = await self._body(request)
        info = {**field(body, "update_info", dict, {}), **body}
        await self._load(field(info, "weight_dir", str, None), field(info, "weight_version", (str, int), None))
        return JSONResponse({"message": "Weights updated", "status": "ok"})

    async def relabel(self, request: Request) -> Response:
        body = await self._body(request)
        label = body.get("weight_version", body.get("new_version"))
        if not isinstance(label, str | int):
            raise BadRequest("weight_version is required.")
        self._engine.relabel(str(label))
        return JSONResponse({"weight_version": str(label)})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._label})

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "fake"})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.alive else 503)

    async def models(self, request: Request) -> Response:
        entry = {"id": "fake", "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": "fake"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self._backing.options.max_length}]})

    async def done(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse({"status": "ok"})

    @property
    def _vocab(self) -> int:
        return self._backing.options.model.vocab

    @property
    def _label(self) -> str | None:
        label = self._engine.label
        return None if label is None else str(label)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await body_of(request, self._backing.options.max_body)

    async def _load(self, name: str | None, label: str | int | None) -> None:
        try:
            await self._backing.load(name, None if label is None else str(label), flush=False)
        except TransferFailed as error:
            raise BadRequest(str(error), 500) from error

    async def _outputs(self, call: _Call) -> list[EngineOutput]:
        rids = [call.rid] if call.samples == 1 else [f"{i}_{call.rid}" for i in range(call.samples)]
        return list(await asyncio.gather(*(self._one(call, rid) for rid in rids)))

    async def _one(self, call: _Call, rid: str) -> EngineOutput:
        return await self._engine.generate(
            prompt_ids=call.prompt,
            max_tokens=call.max_tokens,
            request_id=rid,
            sampling=call.sampling,
            want_logprobs=call.logprobs,
            routes_start=call.routes_start,
        )

    def _tokens_choice(self, call: _Call, index: int, output: EngineOutput, *, described: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "token_ids": list(output.token_ids), "finish_reason": _finish(output), "logprobs": None}
        if call.logprobs and output.logprobs is not None:
            choice["logprobs"] = {"content": _contents(output)}
        if output.routes is not None:
            choice["routed_experts"] = _described(output.routes) if described else as_npy(output.routes)
        return choice

    def _completion_choice(self, call: _Call, index: int, output: EngineOutput, *, text: bool = True) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": _finish(output), "stop_reason": None, "logprobs": None}
        if text:
            choice["text"] = text_of(output.token_ids)
        if call.token_ids:
            choice["token_ids"] = list(output.token_ids)
            choice["prompt_token_ids"] = list(call.prompt)
        if call.logprobs and output.logprobs is not None:
            tokens = [f"token_id:{token}" for token in output.token_ids]
            flat = {"tokens": tokens, "token_logprobs": output.logprobs.tolist(), "top_logprobs": None, "text_offset": [0] * len(tokens)}
            choice["logprobs"] = flat if text else {"content": _contents(output)}
        if output.routes is not None:
            choice["routed_experts"] = as_npy(output.routes)
        return choice

    def _envelope(self, call: _Call, kind: str, choices: list[dict[str, Any]], outputs: Sequence[EngineOutput]) -> dict[str, Any]:
        sampled = sum(len(output.token_ids) for output in outputs)
        usage = {"prompt_tokens": len(call.prompt), "completion_tokens": sampled, "total_tokens": len(call.prompt) + sampled}
        return {
            "id": f"cmpl-{call.rid}",
            "object": kind,
            "created": int(time.time()),
            "model": call.model,
            "choices": choices,
            "usage": usage,
        }

    async def _stream(self, call: _Call) -> AsyncIterator[bytes]:
        with self._backing.watched(call.rid) as queue:
            task = asyncio.ensure_future(self._one(call, call.rid))
            sent = 0
            try:
                while not task.done():
                    waiting = asyncio.ensure_future(queue.get())
                    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    if not waiting.done():
                        waiting.cancel()
                        break
                    tokens = waiting.result().tokens
                    # the last tokens come with the reason, as vLLM sends them
                    if not task.done():
                        yield self._part(call, tokens[sent:], None)
                        sent = len(tokens)
                output = await task
                yield self._part(call, output.token_ids[sent:], output)
                yield b"data: [DONE]\n\n"
            except BadCall as error:
                yield b"data: " + json.dumps(_wrong(BadRequest(str(error)))).encode() + b"\n\n"
            finally:
                if not task.done():
                    await self._engine.abort(call.rid)
                    await asyncio.gather(task, return_exceptions=True)

    def _part(self, call: _Call, tokens: Sequence[int], output: EngineOutput | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "text": text_of(tokens), "logprobs": None, "finish_reason": None, "stop_reason": None}
        if output is not None:
            choice["finish_reason"] = _finish(output)
        if call.token_ids:
            choice["token_ids"] = list(tokens)
        return b"data: " + json.dumps(self._envelope(call, "text_completion", [choice], []), separators=(",", ":")).encode() + b"\n\n"


class _Call:
    """A request for tokens, read and checked; ``sampling`` are its parameters, wherever the endpoint has them."""

    def __init__(self, body: Mapping[str, Any], prompt: tuple[int, ...], sampling: Mapping[str, Any], request: Request) -> None:
        self.prompt = prompt
        self.model: str = field(body, "model", str, "fake")
        self.max_tokens: int = field(sampling, "max_tokens", int, field(sampling, "max_completion_tokens", int, _UNLIMITED))
        self.samples: int = field(sampling, "n", int, 1)
        if not 1 <= self.samples <= 256:
            raise BadRequest(f"n must be 1 to 256, not {self.samples}.")
        wanted = sampling.get("logprobs")
        self.logprobs: bool = wanted is not None and wanted is not False  # 0 asks for those of the sampled tokens
        self.token_ids: bool = field(body, "return_token_ids", bool, False)
        self.stream: bool = field(body, "stream", bool, False)
        self.routes_start: int = field(sampling, "routed_experts_prompt_start", int, field(body, "routed_experts_prompt_start", int, 0))
        self.rid: str = field(body, "request_id", str, None) or request.headers.get("x-request-id") or uuid.uuid4().hex
        kept = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "min_tokens", "repetition_penalty")
        self.sampling = {name: sampling[name] for name in kept if isinstance(sampling.get(name), int | float | str | bool)}
        if self.stream and self.samples > 1:
            raise BadRequest("This fake streams one sample a request.", 501)


def _contents(output: EngineOutput) -> list[dict[str, Any]]:
    logprobs = [] if output.logprobs is None else output.logprobs.tolist()
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(output.token_ids, logprobs, strict=True)
    ]


def _described(routes: IntArray) -> dict[str, Any]:
    """SkyRL's form: the smallest of uint8, int16 and int32 that fits, ``data`` first."""
    most = int(routes.max()) if routes.size else 0
    return as_described(routes.astype("uint8" if most <= 255 else "int16" if most <= 32_767 else "int32"))


def _finish(output: EngineOutput) -> str:
    return {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}.get(output.finish_reason, "abort")


def _compact(body: Mapping[str, Any]) -> Response:
    return Response(json.dumps(body, separators=(",", ":")), media_type="application/json")
