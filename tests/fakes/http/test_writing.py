"""What a server writes to its clients and to its trace, and when."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import uvicorn
from uvicorn.protocols.http import h11_impl, httptools_impl
from uvicorn.server import ServerState

from rollproof.core.case import EngineOptions, Model
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Reply
from rollproof.core.trace import TraceSink
from rollproof.errors import TraceError
from rollproof.fakes.http.asgi import AT_ONCE, Whole
from rollproof.fakes.http.at_once import offering
from rollproof.fakes.http.engine_backend import Backing, RoutesForm, ServeOptions
from rollproof.fakes.http.flushing_sink import Kept
from rollproof.fakes.http.in_process_client import Line
from rollproof.fakes.http.routes_encoding import from_flat
from rollproof.fakes.http.serving import bound_socket
from rollproof.fakes.http.sglang.server import sglang_app
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
    """A client that asks for the connection to be closed has head and body before the end, of a
    reply and of a stream.
    """
    body = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}%s}'
    with served("sglang", OPTIONS) as server:
        for more, end in ((b"", b"}}"), (b', "stream": true', b"0\r\n\r\n")):
            text = body % more
            head = (
                b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length:"
                b" %d\r\n\r\n" % len(text)
            )
            with socket.create_connection(
                ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
            ) as client:
                client.sendall(head + text)
                heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
            assert heard.endswith(end)


def test_small_pieces_are_sent_at_once() -> None:
    """On every loop: with Nagle's algorithm an event of a stream waits until the client has
    acknowledged the one before.
    """

    class Connected(asyncio.Protocol):
        told: asyncio.Future[int]

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            sock = transport.get_extra_info("socket")
            self.told.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def main() -> int:
        loop = asyncio.get_running_loop()
        Connected.told = loop.create_future()
        with bound_socket() as listening:
            server = await loop.create_server(Connected, sock=listening)
            _, writer = await asyncio.open_connection(*listening.getsockname())
            nodelay = await Connected.told
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
    asked = b"POST /generate HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n%s"
    with (
        served("sglang", OPTIONS) as server,
        socket.create_connection(
            ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
        ) as client,
    ):
        closing = [b"", b"", b"connection: close\r\n"]
        client.sendall(
            b"".join(
                asked % (more, len(text) - 1, text % number) for number, more in enumerate(closing)
            )
        )
        heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
    answers = re.split(rb"(?=HTTP/1\.1 200 OK\r\n)", heard)[1:]
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


PROTOCOL = httptools_impl.HttpToolsProtocol


class _Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.waits = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.written += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.waits

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        """All there is was read."""

    resume_reading = pause_reading


async def _heard(app: Any, *asked: bytes) -> _Wire:
    """What a connection that sends ``asked``, one after the other, is answered."""
    config = uvicorn.Config(
        app, http=PROTOCOL, interface="asgi3", lifespan="off", log_config=None, access_log=False
    )
    config.load()
    wire = _Wire()
    connection: Any = PROTOCOL(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(wire)
    for text in asked:
        if not wire.closed:
            connection.data_received(text)
        for _ in range(9):
            await asyncio.sleep(0)
    connection.connection_lost(None)
    return wire


_ANSWER = Whole(b'{"a":', b"1", b"}")


def _app(taken: list[bool]) -> Any:
    """Answers every request, at once where that is offered and taken, which is told."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        offer = (scope.get("extensions") or {}).get(AT_ONCE)
        taken.append(offer is not None and offer(send, _ANSWER))
        if not taken[-1]:
            await send(
                {"type": "http.response.start", "status": 200, "headers": _ANSWER.raw_headers}
            )
            await send({"type": "http.response.body", "body": _ANSWER.body})

    return app


@pytest.mark.parametrize(
    ("head", "at_once"),
    [
        (b"", True),
        (b"connection: keep-alive\r\n", True),
        (b"connection: Keep-Alive\r\n", True),
        (b"connection: close\r\n", False),
        (b"connection: Close\r\n", False),
        (b"connection: keep-alive, close\r\n", False),
    ],
)
def test_what_is_written_at_once_is_what_uvicorn_writes(head: bytes, at_once: bool) -> None:
    """Byte for byte, for one request after the other and for both together; where the connection is
    to be closed uvicorn writes itself.
    """
    ask = b"POST /generate HTTP/1.1\r\nhost: x\r\n%scontent-length: 2\r\n\r\n{}" % head
    for asked in ([ask], [ask, ask], [ask + ask]):
        taken: list[bool] = []
        ours = asyncio.run(_heard(offering(_app(taken), PROTOCOL), *asked))
        theirs = asyncio.run(_heard(_app([]), *asked))
        assert set(taken) == {at_once}
        assert (theirs.written, theirs.closed) == (ours.written, ours.closed)
        assert ours.written.count(b"HTTP/1.1 200 OK\r\n") == len(taken)


