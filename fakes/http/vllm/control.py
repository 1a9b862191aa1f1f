"""vLLM's control: the endpoints by which a trainer holds, empties and updates the engine, and what
the server says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from rollproof.core.engine_contract import PauseMode
from rollproof.fakes.http.asgi import Answer, Asked
from rollproof.fakes.http.engine_backend import Backing
from rollproof.fakes.http.request_body import BadRequest, field, text_of, token_ids, words_of

__all__ = ["Control"]

_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.WAIT, "keep": PauseMode.KEEP}


class Control:
    """Handlers on the engine of ``backing``."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._engine = backing.engine
        self._asleep = False

    async def pause(self, asked: Asked) -> Answer:
        mode, clear = self._mode(asked), self._flag(asked, "clear_cache", default=True)
        await self._engine.pause(_MODES[mode], clear_cache=clear)
        return JSONResponse({"status": "paused"})

    async def resume(self, asked: Asked) -> Answer:
        await self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, asked: Asked) -> Answer:
        return JSONResponse({"is_paused": self._engine.paused})

    async def abort(self, asked: Asked) -> Answer:
        """All, where no ids are given."""
        wanted = field(asked.body(empty=False), "request_ids", (list, str), None)
        rids = [wanted] if isinstance(wanted, str) else wanted or []
        if rids:
            for rid in rids:
                await self._engine.abort(str(rid))
            return JSONResponse({"status": "aborted", "aborted": len(rids)})
        hit = await self._engine.abort("*")
        return JSONResponse({"status": "aborted", "aborted": len(hit)})

    async def abort_by_id(self, asked: Asked) -> Answer:
        wanted = field(asked.body(empty=False), "request_ids", (list, str), None)
        if wanted is None:
            raise BadRequest("Missing 'request_ids' in request body", malformed=True)
        for rid in [wanted] if isinstance(wanted, str) else wanted:
            await self._engine.abort(str(rid))
        return Response(status_code=200)

    async def reset(self, asked: Asked) -> Answer:
        """Fails while calls hold blocks, unless they are preempted."""
        running = [call.call_id for call in self._engine.in_flight if call.running]
        if running and not self._flag(asked, "reset_running_requests", default=False):
            return JSONResponse({"success": False})
        for call_id in running:
            self._engine.evict(call_id)
        self._engine.reset_prefix_cache()
        return JSONResponse({"success": True})

    async def nothing(self, asked: Asked) -> Answer:
        return Response(status_code=200)

    async def sleep(self, asked: Asked) -> Answer:
        level, mode = asked.query("level", "1") or "", self._mode(asked)
        if level not in ("0", "1", "2"):
            raise BadRequest(
                f"1 validation error: level must be 0 to 2, not {level!r}.",
                malformed=True,
                param="query.level",
            )
        await self._engine.pause(_MODES[mode], clear_cache=level != "0")
        self._asleep = True
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, asked: Asked) -> Answer:
        tags = asked.queries("tags") or None
        if tags is None or "kv_cache" in tags:
            self._asleep = False
            await self._engine.resume()
        return JSONResponse({"status": "sleeping" if self._asleep else "awake", "tags": tags})

    async def is_sleeping(self, asked: Asked) -> Answer:
        return JSONResponse({"is_sleeping": self._asleep})

    async def collective_rpc(self, asked: Asked) -> Answer:
        """A method whose name speaks of loading or updating weights loads some."""
        body = asked.body(empty=False)
        method = field(body, "method", str, None)
        if method is None:
            raise BadRequest("Missing 'method' in request body", malformed=True)
        if "weight" in method and method.startswith(("reload", "load", "update", "receive")):
            arguments = field(body, "kwargs", dict, {})
            await self._backing.load_or_refuse(
                arguments.get("weights_path") or arguments.get("weight_dir"), None, flush=False
            )
        return JSONResponse({"results": [None]})

    async def init_transfer(self, asked: Asked) -> Answer:
        if field(asked.body(), "init_info", dict, None) is None:
            raise BadRequest(
                "1 validation error: init_info is required.", malformed=True, param="body.init_info"
            )
        return JSONResponse({"message": "Weight transfer initialized"})

    def said(self, message: str) -> Callable[[Asked], Any]:
        """An endpoint that has nothing to do here."""

        async def say(_asked: Asked) -> Answer:
            return JSONResponse({"message": message})

        return say

    async def update(self, asked: Asked) -> Answer:
        """VLLM's own (``update_info``), and prime-rl's (``weight_dir``)."""
        body = asked.body()
        info = field(body, "update_info", dict, None)
        if info is None and "weight_dir" not in body:
            raise BadRequest(
                "1 validation error: update_info is required.",
                malformed=True,
                param="body.update_info",
            )
        name = field(body if info is None else info, "weight_dir", str, None)
        label = field(body, "weight_version", (str, int), None)
        await self._backing.load_or_refuse(name, None if label is None else str(label), flush=False)
        return JSONResponse(
            {"message": "Weights updated"} if info is not None else {"status": "ok"}
        )

    async def finish(self, asked: Asked) -> Answer:
        label = field(asked.body(), "weight_version", str, None)
        if label is not None:
            self._backing.relabel(label)
        return JSONResponse({"message": "Weight update finished"})

    async def relabel(self, asked: Asked) -> Answer:
        label = asked.body().get("new_version")
        if not isinstance(label, str):
            raise BadRequest(
                "1 validation error: new_version must be a text.",
                malformed=True,
                param="body.new_version",
            )
        self._backing.relabel(label)
        return JSONResponse({"success": True, "new_version": label})

    async def weight_info(self, asked: Asked) -> Answer:
        return JSONResponse({"weight_version": self._backing.label})

    async def check_weights(self, asked: Asked) -> Answer:
        """A checksum of the coded weights: one for each version."""
        body = asked.body()
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

    async def tokenize(self, asked: Asked) -> Answer:
        ids = words_of(field(asked.body(), "prompt", str, ""), self._backing.vocab)
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._backing.max_length,
                "tokens": list(ids),
                "token_strs": None,
            }
        )

    async def detokenize(self, asked: Asked) -> Answer:
        return JSONResponse(
            {
                "prompt": text_of(
                    token_ids(asked.body().get("tokens"), "tokens", self._backing.vocab)
                )
            }
        )

    async def server_info(self, asked: Asked) -> Answer:
        """The part of the start-up configuration that clients read, as text or as JSON."""
        form = asked.query("config_format", "text")
        if form not in ("text", "json"):
            raise BadRequest(
                "1 validation error: config_format must be text or json.",
                malformed=True,
                param="query.config_format",
            )
        config = {
            "model_config": {"model": "fake", "max_model_len": self._backing.max_length},
            "scheduler_config": {"max_num_seqs": self._backing.options.engine.max_batch},
            "weight_transfer_config": {"backend": "nccl"},
        }
        return JSONResponse(
            {
                "vllm_config": config if form == "json" else str(config),
                "vllm_env": {},
                "system_env": {},
            }
        )

    async def metrics(self, asked: Asked) -> Answer:
        loads = self._backing.loads()
        lines = [f"vllm:num_requests_{name} {loads[name]}" for name in ("running", "waiting")]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def event_sources(self, asked: Asked) -> Answer:
        return JSONResponse({})

    async def world_size(self, asked: Asked) -> Answer:
        return JSONResponse({"world_size": 1})

    async def version(self, asked: Asked) -> Answer:
        return JSONResponse({"version": "fake"})

    async def load(self, asked: Asked) -> Answer:
        loads = self._backing.loads()
        return JSONResponse({"server_load": loads["running"] + loads["waiting"]})

    async def health(self, asked: Asked) -> Answer:
        return Response(status_code=200)

    async def models(self, asked: Asked) -> Answer:
        entry = {
            "id": "fake",
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": "fake",
            "parent": None,
        }
        return JSONResponse(
            {
                "object": "list",
                "data": [{**entry, "max_model_len": self._backing.max_length, "permission": []}],
            }
        )

    def _mode(self, asked: Asked) -> str:
        mode = asked.query("mode", "abort") or ""
        if mode not in _MODES:
            raise BadRequest(
                f"1 validation error: mode must be one of {list(_MODES)}, not {mode!r}.",
                malformed=True,
                param="query.mode",
            )
        return mode

    def _flag(self, asked: Asked, name: str, *, default: bool) -> bool:
        text = (asked.query(name) or str(default)).lower()
        if text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise BadRequest(
                f"1 validation error: {name} must be a boolean, not {text!r}.",
                malformed=True,
                param=f"query.{name}",
            )
        return text in ("true", "1", "yes", "on")
