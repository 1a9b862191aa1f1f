"""Router: one address before several servers, as SGLang's gateway (sglang-router) and slime's own
router offer it.

Workers are servers of this process: a request is handed to the chosen one's application. A session
(header ``X-SMG-Routing-Key`` or ``X-Session-ID``) stays with its worker; other calls go to the one
with the fewest. The gateway is held to what sglang-router 0.3.2 answered (tests/http/recorded),
slime's was read in its slime/router/router.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qs, unquote

from starlette.responses import JSONResponse, PlainTextResponse, Response

from rollproof.fakes.http.asgi import Face, Message, Receive, Scope, Send
from rollproof.fakes.http.request_body import BadRequest, json_object

__all__ = ["Router", "RouterKind"]

_METADATA = {
    "model_path": "fake",
    "tp_size": "1",
    "dp_size": "1",
    "served_model_name": "fake",
    "model_type": "fake_moe",
    "architectures": '["FakeMoeForCausalLM"]',
}
_SESSIONS = (b"x-smg-routing-key", b"x-session-id")


@dataclass(slots=True, eq=False)
class _Worker:
    url: str
    app: Face
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    load: int = 0
    given: int = 0

    def told(self) -> dict[str, Any]:
        """As the gateway lists it."""
        return {
            "id": self.id,
            "url": self.url,
            "model_id": "fake",
            "priority": 50,
            "cost": 1.0,
            "worker_type": "regular",
            "is_healthy": self.app.alive,
            "load": self.load,
            "connection_mode": "HTTP",
            "metadata": _METADATA,
            "disable_health_check": False,
        }


class RouterKind(StrEnum):
    """Whose router it is."""

    GATEWAY = "gateway"
    """SGLang's: workers by id under ``/workers``; it forwards what samples, and knows nothing of
    aborts, pauses and updates.
    """
    SLIME = "slime"
    """Slime's: ``/add_worker`` and ``/list_workers``; it forwards everything else to one worker."""


