"""What passes through a proxy, and how the trace shows what went wrong on the way."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Fault, Reply, Unrecorded
from rollproof.errors import TraceError
from rollproof.recording.proxy import detection
from rollproof.recording.proxy.app import ProxyApp
from rollproof.store import TraceWriter
from tests.recording.proxied import UNKNOWN_SERVER, Proxied, proxied

_SAMPLE = {
    "text": "w7",
    "output_ids": [7, 8],
    "meta_info": {"finish_reason": {"type": "length", "length": 2}, "completion_tokens": 2},
}
_BODY = json.dumps(_SAMPLE).encode()
_ASK = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}).encode()


def http(status: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


def chunked(*parts: bytes, end: bool = True) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return framed + (b"0\r\n\r\n" if end else b"")


def event(tokens: list[int], reason: object = None) -> bytes:
    meta = {"finish_reason": reason, "completion_tokens": len(tokens)}
    return b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\n\n"


_LENGTH = {"type": "length", "length": 2}
_PACKED = gzip.compress(_BODY)
_STREAM = "content-type: text/event-stream"
REPLIES: dict[str, bytes] = {
    "plain": http("200 OK", f"content-length: {len(_BODY)}", "X-Odd: a", "x-odd: b", body=_BODY),
    "without a length": http("200 OK", "connection: close", body=_BODY),
    "packed": http(
        "200 OK", "content-encoding: gzip", f"content-length: {len(_PACKED)}", body=_PACKED
    ),
    "stream": http(
        "200 OK",
        _STREAM,
        "transfer-encoding: chunked",
        body=chunked(event([7]), event([7, 8], _LENGTH), b"data: [DONE]\n\n"),
    ),
    "torn stream": http(
        "200 OK",
        _STREAM,
        "transfer-encoding: chunked",
        body=chunked(event([7])[:9], event([7])[9:] + event([7, 8], _LENGTH), b"data: [DONE]\n\n"),
    ),
    "broken stream": http(
        "200 OK",
        _STREAM,
        "transfer-encoding: chunked",
        body=chunked(event([7]), b'data: {"outp', end=False),
    ),
    "unfinished stream": http(
        "200 OK", _STREAM, "transfer-encoding: chunked", body=chunked(event([7]))
    ),
    "broken": http("200 OK", "content-length: 999", body=_BODY),
    "refusal": http("503 Busy", "content-length: 4", "retry-after: 1", body=b"busy"),
    "refusing stream": http(
        "200 OK",
        _STREAM,
        "transfer-encoding: chunked",
        body=chunked(b'data: {"error": {"message": "too long"}}\n\n', b"data: [DONE]\n\n"),
    ),
    "garbage": http("200 OK", "content-length: 9", body=b"\x00garbage\xff"),
    "text only": http("200 OK", "content-length: 34", body=b'{"text": "w7 w8", "meta_info": {}}'),
    "nothing": b"",
    "no http": b"nonsense\r\n\r\n",
}


@contextmanager
def scripted(reply: bytes) -> Iterator[str]:
    """A server that answers each connection with these bytes, and closes it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                data = b""
                while b"\r\n\r\n" not in data or not data.endswith(_ASK):
                    got = connection.recv(65536)
                    if not got:
                        break
                    data += got
                connection.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def ask(url: str, path: str = "/generate", body: bytes = _ASK) -> tuple[bytes, list[str], bytes]:
    """Status line, headers and body of an answer as they came, up to the end of the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST {path}?a=%20b HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
        data = b""
        while part := connection.recv(65536):
            data += part
    head_bytes, _, rest = data.partition(b"\r\n\r\n")
    status, *headers = head_bytes.split(b"\r\n")
    names = ("connection", "transfer-encoding")
    # names of headers know no case, and ASGI has them in lower case
    pairs = [line.decode().partition(":") for line in headers]
    shown = [f"{name.lower()}:{value}" for name, _, value in pairs if name.lower() not in names]
    if b"transfer-encoding: chunked" in head_bytes.lower():
        rest = _unframed(rest)
    return status.split(b" ")[1] if b" " in status else status, sorted(shown), rest


def _unframed(data: bytes) -> bytes:
    """The payload of chunks; the frames of a proxy may be other ones. The end counts as data."""
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if not size:
            break
        length = int(size, 16)
        if not length:
            return out + b"<end>"
        out, data = out + data[:length], data[length + 2 :]
    return out


@contextmanager
def before(reply: bytes, folder: Path, **options: object) -> Iterator[tuple[str, Proxied]]:
    with (
        scripted(reply) as url,
        proxied(url, folder, facts=UNKNOWN_SERVER, **options) as proxy,
    ):
        yield url, proxy


@pytest.mark.parametrize(
    "name", [name for name in REPLIES if name not in ("nothing", "no http", "without a length")]
)
def test_an_answer_passes_unchanged(name: str, tmp_path: Path) -> None:
    """Status, headers, and every byte of the body; also where it breaks off."""
    with before(REPLIES[name], tmp_path) as (url, proxy):
        assert ask(url) == ask(proxy.url)


def test_a_reply_that_ends_with_its_connection_gets_a_frame(tmp_path: Path) -> None:
    """Such a reply cannot be passed on over a connection that stays: it is sent in chunks."""
    with before(REPLIES["without a length"], tmp_path) as (url, proxy):
        status, _, body = ask(url)
        assert (status, body + b"<end>") == (ask(proxy.url)[0], ask(proxy.url)[2])


def _shown(events: list[Event]) -> list[object]:
    return [
        (event.kind, event.output.token_ids, event.delivered)
        if isinstance(event, Reply)
        else (event.kind, event.what)
        if isinstance(event, Fault)
        else event.kind
        for event in events
        if not isinstance(event, Call)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", [("reply", (7, 8), True)]),
        ("packed", [("reply", (7, 8), True)]),
        ("stream", [("reply", (7, 8), True)]),
        ("torn stream", [("reply", (7, 8), True)]),
        ("broken stream", [("reply", (7,), False), ("fault", "broken-stream")]),
        ("unfinished stream", [("reply", (7,), False), ("fault", "broken-stream")]),
        ("broken", [("fault", "lost-reply")]),
        ("refusal", [("fault", "reject")]),
        ("refusing stream", [("fault", "reject")]),
        ("garbage", ["unrecorded"]),
        ("text only", ["unrecorded"]),
        ("nothing", [("fault", "lost-reply")]),
        ("no http", [("fault", "lost-reply")]),
    ],
)
def test_a_trace_shows_how_an_exchange_ended(
    name: str, expected: list[object], tmp_path: Path
) -> None:
    """A call that was answered, refused, lost, or answered in a way that nobody can read."""
    with before(REPLIES[name], tmp_path) as (_, proxy):
        status = ask(proxy.url)[0]
    assert expected == _shown(proxy.trace)
    assert (b"502" if name in ("nothing", "no http") else status) == status


def test_a_server_that_is_gone_is_a_502(tmp_path: Path) -> None:
    """The call was refused: nothing ran."""
    with scripted(b"") as url:
        pass
    with proxied(url, tmp_path, facts=UNKNOWN_SERVER) as proxy:
        status, _, body = ask(proxy.url)
    assert (b"502", True) == (status, b"did not answer" in body)
    assert [("fault", "reject")] == _shown(proxy.trace)


def test_a_status_that_http_does_not_have_is_a_502(tmp_path: Path) -> None:
    """A reply that cannot be passed on is refused, and its client is told why."""
    with before(http("700 Odd", "content-length: 0"), tmp_path) as (_, proxy):
        status, _, body = ask(proxy.url)
    assert (b"502", True) == (status, b"it answered with status 700" in body)
    assert [("fault", "lost-reply")] == _shown(proxy.trace)


def test_a_reply_of_many_chunks_lets_others_go_on(tmp_path: Path) -> None:
    """Chunks that are there at once are passed on in turns."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            time.sleep(0.002)  # noqa: ASYNC251 - work, during which nobody waits
            yield b"y"

    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=chunks())

    async def receive() -> Any:
        received.append(1)
        if len(received) > 1:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def others() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            app = ProxyApp(
                "http://s0",
                server_id="s0",
                client=client,
                begun=lambda _: None,
                ended=lambda _: None,
                unsure=lambda _: None,
                own=lambda *_: asyncio.sleep(0),
                clock=time.monotonic,
                max_body=4096,
            )
            scope = {"type": "http", "method": "GET", "path": "/", "query_string": b""}
            working = asyncio.create_task(others())
            await app({**scope, "headers": []}, receive, send)
            working.cancel()

    received: list[int] = []
    sent: list[Any] = []
    turns: list[int] = []
    asyncio.run(run())

    assert 20 == sum(message.get("body") == b"y" for message in sent)
    assert len(turns) >= 20


