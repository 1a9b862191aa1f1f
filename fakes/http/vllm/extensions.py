"""Private: what SkyRL, prime-rl and AReaL add to vLLM's server, one table.

Read in skyrl 0.3.0 (``vllm_server_actor.py``), areal 1.0.4
(``vllm_ext/areal_vllm_server.py``) and prime-rl at 559b44772 (``src/prime_rl/inference``).
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from rollproof.core.engine_contract import PauseMode
from rollproof.fakes.http.asgi import Answer, Asked, Handler, Whole
from rollproof.fakes.http.engine_backend import Backing
from rollproof.fakes.http.request_body import BadRequest, dumped, field, token_ids
from rollproof.fakes.http.vllm import vllm_calls as written
from rollproof.fakes.http.vllm.vllm_calls import VllmCall

__all__ = ["private_endpoints"]

_AREAL_LOADS = (
    "/areal_update_weights",
    "/areal_update_weights_lora",
    "/areal_update_weights_xccl",
    "/areal_update_weights_lora_xccl",
)
_AREAL_SETS = (
    "/areal_init_weights_update_group",
    "/areal_set_update_weight_meta",
    "/areal_set_update_weight_meta_lora",
)


def private_endpoints(backing: Backing) -> Mapping[str, Handler]:
    """Handlers by path."""
    private = _Private(backing)
    return {
        "/skyrl/v1/generate": private.skyrl_generate,
        "/skyrl/v1/load_lora_adapter": private.skyrl_lora,
        "/finish_session": private.done,
        "/init_broadcaster": private.done,
        "/load_lora_adapter": private.load_lora,
        "/v1/load_lora_adapter": private.load_lora,
        "/v1/unload_lora_adapter": private.done,
        "/areal_pause_generation": private.areal_pause,
        "/areal_continue_generation": private.areal_continue,
        **dict.fromkeys(_AREAL_LOADS, private.areal_load),
        **dict.fromkeys(_AREAL_SETS, private.areal_set),
    }


class _Private:
    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._loras = 0

    async def skyrl_generate(self, asked: Asked) -> Answer:
        """Routes as bytes with shape and dtype (0.4), or as lists in lists (0.3)."""
        body = asked.body(empty=False)
        ids = token_ids(body.get("token_ids"), "token_ids", self._backing.vocab)
        call = VllmCall(
            asked,
            body,
            [ids],
            field(body, "sampling_params", dict, {}),
            self._backing,
            prefix="",
            default=16,
        )
        (wanted,) = call.wanted()[:1]
        output = await self._backing.generate(asked, wanted)
        logprobs = routes = None
        if call.top is not None and output.logprobs is not None:
            logprobs = {"content": [{"logprob": logprob} for logprob in output.logprobs.tolist()]}
        if output.routes is not None:
            routes = (
                output.routes.tolist()
                if self._backing.options.nested_routes
                else written.described(output.routes)
            )
        choice = {
            "token_ids": list(output.token_ids),
            "finish_reason": written.finish_of(output),
            "logprobs": logprobs,
        }
        return Whole(dumped({"choices": [{**choice, "routed_experts": routes}]}))

    async def skyrl_lora(self, asked: Asked) -> Answer:
        body = asked.body()
        name = field(body, "lora_name", str, None)
        if not name or not body.get("lora_path"):
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.", malformed=True)
        await self._backing.load_or_refuse(str(body["lora_path"]), name, flush=False)
        self._loras += 1
        return JSONResponse({"status": "ok", "lora_name": name, "lora_int_id": self._loras})

    async def load_lora(self, asked: Asked) -> Answer:
        body = asked.body()
        path = field(body, "lora_path", str, None)
        await self._backing.load_or_refuse(path, field(body, "lora_name", str, None), flush=False)
        return JSONResponse({"status": "ok"})

    async def areal_pause(self, asked: Asked) -> Answer:
        """Ends what runs, clears the cache, and lets nothing begin."""
        await self._backing.engine.pause(PauseMode.ABORT, clear_cache=True)
        return JSONResponse(
            {"success": True, "message": "Generation paused and all requests aborted"}
        )

    async def areal_continue(self, asked: Asked) -> Answer:
        await self._backing.engine.resume()
        return JSONResponse({"success": True, "message": "Generation continued"})

    async def areal_load(self, asked: Asked) -> Answer:
        """A pause that aborts, the load, a resume, within one request. No label: AReaL counts its
        versions itself.
        """
        body = asked.body()
        name = field(body, "model_path", str, field(body, "lora_model_path", str, None))
        engine = self._backing.engine
        await engine.pause(PauseMode.ABORT, clear_cache=True)
        try:
            await self._backing.load_or_refuse(name, None, flush=True)
        finally:
            await engine.resume()
        return JSONResponse({"success": True, "message": "TP rank: 0 success\n"})

    async def areal_set(self, asked: Asked) -> Answer:
        asked.body()
        return JSONResponse({"success": True, "message": "TP rank: 0 success\n"})

    async def done(self, asked: Asked) -> Answer:
        asked.body()
        return JSONResponse({"status": "ok"})
