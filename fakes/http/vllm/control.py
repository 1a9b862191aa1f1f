"""Control endpoints of the fake vLLM server: a trainer pauses, flushes and updates the engine, and
reads the state of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rollproof.core.engine_contract import PauseMode
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.request_body import (
    BadRequest,
    field,
    json_body,
    text_of,
    token_ids,
    words_of,
)
from rollproof.fakes.http.request_limits import check_texts, check_tokens

__all__ = ["Control"]

_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.WAIT, "keep": PauseMode.KEEP}


class Control:
    """Handlers for the engine of ``backend``."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self._engine = backend.engine
        self._asleep = False

    async def pause(self, request: Request) -> Response:
        mode, clear = _pause_mode(request), _flag(request, "clear_cache", default=True)
        # in every mode new calls are queued until the resume
        await self._engine.pause(_MODES[mode], clear_cache=clear)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._engine.paused})

    async def abort(self, request: Request) -> Response:
        """Abort the calls of ``request_ids``, or all without any."""
        rids = _request_ids(json_body(request, allow_empty=False)) or []
        for rid in rids:
            await self._engine.abort(rid)
        aborted = rids or await self._engine.abort("*")
        return JSONResponse({"status": "aborted", "aborted": len(aborted)})

    async def abort_by_id(self, request: Request) -> Response:
        rids = _request_ids(json_body(request, allow_empty=False))
        if rids is None:
            raise BadRequest("Missing 'request_ids' in request body", malformed=True)
        for rid in rids:
            await self._engine.abort(rid)
        return Response(status_code=200)

    async def reset(self, request: Request) -> Response:
        """Reset the prefix cache; fail while calls hold blocks, unless they are to be preempted."""
        # vLLM's block pool refuses while blocks are referenced (reset_prefix_cache of its
        # block_pool.py), unless the requests are preempted
        running = [call.call_id for call in self._engine.in_flight if call.running]
        if running and not _flag(request, "reset_running_requests", default=False):
            return JSONResponse({"success": False})
        for call_id in running:
            self._engine.evict(call_id)
        # rows of routes are stored with the cached blocks, and go with them
        self._engine.reset_prefix_cache()
        return JSONResponse({"success": True})

    async def nothing(self, request: Request) -> Response:
        return Response(status_code=200)

    async def sleep(self, request: Request) -> Response:
        level, mode = request.query_params.get("level", "1"), _pause_mode(request)
        if level not in ("0", "1", "2"):
            raise BadRequest(
                f"1 validation error: level must be 0 to 2, not {level!r}.",
                malformed=True,
                param="query.level",
            )
        await self._engine.pause(_MODES[mode], clear_cache=level != "0")
        self._asleep = True
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        # weights may be woken first, to be updated; without the KV cache nothing runs yet
        tags = request.query_params.getlist("tags") or None
        if tags is None or "kv_cache" in tags:
            self._asleep = False
            await self._engine.resume()
        return JSONResponse({"status": "sleeping" if self._asleep else "awake", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._asleep})

    async def collective_rpc(self, request: Request) -> Response:
        """Load weights if the name of the method says that it does."""
        body = json_body(request, allow_empty=False)
        method = field(body, "method", str, None)
        if method is None:
            raise BadRequest("Missing 'method' in request body", malformed=True)
        # the methods are a worker extension's own: only their names say what they do
        if "weight" in method and method.startswith(("reload", "load", "update", "receive")):
            arguments = field(body, "kwargs", dict, {})
            await self._backend.load_or_refuse(
                arguments.get("weights_path") or arguments.get("weight_dir"), None, flush=False
            )
        # one worker, and what its method returns is its own affair
        return JSONResponse({"results": [None]})

    async def init_transfer(self, request: Request) -> Response:
        if field(json_body(request), "init_info", dict, None) is None:
            raise BadRequest(
                "1 validation error: init_info is required.", malformed=True, param="body.init_info"
            )
        return JSONResponse({"message": "Weight transfer initialized"})

    def message(self, text: str) -> Callable[[Request], Any]:
        """Return an endpoint that answers with ``text`` and does nothing."""

        async def answer(_request: Request) -> Response:
            return JSONResponse({"message": text})

        return answer

    async def update(self, request: Request) -> Response:
        """Load weights: vLLM's own request has ``update_info``, prime-rl's has ``weight_dir``."""
        body = json_body(request)
        info = field(body, "update_info", dict, None)
        if info is None and "weight_dir" not in body:
            raise BadRequest(
                "1 validation error: update_info is required.",
                malformed=True,
                param="body.update_info",
            )
        name = field(body if info is None else info, "weight_dir", str, None)
        # the label is the caller's: vLLM does not check that weights changed
        label = field(body, "weight_version", (str, int), None)
        await self._backend.load_or_refuse(name, None if label is None else str(label), flush=False)
        return JSONResponse(
            {"message": "Weights updated"} if info is not None else {"status": "ok"}
        )

    async def finish(self, request: Request) -> Response:
        label = field(json_body(request), "weight_version", str, None)
        if label is not None:
            self._backend.relabel(label)
        return JSONResponse({"message": "Weight update finished"})

    async def relabel(self, request: Request) -> Response:
        label = json_body(request).get("new_version")
        if not isinstance(label, str):
            raise BadRequest(
                "1 validation error: new_version must be a text.",
                malformed=True,
                param="body.new_version",
            )
        self._backend.relabel(label)
        return JSONResponse({"success": True, "new_version": label})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._backend.label})

    async def check_weights(self, request: Request) -> Response:
        """Return, or compare, checksums of the coded weights: there is one for each version."""
        body = json_body(request)
        action = body.get("action")
        if action not in ("checksum", "reset", "compare"):
            raise BadRequest(
                "1 validation error: action must be checksum, reset or compare.",
                malformed=True,
                param="body.action",
            )
        if action == "reset":
            return JSONResponse({"status": "reset"})
        sums = {"dp0:pp0:pcp0:tp0:model.fake.weight": f"{self._engine.version:064x}"}
        if action == "checksum":
            return JSONResponse({"checksums": sums})
        baseline = field(body, "baseline", dict, None)
        if baseline is None:
            raise BadRequest("action='compare' requires a 'baseline' object", malformed=True)
        wrong = sorted(key for key in {*sums, *baseline} if sums.get(key) != baseline.get(key))
        return JSONResponse({"match": not wrong, "mismatches": wrong})

    async def tokenize(self, request: Request) -> Response:
        text = field(json_body(request), "prompt", str, "")
        check_texts([text])
        ids = words_of(text, self._backend.vocab)
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._backend.max_length,
                "tokens": list(ids),
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        tokens = json_body(request).get("tokens")
        check_tokens(tokens)
        return JSONResponse({"prompt": text_of(token_ids(tokens, "tokens", self._backend.vocab))})

    async def server_info(self, request: Request) -> Response:
        """Return the part of the start-up configuration that clients read, as text or as JSON."""
        form = request.query_params.get("config_format", "text")
        if form not in ("text", "json"):
            raise BadRequest(
                "1 validation error: config_format must be text or json.",
                malformed=True,
                param="query.config_format",
            )
        config = {
            "model_config": {"model": "fake", "max_model_len": self._backend.max_length},
            "scheduler_config": {"max_num_seqs": self._backend.options.engine.max_batch},
            "weight_transfer_config": {"backend": "nccl"},
        }
        return JSONResponse(
            {
                "vllm_config": config if form == "json" else str(config),
                "vllm_env": {},
                "system_env": {},
            }
        )

    async def metrics(self, request: Request) -> Response:
        loads = self._backend.loads()
        lines = [f"vllm:num_requests_{name} {loads[name]}" for name in ("running", "waiting")]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def event_sources(self, request: Request) -> Response:
        return JSONResponse({})

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "fake"})

    async def load(self, request: Request) -> Response:
        loads = self._backend.loads()
        return JSONResponse({"server_load": loads["running"] + loads["waiting"]})

    async def models(self, request: Request) -> Response:
        entry = {
            "id": "fake",
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": "fake",
            "parent": None,
        }
        base = {**entry, "max_model_len": self._backend.max_length, "permission": []}
        adapters = [
            {**base, "id": name, "root": name, "parent": "fake", "max_model_len": None}
            for name in self._backend.engine.adapters
        ]
        return JSONResponse({"object": "list", "data": [base, *adapters]})


def _pause_mode(request: Request) -> str:
    mode = request.query_params.get("mode", "abort")
    if mode not in _MODES:
        raise BadRequest(
            f"1 validation error: mode must be one of {list(_MODES)}, not {mode!r}.",
            malformed=True,
            param="query.mode",
        )
    return mode


def _flag(request: Request, name: str, *, default: bool) -> bool:
    """Return a boolean parameter of the query; an empty one is the default."""
    text = (request.query_params.get(name) or str(default)).lower()
    if text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise BadRequest(
            f"1 validation error: {name} must be a boolean, not {text!r}.",
            malformed=True,
            param=f"query.{name}",
        )
    return text in ("true", "1", "yes", "on")


def _request_ids(body: Mapping[str, Any]) -> list[str] | None:
    rids = field(body, "request_ids", (list, str), None)
    return [rids] if isinstance(rids, str) else None if rids is None else [str(rid) for rid in rids]
