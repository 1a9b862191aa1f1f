"""What a server writes to its clients and to its trace, and when."""

from __future__ import annotations

import asyncio
import socket

from rollproof.case import EngineOptions, Model
from rollproof.errors import TraceError
from rollproof.fakes.http.backing import ServeOptions
from rollproof.fakes.http.keeping import Kept
from rollproof.trace import Admit, Event
from tests.http.served import served

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
OPTIONS = ServeOptions(flavour="sglang", model=MODEL, engine=EngineOptions(max_batch=8, step=0.0), max_length=512)


class _Sink:
    """Takes ``most`` events, and fails."""

    def __init__(self, most: int) -> None:
        self.events: list[int] = []
        self.flushed: list[int] = []
        self._most = most

    def append(self, event: Event) -> None:
        if len(self.events) == self._most:
            raise TraceError("the disk is full")
        self.events.append(event.index)

    def flush(self) -> None:
        self.flushed.append(len(self.events))


def _told(kept: Kept, count: int) -> None:
    for index in range(count):
        kept.append(Admit(index=index, call_id=index, server_id="s0"))


def test_events_are_handed_on_in_their_order_and_all_at_the_end() -> None:
    """Also those that wait for others, and those that a second has passed over."""

    async def main() -> _Sink:
        sink = _Sink(1000)
        kept = Kept(sink, lambda: None)
        _told(kept, 100)
        assert len(sink.events) < 100
        await asyncio.sleep(1.1)
        assert [100] == sink.flushed
        _told(kept, 3)
        kept.end()
        return sink

    assert [*range(100), 0, 1, 2] == asyncio.run(main()).events


def test_a_sink_that_fails_stops_the_server_once_and_is_told_at_the_end() -> None:
    """What comes later is not taken any more."""

    async def main() -> tuple[list[int], list[str]]:
        sink, stopped = _Sink(70), []
        kept = Kept(sink, lambda: stopped.append("stop"))
        _told(kept, 300)
        try:
            kept.end()
        except TraceError as error:
            stopped.append(str(error))
        return sink.events, stopped

    events, stopped = asyncio.run(main())
    assert (list(range(70)), ["stop", "the disk is full"]) == (events, stopped)


def test_the_last_answer_of_a_connection_arrives_whole() -> None:
    """A client that asks for the connection to be closed has head and body before the end, of a reply and of a stream."""
    body = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}%s}'
    with served("sglang", OPTIONS) as server:
        for more, end in ((b"", b"}}"), (b', "stream": true', b"0\r\n\r\n")):
            text = body % more
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as client:
                client.sendall(head + text)
                heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
            assert heard.endswith(end)