def test_the_client_of_an_older_http_is_left_to_uvicorn() -> None:
    """Whose connection ends with its answer."""
    taken = list[bool]()
    ask = b"POST /generate HTTP/1.0\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    ours = asyncio.run(_heard(offering(_app(taken), PROTOCOL), ask))
    theirs = asyncio.run(_heard(_app([]), ask))
    assert [False] == taken
    assert (theirs.written, theirs.closed) == (ours.written, ours.closed)


def test_what_is_not_known_of_uvicorn_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose cycles lack something, or are made otherwise, writes its answers itself; so
    does a middleware with a ``send``.
    """
    known: Any = httptools_impl.RequestResponseCycle
    app, offers = _app([]), list[Any]()

    class Without(known):  # type: ignore[misc]
        __signature__ = inspect.signature(known)

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            del self.waiting_for_100_continue

    async def looking(scope: Any, receive: Any, send: Any) -> None:
        offers.append(scope["extensions"][AT_ONCE])

    class Middleware:
        async def send(self, message: Any) -> None:
            raise AssertionError(message)

    asyncio.run(cast("Any", offering(looking, PROTOCOL))({}, None, None))
    assert offers[0](Middleware().send, _ANSWER) is False
    assert offering(app, PROTOCOL) is not app
    assert offering(app, h11_impl.H11Protocol) is app
    for unknown in (Without, lambda *, flow: flow.missing, 7, None):
        monkeypatch.setattr(httptools_impl, "RequestResponseCycle", unknown)
        assert offering(app, PROTOCOL) is app


@pytest.mark.parametrize(
    "what", ["disconnected", "response_started", "access_log", "write_paused", "waits", "closing"]
)
def test_a_connection_on_which_that_will_not_do_is_left_to_uvicorn(what: str) -> None:
    """It is lost, its answer has begun, the access is to be logged, its client does not read (yet),
    or it is closing.
    """
    said = list[bool]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        cycle = send.__self__
        if what == "write_paused":
            cycle.flow.pause_writing()
        elif what == "waits":
            cycle.transport.waits = 7
        elif what == "closing":
            cycle.transport.close()
        else:
            setattr(cycle, what, True)
        said.append(scope["extensions"][AT_ONCE](send, _ANSWER))
        cycle.disconnected = True

    ask = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    wire = asyncio.run(_heard(offering(app, PROTOCOL), ask))
    assert ([False], b"") == (said, wire.written)


@pytest.mark.parametrize("form", [None, RoutesForm.COMPACT])
def test_routes_of_a_trace_that_is_only_written_are_those_that_were_sent(
    tmp_path: Path, form: RoutesForm | None
) -> None:
    """Held in a narrow type on the way, they are int32 to whoever reads the file, and to a sink
    that does not know of narrow ones.
    """
    options = ServeOptions(
        flavour="sglang",
        model=Model(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8),
        routes=form,
    )
    told: list[Event] = []

    class Other:
        def append(self, event: Event) -> None:
            told.append(event)

    async def main(sinks: Iterable[TraceSink]) -> list[Any]:
        line = Line(sglang_app(Backing(options, sinks, keep=False)))
        asked = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 9},
            "return_routed_experts": True,
        }
        return [
            heard.json()
            for heard in await asyncio.gather(
                *(line.ask("POST", "/generate", {**asked, "rid": f"r{i}"}) for i in range(9))
            )
        ]

    with TraceWriter(tmp_path / "served.arrow", Backing.header(options)) as writer:
        assert [writer.takes_narrow, False] == [
            Kept(sink, lambda: None).takes_narrow for sink in (writer, Other())
        ]
        answers = asyncio.run(main([writer]))
    assert (
        answers[0]["meta_info"]["routed_experts"]
        == asyncio.run(main([Other()]))[0]["meta_info"]["routed_experts"]
    )
    for events in (list(TraceReader(writer.path)), told):
        replies = [event.output for event in events if isinstance(event, Reply)]
        assert len(answers) == len(replies)
        for output, answer in zip(replies, answers, strict=True):
            meta = answer["meta_info"]
            assert output.routes is not None
            assert (output.routes.dtype, type(output.routes)) == (np.dtype("int32"), np.ndarray)
            sent = from_flat(
                meta["routed_experts"], 48, 8, meta.get("routed_experts_dtype", "int32")
            )
            assert sent.tolist() == output.routes.tolist()