class Router:
    """An ASGI application before ``servers``, by their addresses; all are workers at first, or none
    (``empty``).
    """

    def __init__(
        self,
        servers: Mapping[str, Face],
        kind: RouterKind = RouterKind.GATEWAY,
        *,
        empty: bool = False,
    ) -> None:
        self._servers, self._kind = servers, kind
        self._workers: dict[str, _Worker] = (
            {} if empty else {url: _Worker(url, app) for url, app in servers.items()}
        )
        self._sessions: dict[bytes, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        if path.startswith(
            "/rollproof/"
        ):  # what a stack tells of its samples: the servers share a trace, and each takes it for all
            servers = list(self._servers.values())
            await next((app for app in servers if app.alive), servers[0])(scope, receive, send)
            return
        if self._kind is RouterKind.SLIME:
            answer = self._slime(scope, await _whole(receive)) if path == "/add_worker" else None
            if path == "/list_workers" and method == "GET":
                answer = JSONResponse({"urls": list(self._workers)})
        else:
            answer = await self._gateway(scope, receive, method, path)
        if answer is not None:
            await answer(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _gateway(
        self, scope: Scope, receive: Receive, method: str, path: str
    ) -> Response | None:
        """Its own endpoints; ``None`` for what is forwarded."""
        if path.startswith("/workers/"):
            return self._one(method, unquote(path.removeprefix("/workers/")))
        living = sum(worker.app.alive for worker in self._workers.values())
        match method, path:
            case "GET", "/health" | "/liveness":
                return PlainTextResponse("OK")
            case "GET", "/readiness":
                told = {
                    "status": "ready" if living else "not ready",
                    "healthy_workers": living,
                    "total_workers": len(self._workers),
                }
                return JSONResponse(told, 200 if living else 503)
            case "GET", "/workers":
                return JSONResponse(self._listed())
            case "POST", "/workers":
                return self._add(await _whole(receive))
            case "POST", "/flush_cache":
                return await self._flush(scope)
        forwarded = path == "/generate" or path.startswith("/v1/")
        return None if forwarded else Response(status_code=404)

    async def _flush(self, scope: Scope) -> Response:
        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def unheard(_message: Message) -> None:
            """What the workers say is summed up."""

        workers = [worker for worker in self._workers.values() if worker.app.alive]
        for worker in workers:
            await worker.app(dict(scope), nothing, unheard)
        count = len(workers)
        message = f"Successfully flushed cache on all {count} HTTP workers"
        told = {
            "status": "success",
            "message": message,
            "workers_flushed": count,
            "total_http_workers": count,
            "total_workers": count,
        }
        return JSONResponse(told)

    def _listed(self) -> dict[str, Any]:
        workers = [worker.told() for worker in self._workers.values()]
        return {
            "workers": workers,
            "total": len(workers),
            "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)},
        }

    def _add(self, body: bytes) -> Response:
        url = _read(body).get("url")
        if not isinstance(url, str):
            return PlainTextResponse(
                "Failed to deserialize the JSON body into the target type: missing field `url`", 422
            )
        worker = self._joined(url)
        if worker is None:
            return JSONResponse(
                {
                    "error": f"Worker {url} is not one of the servers of this process.",
                    "code": "BAD_REQUEST",
                },
                400,
            )
        told = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": f"/workers/{worker.id}",
        }
        told["message"] = "Worker addition queued for background processing"
        return JSONResponse(told, 202, {"location": told["location"]})

    def _slime(self, scope: Scope, body: bytes) -> Response:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        given = _read(body)
        url = next(
            (asked[name][-1] for name in ("url", "worker_url") if name in asked),
            given.get("url") or given.get("worker_url"),
        )
        if not isinstance(url, str):
            return JSONResponse(
                {"error": "worker_url is required (use query ?url=... or JSON body)"}, 400
            )
        if self._joined(url) is None:
            return JSONResponse({"error": f"{url} is not one of the servers of this process"}, 400)
        return JSONResponse(
            {
                "status": "success",
                "worker_urls": {one.url: one.load for one in self._workers.values()},
            }
        )

    def _joined(self, url: str) -> _Worker | None:
        url = url.rstrip("/")
        app = self._servers.get(url)
        if app is None or not app.alive:
            return None
        return self._workers.setdefault(url, _Worker(url, app))

    def _one(self, method: str, name: str) -> Response:
        worker = next((one for one in self._workers.values() if name in (one.id, one.url)), None)
        if worker is None:
            if len(name) != 36:
                return JSONResponse(
                    {
                        "error": f"Invalid worker_id '{name}' (expected UUID).",
                        "code": "BAD_REQUEST",
                    },
                    400,
                )
            return JSONResponse(
                {"error": f"Worker {name} not found", "code": "WORKER_NOT_FOUND"}, 404
            )
        if method == "GET":
            return JSONResponse(worker.told())
        if method != "DELETE":
            return JSONResponse({"detail": "Method Not Allowed"}, 405)
        del self._workers[worker.url]
        told = {
            "status": "accepted",
            "worker_id": worker.id,
            "message": "Worker removal queued for background processing",
        }
        return JSONResponse(told, 202)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        worker = self._choose(scope)
        if worker is None:
            await JSONResponse({"error": {"message": "No workers available", "code": 503}}, 503)(
                scope, receive, send
            )
            return
        worker.load += 1
        worker.given += 1
        try:
            await worker.app(scope, receive, send)
        finally:
            worker.load -= 1

    def _choose(self, scope: Scope) -> _Worker | None:
        living = [worker for worker in self._workers.values() if worker.app.alive]
        if not living:
            return None
        session = next((value for name, value in scope["headers"] if name in _SESSIONS), None)
        kept = None if session is None else self._sessions.get(session)
        worker = next((one for one in living if one.url == kept), None) or min(
            living, key=lambda one: (one.load, one.given)
        )
        if session is not None:
            self._sessions[session] = worker.url
        return worker


async def _whole(receive: Receive) -> bytes:
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)


def _read(body: bytes) -> dict[str, Any]:
    """What a body says; nothing where it cannot be read."""
    try:
        return json_object(body)
    except BadRequest:
        return {}
