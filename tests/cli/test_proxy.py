"""``rollproof proxy`` as a command: its first line, its last ones, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollproof.fakes.http.serving import bound_socket
from rollproof.store import TraceReader
from tests.fakes.http.served import Served, served
from tests.support.command_line import command, output_of

ASK = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
CONTRACT = """
rows = "none"
resume = "client"
versions = "none"
logprobs = "temperature-scaled"
abort_surfaces = false
kv_policy = "recompute"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("sglang") as running:
        yield running


def started(*arguments: str) -> tuple[subprocess.Popen[str], str, str]:
    """The process of a proxy, its address, and its first line."""
    process = subprocess.Popen(
        command("proxy", *arguments), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("proxy on "), line + process.stderr.read()
    return process, line.split()[2], line


def test_a_proxy_ends_with_a_sealed_trace_and_its_counts(server: Served, tmp_path: Path) -> None:
    """On Ctrl-C; `rollproof check` reads the trace."""
    process, url, line = started("--to", server.url, "--trace", str(tmp_path), "--name", "a")
    assert f"to sglang fake at {server.url}; no contract was given" in line
    assert 200 == httpx.post(f"{url}/generate", json=ASK, trust_env=False).status_code
    assert 200 == httpx.post(f"{url}/begin_weight_update", json={}, trust_env=False).status_code
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert 0 == process.returncode
    assert f"trace {tmp_path}/a.0001.arrow: 2 events, 0 requests, 1 call, 0 samples" in rest
    assert "2 requests passed; 0 not answered" in rest
    assert "not recorded, because no event is known for them: /begin_weight_update (1)" in rest
    reader = TraceReader(tmp_path / "a.0001.arrow")
    assert ["call", "reply"] == [event.kind for event in reader]
    assert reader.ending is not None
    assert reader.ending.closed


def test_a_proxy_that_is_killed_leaves_all_but_the_last_second(
    server: Served, tmp_path: Path
) -> None:
    """They were flushed, and can be read."""
    process, url, _ = started("--to", server.url, "--trace", str(tmp_path))
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        for _ in range(5):
            client.post("/generate", json=ASK)
        time.sleep(1.1)
        client.post("/generate", json=ASK)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (path,) = tmp_path.iterdir()
    reader = TraceReader(path)
    assert [event.kind for event in reader].count("reply") >= 5
    assert reader.ending is not None
    assert not reader.ending.closed


def test_bad_input_is_refused(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to do, and before anything passes."""
    contract, file = tmp_path / "contract.toml", tmp_path / "file"
    contract.write_text(CONTRACT.replace("T-1", "T"), encoding="utf-8")
    file.touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "p.0001.arrow").touch()
    to = ("--to", server.url)
    with bound_socket() as bound:
        port = str(bound.getsockname()[1])
        expected = {
            ("--to", "http://127.0.0.1:1", "--trace", str(tmp_path / "t")): "does not answer",
            (*to, "--trace", str(file)): "is a file: name a folder",
            (*to, "--trace", str(tmp_path / "used"), "--name", "p"): "p.0001.arrow exists",
            (*to, "--trace", str(tmp_path / "t"), "--port", port): f"Port {port}",
            (*to, "--trace", str(tmp_path / "t"), "--sample", "0"): "must be a share",
            (*to, "--trace", str(tmp_path / "t"), "--redact", "hash"): "hash:KEY",
            (*to, "--trace", str(tmp_path / "t"), "--contract", "none.toml"): "cannot be read",
            (*to, "--trace", str(tmp_path / "t"), "--like", "nobody"): "No preset is named",
            (
                *(*to, "--trace", str(tmp_path / "t"), "--like", "slime"),
                *("--contract", str(contract)),
            ): "choose one",
        }
        for arguments, message in expected.items():
            assert message in output_of(capsys, "proxy", *arguments, code=254)
    assert not (tmp_path / "t").exists()
