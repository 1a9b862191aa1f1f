"""`rollproof show`: stories of findings and requests, pages, and what it says of bad input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from rollproof.verification import trace_survey
from tests.support.shown_traces import traced, written


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def output_of(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = ExitCode.PASS
) -> str:
    """What a command prints to both streams, once it has ended with ``code``."""
    assert code == run(["show", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def test_the_first_finding_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """What the trace is, the promise and the finding, and its story with times and a mark; the
    other findings are listed.
    """
    dump_trace(traced(4, wrong=[1, 2], shifted=[3]), "t.json")
    text = output_of(capsys, "t.json")

    assert "t.json: by hand (recorded); 34 events, 4 requests" in text
    assert "FAIL  stitch.tokens: The response holds exactly the tokens" in text
    assert "    1. 1 of 4 tokens of the response is not what the engines sampled" in text
    assert "... and 1 more finding of this kind" in text
    assert "     event      time  what happened\n        10  +0.000 s  r1 submitted: 3" in text
    assert "\n  >>    17  +7.000 s  r1 delivered: 4 tokens, 6 route rows, ended by length" in text
    assert "    2. routes.position: " in text


@pytest.mark.parametrize("name", ["routes.position.json", "routes.position.2.json"])
def test_a_counterexample_tells_the_finding_of_its_check(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is printed below that finding; those of other checks are listed."""
    dump_trace(traced(4, wrong=[1], shifted=[3]), name)
    text = output_of(capsys, name)
    assert "FAIL  routes.position: " in text
    assert "    1. stitch.tokens: " in text


def test_another_finding_or_request_is_told_on_demand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its number, or by the name of the request."""
    written(Path("t.arrow"), traced(4, wrong=[1], shifted=[3]))
    assert "FAIL  routes.position" in output_of(capsys, "t.arrow", "--finding", "2")
    text = output_of(capsys, "t.arrow", "--request", "r2")

    assert "r2 delivered: 4 tokens" in text
    assert "FAIL" not in text and ">>" not in text


def test_a_clean_trace_tells_its_first_request(capsys: pytest.CaptureFixture[str]) -> None:
    """And says how many more there are."""
    dump_trace(traced(3), "t.json")
    text = output_of(capsys, "t.json")

    assert "No check found anything." in text
    assert "r0 delivered: 4 tokens" in text
    assert "2 more requests, told by --request ID" in text


def test_a_long_trace_says_that_it_was_not_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look ends at the first finding, and names what reads the rest."""
    monkeypatch.setattr(trace_survey, "LONG", 0)
    written(Path("t.arrow"), traced(40, wrong=[1, 30]))
    text = output_of(capsys, "t.arrow")

    assert "read so far" in text
    assert "--finding 1 reads all and lists the others" in text
    assert "read so far" not in output_of(capsys, "t.arrow", "--finding", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.json", "--finding", "2"], "There is no finding 2; there is only 1."),
        (["t.json", "--finding", "0"], "There is no finding 0; there is only 1."),
        (["t.json", "--request", "r9"], "has no request 'r9'; there are r0, r1, r2."),
        (["t.json", "--request", "r0", "--finding", "1"], "Give --finding or --request, not both"),
        (["missing.json"], "There is no trace at missing.json"),
        (["t.json", "--html", "."], "it is a folder"),
        (["newer.json"], "Upgrade rollproof"),
        (["other.json"], "looks like a report"),
        (["empty.json"], "is empty"),
    ],
)
def test_bad_arguments_and_files_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """What is wrong, and what there is."""
    dump_trace(traced(3, wrong=[1]), "t.json")
    Path("newer.json").write_text('{"format": "rollproof-trace", "schema": 9}')
    Path("other.json").write_text('{"schema": 1, "checks": []}')
    Path("empty.json").write_text("")
    assert message in output_of(capsys, *arguments, code=ExitCode.USAGE)


def test_a_cut_trace_is_told_as_far_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """With what is missing."""
    path = written(Path("t.arrow"), traced(6, wrong=[1]))
    path.write_bytes(path.read_bytes()[:-2000])
    text = output_of(capsys, "t.arrow")

    assert "FAIL  stitch.tokens" in text
    assert "The writer did not close the file" in text


def test_a_damaged_trace_is_an_error_after_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    """What could be read is told, and the exit code says that it was not all."""
    path = written(Path("t.arrow"), traced(6, wrong=[1]))
    data = bytearray(path.read_bytes())
    data[data.rindex(b'"r5"') + 1] ^= 1
    path.write_bytes(data)
    text = output_of(capsys, "t.arrow", code=ExitCode.USAGE)

    assert "FAIL  stitch.tokens" in text
    assert "is damaged behind byte" in text


def test_a_page_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Next to the text; its own test says what is in it."""
    pytest.importorskip("jinja2", reason="the page needs rollproof[report]")
    written(Path("t.arrow"), traced(6, wrong=[1]))
    assert "drawn in t.html" in output_of(capsys, "t.arrow", "--html", "t.html")
    assert "<!doctype html>" in Path("t.html").read_text()


def shown(*arguments: str, columns: int) -> str:
    """The output on a terminal of ``columns``."""
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals")
    fcntl, struct, termios = (__import__(name) for name in ("fcntl", "struct", "termios"))
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "rollproof", "show", *arguments],
        stdout=other,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    os.close(other)
    chunks = []
    while True:
        try:
            chunk = os.read(own, 4096)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(own)
    assert ExitCode.PASS == process.wait()
    return b"".join(chunks).decode().replace("\r\n", "\n")


def test_a_narrow_terminal_without_colours() -> None:
    """No line is wider than 60 columns, and none has a colour."""
    dump_trace(traced(4, wrong=[1], shifted=[3]), "t.json")
    text = shown("t.json", columns=60)

    assert [] == re.findall(r"\x1b\[[0-9;]*[39][0-9]m", text)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [] == [line for line in text.splitlines() if len(line) > 60]
    assert ">>" in text


def test_a_pipe_that_closes_ends_the_command() -> None:
    """As `| head -1` does: no traceback."""
    written(Path("t.arrow"), traced(40, wrong=range(40)))
    process = subprocess.Popen(
        [sys.executable, "-m", "rollproof", "show", "t.arrow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()

    assert 141 == process.wait()
    assert "Traceback" not in error
