"""The proxy as an ASGI application: bytes pass unchanged, and a copy of what matters is kept."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollproof.core.error_text import one_line
from rollproof.recording.wire.control_calls import CONTROL_PATHS
from rollproof.recording.wire.exchange import Exchange, How, KeptReply
from rollproof.recording.wire.sampling_calls import SAMPLING_PATHS

__all__ = ["ProxyApp", "ReplyCut", "Traffic"]

_HOP_HEADERS = frozenset(
    (
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers of one connection, not of the message (RFC 9110, 7.6.1)."""
_RECORDED_PATHS = frozenset((*SAMPLING_PATHS, *CONTROL_PATHS))
# paths may have ids in them, and a proxy may run for weeks
_MAX_OTHER_PATHS = 64
_LONGEST_TURN = 0.001
"""Seconds after which a reply lets the others go on."""


class ReplyCut(Exception):
    """The server ended a reply before its end; the connection to the client is closed for it."""


@dataclass(slots=True)
class Traffic:
    """What passed.

    Attributes:
        requests: Requests.
        unreached: Requests that the server did not answer.
        broken: Replies that the server did not end.
        left: Clients that left before the end of their reply.
        other_paths: Requests that change something and were not recorded, by path.
    """

    requests: int = 0
    unreached: int = 0
    broken: int = 0
    left: int = 0
    other_paths: Counter[str] = field(default_factory=Counter)


