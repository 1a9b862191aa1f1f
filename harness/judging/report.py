"""Report: the outcome of a run of checks, in memory and as JSON (schema 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollproof.judging.checks import CheckResult, Verdict

__all__ = ["REPORT_SCHEMA", "Canary", "ExitCode", "Interrupted", "Report"]

REPORT_SCHEMA = 1


class ExitCode:
    """Exit codes of every door of the command line."""

    PASS = 0
    FAIL = 1
    UNKNOWN = 2
    USAGE = 254
    INTERNAL = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """The self-test of a run: a fault planted into the subject's own trace, and the check that saw
    it.

    ``red`` is whether ``expected_by`` found it; a run whose canary stays green cannot be trusted.
    ``planted`` is ``None`` where no trace was fit for planting one.
    """

    planted: str | None
    expected_by: str | None
    red: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "planted": self.planted,
            "expected_by": self.expected_by,
            "red": self.red,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was judged, with which verdicts, and what was exercised.

    ``expected`` maps the ids of failing checks that were declared as expected failures to their
    reasons; one that fails ``otherwise`` than it is known to counts as failed. ``exercised`` counts
    scenario classes over all traces ("aborts mid-decode", "resumes across a weight version", ...).
    """

    subject: str
    profile: str
    seed: int
    results: tuple[CheckResult, ...]
    exercised: Mapping[str, int] = field(default_factory=dict)
    canary: Canary | None = None
    expected: Mapping[str, str] = field(default_factory=dict)
    cases: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """Failing checks that were not expected to fail."""
        return tuple(r for r in self.results if r.verdict is Verdict.FAIL and not self._excused(r))

    @property
    def summary(self) -> dict[str, int]:
        """Number of checks per outcome, with the keys of the JSON schema."""
        counts = Counter(r.verdict for r in self.results)
        expected = sum(r.verdict is Verdict.FAIL and self._excused(r) for r in self.results)
        return {
            "pass": counts[Verdict.PASS],
            "fail": counts[Verdict.FAIL] - expected,
            "unknown": counts[Verdict.UNKNOWN],
            "not_applicable": counts[Verdict.NOT_APPLICABLE],
            "expected_fail": expected,
        }

    def _excused(self, result: CheckResult) -> bool:
        return result.id in self.expected and not result.otherwise

    @property
    def exit_code(self) -> int:
        """0 all pass, 1 some fail (or the canary stayed green), 2 nothing failed and something is
        unknown.
        """
        if self.failed or (
            self.canary is not None and self.canary.planted is not None and not self.canary.red
        ):
            return ExitCode.FAIL
        return (
            ExitCode.UNKNOWN
            if self.summary["unknown"] or not self.summary["pass"]
            else ExitCode.PASS
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON report, schema 1: stable; keys may be added."""
        return {
            "schema": REPORT_SCHEMA,
            "subject": self.subject,
            "profile": self.profile,
            "seed": self.seed,
            "cases": self.cases,
            "seconds": round(self.seconds, 3),
            "summary": self.summary,
            "checks": [
                _result_dict(r, self.expected.get(r.id) if self._excused(r) else None)
                for r in self.results
            ],
            "exercised": dict(self.exercised),
            "canary": self.canary.to_dict() if self.canary else {},
            "notes": list(self.notes),
        }


class Interrupted(KeyboardInterrupt):
    """The user's Ctrl-C, with the reports of what was found until then."""

    def __init__(self, *reports: Report) -> None:
        super().__init__()
        self.reports = reports


def _result_dict(result: CheckResult, expected: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": result.id,
        "verdict": (
            "expected fail"
            if expected is not None and result.verdict is Verdict.FAIL
            else str(result.verdict)
        ),
        "reason": (
            expected if expected is not None and result.verdict is Verdict.FAIL else result.reason
        ),
        "exercised": dict(result.exercised),
        "found": result.found,
        "kinds": dict(result.kinds),
        "known": list(result.known),
        "otherwise": dict(result.otherwise),
        "findings": [
            {
                "title": f.title,
                "kind": f.kind,
                "where": dict(f.where),
                "expected": f.expected,
                "observed": f.observed,
                "hint": f.hint,
                "witness": f.witness,
            }
            for f in result.findings
        ],
    }
    return out
