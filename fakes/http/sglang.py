"""SGLang's server: the endpoints that reinforcement learning uses, with the fields and statuses of SGLang 0.5.21 to 0.5.23.

What differs between its releases (weight-version spans, compact routes) follows the flavour and the options. The fake has no
tokenizer: ``text`` is words ``w5 w6``, one a token.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollproof.fakes.failures import BadCall, EnginePaused, TransferFailed
from rollproof.fakes.http.application import BadRequest, application, body_of, field, text_of, token_ids, words_of
from rollproof.fakes.http.backing import Backing, Sampled
from rollproof.fakes.http.wire import as_int32
from rollproof.records import EngineOutput, FinishReason
from rollproof.trace import PauseMode

__all__ = ["sglang_app"]

_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.RETRACT, "in_place": PauseMode.IN_PLACE}
_UNLIMITED = 128
"""SGLang's own max_new_tokens where a request states none."""


def sglang_app(backing: Backing) -> Starlette:
    """The application; ``backing`` is its engine."""
    face = _Face(backing)
    posts = {
        "/generate": face.generate,
        "/abort_request": face.abort,
        "/pause_generation": face.pause,
        "/continue_generation": face.resume,
        "/update_weights_from_disk": face.update,
        "/update_weights_from_tensor": face.update,
        "/update_weights_from_distributed": face.update,
        "/update_weights_from_ipc": face.update,
        "/update_weight_version": face.relabel,
        "/init_weights_update_group": face.done,
        "/destroy_weights_update_group": face.done,
        "/release_memory_occupation": face.release,
        "/resume_memory_occupation": face.done,
    }
    gets = {
        "/health": face.health,
        "/health_generate": face.health,
        "/get_weight_version": face.moved,
        "/weight_version": face.moved,
        "/v1/loads": face.loads,
        "/get_model_info": face.model_info,
        "/model_info": face.model_info,
        "/get_server_info": face.server_info,
        "/server_info": face.server_info,
        "/v1/models": face.models,
    }
    return application(posts, gets, {"/flush_cache": face.flush}, wrong=_wrong)


