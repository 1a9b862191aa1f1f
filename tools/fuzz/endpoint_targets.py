"""Requests to the fake servers and their router: damaged bodies, and damaged bytes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from rollproof.fakes.http.gateway import RouterKind
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import routing, serving
from tools.fuzz.mutations import Changes, Inputs, damaged_bytes, damaged_json, one_of
from tools.fuzz.target import Broken, Target

__all__ = ["ENDPOINTS"]

_LOUD_SECONDS = 15.0  # less than a hang, which would not say which request it was
_BETWEEN_LOOKS = 25


class _Served:
    """A server in a thread of its own, and what it logged as errors."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._ready = threading.Event()
        self.errors: list[str] = []
        self._count = 0

    def __enter__(self) -> Self:
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self.errors.append(_logged(record))  # type: ignore[method-assign]
        logging.getLogger("uvicorn.error").addHandler(handler)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(30)
        self._connection = http.client.HTTPConnection(self.address, timeout=_LOUD_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self._make() as (url, _):
            logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
            self.address = url.removeprefix("http://")
            self._ready.set()
            await self._end.wait()

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Send one request, and look now and then whether the server still answers others."""
        begun = time.monotonic()
        try:
            self._send(method, path, body, headers)
        except TimeoutError as error:
            raise Broken(f"{method} {path} was not answered in {_LOUD_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException, ValueError):
            pass
        self._count += 1
        if time.monotonic() - begun > 1 or self._count % _BETWEEN_LOOKS == 0:
            self._look(f"{method} {path}")
        if self.errors:
            raise Broken(f"{method} {path} {body[:300]!r}: {self.errors.pop()}")

    def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        # one connection for as long as the server leaves it open: a new one takes as long again
        try:
            self._connection.request(method, path, body or None, headers)
            self._connection.getresponse().read()
        except BaseException:
            self._connection.close()
            raise

    def _look(self, request: str) -> None:
        begun = time.monotonic()
        other = http.client.HTTPConnection(self.address, timeout=_LOUD_SECONDS)
        other.request("GET", "/health")
        other.getresponse().read()
        other.close()
        if time.monotonic() - begun > 5:
            raise Broken(f"{request} held up /health for {time.monotonic() - begun:.1f} s")


def _logged(record: logging.LogRecord) -> str:
    return logging.Formatter().format(record)[-900:]


_SAMPLING = {"temperature": 1.0, "n": 1, "max_tokens": 3, "ignore_eos": True, "top_p": 1.0}
_VLLM: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", {"model": "fake", "prompt": [5, 6], **_SAMPLING, "logprobs": 1}),
    ("/v1/completions", {"prompt": ["w5 w6", "w7"], **_SAMPLING, "stream": True, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}], **_SAMPLING}),
    (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": _SAMPLING, "stream": False},
    ),
    ("/tokenize", {"prompt": "w5 w6"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/collective_rpc", {"method": "x", "args": [1], "kwargs": {"a": 1}}),
    ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["x"], "shapes": [[1]]}}),
    ("/update_weight_version", {"weight_version": "1"}),
    ("/abort_requests", {"request_ids": ["a"]}),
    ("/reset_prefix_cache", {}),
    ("/rollproof/submit", {"request": {"request_id": "r0", "prompt_ids": [5], "max_tokens": 3}}),
)
_SGLANG: tuple[tuple[str, Any], ...] = (
    (
        "/generate",
        {
            "input_ids": [5, 6],
            "sampling_params": {"max_new_tokens": 3, "temperature": 1.0, "n": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
            "return_routed_experts": True,
            "rid": "a",
            "stream": False,
        },
    ),
    (
        "/generate",
        {"text": ["w5", "w6"], "sampling_params": [{"max_new_tokens": 2}] * 2, "stream": True},
    ),
    ("/v1/completions", {"model": "x", "prompt": "w5", "max_tokens": 3, "logprobs": 1}),
    (
        "/v1/chat/completions",
        {"model": "x", "messages": [{"role": "user", "content": "w5"}], "max_tokens": 3},
    ),
    ("/update_weights_from_disk", {"model_path": "/x", "weight_version": "1", "flush_cache": True}),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["x"], "shapes": [[1]]}),
    ("/abort_request", {"rid": "a", "abort_all": False}),
    ("/release_memory_occupation", {"tags": ["weights"]}),
    ("/update_weight_version", {"new_version": "1", "abort_all_requests": True}),
    ("/flush_cache", {}),
)
_ROUTER: tuple[tuple[str, Any], ...] = (
    *_SGLANG[:2],
    ("/workers", {"url": "http://127.0.0.1:1"}),
    ("/add_worker", {"url": "http://127.0.0.1:1"}),
)


def _requests(sound: tuple[tuple[str, Any], ...]) -> Inputs:
    """Return requests with a damaged body, as values and as bytes."""
    return one_of(*(_request(path, body) for path, body in sound))


def _request(path: str, sound: Any) -> Inputs:
    body = one_of(damaged_json(sound), damaged_bytes(json.dumps(sound).encode()))

    def damaged(changes: Changes) -> tuple[str, Any, str]:
        media = changes.random.choice([*["application/json"] * 4, "text/plain", ""])
        return path, body(changes), media

    return damaged


def _ask(request: Any, server: _Served) -> None:
    path, body, media = request
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    server.ask("POST", path, content, {"content-type": media})


def _endpoint(make: Callable[[], Any], sound: tuple[tuple[str, Any], ...]) -> Target:
    return Target(inputs=lambda: _requests(sound), read=_ask, around=lambda: _Served(make))


_HEAD = (
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'transfer-encoding: chunked\r\n\r\n1a\r\n{"input_ids": [5], "rid": 3}\r\n0\r\n\r\n'
)


def _send(data: bytes, server: _Served) -> None:
    host, port = server.address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=_LOUD_SECONDS) as client,
        contextlib.suppress(OSError),
    ):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):
            pass
    server.ask("GET", "/health", b"", {})


# A request whose limit of tokens is damaged samples up to this, one token a millisecond or slower.
_LENGTH = 256
_SGLANG_OPTIONS = ServeOptions(flavour="sglang", max_length=_LENGTH)
_VLLM_OPTIONS = ServeOptions(flavour="vllm", max_length=_LENGTH)
ENDPOINTS: dict[str, Target] = {
    "endpoints-vllm": _endpoint(lambda: serving("vllm", _VLLM_OPTIONS), _VLLM),
    "endpoints-sglang": _endpoint(lambda: serving("sglang", _SGLANG_OPTIONS), _SGLANG),
    "endpoints-router": _endpoint(
        lambda: routing("sglang", _SGLANG_OPTIONS, 2, RouterKind.GATEWAY), _ROUTER
    ),
    "http-bytes": Target(
        inputs=lambda: damaged_bytes(_HEAD),
        read=_send,
        around=lambda: _Served(lambda: serving("sglang", _SGLANG_OPTIONS)),
    ),
}
