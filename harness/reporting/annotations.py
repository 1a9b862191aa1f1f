"""Annotations of GitHub Actions: an error at the line of the user's test or subject.

A line of a job's output that begins with ``::error`` is a workflow command.
https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollproof.reporting.reported_run import ReportedRun
from rollproof.reporting.text import finding_rows, self_test_text

__all__ = ["Annotation", "Level", "annotations_of", "command_lines", "on_github"]

_MOST = 10
"""GitHub shows no more annotations of a level in a step."""
_CHARACTERS = 4_000


class Level(StrEnum):
    """How grave an annotation is."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """A text at a line of a file.

    location: ``file`` and ``line``, as in the JSON report; empty if there is none.
    """

    title: str
    text: str
    level: Level = Level.ERROR
    location: Mapping[str, Any]


def on_github() -> bool:
    """Return whether this is a job of GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def annotations_of(run: ReportedRun) -> Iterator[Annotation]:
    """Yield the first finding of each check that fails, the other problems, and how many checks are
    unknown.
    """
    for report, check in run.with_verdict("fail"):
        rows = [("", check["reason"])]
        if check["findings"]:
            finding = check["findings"][0]
            rows = [("", finding["title"]), *finding_rows(finding, check["id"])]
        yield Annotation(
            title=f"{check['id']}: {report['subject']}",
            text="\n".join(f"{name}: {value}" if name else value for name, value in rows),
            location=report.get("location") or {},
        )
    for report in run.reports:
        canary = report["canary"]
        if canary and canary["planted"] is not None and not canary["red"]:
            yield Annotation(
                title=str(report["subject"]),
                text=self_test_text(canary),
                location=report.get("location") or {},
            )
    for text in run.problems:
        yield Annotation(title="rollproof", text=text, location={})
    unknown = list(run.with_verdict("unknown"))
    if unknown:
        report, check = unknown[0]
        more = f"; {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        yield Annotation(
            title="rollproof: unknown",
            text=f"{check['id']} of {report['subject']} is unknown: {check['reason']}{more}",
            level=Level.WARNING,
            location=report.get("location") or {},
        )


def command_lines(annotations: Sequence[Annotation], root: Path) -> Iterator[str]:
    """Yield the workflow commands, and how many annotations are left out.

    Args:
        annotations: What to show, the most important first.
        root: The folder from which their locations name files.
    """
    shown: Counter[Level] = Counter()
    for annotation in annotations:
        shown[annotation.level] += 1
        if shown[annotation.level] <= _MOST:
            yield _command(annotation, root)
    left = sum(max(count - _MOST, 0) for count in shown.values())
    if left:
        text = (
            f"{left:,} more are not shown here: GitHub shows {_MOST} annotations of a step. The"
            " summary of the job and the log have them."
        )
        yield _command(
            Annotation(title="rollproof", text=text, level=Level.NOTICE, location={}), root
        )


def _command(annotation: Annotation, root: Path) -> str:
    properties = {**_place(annotation.location, root), "title": annotation.title}
    text = annotation.text
    if len(text) > _CHARACTERS:
        text = f"{text[:_CHARACTERS]} ..."
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{annotation.level} {listed}::{_data(text)}"


def _place(location: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Return file and line, with the file relative to the checkout; nothing for a file elsewhere,
    which GitHub could not show.
    """
    if not location:
        return {}
    file = root / location["file"]
    checkout = Path(os.environ.get("GITHUB_WORKSPACE") or root)
    if not file.is_relative_to(checkout):
        return {}
    return {"file": file.relative_to(checkout).as_posix(), "line": str(location["line"])}


def _data(text: str) -> str:
    # the percent sign first, or the escapes that follow would be escaped themselves
    return _encodable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    # a comma ends a property, and two colons end all of them
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _encodable(text: str) -> str:
    """Return what every output can hold: other line breaks and undecodable bytes are escaped."""
    return "".join(
        char if char.isprintable() or char in "\r\n" else ascii(char)[1:-1] for char in text
    )
