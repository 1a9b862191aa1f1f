"""Endpoints by which SGLang loads and unloads adapters at run time.

Read in 0.5.21 (``entrypoints/http_server.py``, ``managers/tokenizer_manager.py``).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import post
from rollproof.fakes.http.request_body import BadRequest, field, json_body

__all__ = ["adapter_routes"]


def adapter_routes(backend: EngineBackend) -> list[Route]:
    """Return the routes of both."""
    adapters = _Adapters(backend)
    return [
        post("/load_lora_adapter", adapters.load),
        post("/unload_lora_adapter", adapters.unload),
    ]


class _Adapters:
    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self._paths: dict[str, str] = {}

    async def load(self, request: Request) -> Response:
        body = json_body(request)
        name, path = self._text(body, "lora_name"), self._text(body, "lora_path")
        try:
            await self._backend.load_adapter(name, path, in_place=False)
        except BadRequest as error:
            return self._answer(str(error))
        self._paths[name] = path
        return self._answer()

    async def unload(self, request: Request) -> Response:
        name = self._text(json_body(request), "lora_name")
        if not await self._backend.unload_adapter(name):
            return self._answer(f"LoRA adapter {name} is not loaded.")
        self._paths.pop(name, None)
        return self._answer()

    @staticmethod
    def _text(body: dict[str, Any], name: str) -> str:
        text: str | None = field(body, name, str, None)
        if not text:
            raise BadRequest(f"1 validation error: {name} is required.", malformed=True)
        return text

    def _answer(self, error: str = "") -> Response:
        loaded = {name: self._paths.get(name, "") for name in self._backend.engine.adapters}
        return JSONResponse(
            {"success": not error, "error_message": error, "loaded_adapters": loaded},
            400 if error else 200,
        )
