"""The fake SGLang server: the endpoints that reinforcement learning uses, with the fields and
statuses of SGLang 0.5.21 to 0.5.23.

What differs between its releases (weight-version spans, compact routes) follows the flavour and the
options. The fake has no tokenizer: ``text`` is words ``w5 w6``, one for each token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.fakes.engine.exceptions import BadCall, EnginePaused, TransferFailed
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.engine_backend import CallSpec, EngineBackend
from rollproof.fakes.http.fake_server import (
    EventStream,
    FakeServer,
    FinalEvent,
    OrjsonResponse,
    get,
    post,
    route,
)
from rollproof.fakes.http.request_body import BadRequest, encode_json, field, json_body
from rollproof.fakes.http.sglang.adapters import adapter_routes
from rollproof.fakes.http.sglang.openai import OpenAI
from rollproof.fakes.http.sglang.sglang_calls import (
    SglangRequest,
    native_chunk,
    native_reply,
    shown_version,
)
from rollproof.fakes.http.streams import abort_unfinished, last_logprob
from rollproof.fakes.http.trace_endpoints import trace_routes

__all__ = ["sglang_app"]

_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.RETRACT, "in_place": PauseMode.IN_PLACE}
_UPDATES: Mapping[str, tuple[str, ...]] = {
    "/update_weights_from_disk": ("model_path",),
    "/update_weights_from_tensor": ("serialized_named_tensors",),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes"),
    "/update_weights_from_ipc": ("zmq_handles",),
}
"""Endpoints that load weights, and the fields that they require."""
_GROUP = ("master_address", "master_port", "rank_offset", "world_size")


def sglang_app(backend: EngineBackend) -> FakeServer:
    """Return the application before the engine of ``backend``."""
    native, openai = _Native(backend), OpenAI(backend)
    routes = [
        route("/generate", native.generate, "POST", "PUT"),
        post("/v1/completions", openai.completions),
        post("/v1/chat/completions", openai.chat),
        post("/abort_request", native.abort),
        post("/pause_generation", native.pause),
        post("/continue_generation", native.resume),
        *(post(path, native.update) for path in _UPDATES),
        post("/update_weight_version", native.relabel),
        post("/begin_weight_update", native.done),
        post("/end_weight_update", native.done),
        post("/init_weights_update_group", native.join_group),
        post("/destroy_weights_update_group", native.done),
        route("/get_weights_by_name", native.no_weights, "GET", "POST"),
        route("/weights_checker", native.done, "GET", "POST"),
        route("/release_memory_occupation", native.release, "GET", "POST"),
        route("/resume_memory_occupation", native.nothing, "GET", "POST"),
        route("/flush_cache", native.flush, "GET", "POST"),
        get("/health", native.health),
        get("/health_generate", native.health),
        get("/ping", native.health),
        get("/v1/loads", native.loads),
        get("/get_model_info", native.model_info),
        get("/model_info", native.model_info),
        get("/get_server_info", native.server_info),
        get("/server_info", native.server_info),
        get("/v1/models", native.models),
        get("/v1/models/{name:path}", native.model),
        *adapter_routes(backend),
        *trace_routes(backend),
    ]
    if not backend.flavour.shows_spans:  # releases up to 0.5.18 had them; later ones answer 404
        routes += [
            get("/get_weight_version", native.weight_version),
            get("/weight_version", native.weight_version),
        ]
    return FakeServer(routes, backend=backend, error_body=_error_body)


def _error_body(error: BadRequest) -> Mapping[str, Any]:
    if error.malformed:
        return {
            "object": "error",
            "message": str(error),
            "type": "Bad Request",
            "param": None,
            "code": error.status,
        }
    return {"error": {"message": str(error)}}


def _require(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if body.get(name) is None]
    if missing:
        raise BadRequest(
            f"{len(missing)} validation errors: {', '.join(missing)} is required.", malformed=True
        )


class _Native:
    """SGLang's own endpoints."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self._engine = backend.engine
        self._started = time.time()

    async def generate(self, request: Request) -> Response:
        body = json_body(request, allow_empty=False)
        try:
            call = SglangRequest.read(body, self._backend)
        except BadRequest as error:
            # SGLang has sent status 200 before it checks the values of a stream
            if body.get("stream") is True and not error.malformed and error.status == 400:
                return EventStream(_refused(error))
            raise
        specs = call.specs()
        if call.stream:
            return EventStream(self._stream(request, specs, listed=call.listed))
        started = time.perf_counter()
        outputs = await self._backend.generate_all(request, specs, unique=True)
        seconds = time.perf_counter() - started
        replies = [
            native_reply(spec, output, seconds, self._backend)
            for spec, output in zip(specs, outputs, strict=True)
        ]
        return OrjsonResponse(replies if call.listed else replies[0])

    async def abort(self, request: Request) -> Response:
        body = json_body(request)
        rid, abort_all = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        # an empty rid without abort_all is ignored: every id begins with it, and SGLang compares by
        # prefix
        if abort_all or rid:
            await self._engine.abort("*" if abort_all else rid)
        return Response(status_code=200)

    async def pause(self, request: Request) -> Response:
        mode = field(json_body(request), "mode", str, "abort")
        if mode not in _MODES:
            raise BadRequest(
                f"2 validation errors: mode must be one of {list(_MODES)}, not {mode!r}.",
                malformed=True,
            )
        # SGLang keeps its radix tree over a pause: later prompts reuse KV of the old policy unless
        # the cache is flushed (miles#2782)
        await self._engine.pause(_MODES[mode], clear_cache=False)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        json_body(request)
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        # calls that were retracted hold no KV: then the cache can be flushed
        if any(call.running for call in self._engine.in_flight):
            return Response("Flush cache failed.\n", 400)
        self._engine.reset_prefix_cache()
        return Response("Cache flushed.\nPlease check backend logs for more details.\n")

    async def update(self, request: Request) -> Response:
        body = json_body(request)
        _require(body, _UPDATES[request.scope["path"]])
        if field(body, "abort_all_requests", bool, False):
            await self._engine.abort("*")
        flush, label = (
            field(body, "flush_cache", bool, True),
            field(body, "weight_version", str, None),
        )
        from_disk = request.scope["path"].endswith("disk")
        more = {"num_paused_requests": 0} if from_disk else {}
        try:
            await self._backend.load(
                field(body, "model_path", str, None) if from_disk else None, label, flush=flush
            )
        except TransferFailed as error:
            return JSONResponse({"success": False, "message": str(error), **more}, 400)
        version = "" if label is None else f" Weight version updated to {label}."
        return JSONResponse(
            {"success": True, "message": f"Succeeded to update model weights.{version}", **more}
        )

    async def relabel(self, request: Request) -> Response:
        body = json_body(request)
        label = field(body, "new_version", str, None)
        if label is None:
            raise BadRequest("2 validation errors: new_version is required.", malformed=True)
        # SGLang's default: publishing a label ends every request in flight
        # 16 of 16 requests of a run ended that way (miles#2372, miles#2589)
        if field(body, "abort_all_requests", bool, True):
            await self._engine.abort("*")
        self._backend.relabel(label)
        return JSONResponse(
            {"success": True, "message": f"Weight version updated to {label}", "new_version": label}
        )

    async def join_group(self, request: Request) -> Response:
        _require(json_body(request), _GROUP)
        return JSONResponse({"success": True, "message": "Success"})

    async def no_weights(self, request: Request) -> Response:
        """Answer as SGLang does for an unknown name: the fake has no tensors."""
        raise BadRequest("Get parameter by name failed")

    async def release(self, request: Request) -> Response:
        json_body(request)
        self._engine.reset_prefix_cache()
        return JSONResponse(None)

    async def nothing(self, request: Request) -> Response:
        json_body(request)
        return JSONResponse(None)

    async def done(self, request: Request) -> Response:
        json_body(request)
        return JSONResponse({"success": True, "message": "Success"})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def weight_version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": shown_version(self._engine.label)})

    async def loads(self, request: Request) -> Response:
        loads, options = self._backend.loads(), self._backend.options
        now = time.time()
        capacity = options.engine.kv_tokens or options.max_length * options.engine.max_batch
        load = {
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
                "loads": [load],
            }
        )

    async def model_info(self, request: Request) -> Response:
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

    async def server_info(self, request: Request) -> Response:
        options = self._backend.options
        info = {
            "model_path": "fake",
            "tokenizer_path": "fake",
            "skip_tokenizer_init": not options.tokenizer,
            "context_length": self._backend.max_length,
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

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
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
        return {**card, "max_model_len": self._backend.max_length}

    async def _stream(
        self, request: Request, specs: Sequence[CallSpec], *, listed: bool
    ) -> AsyncGenerator[bytes]:
        """Yield an event for each token, with all tokens so far (or the new ones, if the server
        streams so); the last event of a call has its reason and routes.
        """
        newest_only = not self._backend.options.incremental
        ready: asyncio.Queue[PendingEvents | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(
                self._stream_sample(
                    request,
                    spec,
                    index if listed else None,
                    PendingEvents(ready, newest_only=newest_only),
                )
            )
            for index, spec in enumerate(specs)
        ]
        all_ended = asyncio.gather(*tasks, return_exceptions=True)
        all_ended.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (pending := await ready.get()) is not None:
                yield pending.take()
            for task in tasks:
                task.result()
        finally:
            await abort_unfinished(specs, tasks, self._backend)
        yield b"data: [DONE]\n\n"

    async def _stream_sample(
        self, request: Request, spec: CallSpec, index: int | None, pending: PendingEvents
    ) -> None:
        """Run one call and put its events into ``pending``; events of several samples have the
        ``index`` of theirs.
        """
        started = time.perf_counter()
        incremental = self._backend.options.incremental
        logprobs: list[float] = []
        sent = 0

        def event(reply: dict[str, Any]) -> bytes:
            return _event(reply if index is None else {**reply, "index": index})

        def on_token(call: InflightCall) -> None:
            nonlocal sent
            if spec.logprobs:
                logprobs.append(last_logprob(call, self._backend))
            if len(call.ids) < call.limit:  # the last token comes with the reply
                chunk = native_chunk(
                    spec, call, logprobs, sent, self._backend, stamped=pending.next_is_first
                )
                pending.put(event(chunk))
                sent = call.sampled

        stream = StreamMode.DELTA if incremental else StreamMode.CUMULATIVE
        try:
            output = await self._backend.generate(
                request, spec, stream=stream, on_token=on_token, unique=True
            )
        except (BadCall, BadRequest, EnginePaused) as error:
            pending.put(_refusal(str(error)))
            return
        reply = native_reply(
            spec,
            output,
            time.perf_counter() - started,
            self._backend,
            sent=sent if incremental else 0,
            stamped=pending.next_is_first,
        )
        pending.put(FinalEvent(event(reply)))


class PendingEvents:
    """Events of one streamed sample that its client has not read yet.

    Args:
        ready: gets this object once for each event.
        newest_only: an event replaces one that waits.
    """

    def __init__(self, ready: asyncio.Queue[PendingEvents | None], *, newest_only: bool) -> None:
        self.next_is_first: bool = True
        """Whether the next event will be the first that is read."""
        self._ready = ready
        self._newest_only = newest_only
        self._events: deque[bytes] = deque()

    def put(self, event: bytes) -> None:
        """Add an event."""
        # as SGLang's _wait_one_response (tokenizer_manager.py) where each event has all tokens so
        # far: thousands that wait for a slow reader would take hundreds of megabytes
        if self._newest_only and self._events:
            self._events[0] = event
            return
        self._events.append(event)
        self.next_is_first = self.next_is_first and self._newest_only
        self._ready.put_nowait(self)

    def take(self) -> bytes:
        """Remove and return the oldest event."""
        self.next_is_first = False
        return self._events.popleft()


async def _refused(error: BadRequest) -> AsyncGenerator[bytes]:
    yield _refusal(str(error))
    yield b"data: [DONE]\n\n"


def _refusal(text: str) -> bytes:
    error = {
        "message": text,
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }
    return _event({"error": error})


def _event(reply: Mapping[str, Any]) -> bytes:
    return b"data: " + encode_json(reply) + b"\n\n"
