"""Endpoints that SkyRL, prime-rl and AReaL add to vLLM's server.

Read in skyrl 0.3.0 (``vllm_server_actor.py``), areal 1.0.4
(``vllm_ext/areal_vllm_server.py``) and prime-rl at 559b44772 (``src/prime_rl/inference``).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollproof.core.engine_contract import PauseMode
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import OrjsonResponse, post
from rollproof.fakes.http.request_body import field, json_body, token_ids
from rollproof.fakes.http.vllm import vllm_calls as replies
from rollproof.fakes.http.vllm.adapters import adapter_source
from rollproof.fakes.http.vllm.vllm_calls import VllmRequest

__all__ = ["extension_routes"]

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


def extension_routes(backend: EngineBackend) -> list[Route]:
    """Return the routes of all three."""
    extensions = _Extensions(backend)
    return [
        post("/skyrl/v1/generate", extensions.skyrl_generate),
        post("/skyrl/v1/load_lora_adapter", extensions.skyrl_lora),
        post("/finish_session", extensions.done),
        post("/init_broadcaster", extensions.done),
        post("/load_lora_adapter", extensions.load_lora),
        post("/areal_pause_generation", extensions.areal_pause),
        post("/areal_continue_generation", extensions.areal_continue),
        *(post(path, extensions.areal_load) for path in _AREAL_LOADS),
        *(post(path, extensions.areal_set) for path in _AREAL_SETS),
    ]


class _Extensions:
    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self._loras = 0

    async def skyrl_generate(self, request: Request) -> Response:
        """Answer with routes as bytes with shape and dtype (0.4), or as nested lists (0.3)."""
        body = json_body(request, allow_empty=False)
        ids = token_ids(body.get("token_ids"), "token_ids", self._backend.vocab)
        call = VllmRequest(
            request,
            body,
            [ids],
            field(body, "sampling_params", dict, {}),
            self._backend,
            prefix="",
            default=16,
        )
        spec = call.specs()[0]
        output = await self._backend.generate(request, spec)
        logprobs = routes = None
        if call.top_logprobs is not None and output.logprobs is not None:
            logprobs = {"content": [{"logprob": logprob} for logprob in output.logprobs.tolist()]}
        if output.routes is not None:
            routes = (
                output.routes.tolist()
                if self._backend.options.nested_routes
                else replies.described(output.routes)
            )
        choice = {
            "token_ids": list(output.token_ids),
            "finish_reason": replies.finish_of(output),
            "logprobs": logprobs,
        }
        return OrjsonResponse({"choices": [{**choice, "routed_experts": routes}]})

    async def skyrl_lora(self, request: Request) -> Response:
        body = json_body(request)
        name, path = adapter_source(body)
        await self._backend.load_adapter(name, path)
        self._loras += 1
        return JSONResponse({"status": "ok", "lora_name": name, "lora_int_id": self._loras})

    async def load_lora(self, request: Request) -> Response:
        """Replace the adapter in place, as prime-rl does, which gives it the name of the model."""
        name, path = adapter_source(json_body(request))
        await self._backend.load_adapter(name, path)
        return JSONResponse({"status": "ok"})

    async def areal_pause(self, request: Request) -> Response:
        """Abort what runs, clear the cache, and start nothing."""
        await self._backend.engine.pause(PauseMode.ABORT, clear_cache=True)
        return JSONResponse(
            {"success": True, "message": "Generation paused and all requests aborted"}
        )

    async def areal_continue(self, request: Request) -> Response:
        await self._backend.engine.resume()
        return JSONResponse({"success": True, "message": "Generation continued"})

    async def areal_load(self, request: Request) -> Response:
        """Pause with an abort, load, and resume, within one request. There is no label: AReaL
        counts its versions itself.
        """
        body = json_body(request)
        name = field(body, "model_path", str, field(body, "lora_model_path", str, None))
        engine = self._backend.engine
        await engine.pause(PauseMode.ABORT, clear_cache=True)
        # resume also after a failed load: the requests would wait for ever
        try:
            await self._backend.load_or_refuse(name, None, flush=True)
        finally:
            await engine.resume()
        return JSONResponse({"success": True, "message": "TP rank: 0 success\n"})

    async def areal_set(self, request: Request) -> Response:
        json_body(request)
        return JSONResponse({"success": True, "message": "TP rank: 0 success\n"})

    async def done(self, request: Request) -> Response:
        json_body(request)
        return JSONResponse({"status": "ok"})
