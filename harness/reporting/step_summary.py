"""The summary of a step of GitHub Actions: verdicts, findings with their stories, and what is
unknown, as Markdown.

https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions#adding-a-job-summary
"""

from __future__ import annotations

import html
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollproof.core.files import text_bytes
from rollproof.reporting.annotations import Annotation
from rollproof.reporting.reported_run import ReportedRun, verdict_of
from rollproof.reporting.text import (
    KINDS,
    finding_lines,
    first_of_each_kind,
    self_test_text,
    summary_text,
    text_of,
)

__all__ = ["append_step_summary", "step_summary_text"]

_BYTES = 1024 * 1024
"""GitHub shows no summary of a step that is larger."""
_SPARE = 1024
"""Bytes for what says that the rest was left out."""
_LEAST = 16 * 1024
"""With fewer bytes left a run is not added."""
_COUNTED = ("pass", "fail", "unknown", "expected_fail", "not_applicable")
_TABLE = """| subject | verdict | pass | fail | unknown | expected fail | n/a |
|---|---|--:|--:|--:|--:|--:|"""
_SUBJECTS = 100
_UNKNOWN = 10
_FAILURES = 20
_CHARACTERS = 500
"""Characters of a text in a line."""
_OPEN = 3
"""Findings that are unfolded."""


def append_step_summary(run: ReportedRun | None, failures: Sequence[Annotation] = ()) -> str | None:
    """Append a run to the file that GitHub names, which other commands of the step may have written
    to. Return why it could not be written, or ``None``.

    Arguments as for ``step_summary_text``.
    """
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    file = Path(name)
    try:
        used = file.stat().st_size if file.exists() else 0
        # GitHub refuses all of a step's summary that is too large, also what others wrote to it
        if used > _BYTES - _LEAST:
            return f"The summary of the step is full ({used:,} bytes), and this run is not in it."
        with file.open("ab") as stream:
            stream.write(text_bytes(step_summary_text(run, failures, most=_BYTES - used)))
    except OSError as error:
        return f"The summary of the step cannot be written to {name}: {error.strerror or error}."
    return None


def step_summary_text(
    run: ReportedRun | None, failures: Sequence[Annotation] = (), *, most: int = _BYTES
) -> str:
    """Return the Markdown of a run.

    Args:
        run: The run; ``None`` if no subject could be run.
        failures: Failures that no report has, such as a subject that could not be run.
        most: The most bytes.
    """
    blocks = [*_failure_blocks(failures)]
    if run is None:
        blocks.insert(0, "## rollproof: FAIL\n")
    else:
        # what is needed most comes first: what does not fit is left out from the end
        blocks = [
            *_head(run),
            *blocks,
            *_finding_blocks(run),
            *_unknown_blocks(run),
            *_gap_blocks(run),
        ]
    size = 0
    kept: list[str] = []
    # whole blocks only: one cut within <details> would fold away all that follows it
    for block in blocks:
        size += len(text_bytes(block)) + 1
        if size > most - _SPARE:
            left = len(blocks) - len(kept)
            kept.append(f"\n{left:,} more parts are left out: a summary holds 1 MiB.\n")
            break
        kept.append(block)
    return "\n".join(kept) + "\n"


def _head(run: ReportedRun) -> Iterator[str]:
    yield f"## rollproof: {run.verdict.upper()}\n"
    yield f"{summary_text(run.report)}\n"
    for text in run.problems[:_FAILURES]:
        yield f"**!** {_inline(text)}\n"
    reports = run.reports
    for report in reports:
        canary = report["canary"]
        if canary and canary["planted"] is not None and not canary["red"]:
            yield f"**!** {_inline(report['subject'])}: {_inline(self_test_text(canary))}\n"
    rows = [
        f"| {_inline(report['subject'])} | {verdict_of(report).upper()} |"
        f" {' | '.join(str(report['summary'][name]) for name in _COUNTED)} |"
        for report in reports[:_SUBJECTS]
    ]
    yield "\n".join([_TABLE, *rows]) + "\n"
    if len(reports) > _SUBJECTS:
        yield f"{len(reports) - _SUBJECTS:,} more subjects.\n"


