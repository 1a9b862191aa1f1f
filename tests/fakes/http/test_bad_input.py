"""Bad requests to either fake server, over real loopback: every answer is a status of its
kind, and the engine is left as it was.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import Served, served

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
ENGINE = EngineOptions(max_batch=4, step=0.002, prefix_cache=True)
SGLANG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
VLLM = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}
CALLS = {"sglang": ("/generate", SGLANG), "vllm": ("/inference/v1/generate", VLLM)}
LONG = {
    "sglang": ("/generate", {**SGLANG, "rid": "long", "sampling_params": {"max_new_tokens": 400}}),
    "vllm": (
        "/inference/v1/generate",
        {**VLLM, "request_id": "long", "sampling_params": {"max_tokens": 400}},
    ),
}
SERVER_KINDS = ("sglang", "vllm")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Served]]:
    options = {
        server_kind: ServeOptions(
            flavour=server_kind, model=MODEL, engine=ENGINE, max_length=512, max_body=20_000
        )
        for server_kind in SERVER_KINDS
    }
    with served("sglang", options["sglang"]) as sglang, served("vllm", options["vllm"]) as vllm:
        yield {"sglang": sglang, "vllm": vllm}


@pytest.fixture(params=SERVER_KINDS)
def server_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "it did not happen within twenty seconds"
        time.sleep(0.005)


def idle(server: Served) -> bool:
    return not server.do(lambda: server.backend.engine.in_flight)


def runs(server: Served) -> bool:
    return bool(server.do(lambda: sum(server.backend.engine.progress().values())))


def answers(server: Served, server_kind: str) -> int:
    path, body = CALLS[server_kind]
    return server.client.post(path, json=body).status_code


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 5000, b"null", b'{"a": NaN, "b": 1e999}', b"{}" * 2],
)
def test_a_body_that_is_no_object_is_a_400(
    servers: dict[str, Served], server_kind: str, content: bytes
) -> None:
    """Malformed JSON is never a 500, and the next call is answered."""
    reply = servers[server_kind].client.post(
        CALLS[server_kind][0], content=content, headers={"content-type": "application/json"}
    )
    assert 400 == reply.status_code
    assert reply.headers["content-type"].startswith("application/json")
    assert 200 == answers(servers[server_kind], server_kind)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused_before_it_is_read(
    servers: dict[str, Served], server_kind: str, chunked: bool
) -> None:
    """A body above the bound is a 413, by its declared length and where none is declared."""
    content: Any = (b"x" * 1000 for _ in range(200)) if chunked else b"x" * 200_000
    try:
        status = (
            servers[server_kind].client.post(CALLS[server_kind][0], content=content).status_code
        )
    except httpx.HTTPError:  # the server answers and closes while the client still sends
        status = 413
    assert 413 == status
    assert 200 == answers(servers[server_kind], server_kind)


def test_a_declared_length_that_is_no_number_or_never_comes_holds_nobody_up(
    servers: dict[str, Served], server_kind: str
) -> None:
    """A client that declares more than it sends, and leaves, leaves no call; others are served in
    the meantime.
    """
    path = CALLS[server_kind][0]
    host, port = servers[server_kind].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(
            f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 5000\r\n\r\n{{".encode()
        )
        assert 200 == answers(servers[server_kind], server_kind)
    with socket.create_connection((host, int(port))) as odd:
        odd.sendall(f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-length: many\r\n\r\n".encode())
        assert b"400" in odd.recv(100).split(b"\r\n")[0]
    until(lambda: idle(servers[server_kind]))


@pytest.mark.parametrize(
    ("server_kind", "path", "body", "status"),
    [
        ("sglang", "/nothing", {}, 404),
        ("vllm", "/nothing", {}, 404),
        ("vllm", "/v1/completions", {"model": "x", "prompt": 7}, 400),
        ("vllm", "/v1/completions", {"model": "x", "prompt": True}, 400),
        ("sglang", "/v1/completions", {"model": "x", "prompt": 7}, 400),
        ("sglang", "/generate", {**SGLANG, "no_such_field": 1}, 200),
        ("vllm", "/inference/v1/generate", {**VLLM, "no_such_field": 1}, 200),
        ("sglang", "/generate", {**SGLANG, "sampling_params": {"no_such_parameter": 1}}, 500),
        ("sglang", "/generate", {**SGLANG, "sampling_params": {"temperature": -1}}, 400),
        ("vllm", "/inference/v1/generate", {**VLLM, "sampling_params": {"temperature": -1}}, 400),
        ("sglang", "/generate", {**SGLANG, "sampling_params": {"max_new_tokens": -1}}, 400),
        ("vllm", "/inference/v1/generate", {**VLLM, "sampling_params": {"max_tokens": 0}}, 400),
        ("sglang", "/generate", {**SGLANG, "input_ids": [5] * 600}, 400),
        ("vllm", "/inference/v1/generate", {**VLLM, "token_ids": [5] * 600}, 400),
        ("sglang", "/generate", {**SGLANG, "input_ids": [1 << 70]}, 400),
        ("vllm", "/inference/v1/generate", {**VLLM, "token_ids": [1 << 70]}, 400),
        ("sglang", "/generate", {**SGLANG, "routed_experts_start_len": 4}, 400),
        ("sglang", "/generate", {**SGLANG, "return_logprob": True, "logprob_start_len": 4}, 400),
        ("sglang", "/generate", {**SGLANG, "return_logprob": True, "logprob_start_len": 3}, 200),
        ("sglang", "/generate", {**SGLANG, "logprob_start_len": 4}, 200),
        (
            "vllm",
            "/inference/v1/generate",
            {**VLLM, "sampling_params": {"routed_experts_prompt_start": 4}},
            400,
        ),
        ("sglang", "/generate", {"text": "\x00\ud800".encode("utf-8", "replace").decode()}, 200),
        ("sglang", "/v1/chat/completions", {"messages": [{"role": "user"}], "max_tokens": 1}, 400),
        ("vllm", "/v1/chat/completions", {"messages": [{"role": "user"}], "max_tokens": 1}, 400),
        ("sglang", "/v1/completions", {"prompt": [5], "logprobs": "all"}, 400),
        ("sglang", "/v1/completions", {"prompt": [5], "logprobs": [1], "stream": True}, 400),
        ("sglang", "/v1/completions", {"prompt": [5], "model": [], "stream": True}, 400),
        ("sglang", "/v1/completions", {"prompt": [5], "stream_options": [1], "stream": True}, 400),
        (
            "sglang",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "w5"}], "model": {}, "stream": True},
            400,
        ),
        ("sglang", "/update_weights_from_distributed", {}, 400),
        ("vllm", "/update_weights", {}, 400),
        ("vllm", "/update_weight_version", {"new_version": 3}, 400),
        ("sglang", "/update_weight_version", {"new_version": 3}, 400),
    ],
)
def test_wrong_values_have_the_status_of_the_real_server(
    servers: dict[str, Served], server_kind: str, path: str, body: dict[str, Any], status: int
) -> None:
    """Unknown endpoints and fields, values out of range, ids beyond every integer."""
    assert status == servers[server_kind].client.post(path, json=body).status_code
    assert 200 == answers(servers[server_kind], server_kind)


def test_a_method_that_an_endpoint_has_not_is_a_405_that_names_those_it_has(
    servers: dict[str, Served], server_kind: str
) -> None:
    """As HTTP requires."""
    reply = servers[server_kind].client.get(CALLS[server_kind][0])
    assert (405, True) == (reply.status_code, "POST" in reply.headers["allow"])


def test_a_handle_in_use_is_refused_by_sglang_and_taken_by_vllm(
    servers: dict[str, Served], server_kind: str
) -> None:
    """SGLang refuses a duplicate rid while the first is in flight; vLLM makes its ids unique
    itself.
    """
    server, (path, body) = servers[server_kind], LONG[server_kind]
    first = threading.Thread(target=lambda: server.client.post(path, json=body))
    first.start()
    until(lambda: runs(server))
    short = {**body, "sampling_params": CALLS[server_kind][1]["sampling_params"]}
    again = server.client.post(path, json=short)
    assert (400 if server_kind == "sglang" else 200) == again.status_code
    server.client.post(
        "/abort_request" if server_kind == "sglang" else "/abort_requests", json={"abort_all": True}
    )
    first.join(20)
    assert 200 == server.client.post(path, json=short).status_code  # the handle is free again


def test_aborts_of_unknown_calls_are_accepted(servers: dict[str, Served], server_kind: str) -> None:
    """An unknown id, an empty one and none at all are answered, and end nothing."""
    bodies: tuple[Any, ...] = (
        ({"rid": "nobody"}, {"rid": ""}, {})
        if server_kind == "sglang"
        else ({"request_ids": ["nobody"]}, {})
    )
    path = "/abort_request" if server_kind == "sglang" else "/abort_requests"
    assert [200] * len(bodies) == [
        servers[server_kind].client.post(path, json=body).status_code for body in bodies
    ]


def test_weights_are_taken_while_paused_and_while_not(
    servers: dict[str, Served], server_kind: str
) -> None:
    """An update needs no pause; pausing twice and resuming twice are taken, and the engine runs
    afterwards.
    """
    server = servers[server_kind]
    if server_kind == "sglang":
        pause, resume = ("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})
        update = ("/update_weights_from_disk", {"model_path": "x", "weight_version": "v"})
    else:
        pause, resume = ("/pause?mode=keep", None), ("/resume", None)
        update = ("/update_weights", {"update_info": {"weight_dir": "x"}})
    orders = [update, pause, pause, update, resume, resume]
    assert [200] * 6 == [server.client.post(path, json=body).status_code for path, body in orders]
    assert 200 == answers(server, server_kind)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_frees_its_slot(
    servers: dict[str, Served], server_kind: str, stream: bool
) -> None:
    """No call goes on for a client that hung up, whether tokens were streamed to it or not."""
    server, (path, body) = servers[server_kind], LONG[server_kind]
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request(
        "POST", path, json.dumps({**body, "stream": stream}), {"content-type": "application/json"}
    )
    until(lambda: runs(server))
    if stream:
        connection.getresponse().read(10)
    connection.close()
    until(lambda: idle(server))
    assert 200 == answers(server, server_kind)


def test_many_clients_that_vanish_at_once_leave_nothing(
    servers: dict[str, Served], server_kind: str
) -> None:
    """More than the engine runs at once: those that waited are forgotten, too."""
    server, (path, body) = servers[server_kind], LONG[server_kind]
    host, port = server.url.removeprefix("http://").split(":")
    connections = []
    for number in range(12):
        connection = http.client.HTTPConnection(host, int(port))
        sglang = {**body, "rid": f"gone-{number}", "request_id": f"gone-{number}"}
        connection.request("POST", path, json.dumps(sglang), {"content-type": "application/json"})
        connections.append(connection)
    until(lambda: server.do(lambda: len(server.backend.engine.in_flight)) == 12)
    for connection in connections:
        connection.close()
    until(lambda: idle(server))
    assert 200 == answers(server, server_kind)
