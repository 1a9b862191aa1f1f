from __future__ import annotations

from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import TraceWriter, dump_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import Concat, Correct

pytestmark = pytest.mark.usefixtures("command_folder")


def test_control_characters_of_a_trace_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A name in a trace that somebody mailed cannot recolour a terminal or move its cursor."""
    dump_trace(run_case(Correct, CLEAN, name="a\x1b[31mred"), tmp_path / "mailed.json")
    text = output_of(capsys, "check", "mailed.json", "--only", "stitch.tokens", code=ExitCode.PASS)

    assert "\x1b" not in text
    assert "a\\x1b[31mred" in text


def test_checks_pass_on_an_unfinished_trace_only_if_asked_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What a file without its end does not show may be wrong: a check that passes on the rest is
    unknown, and one that fails fails. ``--unfinished-ok`` takes the rest for all.
    """
    trace = run_case(Correct, CLEAN)
    writer = TraceWriter(tmp_path / "cut.arrow", trace.header)
    for event in trace.events:
        writer.append(event)
    writer.flush()
    (tmp_path / "killed.arrow").write_bytes((tmp_path / "cut.arrow").read_bytes())
    writer.close()
    arguments = ("--only", "stitch.tokens", "--only", "routes.rows")
    assert "2 pass" in output_of(capsys, "check", "cut.arrow", *arguments, code=ExitCode.PASS)
    killed = output_of(capsys, "check", "killed.arrow", *arguments, code=ExitCode.UNKNOWN)
    assert "UNKNOWN  stitch.tokens: a file is unfinished" in killed
    assert "2 unknown" in killed
    accepted = output_of(
        capsys, "check", "killed.arrow", *arguments, "--unfinished-ok", code=ExitCode.PASS
    )
    assert "The writer did not close the file" in accepted


def test_an_unfinished_trace_blames_no_open_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A killed writer's file is judged as far as it goes, its open request is not blamed, and the
    report says that it is cut.
    """
    trace = run_case(Correct, CLEAN)
    writer = TraceWriter(tmp_path / "cut.arrow", trace.header)
    for event in trace.events:
        if event.kind == "result":
            break
        writer.append(event)
    writer.flush()
    (tmp_path / "killed.arrow").write_bytes((tmp_path / "cut.arrow").read_bytes())
    writer.close()
    killed = output_of(
        capsys, "check", "killed.arrow", "--only", "lifecycle", code=ExitCode.UNKNOWN
    )

    assert "The writer did not close the file" in killed
    assert "FAIL" in output_of(
        capsys, "check", "cut.arrow", "--only", "lifecycle", code=ExitCode.FAIL
    )


def test_one_unreadable_trace_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Readable traces are judged, the unreadable one is told, and the exit code says that not all
    is known.
    """
    dump_trace(run_case(Correct, CLEAN), tmp_path / "good.json")
    (tmp_path / "junk.arrow").write_bytes(b"\x00junk" * 800)
    text = output_of(
        capsys, "check", "good.json", "junk.arrow", "--only", "stitch.tokens", code=ExitCode.UNKNOWN
    )

    assert "1 check: 1 pass" in text
    assert "junk.arrow is not a rollproof trace" in text


def test_github_shows_what_was_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an option on GitHub Actions: an error at the trace, and a summary of the step. What a
    trace says is no command, and --no-github switches all of it off.
    """
    trace = run_case(Concat, ABORTED, name="\n::stop-commands::x")
    dump_trace(trace, tmp_path / "mailed.json")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    arguments = ["check", "mailed.json", "--only", "routes"]
    assert ExitCode.FAIL == run([*arguments, "--no-github"])
    assert "::error" not in capsys.readouterr().out
    assert not (tmp_path / "summary.md").exists()
    assert ExitCode.FAIL == run(arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.lstrip()[:2] == "::"]
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")

    assert ["::error file=mailed.json,line=1", "::warning file=mailed.json,line=1"] == [
        line.partition(",title=")[0] for line in lines
    ]
    assert summary.startswith("## rollproof: FAIL\n")
    assert "<code>routes.rows</code> of ::stop-commands::x: " in summary
    # JSON is alone on standard output
    assert ExitCode.FAIL == run([*arguments, "--json", "-"])
    captured = capsys.readouterr()
    assert "::error file=" in captured.err and captured.out.startswith("{")
