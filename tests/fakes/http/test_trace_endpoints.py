"""A served trace that is judged: requests and samples reported to the server, calls attributed, and
`rollproof check` on what was written.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.contract import Contract
from rollproof.core.events.rollout import Call, Result, Submit
from rollproof.core.records import FinishReason, Request, Rollout
from rollproof.errors import UsageError
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.trace_client import Teller
from rollproof.verification.traces import judge
from tests.fakes.http.served import Served, served

CONTRACT: dict[str, Any] = {
    "rows": "T-1",
    "provenance": "as-sampled",
    "resume": "client",
    "abort_surfaces": False,
    "versions": "none",
    "logprobs": "temperature-scaled",
    "layer_axis": "all",
    "num_layers": 3,
    "moe_layers": (0, 1, 2),
    "num_experts": 8,
    "top_k": 2,
    "filler": "none",
    "dtype": "int32",
    "kv_policy": "keep",
}
MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
OPTIONS = ServeOptions(
    flavour="sglang",
    model=MODEL,
    engine=EngineOptions(step=0.005, prefix_cache=True),
    contract=Contract(**CONTRACT),
)


def rolled(server: Served, request: Request, *, cut: bool, wrong: bool = False) -> Rollout:
    """A client's rollout: one call, or two with an abort between them; ``wrong``: routes
    concatenated.
    """
    ids, logprobs, rows = list(request.prompt_ids), [], []
    assert request.max_tokens is not None
    for number in range(2 if cut else 1):
        body = {
            "rid": f"{request.request_id}-{number}#",
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": request.max_tokens - len(logprobs)},
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": 0 if wrong else sum(map(len, rows)),
        }
        aborted = cut and not number
        reply = (
            _aborted(server, body, 2)
            if aborted
            else server.client.post("/generate", json=body).json()
        )
        ids = [*ids, *reply["output_ids"]]
        logprobs += [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]
        rows.append(
            np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(
                -1, 3, 2
            )
        )
    return Rollout(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        response_ids=tuple(ids[len(request.prompt_ids) :]),
        finish_reason=FinishReason.LENGTH,
        logprobs=np.array(logprobs),
        routes=np.concatenate(rows),
    )


def _aborted(server: Served, body: dict[str, Any], least: int) -> Any:
    """A call that is aborted once it has sampled some tokens."""
    import threading

    got: list[Any] = []
    thread = threading.Thread(
        target=lambda: got.append(server.client.post("/generate", json=body).json())
    )
    thread.start()
    while not server.do(lambda: max(server.backend.engine.progress().values(), default=0)) >= least:
        time.sleep(0.001)
    server.client.post("/abort_request", json={"rid": body["rid"]})
    thread.join()
    return got[0]


def judged(server: Served) -> Any:
    events = server.do(lambda: server.backend.recorder.trace(EngineBackend.header(OPTIONS)))
    return judge(events)


def test_samples_that_are_told_are_judged() -> None:
    """Tokens, logprobs, routes and budgets of a request that was cut off and went on are checked,
    and found right.
    """
    with served("sglang", OPTIONS) as server:
        teller = Teller(server.url)
        for number, cut in enumerate((False, True)):
            request = Request(
                request_id=f"r{number}",
                prompt_ids=(11 + number, 12, 13),
                max_tokens=120 if cut else 6,
            )
            teller.submit(request)
            teller.result(rolled(server, request, cut=cut))
        judgement = judged(server)
        events = server.do(lambda: server.backend.recorder.events)
    passed = {result.id for result in judgement.results if result.verdict == "pass"}
    assert {"r0", "r1"} == {event.request_id for event in events if isinstance(event, Call)}
    assert {
        "stitch.tokens",
        "stitch.logprobs-paired",
        "stitch.resume-prompt",
        "routes.rows",
        "routes.content",
        "lifecycle.ends-once",
    } <= passed
    assert () == judgement.failed


def test_a_fault_in_a_reported_sample_is_detected() -> None:
    """Routes concatenated on resume."""
    with served("sglang", OPTIONS) as server:
        teller = Teller(server.url)
        request = Request(request_id="r0", prompt_ids=(11, 12, 13), max_tokens=120)
        teller.submit(request)
        teller.result(rolled(server, request, cut=True, wrong=True))
        assert "routes.rows" in judged(server).failed


def test_calls_are_attributed_by_header_by_handle_and_by_tokens() -> None:
    """In this order; a call of nobody's keeps its own handle, and one that goes on where an aborted
    one stopped is of the same request.
    """
    send = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
    with served("sglang", OPTIONS) as server:
        teller = Teller(server.url)
        server.client.post("/generate", json={**send, "rid": "unknown"})
        teller.submit(Request(request_id="a", prompt_ids=(5, 6), max_tokens=9))
        teller.submit(Request(request_id="b", prompt_ids=(5, 6, 7), max_tokens=9))
        server.client.post("/generate", json={**send, "rid": "x"})
        server.client.post("/generate", json={**send, "rid": "a"})
        server.client.post(
            "/generate", json={**send, "rid": "y"}, headers=dict(teller.headers("a"))
        )
        teller.ended("a", error="TimeoutError: slow")
        teller.ended("b")
        cut = _aborted(
            server, {**send, "rid": "c1", "sampling_params": {"max_new_tokens": 4000}}, 2
        )
        server.client.post(
            "/generate", json={**send, "rid": "c2", "input_ids": [5, 6, 7, *cut["output_ids"]]}
        )
        events = server.do(lambda: server.backend.recorder.events)
    assert ["unknown", "b", "a", "a", "c1", "c1"] == [
        event.request_id for event in events if isinstance(event, Call)
    ]
    assert 2 == sum(isinstance(event, Submit) for event in events)
    assert ["TimeoutError: slow", None] == [
        event.error for event in events if isinstance(event, Result)
    ]


def test_invalid_reports_are_refused_with_the_reason() -> None:
    """No contract, a request reported twice, the end of a request that is not open, an invalid
    sample, no server.
    """
    submitted = Request(request_id="a", prompt_ids=(5, 6), max_tokens=9)
    with (
        served("sglang") as server,
        pytest.raises(UsageError, match="start the server with --contract"),
    ):
        Teller(server.url).submit(submitted)
    with served(
        "vllm",
        ServeOptions(
            flavour="vllm", contract=Contract(**{**CONTRACT, "dtype": "uint8", "logprobs": "raw"})
        ),
    ) as server:
        teller = Teller(server.url)
        teller.submit(submitted)
        with pytest.raises(UsageError, match="submitted before"):
            teller.submit(submitted)
        with pytest.raises(UsageError, match="is not open"):
            teller.ended("b")
        reply = server.client.post("/rollproof/result", json={"request_id": "a", "rollout": 3})
        assert (400, True) == (reply.status_code, "This is no result" in reply.text)
    with pytest.raises(UsageError, match="cannot be reached"):
        Teller("http://127.0.0.1:1").submit(submitted)


@pytest.mark.parametrize(
    "url",
    ["nope", "", "127.0.0.1:30000", "ftp://host", "http://", "http://h:port", "http://a b", 7],
)
def test_a_reporter_takes_an_address(url: Any) -> None:
    """Anything else is refused at once, and not with the words of urllib at the first report."""
    with pytest.raises(UsageError, match="Teller takes the address of the server, such as http://"):
        Teller(url)


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`rollproof serve` as a process of its own, and its address."""
    command = [sys.executable, "-m", "rollproof", "serve", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert match is not None, first
        for _ in range(400):
            try:
                urllib.request.urlopen(f"{match.group()}/health", timeout=5).close()  # noqa: S310 - our own server
                break
            except OSError:
                time.sleep(0.05)
        yield process, match.group()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_serve_quietly_and_its_trace_is_complete(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Exit 0, no traceback, also while a stream is under way; `rollproof check` reads the trace to
    its end.
    """
    trace, contract = tmp_path / "served.arrow", tmp_path / "contract.json"
    contract.write_text(json.dumps(CONTRACT))
    with started(
        "--as",
        "sglang",
        "--trace",
        str(trace),
        "--contract",
        str(contract),
        "--quiet",
        "--step",
        "0.01",
    ) as (process, url):
        request = Request(request_id="r0", prompt_ids=(11, 12, 13), max_tokens=2)
        teller = Teller(url)
        teller.submit(request)

        async def hang() -> None:
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            body = (
                b'{"input_ids": [5], "stream": true, "sampling_params": {"max_new_tokens": 4000}}'
            )
            writer.write(
                b"POST /generate HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            await writer.drain()
            await asyncio.sleep(0.1)
            process.send_signal(number)
            await asyncio.to_thread(process.wait, 30)
            writer.close()

        asyncio.run(hang())
        assert process.stderr is not None
        said = process.stderr.read()
    assert 0 == process.returncode, said
    assert "Traceback" not in said
    checked = subprocess.run(
        [sys.executable, "-m", "rollproof", "check", str(trace)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode in (1, 2), checked.stderr
    assert "engine calls" in checked.stdout
    assert "unfinished" not in checked.stdout
    assert "none were reported" not in checked.stdout


def test_serve_refuses_unreadable_files(tmp_path: Path) -> None:
    """A plan and a contract that make no sense end it with 254 and one line."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[[faults]]\ndo = 'explode'\n")
    for option in ("--fault-plan", "--contract"):
        command = [sys.executable, "-m", "rollproof", "serve", "--as", "sglang", option, str(wrong)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (254, "") == (ended.returncode, ended.stdout)
        assert ended.stderr.startswith("rollproof: error:")
        assert "Traceback" not in ended.stderr
