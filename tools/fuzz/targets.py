"""What is fuzzed: each target has a strategy that damages sound inputs, and what reads them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import parquet

from rollproof.cli.app import run
from rollproof.errors import RollproofError
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.gateway import RouterKind
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import routing, serving
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.store import TraceWriter, dump_trace
from rollproof.verification.expected_failures import ExpectedFailures, Outcome
from rollproof.verification.runner import run_case
from tools.fuzz.mutations import damaged_bytes, damaged_json, words

__all__ = ["TARGETS", "Broken", "Target"]

_CODES = {0, 1, 2, 254}
"""Exit codes of a command that did what it should."""
_LOUD_SECONDS = 20.0


class Broken(AssertionError):
    """An input that was not read, and not refused as it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Something to fuzz.

    Attributes:
        inputs: the strategy, made once.
        read: reads one input; raises if that went wrong.
        around: what runs while inputs are read, such as a server; what it yields goes to ``read``.
    """

    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any, Any], None]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def _command(*arguments: str) -> str:
    """Run a command line; return what it printed. Raises ``Broken`` for an exit code of a fault."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    if code not in _CODES or "Traceback" in err.getvalue():
        raise Broken(f"{list(arguments)} ended with {code}: {err.getvalue()[-600:]}")
    return out.getvalue()


def _sound_trace(folder: Path) -> Path:
    name, factory = next(iter(REFERENCES.items()))
    dump_trace(run_case(factory, ABORTED, recipe={"reference": name}), folder / "trace.json")
    return folder / "trace.json"


def _trace_json() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        data = json.loads(_sound_trace(Path(folder)).read_bytes())
    del data["checksum"]
    return data


def _trace_arrow() -> bytes:
    name, factory = next(iter(REFERENCES.items()))
    trace = run_case(factory, ABORTED, recipe={"reference": name})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.arrow"
        with TraceWriter(path, trace.header) as writer:
            for event in trace.events:
                writer.append(event)
        return path.read_bytes()


def _gap_table() -> pa.Table:
    return pa.table(
        {
            "sequence_id": ["a", "a", "b", "b", "c"],
            "position": [0, 1, 0, 1, 0],
            "token": [5, 6, 7, 8, 9],
            "rollout_logprob": [-0.5, -1.5, -0.25, -2.0, -1.0],
            "trainer_logprob": [-0.5, -1.25, -0.25, -2.5, -1.0],
            "mask": [True, True, True, False, True],
        }
    )


def _gap_parquet() -> bytes:
    sink = io.BytesIO()
    parquet.write_table(_gap_table(), sink, write_page_checksum=True)
    return sink.getvalue()


def _gap_arrow() -> bytes:
    sink = io.BytesIO()
    table = _gap_table()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _contract() -> dict[str, Any]:
    return {
        "resume": "client",
        "abort_surfaces": False,
        "versions": "none",
        "logprobs": "none",
        "kv_policy": "recompute",
        "rows": "T-1",
        "num_layers": 3,
        "moe_layers": [0, 1, 2],
        "num_experts": 8,
        "top_k": 2,
    }


def _plan() -> dict[str, Any]:
    return {
        "seed": 3,
        "faults": [{"do": "truncate", "path": "/generate", "nth": [2], "keep": 0.5}],
        "actions": [{"do": "abort", "when": {"request": "r1", "tokens": 2}}],
    }


_EXPECTED = """# known
[[expected]]
check = "routes.rows"  # since then
reason = "concatenated"
issue = "verl#6029"
shows = ["too many route rows"]
since = 2026-11-28

# another
[[expected]]
check = "stitch.tokens"
reason = "twice"
subject = "S"
"""


def _read_file(name: str, *commands: tuple[str, ...]) -> Callable[[Any, Any], None]:
    """Return what writes an input to a file and runs commands on it."""

    def read(data: Any, _: Any) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            for command in commands:
                path.write_bytes(content)
                _command(*(part.replace("FILE", str(path)) for part in command))

    return read


