from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli import check as check_command
from rollproof.cli import unit_workers
from rollproof.cli.app import run
from rollproof.core.trace import Trace
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import TraceWriter, dump_trace
from rollproof.verification import trace_files
from rollproof.verification.runner import run_case
from tests.support import dying_worker
from tests.support.command_line import output_of
from tests.support.faulty_subjects import Concat, Correct

pytestmark = pytest.mark.usefixtures("command_folder")
ONLY = ("--only", "stitch", "--only", "routes")


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of two files, and worker processes for any number of them."""
    monkeypatch.setattr(trace_files, "_UNIT_FILES", 2)
    monkeypatch.setattr(check_command, "_SMALL_FILES", 0)


def traces(folder: Path, *, good: int = 3, bad: int = 2) -> None:
    """Files of correct runs, and of runs with findings; no two have the same bytes."""
    folder.mkdir()
    for number in range(good):
        dump_trace(run_case(Correct, CLEAN, name=f"good {number}"), folder / f"a{number}.json")
    for number in range(bad):
        stream(folder / f"b{number}.arrow", run_case(Concat, ABORTED, name=f"bad {number}"))


def stream(path: Path, trace: Trace) -> None:
    """Write a trace in Arrow form."""
    with TraceWriter(path, trace.header) as writer:
        for event in trace.events:
            writer.append(event)


def judged(*arguments: str, code: int) -> dict[str, Any]:
    """The JSON report of ``check``."""
    assert code == run(["check", *arguments, *ONLY, "--json", "report.json"])
    report: dict[str, Any] = json.loads(Path("report.json").read_text(encoding="utf-8"))
    return report


@pytest.mark.usefixtures("small_units")
def test_the_report_is_the_same_however_many_processes_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder is judged in units that its files alone decide, so no byte depends on ``-j``; each
    finding says which file it is in.
    """
    traces(tmp_path / "runs")
    reports = []
    for jobs in ("1", "2"):
        report = judged("runs", "-j", jobs, code=ExitCode.FAIL)
        reports.append(Path("report.json").read_bytes())
    findings = [finding for item in report["checks"] for finding in item["findings"]]

    assert reports[0] == reports[1]
    assert 5 == report["cases"] == report["inputs"]["files"]
    assert {"runs/b0.arrow", "runs/b1.arrow"} == {item["where"]["file"] for item in findings}
    # nothing of the progress goes into a pipe
    assert "judging" not in capsys.readouterr().err


def test_each_file_that_cannot_be_judged_is_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut, flipped, empty, foreign, newer and copied files: none is skipped in silence, none hides
    the others, and the exit code says that something is not known.
    """
    traces(tmp_path / "runs", bad=0)
    folder = tmp_path / "runs"
    stream(folder / "whole.arrow", run_case(Correct, CLEAN))
    whole = (folder / "whole.arrow").read_bytes()
    (folder / "copy.arrow").write_bytes(whole)
    (folder / "cut.arrow").write_bytes(whole[:-40])
    place = len(whole) - 2500  # in the last batch of events
    (folder / "flipped.arrow").write_bytes(
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    )
    (folder / "empty.arrow").touch()
    (folder / "junk.arrow").write_bytes(b"\x00junk")
    (folder / "newer.json").write_text('{"format": "rollproof-trace", "schema": 999}')
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    (folder / "notes.txt").touch()
    report = judged("runs", code=ExitCode.UNKNOWN)
    inputs = report["inputs"]

    assert {
        "a copy": 1,
        "damaged, or no trace": 2,
        "empty": 1,
        "of a newer rollproof": 1,
        "unreadable": 1,
    } == dict(sorted(inputs["unjudged"].items()))
    assert 1 == inputs["unfinished"]
    assert 11 == inputs["files"]
    named = {Path(item["path"]).name for item in inputs["listed"]}
    assert named == {
        *("whole.arrow", "empty.arrow", "flipped.arrow"),
        *("gone.json", "junk.arrow", "newer.json"),
    }
    shown = capsys.readouterr().out
    assert "1 file of the folders not read" in shown
    assert "not judged to the end: 6 of 11 files" in shown


def test_a_path_that_does_not_exist_is_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt path next to good ones judges nothing, and a folder without traces says so."""
    traces(tmp_path / "runs", good=1, bad=0)
    missing = output_of(capsys, "check", "runs", "ruins", code=ExitCode.USAGE)
    (tmp_path / "nothing").mkdir()

    assert "There is no trace at ruins" in missing
    assert "No trace is in nothing" in output_of(capsys, "check", "nothing", code=ExitCode.USAGE)


