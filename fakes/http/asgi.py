"""ASGI: what every face does alike with a request. Endpoints are looked up, bodies read and
bounded, refusals worded, clients that vanish noticed, faults of the wire done.

Starlette's requests and responses, without its router and middleware: those cost as much as
everything that the fake engine does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, ClassVar, TypeAlias
from urllib.parse import parse_qs
from weakref import ref

from starlette.responses import JSONResponse, PlainTextResponse, Response

from rollproof.fakes.engine.exceptions import BadCall, ReplyLost, ServerDied
from rollproof.fakes.http.disconnects import Watch, Watches
from rollproof.fakes.http.fault_plan import Faults, WireFault, WireFaultKind
from rollproof.fakes.http.request_body import BadRequest, Uncaught, json_object
from rollproof.fakes.http.resets import cut, ended

__all__ = [
    "AT_ONCE",
    "OWNER_HEADER",
    "Answer",
    "Asked",
    "Ending",
    "Endpoints",
    "Events",
    "Face",
    "Handler",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "Whole",
    "Wrong",
]

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

OWNER_HEADER = "x-rollproof-request"
"""The header by which a client may say which of its requests a call belongs to."""
AT_ONCE = "rollproof.at_once"
"""The extension by which whoever carries the connection offers to write a ``Whole`` at once: a
function of ``send`` and the answer, which says whether it did.
"""


class Asked:
    """A request that was read: ``path``, ``raw`` body, ``scope`` as ASGI has it.

    ``lost`` says that its answer will not arrive whole, ``late`` by how many seconds the engine
    answers it late. ``abandoned``: whoever read a stream of it has gone; ``streamed``: the answer
    is one; ``broken`` are told where nobody knows how much of the answer arrived.
    """

    __slots__ = (
        "_body",
        "_cycle",
        "abandoned",
        "broken",
        "late",
        "lost",
        "path",
        "raw",
        "scope",
        "streamed",
    )

    def __init__(self, scope: Scope, raw: bytes, cycle: object = None) -> None:
        self.scope: Scope = scope
        self.path: str = scope["path"]
        self.raw: bytes = raw
        self.lost: bool = False
        self.late: float = 0.0
        self.abandoned: bool = False
        self.streamed: bool = False
        self.broken: list[Callable[[], None]] = []
        self._body: dict[str, Any] | None = None
        self._cycle: ref[Any] | None = None
        if hasattr(cycle, "disconnected"):
            self._cycle = ref(
                cycle
            )  # weakly: what refers to itself in a circle stays until it is collected, and costs that
            cycle.asked = self  # type: ignore[attr-defined]  # ``serving`` looks there when the connection is lost later

    def tell_broken(self) -> None:
        """Nobody knows how much of the answer arrived."""
        for tell in self.broken:
            tell()

    def left(self) -> bool:
        """Whether the client has gone away, as far as the server has noticed: uvicorn's cycle of
        request and response knows.
        """
        cycle = None if self._cycle is None else self._cycle()
        return self.abandoned or (cycle is not None and cycle.disconnected)

    def body(self, *, empty: bool = True) -> dict[str, Any]:
        """The JSON object of the body; an empty body is an empty object where ``empty`` allows it.
        Raises ``BadRequest``.
        """
        if self._body is None:
            self._body = json_object(self.raw, empty=empty)
        return self._body

    def header(self, name: str) -> str | None:
        """The value of a header, given in lower case."""
        value = dict(reversed(self.scope["headers"])).get(name.encode("latin-1"))
        return None if value is None else str(value, "latin-1")

    def query(self, name: str, default: str | None = None) -> str | None:
        """The last value of a parameter of the query."""
        found = self.queries(name)
        return found[-1] if found else default

    def queries(self, name: str) -> list[str]:
        """All values of a parameter of the query."""
        return parse_qs(
            self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True
        ).get(name, [])


class Ending(bytes):
    """An event of a stream that ends a call: with it come the reason, the routes and the tags."""

    __slots__ = ()


class Events:
    """An answer in server-sent events; ``parts`` are whole events, of which those that end a call
    are ``Ending``.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: AsyncGenerator[bytes]) -> None:
        self.parts: AsyncGenerator[bytes] = parts


