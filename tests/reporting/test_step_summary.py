"""The summary of a step: verdicts, findings and unknowns in Markdown, below GitHub's limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollproof.reporting.annotations import Annotation
from rollproof.reporting.reported_run import ReportedRun, verdict_of
from rollproof.reporting.step_summary import append_step_summary, step_summary_text
from tests.support.html_pages import HOSTILE, tags_of
from tests.support.made_up_reports import checked, finding, moment, reported

MARKDOWN = "# a\n\n```\n| b | [c](javascript:d) <b>*e*</b> _f_ `g` &amp; \\"


def run_of(*reports: dict[str, Any], **more: Any) -> ReportedRun:
    merged = reports[0] if len(reports) == 1 else {**reports[0], "reports": list(reports)}
    return ReportedRun(report=merged, verdict=verdict_of(merged), **more)


def test_verdicts_findings_and_unknowns_are_there() -> None:
    """Counts by subject, each kind of finding with its story, and the first unknown checks with
    their reasons.
    """
    story = [moment(number, f"event {number}") for number in range(20)]
    odd = finding("odd", story=[*story, moment(20, "the end", broke=True)])
    unknown = [checked(f"u.{number}", "unknown", text="not exercised") for number in range(12)]
    text = step_summary_text(
        run_of(reported("Mine", checked("a.b", "fail", [odd, odd, finding("even")]), *unknown))
    )

    assert text.startswith("## rollproof: FAIL\n\n13 checks: 0 pass, 1 fail, 12 unknown")
    assert "| Mine | FAIL | 0 | 1 | 12 | 0 | 0 |" in text
    assert (
        "<summary><code>a.b</code> of Mine: odd</summary>\n\n<pre>\nwhere     request odd" in text
    )
    assert "... 14 more events" in text and "&gt;&gt; the end" in text
    assert "1 more findings of this check." in text
    assert "- u.0: not exercised\n" in text and "- 2 more\n" in text and "u.10" not in text


def test_a_run_that_passes_is_short() -> None:
    """Verdicts alone."""
    text = step_summary_text(run_of(reported("Mine", checked("a.b", "pass"))))
    assert "## rollproof: PASS" in text
    assert "###" not in text and "<details" not in text


def test_what_was_not_judged_is_there() -> None:
    """Also if there is no report at all."""
    failure = Annotation(title="test_it.py::test_a", text="Mine could not be run", location={})
    for run in (None, run_of(reported("Mine", checked("a.b", "pass")))):
        text = step_summary_text(run, [failure] * 30)
        assert "<summary>test_it.py::test_a</summary>" in text
        assert "Mine could not be run" in text
        assert "10 more.\n" in text


@pytest.mark.parametrize("hostile", [HOSTILE, MARKDOWN, "</pre></details>", "a\udcff\x1b[31m"])
def test_hostile_texts_are_no_markup(hostile: str) -> None:
    """No element but those of the summary, no table or heading of its own, and what is no text at
    all can be written.
    """
    checks = [
        checked(hostile, verdict, [finding(hostile)], hostile)
        for verdict in ("fail", "unknown", "pass")
    ]
    run = run_of(reported(hostile, *checks, text=hostile), problems=[hostile])
    text = step_summary_text(run, [Annotation(title=hostile, text=hostile, location={})])
    # elements in which Markdown changes nothing
    outside = re.sub(r"<pre>.*?</pre>|<summary>.*?</summary>", "", text, flags=re.DOTALL)

    assert {"details", "summary", "code", "pre"} == tags_of(text.replace("\\<", "&lt;")).tags
    assert text.count("</details>") == text.count("<details") == 2
    headings = [line for line in outside.splitlines() if line.startswith("#")]
    assert ["## rollproof: FAIL", "### Not judged", "### Findings", "### Unknown"] == headings
    assert 3 == sum(line.startswith("|") for line in outside.splitlines())
    of_ours = r"^\*\*!\*\*|^</?details.*?>"
    assert not re.search(
        r"(?<!\\)[]`*_<]", re.sub(of_ours, "", outside, flags=re.MULTILINE).replace("\\\\", "")
    )


def test_a_summary_stays_below_one_mebibyte() -> None:
    """With 10,000 failed checks; what is left out is counted."""
    checks = [checked(f"a.{number}", "fail", [finding("y" * 900)]) for number in range(10_000)]
    text = step_summary_text(run_of(reported("Mine", *checks)))

    assert 900_000 < len(text.encode()) <= 1024 * 1024
    assert re.search(r"\n[\d,]+ more parts are left out: a summary holds 1 MiB.\n", text)


def test_summaries_of_one_step_share_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is appended to what other commands wrote, in what they left of the limit; a full file
    stays as it is.
    """
    file = tmp_path / "the summary"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    long = reported("Mine", *[checked(f"a.{i}", "fail", [finding("y" * 400)]) for i in range(2000)])
    file.write_text("mine\n" + "x" * 900_000, encoding="utf-8")
    assert append_step_summary(run_of(long)) is None
    text = file.read_text(encoding="utf-8")
    assert text.startswith("mine\n") and "more parts are left out" in text
    assert 1_000_000 < len(text.encode()) <= 1024 * 1024

    assert "is full" in str(append_step_summary(run_of(long)))
    assert text == file.read_text(encoding="utf-8")


def test_a_summary_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, or no such folder; outside of GitHub there is no file, and nothing to say."""
    run = run_of(reported("Mine", checked("a.b", "pass")))
    for place in (tmp_path, tmp_path / "no" / "file"):
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
        assert f"cannot be written to {place}: " in str(append_step_summary(run))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert append_step_summary(run) is None
