"""Verdict table: what was found on real trainers, kept in a JSON file that docs/replay.md is
written from.

Names that are judged get a new row, the others keep theirs. The file is sorted and without times:
only a verdict or a version changes it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollproof.judging.report import Report

__all__ = ["judge_into", "told_row"]


def told_row(
    report: Report, *, packages: Iterable[str], code: str, parallel: str, model: str, mode: str
) -> dict[str, Any]:
    """What a report says of a trainer, JSON-ready: ``packages`` with their versions, each check's
    verdict, what fails by first finding.

    ``code`` is whose replay code it is, ``parallel`` and ``model`` say in words what ran.
    """
    findings = {result.id: result.findings[0] for result in report.results if result.findings}
    return {
        "code": code,
        "versions": {
            package: importlib.metadata.version(package).partition("+")[0] for package in packages
        },
        "parallel": parallel,
        "model": model,
        "mode": mode,
        "verdicts": {result.id: result.verdict for result in report.results},
        "findings": {check: f"{one.title}: {one.observed}" for check, one in findings.items()},
    }


def judge_into(file: Path, names: Iterable[str], row: Callable[[str], dict[str, Any]]) -> None:
    """Make the row of each name and write it at once: a run that is broken off keeps what it found."""
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in names:
        rows[name] = row(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        failed = [check for check, verdict in rows[name]["verdicts"].items() if verdict == "fail"]
        sys.stdout.write(f"{name}: {', '.join(failed) or 'no check fails'}\n")
        sys.stdout.flush()
