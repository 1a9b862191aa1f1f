"""One HTTP request and what came back, as far as a recorder keeps it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from rollproof.core.call_ownership import Caller
from rollproof.recording.wire.sampling_replies import UnreadableReply

__all__ = ["TOO_LONG", "Exchange", "How", "KeptReply", "StreamedEvents"]

TOO_LONG = "its reply is longer than the recorder keeps (--max-body)"

_INDEX = re.compile(rb'"index":\s*(\d+)\s*\}$')
# in runs: a server may send nothing but empty lines
_EMPTY_LINES = re.compile(rb"\r?\n(?:\r?\n)+")


class How(StrEnum):
    """How an exchange ended."""

    OPEN = "open"
    """It has not."""
    COMPLETE = "complete"
    """The client was sent the whole reply."""
    UNREACHED = "unreached"
    """The server could not be reached, or took no request."""
    BROKEN = "broken"
    """The server's reply ended before its end, or never came."""
    LEFT = "left"
    """The client left before it had the whole reply."""


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its reply.

    Attributes:
        number: of the exchange, from 1.
        server_id: the server.
        method, path, query, headers, body: of the request; names of headers are lower case.
        began, ended: Unix time at which the request was complete, and at which the exchange ended.
        status: of the reply; 0: none came.
        encoding: the reply's content encoding.
        reply: the body in one piece, or as much as came.
        events: the events of a stream; ``None``: it is none.
        how: how it ended.
        detail: what broke.
        caller: where in this process it was made; ``None``: in another one.
        body_too_long, reply_too_long: more bytes came than are kept.
        max_reply: bytes of the reply that are kept, and to which a packed one may expand.
    """

    number: int
    server_id: str
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    body: bytes
    began: float
    ended: float = 0.0
    status: int = 0
    encoding: str = ""
    reply: bytes = b""
    events: StreamedEvents | None = None
    how: How = How.OPEN
    detail: str = ""
    caller: Caller | None = None
    body_too_long: bool = False
    reply_too_long: bool = False
    max_reply: int = 64 << 20

    def request_json(self) -> Any:
        """Return the JSON value of the request; an empty body is ``{}``.

        Raises:
            ValueError: it is no JSON, or longer than what is kept.
        """
        if self.body_too_long:
            raise ValueError("the body is longer than the recorder keeps (--max-body)")
        return orjson.loads(self.body) if self.body else {}

    def reply_json(self) -> Any:
        """Return the JSON value of the reply, or ``None`` if it is none."""
        try:
            return orjson.loads(self.reply_bytes())
        except ValueError:
            return None

    def reply_bytes(self) -> bytes:
        """Return the reply, unpacked.

        Raises:
            UnreadableReply: it is packed in a way that is not known, or more of it came than is
                kept.
        """
        if self.reply_too_long:
            raise UnreadableReply(TOO_LONG)
        if self.encoding in ("", "identity"):
            return self.reply
        if self.encoding not in ("gzip", "deflate"):
            raise UnreadableReply(f"its reply is packed with {self.encoding}")
        # 47 finds a header of gzip or zlib; HTTP's deflate has that of zlib (RFC 9110, 8.4.1.2)
        unpacker = zlib.decompressobj(wbits=47 if self.encoding == "gzip" else zlib.MAX_WBITS)
        try:
            unpacked = unpacker.decompress(self.reply, self.max_reply)
        except zlib.error as error:
            raise UnreadableReply(f"its reply cannot be unpacked ({error})") from error
        # deflate packs zeros a thousandfold: a small reply must not fill the memory
        if unpacker.unconsumed_tail:
            raise UnreadableReply(TOO_LONG)
        return unpacked

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        streamed = 0 if self.events is None else self.events.size
        return len(self.body) + len(self.reply) + streamed


@dataclass(slots=True, eq=False)
class StreamedEvents:
    """The events of a stream, split as they come.

    Attributes:
        newest_only: an event holds all tokens so far, so that the last one of each sample will do:
            those of a long reply would take its square.
        size: bytes that are kept, those of an event that has not ended included.
        done: whether the event came that ends a stream.
    """

    newest_only: bool
    size: int = 0
    done: bool = False
    _events: list[bytes] = field(default_factory=list)
    _newest: dict[int, bytes] = field(default_factory=dict)
    _rest: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes) -> None:
        """Add bytes of the stream."""
        rest = self._rest
        # only new bytes are searched, or an event of many chunks would take the square of it; an
        # empty line may have begun in the last chunk
        start, searched = 0, max(0, len(rest) - 3)
        self.size += len(data)
        rest += data
        while end := _EMPTY_LINES.search(rest, searched):
            self.size -= end.end() - start
            self._take_event(bytes(rest[start : end.start()]))
            start = searched = end.end()
        del end
        del rest[:start]

    def _take_event(self, event: bytes) -> None:
        text = b"\n".join(
            line.removeprefix(b"data:").strip()
            for line in event.split(b"\n")
            if line.startswith(b"data:")
        )
        if text == b"[DONE]":
            self.done = True
        elif text:
            self._add(text)

    def _add(self, text: bytes) -> None:
        self.size += len(text)
        if not self.newest_only:
            self._events.append(text)
            return
        # SGLang writes it last: to parse each event of a long reply would take the square of it
        found = _INDEX.search(text[-32:])
        index = int(found[1]) if found else 0
        self.size -= len(self._newest.get(index, b""))
        self._newest[index] = text

    def __iter__(self) -> Iterator[bytes]:
        yield from self._events
        yield from self._newest.values()


class KeptReply:
    """Keeps a copy of a reply, up to a size.

    Attributes:
        exchange: whose reply it is.
        is_complete: its client needs no more of it: all bytes that were announced have come, or the
            last event of a stream.
    """

    def __init__(self, exchange: Exchange, most: int, expected: int | None) -> None:
        self.exchange: Exchange = exchange
        self.is_complete: bool = expected == 0
        exchange.max_reply = most
        self._expected = expected
        self._chunks: list[bytes] = []
        self._size = 0
        self._came = 0

    @classmethod
    def begin(
        cls,
        exchange: Exchange,
        status: int,
        headers: Mapping[str, str],
        most: int,
        *,
        newest_only: bool,
    ) -> KeptReply:
        """Begin the reply to an exchange.

        Args:
            exchange: the exchange.
            status: the status of the reply.
            headers: the headers of the reply, by names of any case.
            most: bytes that are kept.
            newest_only: as in ``StreamedEvents``.
        """
        exchange.status = status
        exchange.encoding = headers.get("content-encoding", "").strip().lower()
        kind = headers.get("content-type", "")
        # a packed stream shows no events, so that its bytes are kept in one piece
        if kind.startswith("text/event-stream") and not exchange.encoding:
            exchange.events = StreamedEvents(newest_only=newest_only)
        length = headers.get("content-length", "")
        # these have none, even with a Content-Length (RFC 9110, 8.6)
        has_body = exchange.method != "HEAD" and status not in (204, 304)
        expected = int(length) if length.isdecimal() and has_body else None
        return cls(exchange, most, expected if has_body else 0)

    def take(self, chunk: bytes) -> None:
        """Keep a chunk."""
        exchange = self.exchange
        if exchange.how is not How.OPEN:  # it was handed on, and is not this thread's any more
            return
        self._came += len(chunk)
        if not exchange.reply_too_long:
            if exchange.events is None:
                self._chunks.append(chunk)
                self._size += len(chunk)
            else:
                exchange.events.take(chunk)
                self._size = exchange.events.size
            if self._size > exchange.max_reply:
                exchange.reply_too_long = True
                self._chunks.clear()
                if exchange.events is not None:
                    exchange.events = StreamedEvents(newest_only=True)
        if exchange.events is not None and exchange.events.done:
            self.is_complete = True
        if self._came == self._expected:
            self.finish()
            self.is_complete = True

    def finish(self) -> None:
        """Put it into the exchange."""
        if self._chunks:
            self.exchange.reply = b"".join(self._chunks)
            self._chunks = []
