from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode
from rollproof.verification.kill_matrix import run_kill_matrix
from tests.support.command_line import output_of
from tests.support.html_pages import HOSTILE, tags_of

(KNOWN_BUG,) = (bug for bug in KNOWN_BUGS if bug.id == "concat-on-resume")
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
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 known bugs detected, 0 with a check that should not fail" in printed
    assert f"concat-on-resume: {KNOWN_BUG.summary}" in printed


def test_known_bugs_are_listed_after_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those with a wrong outcome without -v: a bug that no check detects is never hidden."""
    monkeypatch.setenv("COLUMNS", "140")
    (right,) = run_kill_matrix(["concat-on-resume"])
    (wrong,) = run_kill_matrix(["logprobs-dropped"])
    monkeypatch.setattr(
        "rollproof.verification.kill_matrix.run_kill_matrix",
        lambda only, meter: (right, replace(wrong, failed=())),
    )

    assert ExitCode.FAIL == run(["known-bugs"])
    short = capsys.readouterr().out
    assert short.startswith("1 of 2 known bugs detected, 0 with a check that should not fail\n")
    assert "logprobs-dropped" in short and "? stitch.logprobs-present" in short
    assert "concat-on-resume" not in short
    assert ExitCode.FAIL == run(["known-bugs", "-v"])
    assert "concat-on-resume" in capsys.readouterr().out


def test_known_bugs_as_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs with a wrong outcome come first; bugs and checks lead to each other; hostile texts stay
    texts.
    """
    pytest.importorskip("jinja2", reason="the page needs rollproof[report]")
    (right,) = run_kill_matrix(["concat-on-resume"])
    (wrong,) = run_kill_matrix(["logprobs-dropped"])
    wrong = replace(
        wrong, failed=("routes.rows",), bug=replace(wrong.bug, summary=HOSTILE, refs=(HOSTILE,))
    )
    monkeypatch.setattr(
        "rollproof.verification.kill_matrix.run_kill_matrix", lambda only, meter: (right, wrong)
    )
    assert ExitCode.FAIL == run(["known-bugs", "--report", "k.html"])
    text = (tmp_path / "k.html").read_text(encoding="utf-8")
    tags = tags_of(text)

    assert 0 == tags.scripts and not tags.tags & {"img", "link"}
    assert set(tags.addresses) <= {f"#{name}" for name in tags.ids}
    assert len(set(tags.ids)) == len(tags.ids)
    assert text.index("logprobs-dropped</code>") < text.index("concat-on-resume</code>")
    assert "NOT DETECTED" in text and "missed: </strong>" in text
    assert "should not fail: </strong>" in text
    assert "1 of 2 known bugs detected, 1 with a check that should not fail" in text
    assert default_registry()["routes.rows"].promise in text


def test_known_bugs_in_other_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """JSON for any other ending; SARIF has no place for them, which is said before the run."""
    assert ExitCode.PASS == run(["known-bugs", "concat-on-resume", "--report", "k.json"])
    assert json.loads((tmp_path / "k.json").read_text(encoding="utf-8"))["bugs"]
    assert "SARIF lists findings in your code" in output_of(
        capsys, "known-bugs", "--report", "k.sarif", code=ExitCode.USAGE
    )
    assert "Cannot write plain/k.html" in output_of(
        capsys, "known-bugs", "--report", "plain/k.html", code=ExitCode.USAGE
    )
