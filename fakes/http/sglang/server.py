"""SGLang's server: the endpoints that reinforcement learning uses, with the fields and statuses of
SGLang 0.5.21 to 0.5.23.

What differs between its releases (weight-version spans, compact routes) follows the flavour and the
options. The fake has no tokenizer: ``text`` is words ``w5 w6``, one a token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse, Response

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.fakes.engine.exceptions import BadCall, EnginePaused, TransferFailed
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.asgi import Answer, Asked, Ending, Endpoints, Events, Face, Handler, Whole
from rollproof.fakes.http.engine_backend import Backing, Wanted
from rollproof.fakes.http.request_body import BadRequest, field
from rollproof.fakes.http.sglang.openai import OpenAI
from rollproof.fakes.http.sglang.sglang_calls import (
    SglangCall,
    indexed,
    last_logprob,
    native_chunk,
    native_reply,
    shown_version,
)
from rollproof.fakes.http.sglang.unread import Unread
from rollproof.fakes.http.trace_endpoints import told_endpoints

__all__ = ["sglang_app"]

_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.RETRACT, "in_place": PauseMode.IN_PLACE}
_UPDATES: Mapping[str, tuple[str, ...]] = {
    "/update_weights_from_disk": ("model_path",),
    "/update_weights_from_tensor": ("serialized_named_tensors",),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes"),
    "/update_weights_from_ipc": ("zmq_handles",),
}
"""Endpoints that load weights, and the fields without which they refuse."""
_GROUP = ("master_address", "master_port", "rank_offset", "world_size")


def sglang_app(backing: Backing) -> Face:
    """The application; ``backing`` is its engine."""
    face, openai = _Native(backing), OpenAI(backing)
    endpoints: Endpoints = {
        "/generate": {"POST": face.generate, "PUT": face.generate},
        "/v1/completions": openai.completions,
        "/v1/chat/completions": openai.chat,
        "/abort_request": face.abort,
        "/pause_generation": face.pause,
        "/continue_generation": face.resume,
        **dict.fromkeys(_UPDATES, face.update),
        "/update_weight_version": face.relabel,
        "/begin_weight_update": face.done,
        "/end_weight_update": face.done,
        "/init_weights_update_group": face.join_group,
        "/destroy_weights_update_group": face.done,
        "/get_weights_by_name": _either(face.no_weights),
        "/weights_checker": _either(face.done),
        "/release_memory_occupation": _either(face.release),
        "/resume_memory_occupation": _either(face.nothing),
        "/flush_cache": _either(face.flush),
        "/health": {"GET": face.health},
        "/health_generate": {"GET": face.health},
        "/ping": {"GET": face.health},
        "/v1/loads": {"GET": face.loads},
        "/get_model_info": {"GET": face.model_info},
        "/model_info": {"GET": face.model_info},
        "/get_server_info": {"GET": face.server_info},
        "/server_info": {"GET": face.server_info},
        "/v1/models": {"GET": face.models},
        "/v1/models/*": {"GET": face.model},
        **told_endpoints(backing),
    }
    if not backing.flavour.shows_spans:  # releases up to 0.5.18 had them; later ones answer 404
        endpoints = {
            **endpoints,
            "/get_weight_version": {"GET": face.weight_version},
            "/weight_version": {"GET": face.weight_version},
        }
    return Face(
        endpoints,
        wrong=_wrong,
        most=backing.options.max_body,
        faults=backing.faults,
        alive=lambda: backing.engine.alive,
    )


def _either(handler: Handler) -> Mapping[str, Handler]:
    return {"GET": handler, "POST": handler}


def _wrong(error: BadRequest) -> Mapping[str, Any]:
    if error.malformed:
        return {
            "object": "error",
            "message": str(error),
            "type": "Bad Request",
            "param": None,
            "code": error.status,
        }
    return {"error": {"message": str(error)}}


def _required(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if body.get(name) is None]
    if missing:
        raise BadRequest(
            f"{len(missing)} validation errors: {', '.join(missing)} is required.", malformed=True
        )


class _Native:
    """SGLang's own endpoints."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._engine = backing.engine
        self._started = time.time()

    async def generate(self, asked: Asked) -> Answer:
        body = asked.body(empty=False)
        try:
            call = SglangCall.read(body, self._backing)
        except BadRequest as error:
            if body.get("stream") is True and not error.malformed and error.status == 400:
                return Events(_refused(error))
            raise
        calls = list(call.wanted())
        if call.stream:
            return Events(self._stream(asked, calls, listed=call.listed))
        if not call.listed:
            return Whole(*await self._reply(asked, calls[0]))
        replies = await asyncio.gather(*(self._reply(asked, wanted) for wanted in calls))
        return Whole(b"[" + b",".join([b"".join(reply) for reply in replies]) + b"]")

    async def abort(self, asked: Asked) -> Answer:
        body = asked.body()
        rid, everything = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        if everything or rid:
            await self._engine.abort("*" if everything else rid)
        return Response(status_code=200)

    async def pause(self, asked: Asked) -> Answer:
        mode = field(asked.body(), "mode", str, "abort")
        if mode not in _MODES:
            raise BadRequest(
                f"2 validation errors: mode must be one of {list(_MODES)}, not {mode!r}.",
                malformed=True,
            )
        await self._engine.pause(_MODES[mode], clear_cache=False)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, asked: Asked) -> Answer:
        asked.body()
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, asked: Asked) -> Answer:
        # calls that were retracted hold no KV: then the cache can be flushed
        if any(call.running for call in self._engine.in_flight):
            return Response("Flush cache failed.\n", 400)
        self._engine.reset_prefix_cache()
        return Response("Cache flushed.\nPlease check backend logs for more details.\n")

    async def update(self, asked: Asked) -> Answer:
        body = asked.body()
        _required(body, _UPDATES[asked.path])
        if field(body, "abort_all_requests", bool, False):
            await self._engine.abort("*")
        flush, label = (
            field(body, "flush_cache", bool, True),
            field(body, "weight_version", str, None),
        )
        disk = asked.path.endswith("disk")
        more = {"num_paused_requests": 0} if disk else {}
        try:
            await self._backing.load(
                field(body, "model_path", str, None) if disk else None, label, flush=flush
            )
        except TransferFailed as error:
            return JSONResponse({"success": False, "message": str(error), **more}, 400)
        version = "" if label is None else f" Weight version updated to {label}."
        return JSONResponse(
            {"success": True, "message": f"Succeeded to update model weights.{version}", **more}
        )

    async def relabel(self, asked: Asked) -> Answer:
        body = asked.body()
        label = field(body, "new_version", str, None)
        if label is None:
            raise BadRequest("2 validation errors: new_version is required.", malformed=True)
        # SGLang's default: publishing a label ends every request in flight
        if field(body, "abort_all_requests", bool, True):
            await self._engine.abort("*")
        self._backing.relabel(label)
        return JSONResponse(
            {"success": True, "message": f"Weight version updated to {label}", "new_version": label}
        )

    async def join_group(self, asked: Asked) -> Answer:
        _required(asked.body(), _GROUP)
        return JSONResponse({"success": True, "message": "Success"})

    async def no_weights(self, asked: Asked) -> Answer:
        """The fake has no tensors, and answers as SGLang does for a name that it cannot give."""
        raise BadRequest("Get parameter by name failed")

    async def release(self, asked: Asked) -> Answer:
        asked.body()
        self._engine.reset_prefix_cache()
        return JSONResponse(None)

    async def nothing(self, asked: Asked) -> Answer:
        asked.body()
        return JSONResponse(None)

    async def done(self, asked: Asked) -> Answer:
        asked.body()
        return JSONResponse({"success": True, "message": "Success"})

    async def health(self, asked: Asked) -> Answer:
        return Response(status_code=200)

    async def weight_version(self, asked: Asked) -> Answer:
        return JSONResponse({"weight_version": shown_version(self._engine.label)})

    async def loads(self, asked: Asked) -> Answer:
        loads, options = self._backing.loads(), self._backing.options
        now = time.time()
        capacity = options.engine.kv_tokens or options.max_length * options.engine.max_batch
        one = {
            "timestamp": now,
            "dp_rank": 0,
            "num_running_reqs": loads["running"],
            "num_waiting_reqs": loads["waiting"],
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": loads["tokens"],
            "num_total_tokens": loads["tokens"],
            "num_active_tokens": loads["tokens"],
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": capacity,
            "max_running_requests": options.engine.max_batch,
            "token_usage": loads["tokens"] / capacity,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": loads["running"] / options.engine.max_batch,
        }
        stamp = datetime.fromtimestamp(now, UTC).isoformat()
        return JSONResponse(
            {
                "timestamp": stamp,
                "version": "fake",
                "accelerator": None,
                "num_accelerators": 1,
                "loads": [one],
            }
        )

    async def model_info(self, asked: Asked) -> Answer:
        info = {
            "model_path": "fake",
            "served_model_name": "fake",
            "tokenizer_path": "fake",
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": shown_version(self._engine.label),
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "fake_moe",
            "architectures": ["FakeMoeForCausalLM"],
        }
        return JSONResponse(info)

    async def server_info(self, asked: Asked) -> Answer:
        options = self._backing.options
        info = {
            "model_path": "fake",
            "tokenizer_path": "fake",
            "skip_tokenizer_init": not options.tokenizer,
            "context_length": self._backing.max_length,
            "max_running_requests": options.engine.max_batch,
            "max_total_tokens": options.engine.kv_tokens,
            "served_model_name": "fake",
            "weight_version": shown_version(self._engine.label),
            "incremental_streaming_output": options.incremental,
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
        }
        return JSONResponse(
            {**info, "version": "fake", "internal_states": [{"last_gen_throughput": 0.0}]}
        )

    async def models(self, asked: Asked) -> Answer:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, asked: Asked) -> Answer:
        name = asked.path.removeprefix("/v1/models/")
        if name == "fake":
            return JSONResponse(self._card())
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
        }
        return JSONResponse({"error": {**error, "code": "model_not_found"}}, 404)

    def _card(self) -> dict[str, Any]:
        card = {
            "id": "fake",
            "object": "model",
            "created": int(self._started),
            "owned_by": "sglang",
            "root": "fake",
            "parent": None,
        }
        return {**card, "max_model_len": self._backing.max_length}

    async def _reply(self, asked: Asked, wanted: Wanted) -> tuple[bytes, ...]:
        begun = time.perf_counter()
        output = await self._backing.generate(asked, wanted, unique=True)
        return native_reply(wanted, output, time.perf_counter() - begun, self._backing)

    async def _stream(
        self, asked: Asked, calls: list[Wanted], *, listed: bool
    ) -> AsyncGenerator[bytes]:
        """All tokens so far in each event (or the new ones, where the server streams so); with the
        last come routes and the reason.
        """
        incremental = self._backing.options.incremental
        ready: asyncio.Queue[Unread | None] = asyncio.Queue()
        tasks = [
            asyncio.ensure_future(
                self._streamed(
                    asked, one, number if listed else None, Unread(ready, newest=not incremental)
                )
            )
            for number, one in enumerate(calls)
        ]
        everything = asyncio.ensure_future(asyncio.wait(tasks))
        everything.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (unread := await ready.get()) is not None:
                yield unread.take()
            for task in tasks:
                task.result()
        finally:
            # the client went away: SGLang ends its requests
            for wanted, task in zip(calls, tasks, strict=True):
                if not task.done():
                    asked.abandoned = True
                    await self._engine.abort(wanted.rid)
            await asyncio.gather(*tasks, return_exceptions=True)
            await everything
        yield b"data: [DONE]\n\n"

    async def _streamed(
        self, asked: Asked, wanted: Wanted, index: int | None, unread: Unread
    ) -> None:
        """The events of one sample."""
        begun = time.perf_counter()
        incremental = self._backing.options.incremental
        logprobs: list[float] = []
        sent = 0

        def event(data: bytes) -> bytes:
            return _event(data if index is None else indexed(data, index))

        def heard(call: InflightCall) -> None:
            nonlocal sent
            if wanted.logprobs:
                logprobs.append(last_logprob(call, self._backing))
            if len(call.ids) < call.limit:  # the last token comes with the reply
                unread.put(
                    event(
                        native_chunk(
                            wanted, call, logprobs, sent, self._backing, stamped=unread.fresh
                        )
                    )
                )
                sent = call.sampled

        try:
            stream = StreamMode.DELTA if incremental else StreamMode.CUMULATIVE
            output = await self._backing.generate(
                asked, wanted, stream=stream, heard=heard, unique=True
            )
        except (BadCall, BadRequest, EnginePaused) as error:
            unread.put(_refusal(str(error)))
            return
        taken = time.perf_counter() - begun
        parts = native_reply(
            wanted,
            output,
            taken,
            self._backing,
            sent=sent if incremental else 0,
            stamped=unread.fresh,
        )
        unread.put(Ending(event(b"".join(parts))))


async def _refused(error: BadRequest) -> AsyncGenerator[bytes]:
    yield _refusal(str(error))
    yield b"data: [DONE]\n\n"


def _refusal(text: str) -> bytes:
    return _event(
        json.dumps(
            {
                "error": {
                    "message": text,
                    "type": "invalid_request_error",
                    "code": 400,
                    "retryable": False,
                }
            }
        ).encode()
    )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