class ProxyApp:
    """Forwards every request to one server.

    Args:
        url: the server's address.
        server_id: its name in the trace.
        client: sends the requests.
        begun: takes an exchange before its request is sent.
        ended: takes it at its end.
        unsure: takes one that was ended as complete, if its client left before it can have read
            the reply.
        own: answers requests below ``/rollproof/``, which are the proxy's own.
        clock: Unix time.
        max_body: bytes of a body that are kept; more are passed on and not recorded.
        newest_only: whether an event of a ``/generate`` stream has all tokens so far (SGLang,
            unless it was started with ``--incremental-streaming-output``).
    """

    def __init__(
        self,
        url: str,
        *,
        server_id: str,
        client: httpx.AsyncClient,
        begun: Callable[[Exchange], None],
        ended: Callable[[Exchange], None],
        unsure: Callable[[Exchange], None],
        own: ASGIApp,
        clock: Callable[[], float],
        max_body: int,
        newest_only: bool = True,
    ) -> None:
        self.traffic: Traffic = Traffic()
        self._url = httpx.URL(url)
        self._server_id = server_id
        self._client = client
        self._begun, self._ended, self._unsure = begun, ended, unsure
        self._own = own
        self._clock = clock
        self._max_body = max_body
        self._newest_only = newest_only
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"].startswith("/rollproof/"):
            await self._own(scope, receive, send)
            return
        body = _Body(receive, self._max_body)
        await body.read()
        if body.client_left:
            return
        self.traffic.requests += 1
        exchange = self._exchange(scope, body)
        if exchange is None:
            await self._forward(scope, body, receive, send, None)
            return
        self._begun(exchange)
        try:
            await self._forward(scope, body, receive, send, exchange)
        except asyncio.CancelledError:
            self._end(exchange, How.BROKEN, "the proxy was stopped")
            raise
        finally:
            self._end(exchange, How.LEFT)

    def _end(self, exchange: Exchange, how: How, detail: str = "") -> None:
        """Hand on an exchange that has ended, unless that was done."""
        if exchange.how is How.OPEN:
            exchange.how, exchange.detail, exchange.ended = how, detail, self._clock()
            self._ended(exchange)

    def _exchange(self, scope: Scope, body: _Body) -> Exchange | None:
        path: str = scope["path"]
        if path not in _RECORDED_PATHS:
            others = self.traffic.other_paths
            # safe methods are to change nothing (RFC 9110, 9.2.1): probes would fill the list
            if scope["method"] not in ("GET", "HEAD", "OPTIONS") and (
                path in others or len(others) < _MAX_OTHER_PATHS
            ):
                others[path] += 1
            return None
        self._count += 1
        query = scope["query_string"].decode("latin-1")
        return Exchange(
            number=self._count,
            server_id=self._server_id,
            method=scope["method"],
            path=path,
            query=dict(parse_qsl(query, keep_blank_values=True)) if query else {},
            headers=dict(scope["headers"]),
            body=b"" if body.is_long else body.recorded,
            body_too_long=body.is_long,
            began=self._clock(),
        )

    async def _forward(
        self, scope: Scope, body: _Body, receive: Receive, send: Send, exchange: Exchange | None
    ) -> None:
        working = asyncio.create_task(self._answer(scope, body, send, exchange))
        # while a long body is still read, reading it notices a client that leaves
        leaving = asyncio.create_task(body.left() if body.is_long else _left(receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                if exchange is not None and exchange.how is How.COMPLETE:
                    self._unsure(exchange)
                # the engine stops working for a client that left, as without the proxy
                self.traffic.left += 1
                working.cancel()
            with suppress(asyncio.CancelledError):
                await working
        finally:
            working.cancel()
            leaving.cancel()

    async def _answer(
        self, scope: Scope, body: _Body, send: Send, exchange: Exchange | None
    ) -> None:
        headers = _message_headers(scope["headers"])
        request = httpx.Request(
            scope["method"],
            self._url.copy_with(raw_path=_raw_path(self._url, scope)),
            # the server's own name: behind a virtual host that of the proxy has no meaning
            headers=[*headers, (b"host", self._url.netloc)],
            content=body.stream() if body.is_long else body.recorded or None,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            await self._refuse(send, exchange, error)
            return
        try:
            await self._pass_on(response, send, exchange)
        finally:
            await response.aclose()

    async def _pass_on(
        self, response: httpx.Response, send: Send, exchange: Exchange | None
    ) -> None:
        if response.status_code >= 600:
            # uvicorn writes none beyond, and an error within it would look like a crash of ours
            error = httpx.RemoteProtocolError(f"it answered with status {response.status_code}")
            await self._refuse(send, exchange, error)
            return
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": _message_headers(response.headers.raw, keep_host=True),
        }
        recorded = None if exchange is None else self._kept_reply(exchange, response)
        if recorded is not None and recorded.is_complete:
            self._end(recorded.exchange, How.COMPLETE)
        await send(start)
        waited = time.monotonic()
        try:
            # raw: its client chose the encoding, and Content-Length counts packed bytes
            async for chunk in response.aiter_raw():
                if recorded is not None:
                    recorded.take(chunk)
                    # its client may go on as soon as it has the end of the reply: what it does then
                    # comes later in the trace
                    if recorded.is_complete:
                        self._end(recorded.exchange, How.COMPLETE)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                # a read may bring ten thousand chunks, which httpx yields without a pause
                if time.monotonic() > waited + _LONGEST_TURN:
                    await asyncio.sleep(0)
                    waited = time.monotonic()
        except httpx.HTTPError as error:
            self.traffic.broken += 1
            if recorded is not None:
                recorded.finish()
                self._end(recorded.exchange, How.BROKEN, one_line(repr(error)))
            # the client is to see that the reply was cut, as it would without the proxy
            raise ReplyCut(str(error)) from error
        finally:
            if recorded is not None:
                recorded.finish()
        if recorded is not None:
            self._end(recorded.exchange, How.COMPLETE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _kept_reply(self, exchange: Exchange, response: httpx.Response) -> KeptReply:
        newest = self._newest_only and SAMPLING_PATHS.get(exchange.path) == "sglang"
        return KeptReply.begin(
            exchange, response.status_code, response.headers, self._max_body, newest_only=newest
        )

    async def _refuse(self, send: Send, exchange: Exchange | None, error: httpx.HTTPError) -> None:
        """Answer a request that the server did not: with 502, which no engine sends."""
        self.traffic.unreached += 1
        what = one_line(f"{type(error).__name__} {error}")
        if exchange is not None:
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            self._end(exchange, How.UNREACHED if refused else How.BROKEN, what)
        body = f"rollproof proxy: {self._url} did not answer: {what}".encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 502, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class _Body:
    """The body of a request: read at once, unless it is longer than what is kept.

    Attributes:
        kept: its beginning.
        is_long: more of it is to come.
        client_left: its client left before its end.
    """

    def __init__(self, receive: Receive, most: int) -> None:
        self.recorded: bytes = b""
        self.is_long: bool = False
        self.client_left: bool = False
        self._receive = receive
        self._most = most
        self._read = asyncio.Event()

    async def read(self) -> None:
        """Read it to its end, or to the most that is kept."""
        message: Message = await self._receive()
        parts: list[bytes] = []
        size = 0
        while True:
            if message["type"] == "http.disconnect":
                self.client_left = True
                return
            part: bytes = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if not message.get("more_body", False) or size > self._most:
                break
            message = await self._receive()
        self.is_long = bool(message.get("more_body", False))
        self.recorded = parts[0] if len(parts) == 1 else b"".join(parts)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield what was read, and then the rest as it comes."""
        yield self.recorded
        self.recorded = b""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_left = True
                self._read.set()
                return
            yield message.get("body", b"")
            if not message.get("more_body", False):
                self._read.set()
                return

    async def left(self) -> None:
        """Wait until the client has left."""
        await self._read.wait()
        if not self.client_left:
            await _left(self._receive)


def _message_headers(
    headers: Iterable[tuple[bytes, bytes]], *, keep_host: bool = False
) -> Sequence[tuple[bytes, bytes]]:
    """Return headers as they are, but those that are about the connection alone."""
    pairs = list(headers)
    left_out = _HOP_HEADERS if keep_host else _HOP_HEADERS | {b"host"}
    named = [value for name, value in pairs if name.lower() == b"connection"]
    if named:
        left_out |= {name.strip().lower() for value in named for name in value.split(b",")}
    return [(name, value) for name, value in pairs if name.lower() not in left_out]


def _raw_path(url: httpx.URL, scope: Scope) -> bytes:
    # `path` is decoded: a %2F in a name would become a separator
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return url.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")


async def _left(receive: Receive) -> None:
    """Wait until the client leaves, once its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
