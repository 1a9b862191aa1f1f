"""Reporting: what a session of the GPU suites found, as one JSON file and one page, with the
machine it was found on.

The JSON is small enough to be kept with a repository: conformance reports without their findings'
witnesses, gap panels without pictures. ``docs/runs`` holds such files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollproof.core.files import write_atomically
from rollproof.gpu_suites.timing import Part, Spending
from rollproof.judging.report import Report

if TYPE_CHECKING:
    from rollproof.gpu_suites.gap.gap_matrix import Cell

__all__ = ["RUN_SCHEMA", "RunReport", "page_text", "short_report"]

RUN_SCHEMA = 1
_FINDINGS = 3
"""Findings of a check that are kept."""


class RunReport:
    """Gathers the results of a session; ``write`` puts them into a folder. ``machine`` is
    ``hardware.described()``.

    With a ``folder`` they are written after each result: a session that is killed leaves what it
    found. ``spending`` is what its time went into.
    """

    def __init__(
        self,
        machine: Mapping[str, Any],
        folder: Path | None = None,
        spending: Spending | None = None,
    ) -> None:
        self._folder = folder
        self._began = time.time()
        self.spending: Spending = spending or Spending()
        self._machine = dict(machine)
        self._suites: list[dict[str, Any]] = []
        self._cells: list[dict[str, Any]] = []
        self._notes: list[str] = []

    def suite(
        self, kind: str, report: Report, *, spent: Mapping[Part, float] | None = None, **more: Any
    ) -> None:
        """A conformance report: of an ``engine`` or of a ``trainer``; ``more`` is told beside it
        (settings, versions).
        """
        self.spending.add(spent or {})
        if spent:
            more["spent"] = {str(part): round(seconds, 1) for part, seconds in spent.items()}
        self._suites.append({"kind": kind, **short_report(report), **more})
        self._written()

    def cell(self, cell: Cell, **more: Any) -> None:
        """A cell of the gap matrix; ``more`` is told beside it."""
        self.spending.add({Part.TRAINING: cell.seconds - cell.ours, Part.JUDGING: cell.ours})
        self._cells.append({**cell.to_dict(), **more})
        self._written()

    def note(self, text: str) -> None:
        """What could not be run and why, or what a reader must know."""
        self._notes.append(text)
        self._written()

    @property
    def empty(self) -> bool:
        """Whether nothing was gathered."""
        return not (self._suites or self._cells)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, schema 1: keys may be added."""
        return {
            "schema": RUN_SCHEMA,
            "began": time.strftime("%Y-%m-%d", time.gmtime(self._began)),
            "seconds": round(self.spending.seconds, 1),
            "seconds_ours": round(self.spending.ours, 1),
            "spent": self.spending.to_dict(),
            "machine": self._machine,
            "suites": self._suites,
            "gap": self._cells,
            "notes": self._notes,
        }

    def write(self, folder: Path, name: str = "run") -> list[Path]:
        """Write ``NAME.json``, and ``NAME.html`` where jinja2 is installed; returns the paths.
        Raises ``UsageError``.
        """
        data = self.to_dict()
        text = folder / f"{name}.json"
        write_atomically(text, json.dumps(data, indent=1) + "\n")
        try:
            page = page_text(data)
        except ImportError:
            return [text]
        write_atomically(text.with_suffix(".html"), page)
        return [text, text.with_suffix(".html")]

    def close(self) -> None:
        """Write it a last time, with all the seconds that the session took."""
        self._written()

    def _written(self) -> None:
        if self._folder is not None:
            self.write(self._folder)


def short_report(report: Report) -> dict[str, Any]:
    """A conformance report as a run keeps it: every verdict, and of what fails the first findings."""
    whole = report.to_dict()
    checks = {}
    for check in whole["checks"]:
        told: dict[str, Any] = {"verdict": check["verdict"]}
        if check["verdict"] in ("fail", "unknown", "not applicable") and check["reason"]:
            told["reason"] = check["reason"]
        if check["findings"]:
            told["findings"] = [
                {key: finding[key] for key in ("title", "where", "expected", "observed")}
                for finding in check["findings"][:_FINDINGS]
            ]
            told["count"] = len(check["findings"])
        checks[check["id"]] = told
    canary = whole.get("canary") or {}
    return {
        "subject": whole["subject"],
        "summary": whole["summary"],
        "seconds": round(report.seconds, 1),
        "expected": dict(report.expected),
        "exercised": whole["exercised"],
        "canary": canary.get("red"),
        "notes": list(report.notes),
        "checks": checks,
    }


def page_text(data: Mapping[str, Any]) -> str:
    """The HTML page of ``RunReport.to_dict``. Raises ``ImportError`` where jinja2 is not installed."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    template = environment.from_string(
        resources.files("rollproof.gpu_suites.report")
        .joinpath("run.html")
        .read_text(encoding="utf-8")
    )
    return template.render(run=data)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
