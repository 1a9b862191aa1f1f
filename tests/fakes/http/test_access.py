"""Who may use a server that listens on a port, what a client may send, and how slowly."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollproof.core.case import EngineOptions
from rollproof.errors import UsageError
from rollproof.fakes.http import connections
from rollproof.fakes.http.access import Access
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import Served, served
from tests.support.html_pages import BROWSER, needs_browser

UPDATES = {
    "sglang": ("/update_weights_from_disk", {"model_path": "/mine"}),
    "vllm": ("/update_weight_version", {"weight_version": "mine"}),
}


@pytest.fixture(params=sorted(UPDATES))
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(request.param, ServeOptions(flavour=request.param)) as running:
        yield running


def label(server: Served) -> Any:
    return server.do(lambda: (server.backend.engine.label, server.backend.engine.version))


def update(server: Served, **headers: str) -> httpx.Response:
    """Change the weights, or their label."""
    kind = server.backend.options.flavour.partition("-")[0]
    path, body = UPDATES[kind]
    return server.client.post(
        path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "LOCALHOST:80", "a.localhost", "[::1]:5"]
)
def test_names_of_this_machine_are_served(server: Served, name: str) -> None:
    """A client may call this machine by any of its own names, and whatever port it believes in."""
    assert 200 == server.client.get("/health", headers={"host": name}).status_code


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[",
        "localhost@evil",
    ],
)
def test_names_of_others_are_not_served(server: Served, name: str) -> None:
    """A name of somebody else that leads here is refused: a page could read what it gets by it."""
    before = label(server)
    reply = update(server, host=name)

    assert 421 == reply.status_code
    assert "call it by 127.0.0.1 or localhost" in reply.json()["error"]["message"]
    assert before == label(server)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_requests_of_web_pages_are_refused(server: Served, headers: dict[str, str]) -> None:
    """What a browser sends for a page of another origin changes nothing, also a page of another
    port of this machine.
    """
    before = label(server)
    reply = update(server, **headers)

    assert (403, before) == (reply.status_code, label(server))
    assert "no requests that a web page sends" in reply.json()["error"]["message"]


def test_a_browser_may_look_at_a_server(server: Served) -> None:
    """An address that a person typed, and a page of the server itself, are answered."""
    assert 200 == server.client.get("/health", headers={"sec-fetch-site": "none"}).status_code
    own = {"sec-fetch-site": "same-origin", "origin": server.url}
    assert 200 == server.client.get("/health", headers=own).status_code


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_must_be_json(server: Served, media: str) -> None:
    """A body of another type is refused in the words of the server, even if it would be JSON."""
    before = label(server)
    kind = server.backend.options.flavour.partition("-")[0]
    reply = server.client.post(
        UPDATES[kind][0], content=b'{"model_path": "/x"}', headers={"content-type": media}
    )

    assert (400, before) == (reply.status_code, label(server))
    assert "Only 'application/json' is allowed" in reply.text


def test_a_post_without_body_needs_no_type(server: Served) -> None:
    """Clients that send nothing name no type."""
    path = "/reset_prefix_cache" if "vllm" in server.backend.options.flavour else "/flush_cache"
    assert 200 == server.client.post(path).status_code


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "gpu-7", ""])  # noqa: S104 - refused
def test_other_machines_need_a_token(host: str) -> None:
    """A server that others can reach has a token; the refusal says how to give it one."""
    with pytest.raises(UsageError, match=r"lets other machines in.*add --token TOKEN"):
        Access(host=host)
    assert "t" == Access(host=host, token="t").token  # noqa: S106 - of this test


def test_a_token_that_no_header_can_hold_is_refused() -> None:
    """It could never be sent."""
    with pytest.raises(UsageError, match="must be printable ASCII"):
        Access(token="a\nb")  # noqa: S106 - of this test


PAGE = """<!doctype html><title>page</title><pre id=probe></pre><script>
const url = "URL", results = [];
const attempts = [
  () => fetch(url + "/update_weights_from_disk", {method: "POST", mode: "no-cors",
    headers: {"content-type": "text/plain"}, body: '{"model_path": "/mine"}'}),
  () => fetch(url + "/update_weights_from_disk", {method: "POST", mode: "no-cors",
    body: new Blob(['{"model_path": "/mine"}'])}),
  () => fetch(url + "/update_weights_from_disk", {method: "POST",
    headers: {"content-type": "application/json"}, body: '{"model_path": "/mine"}'}),
  () => fetch(url + "/flush_cache", {mode: "no-cors"}),
  () => new Promise((done) => { const image = new Image(); image.onerror = done;
    image.src = url + "/flush_cache?image"; }),
];
(async () => {
  for (const attempt of attempts) {
    try { await attempt(); results.push("sent"); } catch (error) { results.push("blocked"); }
  }
  document.getElementById("probe").textContent = results.join(" ");
  await fetch("/done");
})();
</script>"""


@needs_browser
def test_a_page_of_another_port_changes_nothing(tmp_path: Path) -> None:
    """Chromium sends what a page of another origin asks for, with and without asking first; no
    weight, label or cache changes.
    """
    assert BROWSER is not None
    done = threading.Event()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/done":
                done.set()
            text = PAGE.replace("URL", server.url).encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with (
        served("sglang", ServeOptions(flavour="sglang")) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), Page) as pages,
    ):
        before, seen = label(server), len(server.backend.recorder.events)
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        try:
            browser = subprocess.Popen(
                [
                    *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu"),
                    f"--user-data-dir={tmp_path / 'profile'}",
                    *("--remote-debugging-port=0", f"http://127.0.0.1:{pages.server_port}/"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                assert done.wait(60), "the page did not run"
            finally:
                browser.kill()
                browser.wait()
        finally:
            pages.shutdown()
            thread.join()
        assert before == label(server)
        assert seen == len(server.backend.recorder.events)


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_headers_are_bounded(server: Served) -> None:
    """More than 64 KiB of headers are refused while they arrive, in one and in many, also behind
    the body.
    """
    start = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    chunked = b"POST /x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    for head, rest in (
        (start + b"a: ", b"x" * 1000),
        (start, b"abc: d\r\n" * 100),
        (chunked, b"abc: d\r\n" * 100),
        (b"", b"\r\n" * 500),
    ):
        with connect(server) as client:
            client.sendall(head)
            with pytest.raises(OSError, match=r"Broken pipe|reset"):
                for _ in range(10_000):
                    client.sendall(rest)
    assert 200 == server.client.get("/health").status_code


@pytest.mark.parametrize("header", [b"a: " + b"x" * 70_000 + b"\r\n", b"a: b\r\n" * 12_000])
def test_headers_that_arrive_at_once_are_bounded(server: Served, header: bytes) -> None:
    """The limit holds for bytes as they are sent, in one header or in many, and whatever else is
    in the same piece is not run.
    """
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with connect(server) as client:
        client.sendall(request + header + b"\r\n" + request + b"\r\n")
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert 1 == answer.count(b"HTTP/1.1 ")
    assert 200 == server.client.get("/health").status_code


def test_a_large_body_is_no_header(server: Served) -> None:
    """A body may be larger than headers, whatever its pieces."""
    body = b'{"text": "' + b"w5 " * 100_000 + b'"}'
    reply = server.client.post(
        "/generate",
        content=iter([body[:9], body[9:]]),
        headers={"content-type": "application/json"},
    )
    assert 431 != reply.status_code


def test_slow_clients_are_dropped(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes too long to send a request is told so and loses the connection; others are
    served meanwhile, and may wait for an answer as long as they want.
    """
    monkeypatch.setattr(connections, "_MAX_SECONDS", 1)
    head = b"POST /generate HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 9\r\n\r\n"
    for beginning in (b"", b"GET /health HTT", head, head + b"{"):
        with connect(server) as client:
            client.sendall(beginning)
            assert 200 == server.client.get("/health").status_code
            assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for its answer is not dropped, however long it takes."""
    monkeypatch.setattr(connections, "_MAX_SECONDS", 1)
    options = ServeOptions(flavour="sglang", engine=EngineOptions(step=1.0))
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    with served("sglang", options) as server:
        reply = server.client.post("/generate", json=body)

    assert 4 == reply.json()["meta_info"]["completion_tokens"]


def test_connections_are_bounded(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection too many is closed; once others have left there is room again."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 5)
    with ExitStack() as clients:
        for _ in range(5):
            clients.enter_context(connect(server))
        with connect(server) as one_too_many:
            assert b"" == one_too_many.recv(1)
    # the server notices one after the other that they have left
    for _ in range(100):
        with suppress(httpx.TransportError):
            assert 200 == server.client.get("/health").status_code
            return
    pytest.fail("there is no room again")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompts": [[5, 6]] * 8193}, "at most 8,192 samples in one request, not 8,193"),
        ({"prompts": [[5]] * 33, "n": 256}, "at most 8,192 samples in one request, not 8,448"),
        ({"prompts": ["w5"] * 9, "n": 4}, None),
        ({"prompts": ["a " * 1_100_000] * 2}, "at most 4,194,304 characters of text"),
        ({"prompts": [[5] * 2100] * 2000}, "at most 4,194,304 tokens of prompts"),
        ({"prompts": [[5] * 2100] * 70, "scored": True}, "131,072 tokens of prompts with logprobs"),
    ],
)
def test_one_request_cannot_ask_for_everything(
    server: Served, body: dict[str, Any], text: str | None
) -> None:
    """A request that would hold up all others is refused with the limit that it exceeds."""
    prompts, samples, scored = body["prompts"], body.get("n", 1), body.get("scored", False)
    if "vllm" in server.backend.options.flavour:
        more = {"prompt_logprobs": 1} if scored else {}
        sent = {"prompt": prompts, "n": samples, "max_tokens": 1, **more}
        reply = server.client.post("/v1/completions", json=sent)
    else:
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        more = {"return_logprob": True, "logprob_start_len": 0} if scored else {}
        sampling = {"n": samples, "max_new_tokens": 1}
        sent = {key: prompts, "sampling_params": sampling, **more}
        reply = server.client.post("/generate", json=sent)

    assert (200 if text is None else 400) == reply.status_code
    assert text is None or text in reply.text
