"""Routers: one address before several fake servers.

Workers are servers of this process: a request is handed to the application of the chosen one. A
session stays with its worker; other calls go to the worker with the fewest. ``Gateway`` is held to
what sglang-router 0.3.2 answered (tests/fakes/http/recorded), ``SlimeRouter`` to slime's
slime/router/router.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from rollproof.fakes.http.fake_server import FakeServer, get, post, read_body, replay, route
from rollproof.fakes.http.request_body import BadRequest, is_json, json_object

__all__ = ["Gateway", "RouterKind", "SessionRouter", "SlimeRouter", "Worker", "make_router"]

_METADATA = {
    "model_path": "fake",
    "tp_size": "1",
    "dp_size": "1",
    "served_model_name": "fake",
    "model_type": "fake_moe",
    "architectures": '["FakeMoeForCausalLM"]',
}
_SESSION_HEADERS = ("x-smg-routing-key", "x-session-id")
_MAX_BODY = 1 << 20
"""Most bytes of a request to the router itself."""


@dataclass(slots=True, eq=False)
class Worker:
    """A server that a router forwards to.

    Attributes:
        url: its address.
        app: its application.
        id: the id that a gateway lists it under.
        load: calls in flight.
        calls: calls since the beginning.
    """

    url: str
    app: FakeServer
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    load: int = 0
    calls: int = 0


class RouterKind(StrEnum):
    """The router to emulate."""

    GATEWAY = "gateway"
    """SGLang's: workers by id under ``/workers``; it forwards what samples, and knows nothing of
    aborts, pauses and updates.
    """
    SLIME = "slime"
    """Slime's: ``/add_worker`` and ``/list_workers``; it forwards everything else to one worker."""


