"""Stored runs as a static site: a table of releases and checks, a page for each release, and what
changed. It loads nothing from a network, and every page opens from a disk.

Needs jinja2 (the extra ``report``), imported on use. The template escapes every text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rollproof.core.files import check_folder, folder_name, text_bytes, write_atomically
from rollproof.errors import UsageError
from rollproof.judging.checks import Check
from rollproof.reporting.html.pages import (
    inline_script,
    page_template,
    require_packages,
    story_values,
)
from rollproof.reporting.report_files import json_text
from rollproof.reporting.results.release_changes import (
    Releases,
    changes_of,
    faults_of,
    releases_by_name,
)
from rollproof.reporting.results.stored_runs import StoredCheck, StoredFinding, StoredRun
from rollproof.reporting.text import finding_rows

__all__ = ["check_site_target", "write_site"]

_PACKAGE = "rollproof.reporting.html"
_WORST_FIRST = ("fail", "expected fail", "unknown", "pass", "not applicable")
_SHOWN = ("fail", "expected fail", "unknown")
"""Verdicts whose checks have a block on the page of their release."""
_WORD = re.compile(r"[^.-]+[.-]?|[.-]")
"""A piece of an id after which a line may break."""
_CHANGES = 200
"""Changes that the first page lists; the JSON has all."""


def check_site_target(folder: Path) -> None:
    """Check that a site can be made and written.

    Raises ``ExtraError`` if jinja2 is missing, ``UsageError`` if the folder cannot be written to.
    """
    require_packages(
        ("jinja2",), "The site needs", "The JSON of `rollproof verify --json` holds the verdicts."
    )
    check_folder(folder)


def write_site(runs: Iterable[StoredRun], folder: Path, checks: Sequence[Check]) -> list[Path]:
    """Write the site of stored runs, and return its files, ``index.html`` first.

    Args:
        runs: The newest run of each release is shown.
        folder: Where to; other files there stay.
        checks: For their promises.

    Raises:
        UsageError: A file cannot be written, or two releases would share a page.
    """
    releases = releases_by_name(runs)
    shown = [run for found in releases.values() for run in found]
    names = {run.key: _page_name(run) for run in shown}
    if len(set(names.values())) < len(shown):
        raise UsageError(
            "Two releases have names that differ in characters alone that no file name has:"
            f" {', '.join(run.title for run in shown)}."
        )
    promises = {check.id: check.promise for check in checks}
    texts = {"index.html": _index(releases, names, promises), "changes.json": _feed(releases)}
    template = page_template(_PACKAGE, "matrix_release.html")
    for run in shown:
        texts[names[run.key]] = template.render(page=_release(run, promises))
    for name, text in texts.items():
        write_atomically(folder / name, text_bytes(text).decode())
    return [folder / name for name in texts]


def _page_name(run: StoredRun) -> str:
    return f"{folder_name('-'.join(run.key))}.html"


def _index(
    releases: Releases, names: Mapping[tuple[str, str, str], str], promises: Mapping[str, str]
) -> str:
    runs = [run for found in releases.values() for run in found]
    columns = [
        {
            "name": run.name,
            "version": run.version,
            "page": names[run.key],
            "newest": run is found[-1],
            "date": run.date,
        }
        for found in releases.values()
        for run in found
    ]
    ids = dict.fromkeys(
        check for run in runs for part in run.parts.values() for check in part.checks
    )
    # in the order of the registry; checks of other versions of rollproof last
    order = {check: place for place, check in enumerate(promises)}
    rows = []
    for check in sorted(ids, key=lambda check: (order.get(check, len(order)), check)):
        cells = [_cell(run, check) for run in runs]
        # a check that applies to nothing here would only make a long table longer
        if any(cell["verdict"] not in ("", "not applicable") for cell in cells):
            rows.append(
                {
                    "id": check,
                    "words": _WORD.findall(check),
                    "promise": promises.get(check, ""),
                    "quiet": all(cell["verdict"] not in _SHOWN for cell in cells),
                    "cells": cells,
                }
            )
    changes = changes_of(releases)
    values = {
        "columns": columns,
        "names": list(dict.fromkeys(column["name"] for column in columns)),
        "families": list(dict.fromkeys(str(row["id"]).partition(".")[0] for row in rows)),
        "rows": rows,
        "changes": [
            {"date": change.date, "text": change.text, "worse": change.is_worse}
            for change in changes[:_CHANGES]
        ],
        "more_changes": max(len(changes) - _CHANGES, 0),
        "faults": [
            {"fault": fault, "page": names[releases[fault.results, fault.name][-1].key]}
            for fault in faults_of(releases)
        ],
        "has_older": any(not column["newest"] for column in columns),
        "newest": max((run.date for run in runs), default=""),
    }
    text: str = page_template(_PACKAGE, "matrix.html").render(
        page=values, **inline_script(_PACKAGE, "matrix.js")
    )
    return text


def _cell(run: StoredRun, check: str) -> dict[str, str]:
    """Return the worst verdict of a check in the parts of a run, and where its page shows it."""
    found = {
        part: judged.checks[check].verdict
        for part, judged in run.parts.items()
        if check in judged.checks
    }
    # a cell stands for all parts: one that fails must not hide behind others that pass
    for verdict in _WORST_FIRST:
        parts = [part for part, other in found.items() if other == verdict]
        # as in a report over several subjects: what passed somewhere and failed nowhere passes
        if verdict == "unknown" and "pass" in found.values():
            continue
        if parts:
            anchor = _anchor(parts[0], check) if verdict in _SHOWN else ""
            return {"verdict": verdict, "anchor": anchor, "parts": ", ".join(parts)}
    return {"verdict": "", "anchor": "", "parts": ""}


def _anchor(part: str, check: str) -> str:
    return folder_name(f"{part}-{check}")


def _release(run: StoredRun, promises: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page of a release shows."""
    return {
        "title": run.title,
        "facts": [
            ("judged", run.date),
            ("by", f"rollproof {run.rollproof}" if run.rollproof else ""),
            ("profile", run.profile),
            ("seed", str(run.seed) if run.profile else ""),
        ],
        "parts": [
            {
                "name": part,
                "facts": [
                    ("cases", f"{judged.cases:,}" if judged.cases else ""),
                    ("time", f"{judged.seconds:.1f} s" if judged.seconds else ""),
                    ("again", judged.command),
                ],
                "checks": list(_blocks(run, part, promises)),
                "passed": _with_verdict(judged.checks, "pass"),
                "ruled_out": [
                    (check, judged.checks[check].reason)
                    for check in _with_verdict(judged.checks, "not applicable")
                ],
            }
            for part, judged in run.parts.items()
        ],
    }