def _wrong(error: BadRequest) -> Mapping[str, Any]:
    if error.malformed:
        return {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": error.status}
    return {"error": {"message": str(error)}}


class _Face:
    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._engine = backing.engine
        self._started = time.time()

    async def generate(self, request: Request) -> Response:
        body = await body_of(request, self._backing.options.max_body, empty=False)
        call = _Call.read(body, self._backing)
        if call.stream:
            return StreamingResponse(self._stream(call), media_type="text/event-stream")
        outputs = await asyncio.gather(*(self._one(call, rid) for rid in call.rids))
        replies = [_reply(call, rid, output, taken, self._backing) for rid, (output, taken) in zip(call.rids, outputs, strict=True)]
        return Response(replies[0] if len(replies) == 1 else b"[" + b",".join(replies) + b"]", media_type="application/json")

    async def abort(self, request: Request) -> Response:
        body = await self._body(request)
        rid, everything = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        if everything or rid:
            await self._engine.abort("*" if everything else rid)
        return Response(status_code=200)

    async def pause(self, request: Request) -> Response:
        body = await self._body(request)
        mode = field(body, "mode", str, "abort")
        if mode not in _MODES:
            raise BadRequest(f"mode must be one of {list(_MODES)}, not {mode!r}.", malformed=True)
        await self._engine.pause(_MODES[mode], clear_cache=False)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self._body(request)
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        if self._engine.in_flight:
            return Response("Flush cache failed.\n", 400)
        self._engine.reset_prefix_cache()
        return Response("Cache flushed.\nPlease check backend logs for more details.\n")

    async def update(self, request: Request) -> Response:
        body = await self._body(request)
        name = field(body, "model_path", str, None)
        if request.url.path.endswith("disk") and name is None:
            raise BadRequest("model_path is required.", malformed=True)
        if field(body, "abort_all_requests", bool, False):
            await self._engine.abort("*")
        flush = field(body, "flush_cache", bool, True)
        try:
            await self._backing.load(name, field(body, "weight_version", str, None), flush=flush)
        except TransferFailed as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return JSONResponse({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def relabel(self, request: Request) -> Response:
        body = await self._body(request)
        label = field(body, "new_version", str, None)
        if label is None:
            raise BadRequest("new_version is required.", malformed=True)
        # SGLang's default: publishing a label ends every request in flight
        if field(body, "abort_all_requests", bool, True):
            await self._engine.abort("*")
        self._engine.relabel(label)
        return JSONResponse({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def release(self, request: Request) -> Response:
        await self._body(request)
        self._engine.reset_prefix_cache()
        return Response(status_code=200)

    async def done(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse({"success": True, "message": "Success"})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.alive else 503)

    async def moved(self, request: Request) -> Response:
        """What was an endpoint in older releases: 0.5.21 answers 404 and points to /model_info."""
        return JSONResponse({"detail": f"Endpoint '{request.url.path}' is deprecated; use '/model_info'."}, 404)

    async def loads(self, request: Request) -> Response:
        loads, options = self._backing.loads(), self._backing.options
        now = time.time()
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
            "max_total_num_tokens": options.engine.kv_tokens or options.max_length * options.engine.max_batch,
            "max_running_requests": options.engine.max_batch,
            "token_usage": 0.0,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": loads["running"] / options.engine.max_batch,
        }
        stamp = datetime.fromtimestamp(now, UTC).isoformat()
        return JSONResponse({"timestamp": stamp, "version": "fake", "accelerator": None, "num_accelerators": 1, "loads": [one]})

    async def model_info(self, request: Request) -> Response:
        info = {"model_path": "fake", "is_generation": True, "weight_version": _text(self._engine.label), "preferred_sampling_params": None}
        return JSONResponse(info)

    async def server_info(self, request: Request) -> Response:
        options = self._backing.options
        info = {"model_path": "fake", "max_total_num_tokens": options.engine.kv_tokens, "weight_version": _text(self._engine.label)}
        return JSONResponse({**info, "version": "fake", "internal_states": [{"last_gen_throughput": 0.0}]})

    async def models(self, request: Request) -> Response:
        entry = {"id": "fake", "object": "model", "created": int(self._started), "owned_by": "sglang"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self._backing.options.max_length}]})

    async def _body(self, request: Request) -> dict[str, Any]:
        return await body_of(request, self._backing.options.max_body)

    async def _one(self, call: _Call, rid: str) -> tuple[EngineOutput, float]:
        begun = time.perf_counter()
        output = await self._engine.generate(
            prompt_ids=call.prompt,
            max_tokens=call.max_tokens,
            request_id=rid,
            sampling=call.sampling,
            want_routes=call.routes,
            want_logprobs=call.logprobs,
            routes_start=call.routes_start,
        )
        return output, time.perf_counter() - begun

    async def _stream(self, call: _Call) -> AsyncIterator[bytes]:
        rid = call.rids[0]
        with self._backing.watched(rid) as queue:
            task = asyncio.ensure_future(self._one(call, rid))
            try:
                sent, logprobs = 0, list[float]()
                while True:
                    waiting = asyncio.ensure_future(queue.get())
                    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    if task.done():
                        waiting.cancel()
                        break
                    now = waiting.result()
                    if call.logprobs:
                        logprobs.append(_logprob(call, now, self._backing))
                    yield _event(_chunk(call, rid, now.tokens, logprobs, sent, self._backing))
                    sent = len(now.tokens)
                output, taken = await task
                shown = sent if self._backing.options.incremental else 0
                yield _event(_reply(call, rid, output, taken, self._backing, sent=shown, first=not sent))
            except (BadCall, EnginePaused) as error:
                yield _event(json.dumps({"error": {"message": str(error)}}).encode())
            finally:
                # the client went away: SGLang ends its request
                if not task.done():
                    await self._engine.abort(rid)
                    await asyncio.gather(task, return_exceptions=True)
        yield b"data: [DONE]\n\n"


class _Call:
    """A /generate request, read and checked."""

    def __init__(self, body: Mapping[str, Any], backing: Backing) -> None:
        vocab = backing.options.model.vocab
        ids, text = body.get("input_ids"), field(body, "text", str, None)
        if (ids is None) == (text is None):
            raise BadRequest("Either text, input_ids or input_embeds should be provided, and only one of them.")
        self.prompt = token_ids(ids, "input_ids", vocab) if text is None else words_of(text or "", vocab)
        sampling = field(body, "sampling_params", dict, {})
        self.max_tokens: int = field(sampling, "max_new_tokens", int, _UNLIMITED)
        samples = field(sampling, "n", int, 1)
        if not 1 <= samples <= 256:
            raise BadRequest(f"n must be 1 to 256, not {samples}.")
        self.sampling = {name: value for name, value in sampling.items() if name not in ("max_new_tokens", "n")}
        self.stream: bool = field(body, "stream", bool, False)
        self.logprobs: bool = field(body, "return_logprob", bool, False)
        self.routes: bool = field(body, "return_routed_experts", bool, False)
        self.routes_start: int = field(body, "routed_experts_start_len", int, 0)
        rid = field(body, "rid", str, None) or uuid.uuid4().hex
        self.rids: Sequence[str] = [rid] if samples == 1 else [f"{rid}_{i}" for i in range(samples)]
        if self.stream and samples > 1:
            raise BadRequest("This fake streams one sample a request.", 501)

    @classmethod
    def read(cls, body: Mapping[str, Any], backing: Backing) -> _Call:
        """Read ``body``. Raises ``BadRequest``."""
        return cls(body, backing)


def _meta(call: _Call, rid: str, output: EngineOutput, taken: float, backing: Backing) -> dict[str, Any]:
    """``meta_info`` of a finished call, without its routes: the keys depend on how it ended, as SGLang's do."""
    meta: dict[str, Any] = {"id": rid, "finish_reason": _finish(output)}
    ran = output.cached_tokens is not None  # a call that was aborted in the queue has no counts
    if ran:
        meta["prompt_tokens"] = len(call.prompt)
    meta["weight_version"] = _text(output.version)
    if ran:
        meta["num_retractions"] = 0
    if call.logprobs and output.logprobs is not None:
        meta |= _logprobs(output.logprobs.tolist(), output.token_ids)
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(output.token_ids)}
    if ran:
        meta["cached_tokens"] = output.cached_tokens
    if backing.flavour.shows_spans:
        meta["weight_versions"] = [{"version": _text(span.version), "start": span.start, "end": span.end} for span in output.spans]
    meta["cached_tokens_details"] = {"device": output.cached_tokens, "host": 0} if output.cached_tokens else None
    return {**meta, "dp_rank": None, "e2e_latency": taken}


