from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.judging.report import ExitCode
from rollproof.verification.kill_matrix import run_kill_matrix

pytestmark = pytest.mark.usefixtures("command_folder")


def test_known_bugs_in_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The kill matrix has the keys of schema 1, and names can be picked."""
    assert ExitCode.PASS == run(["known-bugs", "concat-on-resume", "--json", "out.json"])
    bugs = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["bugs"]

    assert ["concat-on-resume"] == [bug["id"] for bug in bugs]
    assert {
        "id",
        "refs",
        "killed",
        "by",
        "expected_by",
        "examples",
        "seconds",
        "blamed_wrongly",
    } <= set(bugs[0])
    assert bugs[0]["killed"]
    assert (
        "1 of 1 known bugs detected, 0 with a check that should not fail" in capsys.readouterr().out
    )


def test_known_bugs_are_listed_after_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those with a wrong outcome without -v: a bug that no check detects is never hidden."""
    monkeypatch.setenv("COLUMNS", "140")
    (right,) = run_kill_matrix(["concat-on-resume"])
    (wrong,) = run_kill_matrix(["logprobs-dropped"])
    monkeypatch.setattr(
        "rollproof.cli.known_bugs.run_kill_matrix",
        lambda only, meter: (right, replace(wrong, failed=())),
    )

    assert ExitCode.FAIL == run(["known-bugs"])
    short = capsys.readouterr().out
    assert short.startswith("1 of 2 known bugs detected, 0 with a check that should not fail\n")
    assert "logprobs-dropped" in short and "? stitch.logprobs-present" in short
    assert "concat-on-resume" not in short
    assert ExitCode.FAIL == run(["known-bugs", "-v"])
    assert "concat-on-resume" in capsys.readouterr().out
