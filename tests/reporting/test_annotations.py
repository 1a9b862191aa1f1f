"""Annotations of GitHub Actions: one command a line, whatever the texts are, and no more than are
shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollproof.reporting.annotations import Annotation, Level, annotations_of, command_lines
from rollproof.reporting.reported_run import ReportedRun, verdict_of
from tests.support.made_up_reports import checked, finding, reported

ROOT = Path("/checkout/part")
HOSTILE = "a\r\n::error::b%0A, c:d\u2028e\udcfff"


def lines_of(*annotations: Annotation) -> list[str]:
    return list(command_lines(annotations, ROOT))


def run_of(*reports: dict[str, Any], **more: Any) -> ReportedRun:
    merged = reports[0] if len(reports) == 1 else {**reports[0], "reports": list(reports)}
    return ReportedRun(report=merged, verdict=verdict_of(merged), root=ROOT, **more)


def test_hostile_texts_begin_no_command() -> None:
    """Line breaks, percent signs, and what ends a property are escaped, also other separators of
    lines and bytes that are no text.
    """
    (line,) = lines_of(Annotation(title=HOSTILE, text=HOSTILE, location={"file": "x", "line": 2}))
    assert (
        "::error file=x,line=2,title="
        "a%0D%0A%3A%3Aerror%3A%3Ab%250A%2C c%3Ad\\u2028e\\udcfff"
        "::a%0D%0A::error::b%250A, c:d\\u2028e\\udcfff" == line
    )


@pytest.mark.parametrize(
    ("workspace", "file", "expected"),
    [
        (None, "tests/a b,c\nd.py", "file=tests/a b%2Cc%0Ad.py,line=3,"),
        ("/checkout", "tests/it.py", "file=part/tests/it.py,line=3,"),
        ("/checkout", "/elsewhere/it.py", ""),
        ("/other", "tests/it.py", ""),
    ],
)
def test_files_are_named_from_the_checkout(
    monkeypatch: pytest.MonkeyPatch, workspace: str | None, file: str, expected: str
) -> None:
    """The root may be a part of it. A file elsewhere, which GitHub cannot show, is left out."""
    if workspace is not None:
        monkeypatch.setenv("GITHUB_WORKSPACE", workspace)
    (line,) = lines_of(Annotation(title="t", text="x", location={"file": file, "line": 3}))
    assert f"::error {expected}title=t::x" == line


def test_more_than_github_shows_are_counted() -> None:
    """Ten of a level, and a notice that says how many there are more."""
    errors = [Annotation(title=f"{number}", text="x", location={}) for number in range(10_000)]
    warning = Annotation(title="w", text="x", level=Level.WARNING, location={})
    lines = lines_of(*errors, warning)

    assert 10 == sum(line.startswith("::error ") for line in lines)
    assert "::warning title=w::x" == lines[-2]
    assert lines[-1].startswith("::notice title=rollproof::9,990 more are not shown here")


def test_long_texts_are_cut() -> None:
    """A report of megabytes is no annotation."""
    (line,) = lines_of(Annotation(title="t", text="x" * 1_000_000, location={}))
    assert len(line) < 5_000


def test_a_run_has_one_error_a_failed_check_and_one_warning() -> None:
    """The first finding of each, with the command that repeats it, then other problems; of the
    unknown checks the first one. A self-test that no check detected is an error.
    """
    report = reported(
        "Mine",
        checked("a.b", "fail", [finding("odd"), finding("even")]),
        checked("c.d", "unknown", text="not exercised"),
        checked("e.f", "unknown"),
    )
    located = {**report, "location": {"file": "t.py", "line": 5}}
    blind = {**located, "canary": {**report["canary"], "red": False}}
    shown = list(annotations_of(run_of(blind, problems=["stale"])))

    assert ["a.b: Mine", "Mine", "rollproof", "rollproof: unknown"] == [one.title for one in shown]
    assert shown[0].text.startswith("odd\nwhere: request odd")
    assert "rerun: rollproof replay odd" in shown[0].text
    assert {"file": "t.py", "line": 5} == shown[0].location
    assert "NOT detected" in shown[1].text
    assert "c.d of Mine is unknown: not exercised; 1 more" == shown[3].text
    assert Level.WARNING is shown[3].level


def test_a_run_that_passes_has_none() -> None:
    """Expected failures are no errors either."""
    passed = reported("A", checked("a.b", "pass"), checked("c.d", "expected fail", [finding("x")]))
    assert [] == list(annotations_of(run_of(passed)))
