"""Clients that read slowly: what they are owed waits in bounded memory, nothing of it is lost, and
nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from rollproof.core.events.rollout import Fault, Reply
from rollproof.fakes.http.connections import TolerantTransport
from rollproof.fakes.http.sglang.server import PendingEvents
from rollproof.store import TraceReader
from tests.fakes.http.test_serve_command import started, until

SIZES = ("--layers", "48", "--experts", "128", "--top-k", "8", "--step", "0")
"""So a reply has 80 KB, most of it routes."""
CONNECTIONS, PIPELINED = 8, 80
MAX_GROWTH = 25 << 20
"""Bytes by which the server may grow: half of the 8 x 80 replies that wait."""


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str], str]]:
    with started(*SIZES, "--as", request.param) as (process, url):
        for number in range(8):
            path, body = _request_to(request.param, f"warm-{number}")
            httpx.post(url + path, json=body)
        yield request.param, process, url


def _request_to(server_kind: str, name: str, *, stream: bool = False) -> tuple[str, dict[str, Any]]:
    """Path and body of a call with routes."""
    if server_kind == "sglang":
        sampling = {"max_new_tokens": 37, "ignore_eos": True}
        return "/generate", {
            "input_ids": [5, 6, 7],
            "sampling_params": sampling,
            "return_routed_experts": True,
            "rid": name,
            "stream": stream,
        }
    return "/inference/v1/generate", {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 37 if stream else 150, "ignore_eos": True},
        "request_id": name,
        "stream": stream,
    }


def _connected(url: str) -> socket.socket:
    """A connection whose receiving end holds next to nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    client.settimeout(60)
    return client


def _send(client: socket.socket, *requests: tuple[str, dict[str, Any]]) -> None:
    """Requests of these paths and bodies, in one piece."""
    texts = [(path.encode(), json.dumps(body).encode()) for path, body in requests]
    head = (
        b"POST %s HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length:"
        b" %d\r\n\r\n%s"
    )
    client.sendall(b"".join(head % (path, len(text), text) for path, text in texts))


class Reader:
    """Reads answers from a connection, the first bytes in crumbs."""

    def __init__(self, client: socket.socket, crumbs: int = 400) -> None:
        self._client, self._crumbs, self._buffer = client, crumbs, bytearray()

    def answer(self) -> bytes:
        """The body of the next one, of a known length or in chunks."""
        head = self._until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
        length = re.search(rb"content-length: (\d+)", head)
        if length is not None:
            return self._take(int(length[1]))
        parts = []
        while size := int(self._until(b"\r\n"), 16):
            parts.append(self._take(size))
            self._until(b"\r\n")
        self._until(b"\r\n")
        return b"".join(parts)

    def _until(self, end: bytes) -> bytes:
        while (place := self._buffer.find(end)) < 0:
            self._more()
        return self._take(place + len(end))

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _more(self) -> None:
        self._crumbs -= 1
        data = self._client.recv(7 if self._crumbs > 0 else 1 << 16)
        assert data, "the connection ended before the complete answer had come"
        self._buffer += data


