"""Line: an HTTP client for a face in the same process, without a socket: for virtual time.

It sees what a client on a socket sees: a status, headers and a body, or the parts of a stream; a
connection that breaks; a body that is shorter than its declared length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollproof.fakes.http.asgi import Face, Message
from rollproof.fakes.http.resets import Cut

__all__ = ["BrokenOff", "Heard", "Line"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """An answer: ``parts`` are what came at once (the events of a stream), ``body`` is all of it."""

    status: int
    headers: Mapping[str, str]
    parts: tuple[bytes, ...]

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self.parts)

    def json(self) -> Any:
        """The body read. Raises ``ValueError`` where it is no JSON."""
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a stream, without the mark of its end."""
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        return [orjson.loads(line) for line in lines if line != b"[DONE]"]


class BrokenOff(ConnectionResetError):
    """The connection broke; ``heard`` is what had come before (``None``: nothing)."""

    def __init__(self, heard: Heard | None) -> None:
        super().__init__("The connection broke before the whole answer had come.")
        self.heard: Heard | None = heard


class Line:
    """A connection to ``app``."""

    def __init__(self, app: Face) -> None:
        self._app = app

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Heard:
        """One exchange. Raises ``BrokenOff``."""
        raw = b"" if body is None else orjson.dumps(body)
        head, sent = _Head(), [{"type": "http.request", "body": raw, "more_body": False}]
        address, _, query = path.partition("?")
        given = {
            "content-type": "application/json",
            "content-length": str(len(raw)),
            **(headers or {}),
        }
        scope = {
            "type": "http",
            "method": method,
            "path": address,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "extensions": {"rollproof.cut": {}},
        }

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # the client stays until it has its answer
            raise AssertionError

        await self._app(scope, receive, head.take)
        heard = head.heard()
        length = heard.headers.get("content-length")
        if length is not None and len(heard.body) < int(length):
            raise BrokenOff(heard)
        return heard


class _Head:
    """The messages of an answer."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def take(self, message: Message) -> None:
        if message is Cut.message:
            raise BrokenOff(self.heard() if self._status else None)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self._parts.append(message["body"])

    def heard(self) -> Heard:
        return Heard(status=self._status, headers=self._headers, parts=tuple(self._parts))