def _logprobs(logprobs: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    return {"input_token_logprobs": [], "output_token_logprobs": pairs, "output_token_logprobs_length": len(pairs)}


def _reply(call: _Call, rid: str, output: EngineOutput, taken: float, backing: Backing, *, sent: int = 0, first: bool = True) -> bytes:
    meta = _meta(call, rid, output, taken, backing)
    if first:  # of a stream SGLang stamps the first chunk only
        meta["response_sent_to_client_ts"] = time.time()
    body: dict[str, Any] = {"text": text_of(output.token_ids[sent:])} if backing.options.tokenizer else {}
    text = json.dumps({**body, "output_ids": list(output.token_ids[sent:]), "meta_info": meta}, separators=(",", ":")).encode()
    if output.routes is None:
        return text
    # base64 needs no escaping: laid in behind the encoder, which would look at each of its characters
    return b'%s,"routed_experts":"%s"}}' % (text[:-2], as_int32(output.routes).encode("ascii"))


def _logprob(call: _Call, now: Sampled, backing: Backing) -> float:
    """Of the token that was sampled last."""
    ids = [*call.prompt, *now.tokens]
    last = len(ids) - 1
    return float(backing.policy.logprobs_spans([(last, last + 1, now.key)], ids, last, last + 1)[0])


def _chunk(call: _Call, rid: str, tokens: tuple[int, ...], logprobs: list[float], sent: int, backing: Backing) -> bytes:
    shown = tokens[sent:] if backing.options.incremental else tokens
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": None,
        "prompt_tokens": len(call.prompt),
        "weight_version": _text(backing.engine.label),
        "num_retractions": 0,
    }
    if call.logprobs:
        meta |= _logprobs(logprobs, tokens)
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(tokens), "cached_tokens": 0, "cached_tokens_details": None}
    meta["dp_rank"] = None
    if not sent:
        meta["response_sent_to_client_ts"] = time.time()
    body: dict[str, Any] = {"text": text_of(shown)} if backing.options.tokenizer else {}
    return json.dumps({**body, "output_ids": list(shown), "meta_info": meta}, separators=(",", ":")).encode()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _finish(output: EngineOutput) -> dict[str, Any]:
    if output.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason is FinishReason.STOP:
        return {"type": "stop", "matched": output.token_ids[-1] if output.token_ids else None}
    return {"type": "abort", "message": output.message or "Aborted", "status_code": None, "err_type": None}


def _text(label: Any) -> str:
    return "default" if label is None else str(label)