def _read_plan(data: Any, _: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        with contextlib.suppress(RollproofError):
            FaultPlan.from_file(path)


def _read_expected(data: Any, _: Any) -> None:
    """A list that is read can be read again after what fails now was accepted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expected.toml"
        path.write_bytes(data)
        with contextlib.suppress(RollproofError):
            known = ExpectedFailures.read(path)
            verdicts = {"routes.rows": "pass", "stitch.tokens": "fail", "routes.position": "fail"}
            with contextlib.suppress(RollproofError):
                known.accept([Outcome(subject=name, verdicts=verdicts) for name in "ST"])
            try:
                ExpectedFailures.read(path)
            except RollproofError as error:
                raise Broken(f"accepting made the file unreadable: {error}") from error


_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("verify", "--subject", "nosuch:x"),  # without it, it would judge all references
    ("check",),
    ("show",),
    ("replay",),
    ("seal", "--check"),
    ("gap",),
    ("serve", "--as", "vllm", "--top-k", "99"),  # refused, or it would serve
    ("known-bugs", "nosuch"),
    ("checks",),
    ("contract",),
    ("contract", "from"),
    ("nosuch",),
    (),
)
_OPTIONS = [
    "--json",
    "--html",
    "--report",
    "--only",
    "--seed",
    "--profile",
    "--expected",
    "--accept",
    "--witness-dir",
    "--flavour",
    "--jobs",
    "--stack",
    "--part",
    "--checkout",
    "--engine",
    "--request",
    "--finding",
    "--subject",
    "--trust-subject",
    "--contract",
    "--trace",
    "--port",
    "--host",
    "--token",
    "--workers",
    "--router",
    "--routes",
    "--limits",
    "--metrics",
    "--sequence",
    "--rollout",
    "--trainer",
    "--help",
    "-h",
    "-v",
    "--version",
    "--unfinished-ok",
]


@st.composite
def _command_lines(draw: st.DrawFn) -> list[str]:
    values = words.filter(lambda text: "\0" not in text) | st.sampled_from(
        ["trace.json", ".", "/", "/dev/null", "-1", "1e9", "routes.rows", "vllm", "nosuch.json"]
    )
    more = draw(st.lists(st.sampled_from(_OPTIONS) | values, max_size=5))
    return [*draw(st.sampled_from(_COMMANDS)), *more]


def _read_command_line(arguments: list[str], folder: Any) -> None:
    encodable = [word.encode("utf-8", "replace").decode() for word in arguments]
    folder.count += 1
    if folder.count % 500:
        _command(*encodable)
        return
    # and now and then as a shell would
    done = subprocess.run(
        [sys.executable, "-m", "rollproof", *encodable],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    if done.returncode not in _CODES:
        raise Broken(f"{encodable} ended with {done.returncode}: {done.stderr[-600:]}")


class _Counted:
    count = 0


@contextlib.contextmanager
def _folder() -> Iterator[_Counted]:
    """A folder with a trace, from which a command line may name files and in which it may write."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        _sound_trace(Path(folder))
        os.chdir(folder)
        try:
            yield _Counted()
        finally:
            os.chdir(before)


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


TARGETS: dict[str, Target] = {
    "trace-json": Target(
        inputs=lambda: damaged_json(_trace_json()),
        read=_read_file("t.json", ("check", "FILE"), ("show", "FILE"), ("seal", "FILE")),
    ),
    "trace-bytes": Target(
        inputs=lambda: damaged_bytes(json.dumps(_trace_json()).encode()),
        read=_read_file("t.json", ("check", "FILE")),
    ),
    "trace-replay": Target(
        inputs=lambda: damaged_json(_trace_json()["header"]).map(
            lambda header: {**_trace_json(), "header": header}
        ),
        read=_read_file("t.json", ("replay", "FILE")),
    ),
    "trace-arrow": Target(
        inputs=lambda: damaged_bytes(_trace_arrow()),
        read=_read_file("t.arrow", ("check", "FILE"), ("show", "FILE")),
    ),
    "gap-parquet": Target(
        inputs=lambda: damaged_bytes(_gap_parquet()),
        read=_read_file("g.parquet", ("gap", "FILE", "--json", "-")),
    ),
    "gap-arrow": Target(
        inputs=lambda: damaged_bytes(_gap_arrow()),
        read=_read_file("g.arrow", ("gap", "FILE", "--json", "-")),
    ),
    "contract": Target(
        inputs=lambda: damaged_json(_contract()) | damaged_bytes(json.dumps(_contract()).encode()),
        # top-k 99 exceeds the experts, which are looked at last: nothing is served
        read=_read_file("c.json", ("serve", "--as", "vllm", "--contract", "FILE", "--port", "1")),
    ),
    "fault-plan": Target(
        inputs=lambda: damaged_json(_plan()) | damaged_bytes(json.dumps(_plan()).encode()),
        read=_read_plan,
    ),
    "expected-failures": Target(
        inputs=lambda: damaged_bytes(_EXPECTED.encode()), read=_read_expected
    ),
    "command-line": Target(inputs=_command_lines, read=_read_command_line, around=_folder),
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