def test_a_client_that_leaves_breaks_its_call(tmp_path: Path) -> None:
    """The server is left, too, and the trace says what had passed."""
    stream = http("200 OK", _STREAM, "content-length: 99999", body=event([7]))
    released = threading.Event()
    left: list[bool] = []

    def slow(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(_ASK):
            data += connection.recv(65536)
        connection.sendall(stream)
        connection.settimeout(20)
        left.append(connection.recv(1) == b"")
        released.set()

    with _server(slow) as url, proxied(url, tmp_path, facts=UNKNOWN_SERVER) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(_ASK)}\r\n\r\n"
            connection.sendall(head.encode() + _ASK)
            assert connection.recv(65536)
        assert released.wait(20)
    assert [True] == left
    assert [("reply", (7,), False), ("fault", "broken-stream")] == _shown(proxy.trace)
    assert 1 == proxy.proxy.traffic.left


@contextmanager
def _server(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            handle(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread.join(20)
    listening.close()


def test_long_bodies_pass_and_are_not_recorded(tmp_path: Path) -> None:
    """In both directions; the trace says that the reply was too long."""
    body = json.dumps({**_SAMPLE, "text": "w" * 9000}).encode()
    reply = http("200 OK", f"content-length: {len(body)}", body=body)
    with before(reply, tmp_path, max_body=4096) as (url, proxy):
        assert ask(url) == ask(proxy.url)
        long_request = b"[" + b" " * 200_000 + b"]" + _ASK
        assert ask(url, body=long_request) == ask(proxy.url, body=long_request)
    (unrecorded,) = [event for event in proxy.trace if isinstance(event, Unrecorded)]
    assert "its reply is longer than the recorder keeps (--max-body)" == unrecorded.reason
    assert 2 == proxy.proxy.counts.unreadable


def test_a_full_disk_stops_the_recording_and_not_the_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not written is counted, and why is said."""

    def full(self: TraceWriter, event: Event) -> None:
        raise TraceError(f"{self.path.name} could not be written: no space left on device")

    with before(REPLIES["plain"], tmp_path) as (url, proxy):
        monkeypatch.setattr(TraceWriter, "append", full)
        assert ask(url) == ask(proxy.url) == ask(proxy.url)
    counts = proxy.proxy.counts
    assert "Recording has stopped: " in counts.failure
    assert "no space left on device" in str(counts)
    assert (0, 4) == (counts.events, counts.dropped)
    assert 2 == proxy.proxy.traffic.requests


def test_a_full_queue_drops_events_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traffic does not wait for the writer."""
    with before(REPLIES["plain"], tmp_path, queue_bytes=1) as (_, proxy):
        assert b"200" == ask(proxy.url)[0]
    assert [("unrecorded")] == [event.kind for event in proxy.trace if event.kind != "call"][:1]
    assert 2 == proxy.proxy.counts.dropped


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "--to http://127.0.0.1:1 does not answer"),
        ("127.0.0.1:30000", "must be the address of a server"),
        ("ftp://x", "must be the address of a server"),
    ],
)
def test_an_address_that_does_not_answer(url: str, message: str) -> None:
    """Is refused before anything is written."""
    with pytest.raises(detection.UsageError, match=message):
        detection.detect(url)


@pytest.mark.parametrize("answer", [b'{"data": [', b" "])
def test_an_answer_without_an_end_is_none(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server says of itself is read up to a limit, in bytes and in time."""
    monkeypatch.setattr(detection, "_MAX_ANSWER", 1 << 16)
    endless = itertools.chain([answer], itertools.repeat(b" " * 4096))
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=endless))
    with httpx.Client(base_url="http://s0", transport=transport) as client:
        assert {} == detection._asked(client, "/v1/models")