class SessionRouter:
    """An ASGI application before ``servers``: it answers ``routes`` itself, and forwards the rest.

    Args:
        servers: applications by address; all are workers at first.
        routes: the router's own endpoints.
    """

    def __init__(self, servers: Mapping[str, FakeServer], routes: Sequence[Route]) -> None:
        self.servers: Mapping[str, FakeServer] = servers
        self.workers: dict[str, Worker] = {url: Worker(url, app) for url, app in servers.items()}
        self._sessions: dict[str, str] = {}
        self._router = Router(routes, redirect_slashes=False, default=self.other)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._router(scope, receive, send)

    async def broadcast(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have every living worker answer, and pass on the answer of the last."""
        # the body is read once, and replayed for each worker
        body = await read_body(scope, receive, _MAX_BODY)
        *others, last = self.living()
        for worker in others:
            await worker.app(scope, replay(body, receive), _discard)
        await last.app(scope, replay(body, receive), send)

    async def other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is for none of the router's own endpoints."""
        # What a stack reports of its samples: the servers share a trace, and each takes it for all.
        if scope["path"].startswith("/rollproof/"):
            servers = list(self.servers.values())
            await next((app for app in servers if app.alive), servers[0])(scope, receive, send)
        else:
            await self.forward(scope, receive, send)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have one worker answer."""
        worker = self.choose(session_of(scope))
        if worker is None:
            refusal = JSONResponse({"error": {"message": "No workers available", "code": 503}}, 503)
            await refusal(scope, receive, send)
            return
        self.begin(worker)
        try:
            await worker.app(scope, receive, send)
        finally:
            self.end(worker)

    def begin(self, worker: Worker) -> None:
        """Count a call that begins."""
        worker.load += 1
        worker.calls += 1

    def end(self, worker: Worker) -> None:
        """Count a call that has ended."""
        worker.load -= 1

    def choose(self, session: str | None) -> Worker | None:
        """Return the living worker of the session, or else the one with the fewest calls."""
        candidates = self.candidates()
        if not candidates:
            return None
        url = None if session is None else self._sessions.get(session)
        worker = next((worker for worker in candidates if worker.url == url), None)
        if worker is None:
            worker = min(candidates, key=self.rank)
        # a turn on another worker would prefill everything again
        if session is not None:
            self._sessions[session] = worker.url
        return worker

    def rank(self, worker: Worker) -> tuple[int, ...]:
        """Return what a new call goes to the worker with the least of."""
        # calls break the tie between idle workers: they take turns
        return worker.load, worker.calls

    def end_session(self, session: str) -> None:
        """Forget which worker a session has."""
        self._sessions.pop(session, None)

    def candidates(self) -> list[Worker]:
        """Return the workers that a new call may go to."""
        return self.living()

    def living(self) -> list[Worker]:
        """Return the workers that are alive."""
        return [worker for worker in self.workers.values() if worker.app.alive]

    def join(self, url: str) -> Worker | None:
        """Make the living server at ``url`` a worker; ``None`` if there is none in this process."""
        url = url.rstrip("/")
        app = self.servers.get(url)
        if app is None or not app.alive:
            return None
        return self.workers.setdefault(url, Worker(url, app))


def session_of(scope: Scope) -> str | None:
    """Return the session that a request names in its headers."""
    headers = Request(scope).headers
    return next((headers[name] for name in _SESSION_HEADERS if name in headers), None)


class Gateway(SessionRouter):
    """SGLang's gateway."""

    def __init__(self, servers: Mapping[str, FakeServer]) -> None:
        super().__init__(
            servers,
            [
                get("/health", self._health),
                get("/liveness", self._health),
                get("/readiness", self._readiness),
                route("/workers", self._workers, "GET", "POST"),
                route("/workers/{name:path}", self._worker, "GET", "DELETE"),
                post("/flush_cache", self._flush),
            ],
        )

    async def other(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/generate" or path.startswith(("/v1/", "/rollproof/")):
            await super().other(scope, receive, send)
        else:
            # to abort, pause or update, a stack has to call the workers themselves
            await Response(status_code=404)(scope, receive, send)

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("OK")

    async def _readiness(self, _request: Request) -> Response:
        living = len(self.living())
        body = {
            "status": "ready" if living else "not ready",
            "healthy_workers": living,
            "total_workers": len(self.workers),
        }
        return JSONResponse(body, 200 if living else 503)

    async def _workers(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._add(request)
        workers = [_listed(worker) for worker in self.workers.values()]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        return JSONResponse({"workers": workers, "total": len(workers), "stats": stats})

    async def _add(self, request: Request) -> Response:
        # plain text, in the words of the gateway's JSON extractor (axum)
        url = (await _object_in(request)).get("url")
        if not isinstance(url, str):
            return PlainTextResponse(
                "Failed to deserialize the JSON body into the target type: missing field `url`", 422
            )
        worker = self.join(url)
        if worker is None:
            message = f"Worker {url} is not one of the servers of this process."
            return JSONResponse({"error": message, "code": "BAD_REQUEST"}, 400)
        location = f"/workers/{worker.id}"
        body = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": location,
            "message": "Worker addition queued for background processing",
        }
        return JSONResponse(body, 202, {"location": location})

    async def _worker(self, request: Request) -> Response:
        name = request.path_params["name"]
        worker = next(
            (worker for worker in self.workers.values() if name in (worker.id, worker.url)), None
        )
        # 36 characters: the length of a UUID
        if worker is None and len(name) != 36:
            message = f"Invalid worker_id '{name}' (expected UUID)."
            return JSONResponse({"error": message, "code": "BAD_REQUEST"}, 400)
        if worker is None:
            message = f"Worker {name} not found"
            return JSONResponse({"error": message, "code": "WORKER_NOT_FOUND"}, 404)
        if request.method != "DELETE":
            return JSONResponse(_listed(worker))
        del self.workers[worker.url]
        body = {
            "status": "accepted",
            "worker_id": worker.id,
            "message": "Worker removal queued for background processing",
        }
        return JSONResponse(body, 202)

    async def _flush(self, request: Request) -> Response:
        workers = self.living()
        for worker in workers:
            await worker.app(request.scope, replay(b"", request.receive), _discard)
        count = len(workers)
        return JSONResponse(
            {
                "status": "success",
                "message": f"Successfully flushed cache on all {count} HTTP workers",
                "workers_flushed": count,
                "total_http_workers": count,
                "total_workers": count,
            }
        )


class SlimeRouter(SessionRouter):
    """Slime's own router."""

    def __init__(self, servers: Mapping[str, FakeServer]) -> None:
        super().__init__(
            servers,
            [
                route("/add_worker", self._add, "GET", "POST"),
                get("/list_workers", self._list),
            ],
        )

    async def _add(self, request: Request) -> Response:
        # slime reads the query first, see add_worker in its router.py
        query, body = request.query_params, await _object_in(request)
        url = next(
            (query[name] for name in ("url", "worker_url") if name in query),
            body.get("url") or body.get("worker_url"),
        )
        if not isinstance(url, str):
            message = "worker_url is required (use query ?url=... or JSON body)"
            return JSONResponse({"error": message}, 400)
        if self.join(url) is None:
            return JSONResponse({"error": f"{url} is not one of the servers of this process"}, 400)
        loads = {worker.url: worker.load for worker in self.workers.values()}
        return JSONResponse({"status": "success", "worker_urls": loads})

    async def _list(self, _request: Request) -> Response:
        return JSONResponse({"urls": list(self.workers)})


async def _discard(_message: Any) -> None:
    """Do not pass on what a worker answers."""


def make_router(kind: RouterKind, servers: Mapping[str, FakeServer]) -> SessionRouter:
    """Return a router of ``kind`` before ``servers``."""
    return Gateway(servers) if kind is RouterKind.GATEWAY else SlimeRouter(servers)


def _listed(worker: Worker) -> dict[str, Any]:
    """Return a worker as SGLang's gateway lists it."""
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": "fake",
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": worker.app.alive,
        "load": worker.load,
        "connection_mode": "HTTP",
        "metadata": _METADATA,
        "disable_health_check": False,
    }


async def _object_in(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body; an empty one if it cannot be read."""
    if not is_json(request.scope):
        return {}
    try:
        return json_object(await read_body(request.scope, request.receive, _MAX_BODY))
    except BadRequest:
        return {}
