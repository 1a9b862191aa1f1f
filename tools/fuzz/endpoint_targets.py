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

from hypothesis import strategies as st

from rollproof.fakes.http.gateway import RouterKind
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import routing, serving
from tools.fuzz.mutations import damaged_bytes, damaged_json
from tools.fuzz.target import Broken, Target

__all__ = ["ENDPOINTS"]

_LOUD_SECONDS = 20.0


class _Served:
    """A server in a thread of its own, and what it logged as errors."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._ready = threading.Event()
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self.errors.append(_logged(record))  # type: ignore[method-assign]
        logging.getLogger("uvicorn.error").addHandler(handler)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(30)
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

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> int | None:
        """Send one request, and look whether the server still answers at once."""
        status = None
        connection = http.client.HTTPConnection(self.address, timeout=_LOUD_SECONDS)
        try:
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            reply.read()
            status = reply.status
        except TimeoutError as error:
            # a call that waits for a resume has no answer: its client may leave
            if path not in _WAITING:
                raise Broken(f"{method} {path} was not answered in {_LOUD_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            connection.close()
        begun = time.monotonic()
        other = http.client.HTTPConnection(self.address, timeout=_LOUD_SECONDS)
        other.request("GET", "/health")
        other.getresponse().read()
        other.close()
        if time.monotonic() - begun > 5:
            raise Broken(f"{method} {path} held up /health for {time.monotonic() - begun:.1f} s")
        if self.errors:
            raise Broken(f"{method} {path} {body[:300]!r}: {self.errors.pop()}")
        return status


_WAITING: frozenset[str] = frozenset()


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


def _requests(sound: tuple[tuple[str, Any], ...]) -> st.SearchStrategy[Any]:
    """Return requests with a damaged body, as values and as bytes."""
    return st.one_of(
        *(
            st.tuples(
                st.just(path),
                damaged_json(body) | damaged_bytes(json.dumps(body).encode()),
                st.sampled_from(["application/json", "text/plain", ""])
                | st.just("application/json"),
            )
            for path, body in sound
        )
    )


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


ENDPOINTS: dict[str, Target] = {
    "endpoints-vllm": _endpoint(lambda: serving("vllm"), _VLLM),
    "endpoints-sglang": _endpoint(lambda: serving("sglang"), _SGLANG),
    "endpoints-router": _endpoint(
        lambda: routing("sglang", ServeOptions(flavour="sglang"), 2, RouterKind.GATEWAY), _ROUTER
    ),
    "http-bytes": Target(
        inputs=lambda: damaged_bytes(_HEAD),
        read=_send,
        around=lambda: _Served(lambda: serving("sglang")),
    ),
}