@pytest.mark.usefixtures("small_units")
def test_fail_fast_ends_at_the_first_finding(tmp_path: Path) -> None:
    """What is behind the first finding is not judged, so nothing passes; the report is the same
    with several processes.
    """
    traces(tmp_path / "runs", bad=3)
    report = judged("runs", "--fail-fast", "-j", "1", code=ExitCode.FAIL)
    alone = Path("report.json").read_bytes()
    judged("runs", "--fail-fast", "-j", "2", code=ExitCode.FAIL)

    assert report["inputs"]["stopped"]
    assert 4 == report["inputs"]["files"]
    assert 0 == report["summary"]["pass"]
    assert alone == Path("report.json").read_bytes()


def test_a_sample_is_the_same_in_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--sample judges so many files, chosen by their paths alone, and the report says so."""
    traces(tmp_path / "runs", good=6, bad=0)
    first = judged("runs", "--sample", "2", code=ExitCode.UNKNOWN)
    again = judged("runs", "--sample", "2", code=ExitCode.UNKNOWN)
    share = judged("runs", "--sample", "1%", code=ExitCode.UNKNOWN)

    assert 2 == first["cases"]
    assert first == again
    assert 1 == share["cases"]
    assert "a sample: 2 of 6 files were judged" in first["notes"]
    for wrong in ("0", "half", "0%", "101%"):
        assert "--sample takes" in output_of(
            capsys, "check", "runs", "--sample", wrong, code=ExitCode.USAGE
        )


def test_since_leaves_out_older_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--since takes an age or a date, and the files that it leaves out are counted."""
    traces(tmp_path / "runs", bad=0)
    os.utime(tmp_path / "runs" / "a0.json", (0, 0))
    for since in ("2h", "2001-01-01"):
        report = judged("runs", "--since", since, code=ExitCode.UNKNOWN)
        assert 2 == report["cases"]
        assert "1 file older than --since were left out" in report["notes"]

    assert "--since takes an age" in output_of(
        capsys, "check", "runs", "--since", "yesterday", code=ExitCode.USAGE
    )
    assert "nothing is left" in output_of(
        capsys, "check", "runs/a0.json", "--since", "1d", code=ExitCode.USAGE
    )


@pytest.mark.usefixtures("small_units")
def test_a_worker_that_dies_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead worker was judging is judged again, with the same result. A file that ends its
    process each time is named, and its neighbours are judged.
    """
    traces(tmp_path / "runs", good=1, bad=1)
    folder = tmp_path / "runs"
    dump_trace(run_case(Correct, CLEAN, name="died once"), folder / "a_once.json")
    undisturbed = judged("runs", "-j", "1", code=ExitCode.FAIL)
    dump_trace(run_case(Correct, CLEAN, name="dies"), folder / "deadly.json")
    monkeypatch.setattr(unit_workers, "_work", dying_worker.work)
    disturbed = judged("runs", "-j", "2", code=ExitCode.FAIL)

    assert (tmp_path / "died").exists()
    assert {"its process died": 1} == disturbed["inputs"]["unjudged"]
    assert ["runs/deadly.json"] == [item["path"] for item in disturbed["inputs"]["listed"]]
    assert undisturbed["checks"] == disturbed["checks"]
    assert undisturbed["exercised"] == disturbed["exercised"]


def test_slices_show_the_same_finding_by_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--slices writes the first, the worst and a minimal slice of a failing check: each is a trace
    that ``check`` judges and ``show`` tells, with that finding, and nothing else.
    """
    (request,) = ABORTED.requests
    other = replace(request, request_id="r1", prompt_ids=(21, 22, 23))
    case = replace(ABORTED, requests=(request, other))
    (tmp_path / "runs").mkdir()
    dump_trace(run_case(Correct, CLEAN), tmp_path / "runs" / "a.json")
    stream(tmp_path / "runs" / "b.arrow", run_case(Concat, case))
    whole = judged("runs", "--slices", "slices", code=ExitCode.FAIL)
    (failing,) = (item for item in whole["checks"] if item["verdict"] == "fail")
    files = whole["inputs"]["slices"]["routes.rows"]
    sizes = {}
    for name, path in files.items():
        part = judged(path, code=ExitCode.FAIL)
        (check,) = (item for item in part["checks"] if item["verdict"] == "fail")
        sizes[name] = part["inputs"]["events"]
        assert failing["id"] == check["id"] == "routes.rows"
        assert failing["findings"][0]["title"] == check["findings"][0]["title"]
        assert failing["findings"][0]["kind"] == check["findings"][0]["kind"]
        assert "routes.rows" in output_of(capsys, "show", path, code=ExitCode.PASS)

    assert {"first", "minimal"} == sizes.keys()
    assert sizes["minimal"] < sizes["first"] < whole["inputs"]["events"]
