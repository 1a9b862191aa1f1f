"""A report as one self-contained HTML file: verdicts, findings with their story, situations.

Takes the JSON form of a report (schema 1), as the reports in text do. Needs jinja2 (the extra
``report``), imported on use. The page has no script, and the template escapes every text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollproof.core.files import check_target, text_bytes
from rollproof.reporting.html.gap_panels import gap_panel
from rollproof.reporting.html.pages import page_template, require_packages, story_values
from rollproof.reporting.reported_run import WORST_FIRST, ReportedRun, verdict_of
from rollproof.reporting.text import finding_rows, flavours_text, self_test_text, summary_text

__all__ = ["check_report_page_target", "report_page_text"]

_BYTES = 2_000_000
"""A page is not larger, unless the smallest detail is."""
_LISTED = ("fail", "expected fail", "unknown")
"""Verdicts whose checks have a block of their own."""
_NOTES = 20
"""Notes of a page, and of a subject, that are shown; the others are counted."""
_NAMES = 3
"""Subjects that the title names, if the report has no name of its own; more are counted."""
_COLUMNS = 40
"""Subjects of the table of verdicts; further ones have their blocks alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Detail:
    """How much of each finding and subject a page shows.

    moments: The most events of a story; the last ones, and those that broke the promise.
    characters: The most characters of a text.
    each_kind: The most findings of a kind of a check of a subject.
    subjects: The most blocks of subjects.
    """

    moments: int
    characters: int
    each_kind: int
    subjects: int


_DETAILS = (
    _Detail(moments=64, characters=4000, each_kind=64, subjects=2000),
    _Detail(moments=12, characters=1000, each_kind=64, subjects=1000),
    _Detail(moments=8, characters=400, each_kind=1, subjects=400),
    _Detail(moments=4, characters=200, each_kind=1, subjects=100),
    _Detail(moments=0, characters=100, each_kind=1, subjects=25),
    _Detail(moments=0, characters=60, each_kind=1, subjects=5),
)
"""The first with which the page is small enough is taken."""


def check_report_page_target(path: Path) -> None:
    """Check, before a long run, that a page can be made and written.

    Raises ``ExtraError`` if jinja2 is missing, ``UsageError`` if the path cannot be written to.
    """
    require_packages(
        ("jinja2",),
        "The HTML report needs",
        "Without it the terminal output and the JSON report hold the same.",
    )
    check_target(path)


def report_page_text(run: ReportedRun) -> str:
    """Return the HTML, of at most 2 MB; what is left out for that is said on the page."""
    template = page_template("rollproof.reporting.html", "report.html")
    # a page that is too large even so is better than none
    for detail in _DETAILS[:-1]:
        text = _joined(template.generate(page=_values(run, detail)), _BYTES)
        if text is not None:
            return text
    return text_bytes(template.render(page=_values(run, _DETAILS[-1]))).decode()


def _joined(parts: Iterable[str], most: int) -> str | None:
    """Join the parts of a page, ``None`` if they take more than ``most`` bytes."""
    size, encoded = 0, []
    for part in parts:
        # an undecodable byte of a name is no text that a file could hold
        encoded.append(text_bytes(part))
        size += len(encoded[-1])
        if size > most:
            return None
    return b"".join(encoded).decode()


def _values(run: ReportedRun, detail: _Detail) -> dict[str, Any]:
    """Return what the template shows."""
    report, reports = run.report, run.reports
    shown = reports[: detail.subjects]
    promises = {check.id: check.promise for check in run.checks}
    cut = _Cut(detail)
    situations = {name: number for number, name in enumerate(_situations(report), 1)}
    checks = {check["id"]: number for number, check in enumerate(_checks(reports), 1)}
    subjects = [_subject(one, number, checks, cut) for number, one in enumerate(shown, 1)]
    values = {
        "title": cut.text(_title(report, reports)),
        "verdict": run.verdict,
        "summary": "; ".join(filter(None, (summary_text(report), _gaps_text(report)))),
        "problems": cut.notes(run.problems),
        "notes": cut.notes((*run.notes, *report.get("notes", ()))),
        "facts": _facts(report, len(reports)),
        "self_test": self_test_text(report["canary"]),
        "subjects": subjects,
        "more_subjects": len(reports) - len(shown),
        "gaps": [
            {
                "number": number,
                "name": cut.text(gap["subject"]),
                **gap_panel(gap, cut.text),
            }
            for number, gap in enumerate(report.get("gaps", ())[: detail.subjects], 1)
        ],
        "table": _table(subjects, checks, cut),
        "situations": [
            {"name": cut.text(name), "number": number, "count": report["exercised"][name]}
            for name, number in situations.items()
        ],
        "checks": [
            {
                "id": cut.text(check["id"]),
                "number": checks[check["id"]],
                "promise": promises.get(check["id"], ""),
                "situations": [
                    (cut.text(name), situations.get(name), count)
                    for name, count in check["exercised"].items()
                ],
                "subjects": [
                    (subject["number"], subject["name"], subject["verdicts"][check["id"]])
                    for subject in subjects
                    if subject["verdicts"].get(check["id"]) in _LISTED
                ],
            }
            for check in _checks(reports)
        ],
    }
    values["left_out"] = list(cut.left_out())
    return values