def _failure_blocks(failures: Sequence[Annotation]) -> Iterator[str]:
    if failures:
        yield "### Not judged\n"
    for failure in failures[:_FAILURES]:
        yield _details(_tag(failure.title), failure.text, opened=True)
    if len(failures) > _FAILURES:
        yield f"{len(failures) - _FAILURES:,} more.\n"


def _finding_blocks(run: ReportedRun) -> Iterator[str]:
    """Yield the first findings of each check that fails, each of another kind."""
    number = 0
    for report, check in run.with_verdict("fail"):
        if not number:
            yield "### Findings\n"
        kinds = first_of_each_kind(check["findings"])[:KINDS]
        more = check.get("found", len(check["findings"])) - len(kinds)
        head = f"<code>{_tag(check['id'])}</code> of {_tag(report['subject'])}"
        for finding in kinds:
            number += 1
            flavours = check.get("flavours", {}).get(finding.get("kind", ""), ())
            lines = finding_lines(finding, 1, check["id"], flavours)
            text = textwrap.dedent(text_of(list(lines)[1:]))  # the title is the head
            yield _details(f"{head}: {_tag(finding['title'])}", text, opened=number <= _OPEN)
        if not kinds:
            yield _details(f"{head}: {_tag(check['reason'])}", "", opened=False)
        elif more > 0:
            yield f"{more:,} more findings of this check.\n"


def _unknown_blocks(run: ReportedRun) -> Iterator[str]:
    unknown = list(run.with_verdict("unknown"))
    if not unknown:
        return
    several = len(run.reports) > 1
    rows = []
    for report, check in unknown[:_UNKNOWN]:
        subject = f" of {_inline(report['subject'])}" if several else ""
        rows.append(f"- {_inline(check['id'])}{subject}: {_inline(check['reason'])}")
    if len(unknown) > _UNKNOWN:
        rows.append(f"- {len(unknown) - _UNKNOWN:,} more")
    yield "### Unknown\n\n" + "\n".join(rows) + "\n"


def _gap_blocks(run: ReportedRun) -> Iterator[str]:
    gaps = run.report.get("gaps", ())
    if not gaps:
        return
    rows = []
    for gap in gaps[:_SUBJECTS]:
        failed = [name for name, metric in gap["metrics"].items() if metric["verdict"] == "fail"]
        causes = [cause["class"] for cause in gap["diagnosis"][:1]]
        facts = (gap["subject"], ", ".join(failed), ", ".join(causes))
        subject, beyond, cause = map(_inline, facts)
        rows.append(f"| {subject} | {gap['verdict'].upper()} | {beyond} | {cause} |")
    head = "### Gaps\n\n| gap | verdict | beyond its limit | likely cause |\n|---|---|---|---|"
    yield "\n".join([head, *rows]) + "\n"
    if len(gaps) > _SUBJECTS:
        yield f"{len(gaps) - _SUBJECTS:,} more gaps.\n"


def _details(head: str, text: str, *, opened: bool) -> str:
    # an empty line begins an element of its own, in which Markdown changes nothing up to its end
    body = f"<pre>\n{html.escape(text)}\n</pre>\n\n" if text else ""
    return f"<details{' open' if opened else ''}><summary>{head}</summary>\n\n{body}</details>\n"


def _tag(text: Any) -> str:
    """Return a text for the head of an element: one line, which Markdown leaves as it is."""
    return html.escape(_short(text))


def _inline(text: Any) -> str:
    """Return a text for a line of Markdown: one line, in which nothing is markup."""
    return re.sub(r"([!-'*+;<>-@\[-`{-~])", r"\\\1", _short(text))


def _short(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]} ..."
