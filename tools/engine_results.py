"""The JSON files of verdicts on real engines, from which docs/engines.md is made.

A file has the rows of one engine: ``{"versions": {package: version}, "runs": {name: row}, "gap":
[row]}``. It is sorted, so that only a result or a version changes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollproof.gap.gap_report import GapReport
    from rollproof.judging.report import Report
    from rollproof.verification.engine_gap import RolloutGap
    from rollproof.verification.engines import EngineRun

__all__ = ["GAP_METRICS", "gap_rows", "load_results", "row_of", "save_results"]

GAP_METRICS = (
    "abs_diff_mean",
    "abs_diff_p99",
    "abs_diff_max",
    "kl_mu_pi_k3",
    "layer_mismatch",
    "any_layer_mismatch",
)
"""The metrics of a gap in the files, as ``rollproof.gap`` names them."""


def row_of(report: Report, run: EngineRun, about: str) -> dict[str, Any]:
    """Return the row of a run, JSON-ready.

    It has the verdict of each check, the first finding of each failure, and what was exercised.
    """
    findings = {result.id: result.findings[0] for result in report.results if result.findings}
    reasons = {
        result.id: result.reason
        for result in report.results
        if str(result.verdict) in ("unknown", "not applicable")
    }
    return {
        "about": about,
        "experiments": sorted(run.seconds),
        "verdicts": {result.id: str(result.verdict) for result in report.results},
        "findings": {
            check: f"{finding.title}: {finding.observed}" for check, finding in findings.items()
        },
        "reasons": reasons,
        "exercised": {
            result.id: dict(result.exercised) for result in report.results if result.exercised
        },
        "notes": list(report.notes),
    }


def gap_rows(gap: RolloutGap, model: str) -> list[dict[str, Any]]:
    """Return a gap as two rows, JSON-ready: natively routed, and with the engine's routes."""
    return [
        {
            "engine": gap.engine,
            "model": model,
            "dtype": gap.dtype,
            "routing": routing,
            **_measured(report),
        }
        for routing, report in (("native", gap.native), ("replayed", gap.replayed))
    ]


def load_results(file: Path) -> dict[str, Any]:
    """Read a file; without it the sections are empty."""
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {"versions": {}, "runs": {}, "gap": [], **stored}


def save_results(
    file: Path,
    packages: Iterable[str],
    *,
    runs: Mapping[str, Any] | None = None,
    gap: list[Any] | None = None,
) -> None:
    """Write rows into a file: runs replace those of the same name, a gap replaces the gap."""
    results = load_results(file)
    results["versions"] = {
        package: metadata.version(package).partition("+")[0] for package in sorted(packages)
    }
    results["runs"].update(runs or {})
    if gap is not None:
        results["gap"] = gap
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _measured(report: GapReport) -> dict[str, Any]:
    metrics = {
        name: report.panel.metrics[name] for name in GAP_METRICS if name in report.panel.metrics
    }
    return {
        "n_tokens": report.panel.n_tokens,
        "n_sequences": report.panel.n_sequences,
        "metrics": {
            name: [_short(metric.value), _short(metric.low), _short(metric.high)]
            for name, metric in metrics.items()
        },
    }


def _short(value: float) -> float | None:
    """Round to three digits, as in the table; ``None`` for NaN."""
    return float(f"{value:.3g}") if value == value else None
