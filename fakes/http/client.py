"""A small HTTP client on asyncio's connections, for reference clients on a virtual loop.

It reports what any client on a socket sees: a status, headers and a body, a connection that breaks,
and how much had arrived by then.
"""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

__all__ = ["BrokenReply", "HttpClient", "HttpReply"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpReply:
    """A reply, or as much of one as arrived: its status, headers (names in lower case) and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body. Raise ``ValueError`` if it is no JSON."""
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        """Return the events of a stream, without the mark of its end."""
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        return [orjson.loads(line) for line in lines if line != b"[DONE]"]


class BrokenReply(ConnectionResetError):
    """The connection broke; ``partial`` is what had arrived, or ``None`` before the headers."""

    def __init__(self, partial: HttpReply | None) -> None:
        super().__init__("The connection broke before the complete reply arrived.")
        self.partial: HttpReply | None = partial


class HttpClient:
    """A client of the server on ``port`` of this machine; each request has its own connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> HttpReply:
        """Send ``body`` as JSON and return the reply.

        Raises:
            BrokenReply: the connection broke, or ended before the declared length.
        """
        content = b"" if body is None else orjson.dumps(body)
        # The server closes the connection, after all of its reply. If the client did, the server
        # could not tell whether a stream was read to its end.
        fields = {
            "host": "127.0.0.1",
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(content)),
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        loop = asyncio.get_running_loop()
        transport, received = await loop.create_connection(_Received, "127.0.0.1", self._port)
        try:
            transport.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            await received.ended
        finally:
            transport.close()
        return _parse(bytes(received.data), method)


class _Received(asyncio.Protocol):
    """Collects what arrives until the connection ends; a reset ends it, too."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Source:
    """What ``http.client`` reads a reply from in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parse(data: bytes, method: str) -> HttpReply:
    response = http.client.HTTPResponse(cast("Any", _Source(data)), method=method)
    try:
        response.begin()
    except (http.client.HTTPException, ConnectionError) as error:
        raise BrokenReply(None) from error
    headers = {name.lower(): value for name, value in response.getheaders()}
    try:
        body = response.read()
    except http.client.IncompleteRead as error:
        partial = HttpReply(status=response.status, headers=headers, body=error.partial)
        raise BrokenReply(partial) from error
    return HttpReply(status=response.status, headers=headers, body=body)
