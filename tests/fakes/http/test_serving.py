"""What a server writes to its clients and to its trace, and when."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Call, Reply
from rollproof.core.routes_encoding import from_flat
from rollproof.core.trace import TraceSink
from rollproof.errors import TraceError
from rollproof.fakes.http.client import HttpClient
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.serve_options import RoutesForm, ServeOptions
from rollproof.fakes.http.serving import FlushingSink, bound_socket, serving
from rollproof.store import TraceReader, TraceWriter
from tests.fakes.http.served import served

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
OPTIONS = ServeOptions(
    flavour="sglang", model=MODEL, engine=EngineOptions(max_batch=8, step=0.0), max_length=512
)


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


def _append(sink: FlushingSink, count: int) -> None:
    for index in range(count):
        sink.append(Admit(index=index, call_id=index, server_id="s0"))


def test_events_are_flushed_a_second_later() -> None:
    """In their order, and only while there are new ones."""

    async def main() -> _Sink:
        sink = _Sink(1000)
        flushing = FlushingSink(sink, lambda: None)
        _append(flushing, 100)
        assert [] == sink.flushed
        await asyncio.sleep(1.1)
        assert [100] == sink.flushed
        await asyncio.sleep(1.1)
        assert [100] == sink.flushed
        _append(flushing, 3)
        flushing.close()
        return sink

    assert [*range(100), 0, 1, 2] == asyncio.run(main()).events


def test_a_sink_that_fails_stops_the_server_once_and_raises_at_the_end() -> None:
    """Later events are not taken any more."""

    async def main() -> tuple[list[int], list[str]]:
        sink, stopped = _Sink(70), []
        flushing = FlushingSink(sink, lambda: stopped.append("stop"))
        _append(flushing, 300)
        try:
            flushing.close()
        except TraceError as error:
            stopped.append(str(error))
        return sink.events, stopped

    events, stopped = asyncio.run(main())
    assert (list(range(70)), ["stop", "the disk is full"]) == (events, stopped)


def test_the_last_answer_of_a_connection_arrives_completely() -> None:
    """A client that requests the connection to be closed gets head and body before the end, of a
    reply and of a stream.
    """
    body = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}%s}'
    with served("sglang", OPTIONS) as server:
        for more, end in ((b"", b"}}"), (b', "stream": true', b"0\r\n\r\n")):
            text = body % more
            head = (
                b"POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length:"
                b" %d\r\n\r\n" % len(text)
            )
            with socket.create_connection(
                ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
            ) as client:
                client.sendall(head + text)
                received = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert received.startswith(b"HTTP/1.1 200 OK\r\n")
            assert received.endswith(end)


def test_small_pieces_are_sent_at_once() -> None:
    """On every loop: with Nagle's algorithm an event of a stream waits until the client has
    acknowledged the one before.
    """

    class Connected(asyncio.Protocol):
        reported: asyncio.Future[int]

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            sock = transport.get_extra_info("socket")
            self.reported.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def main() -> int:
        loop = asyncio.get_running_loop()
        Connected.reported = loop.create_future()
        with bound_socket() as listening:
            server = await loop.create_server(Connected, sock=listening)
            _, writer = await asyncio.open_connection(*listening.getsockname())
            nodelay = await Connected.reported
            writer.close()
            server.close()
        return nodelay

    assert asyncio.run(main())


def test_an_answer_has_the_same_head_however_it_is_written() -> None:
    """At once where the connection stays open, by uvicorn where it closes; two requests that come
    together are answered in turn.
    """
    text = (
        b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}, "rid": "%d",'
        b' "return_routed_experts": true}'
    )
    raw_request = (
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"%scontent-length: %d\r\n\r\n%s"
    )
    with (
        served("sglang", OPTIONS) as server,
        socket.create_connection(
            ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
        ) as client,
    ):
        closing = [b"", b"", b"connection: close\r\n"]
        client.sendall(
            b"".join(
                raw_request % (more, len(text) - 1, text % number)
                for number, more in enumerate(closing)
            )
        )
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    answers = re.split(rb"(?=HTTP/1\.1 200 OK\r\n)", received)[1:]
    heads = [
        re.sub(rb"date: [^\r]+|content-length: \d+", b"...", answer.partition(b"\r\n\r\n")[0])
        for answer in answers
    ]
    assert [heads[0], heads[0], heads[0] + b"\r\nconnection: close"] == [
        *heads[:2],
        heads[2].replace(b"Connection", b"connection"),
    ]
    for number, answer in enumerate(answers):
        length = re.search(rb"content-length: (\d+)", answer)
        assert length is not None
        assert b'"id":"%d"' % number in answer
        assert len(answer.partition(b"\r\n\r\n")[2]) == int(length[1])


@pytest.mark.parametrize("form", [None, RoutesForm.COMPACT])
def test_routes_in_a_trace_are_those_that_were_sent(
    tmp_path: Path, form: RoutesForm | None
) -> None:
    """Whatever form they have in the reply, they are int32 in the trace."""
    options = ServeOptions(
        flavour="sglang",
        model=Model(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8),
        routes=form,
    )
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 9},
        "return_routed_experts": True,
    }

    async def main(sink: TraceSink) -> list[Any]:
        async with serving("sglang", options, sinks=[sink]) as (url, _):
            client = HttpClient(int(url.rpartition(":")[2]))
            replies = await asyncio.gather(
                *(client.request("POST", "/generate", {**body, "rid": f"r{i}"}) for i in range(9))
            )
        return [reply.json() for reply in replies]

    with TraceWriter(tmp_path / "served.arrow", EngineBackend.header(options)) as writer:
        answers = {answer["meta_info"]["id"]: answer for answer in asyncio.run(main(writer))}
    events = list(TraceReader(writer.path))
    rids = {event.call_id: event.request_id for event in events if isinstance(event, Call)}
    replies = [event for event in events if isinstance(event, Reply)]
    assert len(answers) == len(replies)
    for reply in replies:
        routes, meta = reply.output.routes, answers[rids[reply.call_id]]["meta_info"]
        assert routes is not None
        assert (routes.dtype, type(routes)) == (np.dtype("int32"), np.ndarray)
        sent = from_flat(meta["routed_experts"], 48, 8, meta.get("routed_experts_dtype", "int32"))
        assert sent.tolist() == routes.tolist()