def _with_verdict(checks: Mapping[str, StoredCheck], verdict: str) -> list[str]:
    return [check for check, stored in checks.items() if stored.verdict == verdict]


def _blocks(run: StoredRun, part: str, promises: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    checks, command = run.parts[part].checks, run.parts[part].command
    for verdict in _SHOWN:
        for check in _with_verdict(checks, verdict):
            stored = checks[check]
            yield {
                "id": check,
                "anchor": _anchor(part, check),
                "verdict": verdict,
                "promise": promises.get(check, ""),
                "reason": stored.reason,
                "known": stored.known,
                "command": f"{command} --only {check}" if _takes_only(command) else "",
                "findings": [_finding(finding, check) for finding in stored.findings],
            }


def _takes_only(command: str) -> bool:
    return command.startswith("rollproof verify ")


def _finding(finding: StoredFinding, check: str) -> dict[str, Any]:
    values = {**_ABSENT, **msgspec.to_builtins(finding)}
    return {
        "title": finding.title,
        "rows": [row for row in finding_rows(values, check) if row[0] != "more"],
        "story": story_values(values["story"]) if values["story"] else None,
    }


_ABSENT: Mapping[str, Any] = {
    "where": {},
    "expected": "",
    "observed": "",
    "hint": "",
    "flavour": "",
    "after": [],
    "story": [],
    "witness": None,
}
"""The fields that a stored finding leaves out."""


def _feed(releases: Releases) -> str:
    """Return changes and faults as JSON."""
    return json_text(
        {
            "schema": 1,
            "changes": [asdict(change) for change in changes_of(releases)],
            "faults": [asdict(fault) for fault in faults_of(releases)],
        }
    )