class _Cut:
    """Shortens what a page shows, and counts what it leaves out."""

    def __init__(self, detail: _Detail) -> None:
        self.detail = detail
        self.texts = self.moments = self.findings = 0

    def text(self, text: str) -> str:
        """Return the text, cut if it is too long."""
        text = str(text)
        if len(text) <= self.detail.characters:
            return text
        self.texts += 1
        return f"{text[: self.detail.characters]} ..."

    def notes(self, notes: Sequence[str]) -> list[str]:
        """Return the first notes, and how many there are more."""
        more = len(notes) - _NOTES
        shown = [self.text(note) for note in notes[:_NOTES]]
        return [*shown, f"and {more:,} more"] if more > 0 else shown

    def story(self, story: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the last moments, and those that broke the promise."""
        first = len(story) - self.detail.moments
        moments = [
            {**moment, "text": self.text(moment["text"])}
            for place, moment in enumerate(story)
            if place >= first or (moment.get("broke") and self.detail.moments)
        ]
        self.moments += len(story) - len(moments)
        return moments

    def of_each_kind(self, findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the first findings of each kind."""
        seen: Counter[str] = Counter()
        kept = []
        for finding in findings:
            kind = finding.get("kind") or finding["title"]
            seen[kind] += 1
            if seen[kind] <= self.detail.each_kind:
                kept.append(finding)
        self.findings += len(findings) - len(kept)
        return kept

    def left_out(self) -> Iterator[str]:
        """Yield what the page does not show."""
        counts = (
            (self.findings, "finding of a kind that is shown", "findings of kinds that are shown"),
            (self.moments, "event of a story", "events of stories"),
            (self.texts, "end of a text", "ends of texts"),
        )
        for count, one, many in counts:
            if count:
                yield f"{count:,} {one if count == 1 else many}"


def _title(report: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> str:
    names = [str(one["subject"]) for one in reports]
    if len(names) > _NAMES and report["subject"] == ", ".join(names):
        return f"{len(names):,} subjects"
    return str(report["subject"])


def _gaps_text(report: Mapping[str, Any]) -> str:
    counts = Counter(gap["verdict"] for gap in report.get("gaps", ()))
    named = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
    return f"{counts.total():,} gap{'s' if counts.total() > 1 else ''}: {named}" if counts else ""


def _facts(report: Mapping[str, Any], subjects: int) -> list[tuple[str, str]]:
    facts = [
        ("subjects", f"{subjects:,}" if subjects > 1 else ""),
        ("profile", report["profile"]),
        ("seed", str(report["seed"])),
        ("cases", f"{report['cases']:,}" if report.get("cases") else ""),
        ("engines", flavours_text(report)),
        ("time", f"{report['seconds']:.1f} s" if report.get("seconds") else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _situations(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the situations, the missing ones first, then the most frequent."""
    counts = report["exercised"]
    return sorted(counts, key=lambda name: (counts[name] != 0, -counts[name]))


def _checks(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the checks of all reports, with how often each was exercised in all of them."""
    exercised: dict[str, Counter[str]] = {}
    for report in reports:
        for check in report["checks"]:
            exercised.setdefault(check["id"], Counter()).update(check["exercised"])
    return [{"id": check_id, "exercised": counts} for check_id, counts in exercised.items()]


def _subject(
    report: Mapping[str, Any], number: int, checks: Mapping[str, int], cut: _Cut
) -> dict[str, Any]:
    """Return the block of a subject."""
    by_verdict: dict[str, list[Mapping[str, Any]]] = {verdict: [] for verdict in WORST_FIRST}
    for check in report["checks"]:
        by_verdict[check["verdict"]].append(check)
    return {
        "number": number,
        "name": cut.text(report["subject"]),
        "verdict": verdict_of(report),
        "summary": report["summary"],
        "facts": _facts(report, 1),
        "self_test": self_test_text(report["canary"]),
        "notes": cut.notes(report.get("notes", ())),
        "checks": [
            _check(check, checks[check["id"]], cut)
            for verdict in _LISTED
            for check in by_verdict[verdict]
        ],
        "passed": [_name(check, checks, cut) for check in by_verdict["pass"]],
        "ruled_out": [
            (*_name(check, checks, cut), cut.text(check["reason"]))
            for check in by_verdict["not applicable"]
        ],
        "verdicts": {check["id"]: check["verdict"] for check in report["checks"]},
    }


def _name(check: Mapping[str, Any], checks: Mapping[str, int], cut: _Cut) -> tuple[str, int]:
    return cut.text(check["id"]), checks[check["id"]]


def _check(check: Mapping[str, Any], number: int, cut: _Cut) -> dict[str, Any]:
    """Return the block of a check that did not pass."""
    kept = cut.of_each_kind(check["findings"])
    findings = []
    for finding in kept:
        story = cut.story(finding.get("story", ()))
        rows = finding_rows(finding, check["id"])
        findings.append(
            {
                "title": cut.text(finding["title"]),
                "rows": [(name, cut.text(value)) for name, value in rows],
                "story": story_values(story) if story else None,
            }
        )
    known = f" (known: {'; '.join(check['known'])})" if check.get("known") else ""
    reason = f"fails in a new way{known}" if check.get("otherwise") else check["reason"]
    return {
        "id": cut.text(check["id"]),
        "number": number,
        "verdict": check["verdict"],
        "reason": cut.text(reason),
        "findings": findings,
        # the judge counts all findings, and keeps the first ones
        "more": max(check.get("found", len(check["findings"])) - len(kept), 0),
    }


def _table(
    subjects: Sequence[Mapping[str, Any]], checks: Mapping[str, int], cut: _Cut
) -> dict[str, Any]:
    """Return the verdicts by check and subject, of the checks that did not pass everywhere."""
    columns = subjects[:_COLUMNS]
    rows = [
        {
            "id": cut.text(check_id),
            "number": number,
            "cells": [subject["verdicts"].get(check_id, "") for subject in columns],
        }
        for check_id, number in checks.items()
        if any(subject["verdicts"].get(check_id) in _LISTED for subject in columns)
    ]
    return {"columns": columns, "rows": rows, "more": len(subjects) - len(columns)}
