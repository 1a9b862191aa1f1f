"""`rollproof serve` as a process: what it refuses to start with, how it ends, and what is left of
its trace.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.store import TraceReader

CALL = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
    "return_routed_experts": True,
}
PROMISED = (Path(__file__).parents[3] / "docs" / "example" / "served_contract.toml").read_text(
    encoding="utf-8"
)
resource = pytest.importorskip("resource", reason="POSIX only")


@contextmanager
def started(
    *arguments: str,
    before: Callable[[], None] | None = None,
    reached: str = r"http://127\.0\.0\.1:\d+",
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the address of a server that listens. Background runs ignore SIGINT, which a
    child would inherit.
    """

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if before is not None:
            before()

    command = [sys.executable, "-m", "rollproof", "serve", "--as", "sglang", "--quiet", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=prepare
    )
    assert process.stderr is not None
    try:
        match = re.search(reached, process.stderr.readline())
        assert match is not None
        until(lambda: answered(match.group()) is not None)
        yield process, match.group()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def answered(url: str, path: str = "/health", body: object = None) -> int | None:
    """The status; ``None`` where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    return status_of(
        urllib.request.Request(url + path, data, {"content-type": "application/json"})  # noqa: S310 - our own server
    )


def status_of(request: urllib.request.Request) -> int | None:
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310 - our own server
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--flavour vllm",
            (
                "--flavour vllm does not go with --as sglang: choose one of ['sglang',"
                " 'sglang-0.5.17']."
            ),
        ),
        (
            "--routes npy",
            "--routes npy does not go with --as sglang: choose one of ['int32', 'compact'].",
        ),
        ("--router slime", "--router needs --workers N with more than one"),
        (
            "--router nosuch --workers 2",
            "--router nosuch does not go with --as sglang: choose one of ['gateway', 'slime'].",
        ),
        ("--step inf", "Invalid value for '--step'"),
        ("--trace .", "--trace . exists: name a new file, or remove it first."),
        ("--port 70000", "--port must be 0 to 65535, not 70000."),
        ("--as vllm --incremental", "--incremental is an option of SGLang"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(
    arguments: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """254 before a port is taken; what would be ignored is refused, too."""
    monkeypatch.chdir(tmp_path)
    assert 254 == run(
        ["serve", *([] if "--as" in arguments else ["--as", "sglang"]), *arguments.split()]
    )
    printed = capsys.readouterr().err
    assert text in printed
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "contract.json",
            "[1]",
            (
                "The contract contract.json must be an object with the fields of docs/contract.md,"
                " not a list."
            ),
        ),
        (
            "contract.toml",
            'rows = "T"',
            "contract.toml: The contract cannot be used:\n  - resume must be declared.",
        ),
        (
            "contract.toml",
            PROMISED.replace("num_layers = 3", "num_layers = 4"),
            (
                "The contract contract.toml is about another model: num_layers is 4 there, and 3 of"
                " the served model."
            ),
        ),
        (
            "plan.toml",
            '[[actions]]\ndo = "kill"\nserver = "s1"\nwhen = { request = "r", tokens = 1 }',
            (
                "plan.toml: server s1 does not go with --as sglang --workers 1: choose one of"
                " ['s0']."
            ),
        ),
    ],
)
def test_a_file_that_does_not_fit_the_server_is_refused(
    name: str,
    text: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name, and in words of the file."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    option = "--fault-plan" if name.startswith("plan") else "--contract"
    assert 254 == run(["serve", "--as", "sglang", "--layers", "3", option, name])
    assert words in capsys.readouterr().err


def test_a_port_in_use_is_refused() -> None:
    """With the port, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert 254 == run(["serve", "--as", "sglang", "--port", str(taken.getsockname()[1])])


def test_a_killed_server_loses_no_more_than_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was recorded is in the file a second later, however little it is; `check` says what it
    could not judge, why, and what to do.
    """
    trace = tmp_path / "served.arrow"
    with started("--trace", str(trace)) as (process, url):
        assert 200 == answered(url, "/generate", CALL)
        until(lambda: len(list(TraceReader(trace))) == 4)
        process.kill()
        process.wait(30)
    reader = TraceReader(trace)
    assert ["weights", "call", "admit", "reply"] == [event.kind for event in reader]
    assert reader.ending is not None
    assert (False, 0) == (reader.ending.closed, reader.ending.lost)
    assert 2 == run(["check", str(trace)])
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"not judged: \d+ checks \(stitch \d+, .*\): they need requests and samples, and none were"
        r" reported to this recording",
        output,
    )
    assert "none of their situations occurred (" in output
    assert "next: have your client report its samples:" in output


def test_folders_of_the_trace_are_made(tmp_path: Path) -> None:
    """As those of --json are; a place where none can be made is refused before the start."""
    trace = tmp_path / "new" / "folder" / "served.arrow"
    with started("--trace", str(trace)) as (_, url):
        assert 200 == answered(url, "/generate", CALL)
        until(lambda: len(list(TraceReader(trace))) == 4)
    (tmp_path / "file").touch()

    assert 254 == run(["serve", "--as", "sglang", "--trace", str(tmp_path / "file" / "t.arrow")])


def test_a_full_disk_ends_the_server_and_is_reported_once(tmp_path: Path) -> None:
    """A server whose trace cannot be written is of no use: it ends with 254 and the reason; what it
    wrote before is readable.
    """
    trace = tmp_path / "served.arrow"

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    with started("--trace", str(trace), before=bounded) as (process, url):
        until(lambda: answered(url, "/generate", CALL) is None)
        process.wait(30)
        assert process.stderr is not None
        printed = process.stderr.read()
    assert (254, 1) == (process.returncode, printed.count("\n")), printed
    assert f"rollproof: error: {trace} could not be written: [Errno 27]" in printed
    assert "call" in [event.kind for event in TraceReader(trace)]


def test_a_client_in_the_middle_of_its_request_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Nor is a traceback printed."""
    with started() as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /generate HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 500\r\n\r\n{")
            assert 200 == answered(url)
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        assert process.stderr is not None
        assert (0, False) == (process.returncode, "Traceback" in process.stderr.read())


def test_a_server_for_other_machines_asks_for_its_token() -> None:
    """With --host of another name, whoever sends the token is served, by whatever name."""
    with started(
        "--host", "127.0.0.2", "--token", "of-mine", reached=r"http://127\.0\.0\.2:\d+"
    ) as (
        _,
        url,
    ):
        for key, name, status in (
            ("Bearer of-mine", "gpu-7", 200),
            ("Bearer of-mine2", "127.0.0.2", 401),
            ("of-mine", "127.0.0.2", 401),
            ("", "127.0.0.2", 401),
        ):
            request = urllib.request.Request(  # noqa: S310 - our own server
                f"{url}/health", headers={"authorization": key, "host": name}
            )
            assert status == status_of(request)


def test_a_server_for_other_machines_needs_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one it does not start, and says why."""
    assert 254 == run(["serve", "--as", "vllm", "--host", "0.0.0.0"])  # noqa: S104 - refused
    assert "lets other machines in" in capsys.readouterr().err


def test_a_host_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An address that is not this machine's cannot be listened on."""
    assert 254 == run(["serve", "--as", "vllm", "--host", "192.0.2.1", "--token", "x"])
    assert "Cannot listen on 192.0.2.1, port 0" in capsys.readouterr().err