class Whole:
    """An answer of JSON that is written already, with status 200: ``parts``, one after the other."""

    __slots__ = ("parts",)
    status_code: ClassVar[int] = 200

    def __init__(self, *parts: bytes) -> None:
        self.parts: tuple[bytes, ...] = parts

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self.parts)

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """As starlette's responses have them."""
        return [
            (b"content-length", b"%d" % sum(map(len, self.parts))),
            (b"content-type", b"application/json"),
        ]


Answer: TypeAlias = "Response | Events | Whole"
Handler: TypeAlias = Callable[[Asked], Awaitable[Answer]]
Wrong: TypeAlias = Callable[[BadRequest], Mapping[str, Any]]
"""How a server words a refusal: the JSON object that it sends."""
Endpoints: TypeAlias = "Mapping[str, Handler | Mapping[str, Handler]]"
"""Handlers by path, for POST, or by path and method. A path that ends with ``/*`` stands for all
below it.
"""

_NOT_FOUND = {"detail": "Not Found"}
_NOT_ALLOWED = {"detail": "Method Not Allowed"}
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Face:
    """An ASGI application of these ``endpoints``; what is wrong with a request is answered in the
    words of ``wrong``.

    A body may have ``most`` bytes. ``alive`` says whether there is a server at all: a dead one
    resets every connection.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        wrong: Wrong,
        most: int,
        faults: Faults | None = None,
        alive: Callable[[], bool] = lambda: True,
        not_found: Mapping[str, Any] = _NOT_FOUND,
        not_allowed: Mapping[str, Any] = _NOT_ALLOWED,
    ) -> None:
        self._exact: dict[str, Mapping[str, Handler]] = {}
        self._below: dict[str, Mapping[str, Handler]] = {}
        for path, found in endpoints.items():
            methods = found if isinstance(found, Mapping) else {"POST": found}
            (self._below if path.endswith("/*") else self._exact)[path.removesuffix("*")] = methods
        self._wrong, self._most, self._faults, self._alive = wrong, most, faults, alive
        self._not_found, self._not_allowed = not_found, not_allowed
        self._watches = Watches()

    @property
    def paths(self) -> tuple[str, ...]:
        """The endpoints that it has."""
        return (*self._exact, *(f"{path}*" for path in self._below))

    @property
    def alive(self) -> bool:
        """Whether there is a server behind it."""
        return self._alive()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if not self._alive():
            await cut(scope, send)
            return
        try:
            raw = await _read(scope, receive, self._most)
        except BadRequest as error:
            await _deliver(JSONResponse(self._wrong(error), error.status), send)
            return
        except asyncio.CancelledError:
            await ended(scope, send)
            return
        if raw is None:  # the client went away before it had said what it wants
            return
        asked = Asked(scope, raw, getattr(send, "__self__", None))
        fault = (
            self._faults.due(asked.path, raw, asked.header(OWNER_HEADER))
            if self._faults is not None
            else None
        )
        handler = self._handler(scope)
        if isinstance(handler, Response):
            await _deliver(handler, send)
        elif fault is None:
            await self._watched(self._served(handler, asked, send), scope, receive, send)
        else:
            await self._watched(self._harmed(handler, asked, send, fault), scope, receive, send)

    def _handler(self, scope: Scope) -> Handler | Response:
        path = scope["path"]
        methods = self._exact.get(path)
        if methods is None:
            methods = next(
                (
                    found
                    for start, found in self._below.items()
                    if path.startswith(start) and len(path) > len(start)
                ),
                None,
            )
        if methods is None:
            return JSONResponse(self._not_found, 404)
        found = methods.get(scope["method"])
        return found or JSONResponse(self._not_allowed, 405, {"allow": ", ".join(methods)})

    async def _served(self, handler: Handler, asked: Asked, send: Send) -> None:
        await _handed_over(await self._answer(handler, asked), asked, send)

    async def _answer(self, handler: Handler, asked: Asked) -> Answer:
        try:
            return await handler(asked)
        except BadRequest as error:
            return JSONResponse(self._wrong(error), error.status)
        except BadCall as error:
            return JSONResponse(self._wrong(BadRequest(str(error))), 400)
        except Uncaught:
            return PlainTextResponse("Internal Server Error", 500)

    async def _harmed(self, handler: Handler, asked: Asked, send: Send, fault: WireFault) -> None:
        """The same with one fault of the wire."""
        if fault.do is WireFaultKind.STATUS and not fault.after_engine:
            await _deliver(_failure(fault), send)
            return
        if fault.do is WireFaultKind.SLOW:
            asked.late = (
                fault.seconds
            )  # the engine takes the time: whoever leaves meanwhile has not had its reply
            answer = await self._answer(handler, asked)
            if not isinstance(answer, Events):
                await asyncio.sleep(asked.late)  # where no engine was asked
            await _handed_over(answer, asked, send)
            return
        asked.lost = (
            True  # the engine is told, so that the trace says that nobody received its reply
        )
        answer = await self._answer(handler, asked)
        if fault.do is WireFaultKind.STATUS:
            if isinstance(answer, Events):
                await _drained(answer)
            await _deliver(_failure(fault), send)
            return
        await _cut_short(answer, asked.scope, send, fault)

    async def _watched(self, work: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Do ``work``, and end it where the client goes away meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        watch = Watch(receive, task)
        self._watches.add(watch)
        try:
            await work
        except (ServerDied, ReplyLost):
            await cut(scope, send)
        except asyncio.CancelledError:
            if watch.vanished and task.uncancel() == 0:
                return
            await ended(scope, send)
        finally:
            self._watches.end(watch)


async def _read(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """The whole body; ``None`` where the client went away. Raises ``BadRequest`` where it is larger
    than ``most`` bytes.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > most:
        raise BadRequest(f"The body has {int(declared)} bytes; at most {most} are taken.", 413)
    message = await receive()
    body = message.get("body", b"")
    parts, size = [body], len(body)
    while message["type"] == "http.request" and message.get("more_body"):
        if size > most:
            raise BadRequest(f"The body has more than {most} bytes.", 413)
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if message["type"] == "http.disconnect":
        return None
    if size > most:
        raise BadRequest(f"The body has more than {most} bytes.", 413)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _handed_over(answer: Answer, asked: Asked, send: Send) -> None:
    """Send an answer; a stream only for as long as somebody listens."""
    if isinstance(answer, Whole):
        at_once = (asked.scope.get("extensions") or {}).get(AT_ONCE)
        if at_once is None or not at_once(send, answer):
            await _deliver(answer, send)
        return
    if not isinstance(answer, Events):
        await _deliver(answer, send)
        return
    whole, asked.streamed = False, True
    try:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        async for part in answer.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if asked.left():
                await answer.parts.aclose()
                return
        await send({"type": "http.response.body", "body": b""})
        whole = not asked.left()
    finally:
        if not whole:
            asked.tell_broken()


