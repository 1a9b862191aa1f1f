"""The report of a session of the GPU suites and its machine, as one JSON file and one page.

The JSON is small enough for a repository: conformance reports without counterexamples, gap panels
without plots. ``docs/runs`` holds such files.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollproof.core.files import write_atomically
from rollproof.gpu_suites.timing import Part, Spending
from rollproof.judging.report import Report
from rollproof.reporting.html.gap_panels import gap_panel
from rollproof.reporting.html.pages import page_template

if TYPE_CHECKING:
    from rollproof.gpu_suites.gap.gap_matrix import Cell

__all__ = ["RUN_SCHEMA", "RunReport", "page_text", "short_report"]

RUN_SCHEMA = 1
# Findings that are stored for each check
_FINDINGS = 3


class RunReport:
    """The results of a session.

    Args:
        machine: ``hardware.described()``.
        folder: where to write the report after each result, so that a session that is killed leaves
            its results.
        spending: how the session spends its time.
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
        """Add a conformance report of an ``engine`` or a ``trainer``, and ``more`` about it."""
        self.spending.add(spent or {})
        if spent:
            more["spent"] = {str(part): round(seconds, 1) for part, seconds in spent.items()}
        self._suites.append({"kind": kind, **short_report(report), **more})
        self._save()

    def cell(self, cell: Cell, **more: Any) -> None:
        """Add a cell of the gap matrix, and ``more`` about it."""
        # the time of a cell that is not the trainer's is comparing
        self.spending.add({Part.TRAINING: cell.seconds - cell.ours, Part.JUDGING: cell.ours})
        self._cells.append({**cell.to_dict(), **more})
        self._save()

    def note(self, text: str) -> None:
        """Add a note: what could not be run and why, or what a reader must know."""
        self._notes.append(text)
        self._save()

    @property
    def empty(self) -> bool:
        """Whether there is no result."""
        return not (self._suites or self._cells)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, schema 1: keys may be added."""
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
        """Write ``NAME.json``, and ``NAME.html`` if jinja2 is installed; return the paths.

        Raises ``UsageError`` if the folder cannot be written to.
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
        """Write the report a last time, with all seconds of the session."""
        self._save()

    def _save(self) -> None:
        if self._folder is not None:
            self.write(self._folder)


def short_report(report: Report) -> dict[str, Any]:
    """Return a conformance report with every verdict, and the first findings of each failure."""
    full = report.to_dict()
    checks = {}
    for check in full["checks"]:
        result: dict[str, Any] = {"verdict": check["verdict"]}
        # a check that passed needs no reason, and there are hundreds
        if check["verdict"] in ("fail", "unknown", "not applicable") and check["reason"]:
            result["reason"] = check["reason"]
        if check["findings"]:
            result["findings"] = [
                {key: finding[key] for key in ("title", "where", "expected", "observed")}
                for finding in check["findings"][:_FINDINGS]
            ]
            result["count"] = len(check["findings"])
        checks[check["id"]] = result
    canary = full.get("canary") or {}
    return {
        "subject": full["subject"],
        "summary": full["summary"],
        "seconds": round(report.seconds, 1),
        "expected": dict(report.expected),
        "exercised": full["exercised"],
        "canary": canary.get("red"),
        "notes": list(report.notes),
        "checks": checks,
    }


def page_text(data: Mapping[str, Any]) -> str:
    """Return the HTML page of ``RunReport.to_dict``. Raises ``ImportError`` without jinja2."""
    suites = [_suite(suite, number) for number, suite in enumerate(data["suites"], 1)]
    cells = [_cell(cell, number) for number, cell in enumerate(data["gap"], 1)]
    template = page_template("rollproof.gpu_suites.report", "run.html", {"number": _number})
    titles = {"engine": "Engines", "trainer": "Trainers"}
    by_kind = {kind: [suite for suite in suites if suite["kind"] == kind] for kind in titles}
    text: str = template.render(
        run=data,
        verdict=_verdict([suite["verdict"] for suite in suites], cells),
        classes={
            "pass": "pass",
            "fail": "fail",
            "unknown": "inconclusive",
            "known to fail": "inconclusive",
        },
        totals=_totals(suites, cells),
        failed=_failures(suites, cells),
        gpus=Counter(map(_gpu, data["machine"]["gpus"])),
        cells=cells,
        kinds=[(kind, titles[kind], of_kind) for kind, of_kind in by_kind.items() if of_kind],
    )
    return text


def _suite(suite: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a suite with what its block shows; runs of older versions lack some keys."""
    summary, known, left_out = suite["summary"], suite.get("known", {}), suite.get("left_out", {})
    if summary["fail"] or suite["canary"] is False:
        verdict = "fail"
    else:
        verdict = "unknown" if summary["unknown"] or not summary["pass"] else "pass"
    shown = [
        (check_id, check, "known to fail" if check_id in suite["expected"] else check["verdict"])
        for check_id, check in suite["checks"].items()
        if check["verdict"] in ("fail", "unknown")
    ]
    # news first
    order = ("fail", "known to fail", "unknown")
    return {
        **suite,
        "number": number,
        "verdict": verdict,
        "known": known,
        "left_out": left_out,
        "known_count": summary["expected_fail"]
        + sum(bool(one["failed"]) for one in known.values()),
        "shown": sorted(shown, key=lambda item: order.index(item[2])),
        "has_block": bool(shown or known or left_out or suite["notes"]),
    }


def _failed(known: Mapping[str, Any]) -> bool:
    return bool(known["failed"])


def _cell(cell: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a cell of the gap with the panel of each routing."""
    controls = cell["effect"]["controls"]
    return {
        **cell,
        "number": number,
        "panels": [
            (name, {**gap_panel(report), "control": name in controls})
            for name, report in cell["reports"].items()
        ],
    }


def _verdict(verdicts: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict of a run; known failures are none."""
    of_cells = [cell["effect"]["verdict"] for cell in cells]
    if "fail" in verdicts or "fail" in of_cells:
        return "fail"
    undecided = "unknown" in verdicts or "inconclusive" in of_cells
    return "unknown" if undecided or not (verdicts or of_cells) else "pass"


def _totals(suites: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return what was found, in one line."""
    counts = [
        (sum(suite["summary"]["pass"] for suite in suites), "pass"),
        (sum(suite["summary"]["fail"] for suite in suites), "fail"),
        (sum(suite["summary"]["unknown"] for suite in suites), "unknown"),
        (sum(suite["known_count"] for suite in suites), "known to fail"),
        (sum(len(suite["left_out"]) for suite in suites), "experiments left out"),
    ]
    named = ", ".join(f"{count:,} {what}" for count, what in counts)
    return f"{len(suites):,} engines and trainers: {named}; {len(cells):,} gaps measured"


def _failures(
    suites: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return anchor and name of what failed: it may be far down the page."""
    failed = [
        (f"s{suite['number']}" if suite["has_block"] else f"{suite['kind']}s", suite["subject"])
        for suite in suites
        if suite["verdict"] == "fail"
    ]
    return failed + [
        (f"g{cell['number']}", f"gap of {cell['engine']}, {cell['trainer']}")
        for cell in cells
        if cell["effect"]["verdict"] == "fail"
    ]


def _gpu(gpu: Mapping[str, Any]) -> str:
    """Return name, memory and capability of a GPU, as far as they are known."""
    facts = [f"{gpu['memory_gib']} GiB"] if gpu.get("memory_gib") else []
    if facts and gpu.get("capability"):
        facts.append(f"capability {gpu['capability']}")
    name = gpu["name"] or "a GPU"
    return f"{name} ({', '.join(facts)})" if facts else name


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
