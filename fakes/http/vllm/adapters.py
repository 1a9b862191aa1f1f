"""Endpoints by which vLLM loads and unloads adapters at run time.

They exist with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``; read in 0.32
(``entrypoints/openai/models/serving.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import post
from rollproof.fakes.http.request_body import BadRequest, field, json_body

__all__ = ["adapter_routes", "adapter_source"]


def adapter_routes(backend: EngineBackend) -> list[Route]:
    """Return the routes of both."""
    adapters = _Adapters(backend)
    return [
        post("/v1/load_lora_adapter", adapters.load),
        post("/v1/unload_lora_adapter", adapters.unload),
    ]


def adapter_source(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of an adapter and the path that it is loaded from.

    Raises:
        BadRequest: one of them is missing.
    """
    name, path = field(body, "lora_name", str, None), field(body, "lora_path", str, None)
    if not name or not path:
        raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.", malformed=True)
    return name, path


class _Adapters:
    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend

    async def load(self, request: Request) -> Response:
        body = json_body(request)
        name, path = adapter_source(body)
        in_place = field(body, "load_inplace", bool, False)
        # the server refuses what its engine would silently keep
        if name in self._backend.engine.adapters and not in_place:
            raise BadRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the"
                " adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        await self._backend.load_adapter(name, path, in_place=in_place)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = field(json_body(request), "lora_name", str, None)
        if not name:
            raise BadRequest(
                "'lora_name' needs to be provided to unload a LoRA adapter.", malformed=True
            )
        if not await self._backend.unload_adapter(name):
            raise BadRequest(f"The lora adapter '{name}' cannot be found.", 404, param="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