async def _deliver(answer: Response | Whole, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers}
    )
    await send({"type": "http.response.body", "body": answer.body})


async def _drained(answer: Events) -> None:
    async for _ in answer.parts:
        pass


def _failure(fault: WireFault) -> Response:
    return Response(
        json.dumps({"detail": f"planned fault: status {fault.status}"}),
        fault.status,
        media_type="application/json",
    )


async def _cut_short(answer: Answer, scope: Scope, send: Send, fault: WireFault) -> None:
    """Send the beginning of an answer: ``fault.keep`` of its bytes, or of its events, and none that
    ends a call.
    """
    short = fault.do is WireFaultKind.WRONG_LENGTH
    if isinstance(answer, Events):
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        parts = [part async for part in answer.parts]
        most = next(
            (number for number, part in enumerate(parts) if isinstance(part, Ending)), len(parts)
        )
        for part in parts[: min(most, max(1, int(len(parts) * fault.keep)))]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    else:
        body = bytes(answer.body)[: int(len(answer.body) * fault.keep)]
        length = len(body) if short else len(answer.body)
        headers = [(name, value) for name, value in answer.raw_headers if name != b"content-length"]
        start = {
            "status": answer.status_code,
            "headers": [*headers, (b"content-length", b"%d" % length)],
        }
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": body, "more_body": not short})
    if not short:
        await cut(scope, send, reset=fault.do is WireFaultKind.RESET)
    elif isinstance(answer, Events):
        await send({"type": "http.response.body", "body": b""})
