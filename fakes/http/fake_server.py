"""The fake servers as ASGI applications: Starlette's routes, with a bounded body before them and
the planned faults of the wire around them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from rollproof.fakes.engine.exceptions import BadCall, ReplyLost, ServerDied
from rollproof.fakes.http.connections import Delivery, connection_of, delivery_of
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fault_plan import WireFault, WireFaultKind
from rollproof.fakes.http.request_body import (
    BadRequest,
    UncaughtError,
    encode_json,
    header_of,
    is_json,
)

__all__ = [
    "ErrorBody",
    "EventStream",
    "FakeServer",
    "FinalEvent",
    "OrjsonResponse",
    "get",
    "post",
    "read_body",
    "replay",
    "route",
]

ErrorBody: TypeAlias = "Callable[[BadRequest], Mapping[str, Any]]"
"""How a server words a refusal: the JSON object that it sends."""


_NO_JSON = BadRequest(
    "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
    malformed=True,
)
"""The words of vLLM and SGLang."""
Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"
"""An endpoint: it answers a request."""


def route(path: str, handler: Handler, *methods: str) -> Route:
    """Return the route of an endpoint for ``methods``."""
    return Route(path, _Endpoint(handler), methods=methods)


def post(path: str, handler: Handler) -> Route:
    """Return the route of an endpoint for POST."""
    return route(path, handler, "POST")


def get(path: str, handler: Handler) -> Route:
    """Return the route of an endpoint for GET."""
    return route(path, handler, "GET")


class _Endpoint:
    """A handler as an ASGI application.

    Starlette makes one of a function, too, with a layer around it that looks for handlers of
    exceptions: a sixth of the time of an endpoint that does nothing. ``FakeServer`` catches them.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


class OrjsonResponse(JSONResponse):
    """A reply with logprobs and routes: NaN becomes null, where ``JSONResponse`` fails."""

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class FinalEvent(bytes):
    """An event of a stream that ends a call: it carries the finish reason, routes and versions.

    A planned fault that cuts a stream short never sends it.
    """

    __slots__ = ()


class EventStream(StreamingResponse):
    """Server-sent events; ``events`` are whole events with their ``data:``."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        super().__init__(
            events, headers={"cache-control": "no-cache"}, media_type="text/event-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette runs two more tasks for each stream, to notice a client that leaves; here the
        # connection cancels the request's task.
        delivery_of(scope).streamed = True
        await self.stream_response(send)

    async def stream_response(self, send: Send) -> None:
        # A generator that is left while it waits at a `yield` (its reader is slow, and goes away)
        # would only be closed by the garbage collector, and its engine calls go on until then.
        async with aclosing(self._events):
            await super().stream_response(send)


class FakeServer:
    """A fake server before the engine of ``backend``; refusals are worded by ``error_body``."""

    def __init__(
        self, routes: Sequence[Route], *, backend: EngineBackend, error_body: ErrorBody
    ) -> None:
        self.routes: Sequence[Route] = routes
        self._backend = backend
        self._error_body = error_body
        # Not `Starlette`: its ServerErrorMiddleware would answer with 500 where an engine has died
        # and the connection has to break.
        self._router = Router(routes)

    @property
    def alive(self) -> bool:
        """Whether the engine is alive; a dead server resets every connection."""
        return self._backend.engine.alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        connection, delivery = connection_of(scope), Delivery()
        scope = {
            **scope,
            "app": self,  # Router raises its 404 and 405 as HTTPException only within an app
            "state": {**scope["state"], "delivery": delivery},
        }

        started = False
        # what a client reports is no part of the server that dies
        reported = scope["path"].startswith("/rollproof/")

        async def send_if_alive(message: Message) -> None:
            nonlocal started
            if not (self.alive or reported):
                raise ServerDied
            started = True
            await send(message)

        connection.begin(delivery)
        try:
            if self.alive or reported:
                await self._answer(scope, receive, send_if_alive, delivery)
            else:
                await connection.break_off()
        except (ServerDied, ReplyLost):
            await connection.break_off()
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if delivery.disconnected and task is not None:
                # the cancellation ends here: asyncio.timeout and TaskGroup count those that are
                # pending
                task.uncancel()
                await _complete(started, scope, receive, send)
                return
            # The server stops, and uvicorn would log a traceback for each request that it
            # cancels. The loop may end meanwhile, and cancel once more.
            with suppress(asyncio.CancelledError):
                await connection.break_off()
        finally:
            connection.end(delivery)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, delivery: Delivery) -> None:
        try:
            body = await read_body(scope, receive, self._backend.options.max_body)
        except BadRequest as error:
            await self._refusal(error)(scope, receive, send)
            return
        if body and not is_json(scope):
            await self._refusal(_NO_JSON)(scope, receive, send)
            return
        # for the endpoint: to read it from ASGI once more takes as long as parsing it
        scope["state"]["body"] = body
        faults = self._backend.faults
        fault = (
            None
            if faults is None
            else faults.due(scope["path"], body, self._backend.request_named(scope))
        )
        if fault is None:
            await self._route(scope, receive, send)
        elif fault.do is WireFaultKind.SLOW:
            delivery.delay = fault.seconds or 0.0
            await self._route(scope, receive, _delayed(send, delivery))
        elif fault.do is WireFaultKind.STATUS and not fault.after_engine:
            await _planned_status(fault)(scope, receive, send)
        else:
            # the engine knows, so that the trace says that nobody received its reply
            delivery.lost = True
            messages: list[Message] = []
            await self._route(scope, receive, _collect(messages))
            if fault.do is WireFaultKind.STATUS:
                await _planned_status(fault)(scope, receive, send)
            else:
                await _cut_short(messages, scope, send, fault)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the endpoint answer, or refuse in the words of this server."""
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            refusal = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
            await refusal(scope, receive, send)
        except BadRequest as error:
            await self._refusal(error)(scope, receive, send)
        except BadCall as error:
            await self._refusal(BadRequest(str(error)))(scope, receive, send)
        except UncaughtError:
            await PlainTextResponse("Internal Server Error", 500)(scope, receive, send)

    def _refusal(self, error: BadRequest) -> Response:
        return JSONResponse(self._error_body(error), error.status)


