"""A thread writes a trace while ``rollproof check --follow`` judges it. The writer goes on only
once it has seen what it waits for, so that nothing depends on how fast either is.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli import follow
from rollproof.cli.app import run
from rollproof.core.trace import Trace
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import TraceWriter
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import Concat, Correct

pytestmark = pytest.mark.usefixtures("command_folder")
LINES = Path("lines.jsonl")
ONLY = ("--only", "routes.rows", "--only", "stitch.tokens")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other closely."""
    monkeypatch.setattr(follow, "_INTERVAL", 0.02)


def lines() -> list[dict[str, Any]]:
    """The complete lines of JSON that were written so far."""
    text = LINES.read_text(encoding="utf-8") if LINES.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def seen(what: Callable[[], bool]) -> bool:
    """Wait until something is there; false if it does not come."""
    for _ in range(3000):
        if what():
            return True
        time.sleep(0.01)
    return False


def put(writer: TraceWriter, trace: Trace) -> None:
    """Write the events of a trace, so that a reader sees them."""
    for event in trace.events:
        writer.append(event)
    writer.flush()


def followed(write: Callable[[], None], *arguments: str) -> int:
    """The exit code of a command that follows while ``write`` runs in a thread."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    # a command that does not end must not stop all tests
    limit = threading.Timer(60, os.kill, (os.getpid(), signal.SIGTERM))
    thread.start()
    limit.start()
    code = run(["check", "--follow", *arguments, "--json", str(LINES)])
    limit.cancel()
    thread.join()
    if errors:
        raise errors[0]
    return code


def test_a_fault_in_the_middle_is_told_before_the_end(tmp_path: Path) -> None:
    """An alarm comes while the writer is at work; the end is that of ``check``, with its report."""
    good, bad = run_case(Correct, CLEAN), run_case(Concat, ABORTED)
    writer = TraceWriter(tmp_path / "run.arrow", good.header)
    put(writer, good)

    def write() -> None:
        assert seen(LINES.exists)
        assert [] == lines()
        writer.start(bad.header)
        put(writer, bad)
        assert seen(lambda: len(lines()) > 0)
        assert {"routes.rows"} == {line["check"] for line in lines()}
        writer.start(good.header)
        put(writer, good)
        writer.close()

    code = followed(write, "run.arrow", *ONLY)
    *alarms, last = lines()

    assert ExitCode.FAIL == code
    assert "route rows" in alarms[0]["finding"]["title"]
    assert ExitCode.FAIL == run(["check", "run.arrow", *ONLY, "--json", "report.json"])
    assert json.loads(Path("report.json").read_text(encoding="utf-8")) == last["report"]


def test_files_that_appear_in_a_folder_are_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder is followed until it is stopped; a file that turns out damaged is told and counted,
    and the others go on.
    """
    good, bad = run_case(Correct, CLEAN), run_case(Concat, ABORTED)
    runs = tmp_path / "runs"
    runs.mkdir()

    def write() -> None:
        assert seen(LINES.exists)
        with TraceWriter(runs / "a.arrow", good.header) as writer:
            put(writer, good)
        (runs / "junk.arrow").write_bytes(b"\x00junk")
        assert seen(lambda: "unjudged" in {line.get("alarm") for line in lines()})
        with TraceWriter(runs / "b.arrow", bad.header) as writer:
            put(writer, bad)
            assert seen(lambda: "finding" in {line.get("alarm") for line in lines()})
        (runs / "c.arrow").touch()
        os.kill(os.getpid(), signal.SIGINT)

    code = followed(write, "runs", *ONLY)
    report = lines()[-1]["report"]

    assert ExitCode.FAIL == code
    assert 2 == report["cases"]
    assert {"damaged, or no trace": 1} == report["inputs"]["unjudged"]
    finding = next(item for item in report["checks"] if item["findings"])["findings"][0]
    assert str(Path("runs") / "b.arrow") == finding["where"]["file"]
    assert "FAIL  routes.rows" in capsys.readouterr().out


def test_ctrl_c_ends_with_the_report_of_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the writer did not write counts as not seen, as in ``check`` of an unfinished file."""
    good = run_case(Correct, CLEAN)
    writer = TraceWriter(tmp_path / "run.arrow", good.header)

    def write() -> None:
        assert seen(LINES.exists)
        put(writer, good)
        os.kill(os.getpid(), signal.SIGINT)

    code = followed(write, "run.arrow", *ONLY)
    writer.close()

    assert ExitCode.UNKNOWN == code
    assert "a file is unfinished" in capsys.readouterr().out
    assert len(good.events) == lines()[-1]["report"]["inputs"]["events"]


def test_a_file_that_its_writer_starts_again_is_not_followed_further(tmp_path: Path) -> None:
    """A file that became shorter is another run: it is told, and not judged as the rest of the
    first.
    """
    bad = run_case(Concat, ABORTED)
    writer = TraceWriter(tmp_path / "run.arrow", bad.header)
    put(writer, bad)

    def write() -> None:
        assert seen(lambda: len(lines()) > 0)
        (tmp_path / "run.arrow").write_bytes(b"")

    code = followed(write, "run.arrow", *ONLY)
    writer.close()
    unjudged = [line for line in lines() if line.get("alarm") == "unjudged"]

    assert ExitCode.FAIL == code
    assert "became shorter while it was followed" in unjudged[0]["error"]


def test_metrics_count_findings_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prometheus reads the number of findings by check, events, and files, from loopback."""
    pytest.importorskip("prometheus_client")
    bad = run_case(Concat, ABORTED)
    writer = TraceWriter(tmp_path / "run.arrow", bad.header)
    pages: list[str] = []
    port = 0

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def write() -> None:
        nonlocal port
        assert seen(LINES.exists)
        put(writer, bad)
        assert seen(lambda: len(lines()) > 0)
        told = capsys.readouterr().out
        port = int(told.partition("http://127.0.0.1:")[2].partition("/")[0])
        pages.append(scrape())
        writer.close()

    code = followed(write, "run.arrow", *ONLY, "--metrics", "0")

    assert ExitCode.FAIL == code
    assert 'rollproof_findings_total{check="routes.rows"} 1.0' in pages[0]
    assert 'rollproof_findings_total{check="stitch.tokens"} 0.0' in pages[0]
    assert f"rollproof_events_total {float(len(bad.events))}" in pages[0]
    assert 'rollproof_files{state="open"} 1.0' in pages[0]


def test_options_that_do_not_go_with_following_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics need --follow, which takes no selection, and follows what exists."""
    (tmp_path / "runs").mkdir()
    for arguments, text in (
        (("--metrics", "0"), "add --follow"),
        (("--follow", "-j", "2"), "omit the other options"),
    ):
        assert text in output_of(capsys, "check", "runs", *arguments, code=ExitCode.USAGE)
    assert "There is no trace at ruins" in output_of(
        capsys, "check", "ruins", "--follow", code=ExitCode.USAGE
    )
