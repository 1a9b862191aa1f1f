"""What every file of a report shows, and what GitHub Actions shows: a run with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollproof.judging.checks import Check

__all__ = ["WORST_FIRST", "ReportedRun", "verdict_of"]

WORST_FIRST = ("fail", "unknown", "expected fail", "pass", "not applicable")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """A run.

    report: The JSON form of the report, with the subjects' own below ``reports`` if there are
        several.
    verdict: ``pass``, ``fail`` or ``unknown``, which the exit code of the run says too.
    checks: The checks, for their promises.
    problems: What else made the run fail.
    notes: Remarks on the run.
    root: The folder from which the report names files.
    """

    report: Mapping[str, Any]
    verdict: str
    checks: Sequence[Check] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    root: Path = field(default_factory=Path.cwd)

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """The report of each subject, failures first, each in the order of the run."""
        reports = list(self.report.get("reports", ()))
        if not reports and self.report["checks"]:
            reports = [self.report]
        return sorted(reports, key=lambda report: WORST_FIRST.index(verdict_of(report)))

    def with_verdict(self, verdict: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Yield each report and each of its checks that has a verdict."""
        for report in self.reports:
            for check in report["checks"]:
                if check["verdict"] == verdict:
                    yield report, check


def verdict_of(report: Mapping[str, Any]) -> str:
    """Return the verdict over all checks and gaps of a report, as its exit code says it."""
    summary, canary = report["summary"], report["canary"]
    gaps = {gap["verdict"] for gap in report.get("gaps", ())}
    missed = canary and canary["planted"] is not None and not canary["red"]
    if summary["fail"] or missed or "fail" in gaps:
        return "fail"
    undecided = summary["unknown"] or "inconclusive" in gaps
    return "pass" if (summary["pass"] or gaps) and not undecided else "unknown"