async def _complete(started: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Complete the answer to a client that has gone."""
    # of several requests that came at once uvicorn notices only that the last one's client left,
    # and it would log an error for an answer that is not complete
    if started:
        with suppress(RuntimeError):  # less than the declared length
            await send({"type": "http.response.body", "body": b""})
    else:
        await Response(status_code=503)(scope, receive, send)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the body. Raise ``BadRequest`` with status 413 if it is larger than ``max_bytes``."""
    declared = header_of(scope, "content-length") or ""
    # before anything is read; the header may be absent (chunked), or a lie
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BadRequest(f"The body has {declared} bytes; the limit is {max_bytes}.", 413)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise BadRequest(f"The body has more than {max_bytes} bytes.", 413)
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return ``receive`` for an application that has not read the body yet."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed


def _delayed(send: Send, delivery: Delivery) -> Send:
    """Return ``send`` for an answer that comes late although no engine call took the time."""

    async def delayed(message: Message) -> None:
        if message["type"] == "http.response.start" and not _is_event_stream(message):
            await asyncio.sleep(delivery.delay)
        await send(message)

    return delayed


def _collect(messages: list[Message]) -> Send:
    async def collected(message: Message) -> None:
        messages.append(message)

    return collected


def _is_event_stream(start: Message) -> bool:
    media: bytes = dict(start["headers"]).get(b"content-type", b"")
    return media.startswith(b"text/event-stream")


def _planned_status(fault: WireFault) -> Response:
    return JSONResponse({"detail": f"planned fault: status {fault.status}"}, fault.status)


async def _cut_short(
    messages: Sequence[Message], scope: Scope, send: Send, fault: WireFault
) -> None:
    """Send the beginning of an answer: ``fault.keep`` of its bytes, or of the events of a stream
    that come before the end of any call.
    """
    start, parts = messages[0], [message.get("body", b"") for message in messages[1:]]
    declared_short = fault.do is WireFaultKind.WRONG_LENGTH
    if _is_event_stream(start):
        await send(start)
        events = [part for part in parts if part]
        before_end = next(
            (number for number, event in enumerate(events) if isinstance(event, FinalEvent)),
            len(events),
        )
        for event in events[: min(before_end, max(1, int(len(events) * fault.keep)))]:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if declared_short:
            await send({"type": "http.response.body", "body": b""})
    else:
        body = b"".join(parts)
        beginning = body[: int(len(body) * fault.keep)]
        length = len(beginning) if declared_short else len(body)
        headers = [header for header in start["headers"] if header[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % length))
        await send({**start, "headers": headers})
        await send(
            {"type": "http.response.body", "body": beginning, "more_body": not declared_short}
        )
    if not declared_short:
        await connection_of(scope).break_off(reset=fault.do is WireFaultKind.RESET)