def _resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that the server has."""
    statm = Path(f"/proc/{process.pid}/statm")
    if not statm.exists():
        pytest.skip("what a process holds is read from /proc")
    return int(statm.read_text().split()[1]) * 4096


def _name(server_kind: str, body: bytes, *, stream: bool) -> str:
    """Whose answer this is; of a stream, after a look at its end."""
    if stream:
        assert body.endswith(b"data: [DONE]\n\n")
        body = body.split(b"\n\n")[0].removeprefix(b"data: ")
    read = json.loads(body)
    data: str = (
        read["meta_info"]["id"]
        if server_kind == "sglang"
        else read["request_id"].removeprefix("generate-tokens-")
    )
    return data


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "stream"])
def test_a_slow_reader_loses_nothing_and_holds_up_nobody(
    server: tuple[str, subprocess.Popen[str], str], stream: bool
) -> None:
    """Requests that come together on connections kept open; each answer arrives completely, in its
    turn, however late it is read.
    """
    server_kind, process, url = server
    before = _resident(process)
    clients = [_connected(url) for _ in range(CONNECTIONS)]
    try:
        for i, client in enumerate(clients):
            for k in range(PIPELINED):
                _send(client, _request_to(server_kind, f"{stream}-{i}-{k}", stream=stream))
        slowest = 0.0
        for number in range(40):
            begun = time.monotonic()
            path, body = _request_to(server_kind, f"{stream}-other-{number}")
            httpx.post(url + path, json=body, timeout=60).raise_for_status()
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 2
        assert _resident(process) - before < MAX_GROWTH
        for i, client in enumerate(clients):
            reader = Reader(client)
            assert [f"{stream}-{i}-{k}" for k in range(PIPELINED)] == [
                _name(server_kind, reader.answer(), stream=stream) for _ in range(PIPELINED)
            ]
        assert _resident(process) - before < MAX_GROWTH
    finally:
        for client in clients:
            client.close()


def test_a_long_stream_that_nobody_reads_takes_little() -> None:
    """Where each event has all tokens so far, the newest is all that waits; together they would
    take hundreds of megabytes.
    """
    with started("--step", "0") as (process, url), _connected(url) as client:
        path, body = _request_to("sglang", "long", stream=True)
        before = _resident(process)
        sampling = {"max_new_tokens": 2000, "ignore_eos": True}
        _send(client, (path, {**body, "return_logprob": True, "sampling_params": sampling}))
        until(lambda: httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_running_reqs"] == 0)
        assert _resident(process) - before < MAX_GROWTH
        assert _name("sglang", Reader(client).answer(), stream=True) == "long"


@pytest.mark.parametrize(
    ("newest", "read"), [(True, [b"2", b"4"]), (False, [b"1", b"2", b"3", b"4"])]
)
def test_the_first_event_that_is_read_is_distinguished(newest: bool, read: list[bytes]) -> None:
    """It alone says when it was sent, also where it took the place of events that nobody read."""
    ready: asyncio.Queue[PendingEvents | None] = asyncio.Queue()
    pending = PendingEvents(ready, newest_only=newest)
    fresh, taken = [], []
    for event, reads in ((b"1", False), (b"2", True), (b"3", False), (b"4", True)):
        fresh.append(pending.next_is_first)
        pending.put(event)
        while reads and not ready.empty():
            waiting = ready.get_nowait()
            assert waiting is pending
            taken.append(waiting.take())

    assert read == taken
    assert [True, newest, False, False] == fresh


def test_who_leaves_without_having_read_is_forgotten(tmp_path: Path) -> None:
    """Whatever waits for it; the server goes on, says nothing of it, and its trace is complete."""
    trace = tmp_path / "served.arrow"
    with started(*SIZES, "--trace", str(trace)) as (process, url):
        for round_ in range(3):
            clients = [_connected(url) for _ in range(8)]
            for i, client in enumerate(clients):
                for k in range(4):
                    _send(client, _request_to("sglang", f"{round_}-{i}-{k}", stream=i % 2 == 0))
            path, body = _request_to("sglang", f"other-{round_}")
            httpx.post(url + path, json=body, timeout=60).raise_for_status()
            for client in clients:
                client.close()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert (0, "") == (process.returncode, said)
    kinds = Counter(type(event).__name__ for event in TraceReader(trace))
    assert kinds["Call"] >= 3 + 3 * 8


def test_writes_after_the_end_of_a_connection_are_ignored() -> None:
    """An error of the event loop is not logged: uvloop raises one then, asyncio does not."""

    class Closable:
        def __init__(self) -> None:
            self.closed, self.written = False, b""

        def is_closing(self) -> bool:
            return self.closed

        def write(self, data: bytes) -> None:
            if self.closed:
                raise RuntimeError("the handler is closed")
            self.written += data

    transport = Closable()
    tolerant = TolerantTransport(cast("asyncio.Transport", transport))
    tolerant.write(b"head")
    transport.closed = True
    tolerant.write(b"body")

    assert b"head" == transport.written
    assert tolerant.is_closing()


def test_of_requests_that_came_together_no_answer_is_taken_for_read(tmp_path: Path) -> None:
    """Where the client left with answers unread: it requested the later ones before it could have
    read the earlier ones.
    """
    pytest.importorskip(
        "httptools", reason="over h11, uvicorn reads a request when the one before is answered"
    )
    trace = tmp_path / "served.arrow"
    with started(*SIZES, "--trace", str(trace)) as (process, url):
        with _connected(url) as client:
            _send(client, *[_request_to("sglang", f"r{k}") for k in range(4)])
            until(lambda: httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_running_reqs"] == 0)
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    events = list(TraceReader(trace))
    assert said == ""
    answered = {event.call_id for event in events if isinstance(event, Reply) and event.delivered}
    assert answered
    assert answered == {
        event.call_id
        for event in events
        if isinstance(event, Fault) and event.what == "broken-stream"
    }
