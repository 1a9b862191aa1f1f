"""What a server writes to its clients and to its trace, and when."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rollproof.case import EngineOptions, Model
from rollproof.errors import TraceError
from rollproof.fakes.http.asgi import Whole
from rollproof.fakes.http.at_once import _EXTENSIONS, writing_at_once
from rollproof.fakes.http.backing import Backing, RoutesForm, ServeOptions
from rollproof.fakes.http.keeping import Kept
from rollproof.fakes.http.line import Line
from rollproof.fakes.http.sglang import sglang_app
from rollproof.fakes.http.wire import from_flat
from rollproof.store import TraceReader, TraceWriter
from rollproof.trace import Admit, Event, Reply, TraceSink
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


def test_an_answer_has_the_same_head_however_it_is_written() -> None:
    """At once where the connection stays open, by uvicorn where it closes; two requests that come together are answered in turn."""
    pytest.importorskip("httptools", reason="uvicorn's own parser writes every answer itself")
    text = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}, "rid": "%d", "return_routed_experts": true}'
    asked = b"POST /generate HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n%s"
    with (
        served("sglang", OPTIONS) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as client,
    ):
        closing = [b"", b"", b"connection: close\r\n"]
        client.sendall(b"".join(asked % (more, len(text) - 1, text % number) for number, more in enumerate(closing)))
        heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
    answers = re.split(rb"(?=HTTP/1\.1 200 OK\r\n)", heard)[1:]
    heads = [re.sub(rb"date: [^\r]+|content-length: \d+", b"...", answer.partition(b"\r\n\r\n")[0]) for answer in answers]
    assert [heads[0], heads[0], heads[0] + b"\r\nconnection: close"] == heads
    for number, answer in enumerate(answers):
        length = re.search(rb"content-length: (\d+)", answer)
        assert length is not None
        assert b'"id":"%d"' % number in answer
        assert len(answer.partition(b"\r\n\r\n")[2]) == int(length[1])


def test_a_connection_is_closed_where_uvicorn_looks_for_the_header_only_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As releases of it up to 0.46 at least do: what a cycle says of keeping the connection alive is not all."""
    impl = pytest.importorskip("uvicorn.protocols.http.httptools_impl", reason="uvicorn's own parser writes every answer itself")
    close = (b"connection", b"close")

    class Older(impl.RequestResponseCycle):  # type: ignore[misc]
        __signature__ = inspect.signature(impl.RequestResponseCycle)

        def __init__(self, **given: Any) -> None:
            super().__init__(**{**given, "keep_alive": True})

        async def send(self, message: Any) -> None:
            if not self.response_started and close in self.scope["headers"]:
                message = {**message, "headers": [*message["headers"], close]}
            await super().send(message)

    monkeypatch.setattr(impl, "RequestResponseCycle", Older)
    assert impl.HttpToolsProtocol is not writing_at_once(impl.HttpToolsProtocol)
    text = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}'
    with (
        served("sglang", OPTIONS) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=3) as client,
    ):
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
        heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"\r\nconnection: close\r\n" in heard
    assert heard.endswith(b"}}")


def test_the_send_of_a_middleware_is_left_to_it() -> None:
    """It is a method of an object, too, but of none of uvicorn's."""

    class Middleware:
        async def send(self, message: Any) -> None:
            raise AssertionError(message)

    answer: Any = None
    (written,) = _EXTENSIONS.values()
    assert written(Middleware().send, answer) is False


def test_what_is_not_known_of_uvicorn_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose cycles lack something, or are made otherwise, writes its answers itself; so does one whose connection is closing."""
    impl = pytest.importorskip("uvicorn.protocols.http.httptools_impl", reason="uvicorn's own parser writes every answer itself")
    protocol, known = impl.HttpToolsProtocol, impl.RequestResponseCycle
    offering = writing_at_once(protocol)
    assert protocol is not offering

    class Without(known):  # type: ignore[misc]
        __signature__ = inspect.signature(known)

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            del self.waiting_for_100_continue

    for unknown in (Without, lambda *, flow: flow.missing, 7, None):
        monkeypatch.setattr(impl, "RequestResponseCycle", unknown)
        assert protocol is writing_at_once(protocol)

    class Closing:
        written: ClassVar[list[bytes]] = []
        writelines = written.extend

        def is_closing(self) -> bool:
            return True

    given = dict.fromkeys(inspect.signature(known).parameters)
    flow = SimpleNamespace(write_paused=False)
    cycle = known(**{**given, "scope": {"headers": []}, "keep_alive": True, "flow": flow, "transport": Closing()})
    at_once = next(iter(_EXTENSIONS.values()))
    assert not at_once(cycle.send, Whole(b"{}"))
    assert [] == Closing.written


@pytest.mark.parametrize("form", [None, RoutesForm.COMPACT])
def test_routes_of_a_trace_that_is_only_written_are_those_that_were_sent(tmp_path: Path, form: RoutesForm | None) -> None:
    """Held in a narrow type on the way, they are int32 to whoever reads the file, and to a sink that does not know of narrow ones."""
    options = ServeOptions(flavour="sglang", model=Model(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8), routes=form)
    told: list[Event] = []

    class Other:
        def append(self, event: Event) -> None:
            told.append(event)

    async def main(sinks: Iterable[TraceSink]) -> list[Any]:
        line = Line(sglang_app(Backing(options, sinks, keep=False)))
        asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 9}, "return_routed_experts": True}
        return [
            heard.json() for heard in await asyncio.gather(*(line.ask("POST", "/generate", {**asked, "rid": f"r{i}"}) for i in range(9)))
        ]

    with TraceWriter(tmp_path / "served.arrow", Backing.header(options)) as writer:
        assert [writer.takes_narrow, False] == [Kept(sink, lambda: None).takes_narrow for sink in (writer, Other())]
        answers = asyncio.run(main([writer]))
    assert answers[0]["meta_info"]["routed_experts"] == asyncio.run(main([Other()]))[0]["meta_info"]["routed_experts"]
    for events in (list(TraceReader(writer.path)), told):
        replies = [event.output for event in events if isinstance(event, Reply)]
        assert len(answers) == len(replies)
        for output, answer in zip(replies, answers, strict=True):
            meta = answer["meta_info"]
            assert output.routes is not None
            assert (output.routes.dtype, type(output.routes)) == (np.dtype("int32"), np.ndarray)
            sent = from_flat(meta["routed_experts"], 48, 8, meta.get("routed_experts_dtype", "int32"))
            assert sent.tolist() == output.routes.tolist()
