"""Connections of the fake servers: uvicorn's protocol, which can be broken on purpose, which knows
what its client may not have read, and which bounds what a client may send and how slowly.

ASGI has no word for any of them. This is a protocol class for uvicorn's option ``http``; it adds to
the methods of ``asyncio.Protocol``, and hands itself to the application as
``request.state.connection``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = [
    "MAX_CONNECTIONS",
    "Connection",
    "Delivery",
    "TolerantTransport",
    "connection_of",
    "delivery_of",
]

MAX_CONNECTIONS = 16_384
"""Open connections of one process: vLLM and SGLang have no limit, a run has some thousand calls."""
_MAX_HEAD = 64 << 10
"""Bytes of a request that are not its body: h11's own limit, which httptools does not have."""
_MAX_SECONDS = 30
"""Seconds in which a request must arrive, from the first byte to the last."""

_MAX_UNREAD = 1024
"""Answers of one connection that are remembered because its client may not have read them."""
_CLOSE_TIMEOUT = 1.0
"""Seconds for which a connection that is being closed may take to send what was written."""


class Delivery:
    """How the answer to one request reaches its client.

    Attributes:
        lost: a planned fault keeps the answer from arriving whole.
        delay: seconds by which the engine answers late, as a planned fault.
        streamed: the answer is a stream of events.
        complete: the answer was written to the end.
        disconnected: the client went away before that.
        on_uncertain: called where the client may not have received the whole answer.
    """

    __slots__ = ("complete", "delay", "disconnected", "lost", "on_uncertain", "streamed", "task")

    def __init__(self) -> None:
        self.lost: bool = False
        self.delay: float = 0.0
        self.streamed: bool = False
        self.complete: bool = False
        self.disconnected: bool = False
        self.on_uncertain: list[Callable[[], None]] = []
        self.task: asyncio.Task[Any] | None = asyncio.current_task()

    def is_disconnected(self) -> bool:
        """Return whether the client has gone away, as far as the server has noticed."""
        return self.disconnected

    def report_uncertain(self) -> None:
        """Say that the client may have received a part of the answer, or nothing."""
        for callback in self.on_uncertain:
            callback()


class TolerantTransport:
    """A transport that ignores what is written after its connection has ended.

    asyncio's own do; uvloop's raise RuntimeError. Of several requests that came at once uvicorn
    notices for the last one alone that the client has left, and goes on answering the others.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        state = {**app_state, "connection": self}
        super().__init__(config, server_state, state, _loop)
        self._pipe: asyncio.Transport | None = None
        self._closed = asyncio.Event()
        self._client_closed = False
        self._breaking = False
        self._open = 0
        self._others = server_state.connections
        self._is_arriving = True
        self._seconds = 0
        self._head = 0
        # bounded: a client may send thousands of requests over one connection and read none of them
        self._unread: deque[Delivery] = deque(maxlen=_MAX_UNREAD)

    def connection_made(self, transport: Any) -> None:
        self._pipe = transport
        tolerant: Any = TolerantTransport(transport)  # it has every method of the one it wraps
        super().connection_made(tolerant)
        if len(self._others) > MAX_CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        # A client that sends its next request after an answer has read that answer. One that sends
        # several requests at once says nothing by it.
        if not self._open:
            self._unread.clear()
        self._is_arriving = True
        self._head += len(data)
        super().data_received(data)
        if self._head > _MAX_HEAD:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        # a request that arrives in one piece is begun within `data_received`
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > (
            _MAX_HEAD
        ):
            self._refuse_head()
            raise ValueError("refused")  # which ends the parsing of what arrived with it
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_arriving, self._seconds, self._head = False, 0, 0
        super().on_message_complete()

    def second_passed(self) -> None:
        """Close the connection if its next request has been arriving for too long."""
        # counted, not measured: a machine that was asleep does not drop the connections of its
        # clients
        if self._is_arriving:
            self._seconds += 1
            if self._seconds > _MAX_SECONDS:
                self._refuse(408, b"This request took more than 30 s to arrive.")

    def _refuse_head(self) -> None:
        self._refuse(431, b"The headers of this request have more than 64 KiB.")

    def _refuse(self, status: int, text: bytes) -> None:
        if self._pipe is None or self._pipe.is_closing():
            return
        head = b"HTTP/1.1 %d \r\ncontent-type: text/plain\r\ncontent-length: %d\r\n" % (
            status,
            len(text),
        )
        self._pipe.write(head + b"connection: close\r\n\r\n" + text)
        self._pipe.close()

    def eof_received(self) -> None:
        self._client_closed = True
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._closed.set()
        for delivery in self._unread:
            if not delivery.complete:
                delivery.disconnected = True
                delivery.report_uncertain()
                if delivery.task is not None and not self._breaking:
                    delivery.task.cancel()
            # A client that closes with unread bytes in its buffer resets the connection. One that
            # leaves a stream may have been handed less than arrived at its machine.
            elif exc is not None or (self._client_closed and delivery.streamed):
                delivery.report_uncertain()

    def begin(self, delivery: Delivery) -> None:
        """Watch over the answer to one request, up to ``end``: the task of a client that
        disconnects is cancelled.
        """
        self._unread.append(delivery)
        self._open += 1

    def end(self, delivery: Delivery) -> None:
        """Note that the answer to a request is written, or that its client has gone."""
        self._open -= 1
        delivery.complete = not delivery.disconnected
        delivery.task = None

    async def break_off(self, *, reset: bool = True) -> None:
        """End the connection in the middle of an answer: with a reset, or in order after what was
        written.
        """
        assert self._pipe is not None
        self._breaking = True
        if reset:
            # abort() drops what waits in asyncio's buffer: give it a turn to be sent
            await asyncio.sleep(0)
            sock = self._pipe.get_extra_info("socket")
            if sock is not None:
                # with a linger time of zero, closing sends RST and not FIN
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._pipe.abort()
        else:
            self._pipe.close()
        # uvicorn logs an error if an application returns without an answer before it has noticed
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._closed.wait()


def connection_of(scope: Any) -> Connection:
    """Return the connection that a request came over.

    Raises:
        TypeError: another server than that of ``rollproof.fakes.http.serving`` runs the
            application.
    """
    connection = scope.get("state", {}).get("connection")
    if not isinstance(connection, Connection):
        raise TypeError(
            "A fake server must be run by rollproof.fakes.http.serving: planned faults break the"
            " connection, which other ASGI servers do not offer."
        )
    return connection


def delivery_of(scope: Any) -> Delivery:
    """Return how the answer to this request is delivered."""
    delivery: Delivery = scope["state"]["delivery"]
    return delivery
