"""The outcome of a run of checks, in memory and as JSON (schema 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollproof.judging.checks import CheckResult, Finding, Verdict
from rollproof.judging.story import Moment

__all__ = [
    "REPORT_SCHEMA",
    "Canary",
    "ExitCode",
    "Interrupted",
    "Report",
    "finding_dict",
    "moment_dict",
]

REPORT_SCHEMA = 1


class ExitCode:
    """Exit codes of all commands; Ctrl-C ends them with 130."""

    PASS = 0
    FAIL = 1
    UNKNOWN = 2
    USAGE = 254
    INTERNAL = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """The self-test of a run: a fault that was planted into the subject's own trace.

    A run whose canary stays green cannot be trusted.

    planted: The fault, or ``None`` if no trace was fit for one.
    expected_by: The id of the check that must find it.
    red: Whether it did.
    reason: Why nothing was planted.
    """

    planted: str | None
    expected_by: str | None
    red: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "planted": self.planted,
            "expected_by": self.expected_by,
            "red": self.red,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was judged, with which verdicts, and what was exercised.

    Attributes:
        subject: The name of the system under test.
        profile: The profile of the run.
        seed: Its seed.
        results: The results of the checks, in the order of the registry; in the JSON form
            ``checks``.
        exercised: How often each situation occurred in all traces ("aborts mid-decode", ...).
        canary: The self-test.
        expected: The reasons of expected failures by the id of the check. A check that also fails
            in a new way (``CheckResult.otherwise``) counts as failed.
        cases: The number of cases.
        flavours: The engine flavours on which they ran, if the subject runs on fake engines.
        seconds: Their wall time.
        notes: Remarks for the reader.
        undelivered: Why no rollout delivered a sample, if all raised or returned nothing; not in
            the JSON form, where it is a note.
    """

    subject: str
    profile: str
    seed: int
    results: tuple[CheckResult, ...]
    exercised: Mapping[str, int] = field(default_factory=dict)
    canary: Canary | None = None
    expected: Mapping[str, str] = field(default_factory=dict)
    cases: int = 0
    flavours: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    undelivered: str = ""

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The failing checks that were not expected to fail."""
        return tuple(
            result
            for result in self.results
            if result.verdict is Verdict.FAIL and not self._excused(result)
        )

    @property
    def summary(self) -> dict[str, int]:
        """The number of checks per outcome, with the keys of the JSON schema."""
        counts = Counter(result.verdict for result in self.results)
        expected = sum(
            result.verdict is Verdict.FAIL and self._excused(result) for result in self.results
        )
        return {
            "pass": counts[Verdict.PASS],
            "fail": counts[Verdict.FAIL] - expected,
            "unknown": counts[Verdict.UNKNOWN],
            "not_applicable": counts[Verdict.NOT_APPLICABLE],
            "expected_fail": expected,
        }

    def _excused(self, result: CheckResult) -> bool:
        # An expected failure excuses its check only as far as the known failures explain the
        # findings.
        return result.id in self.expected and not result.otherwise

    @property
    def exit_code(self) -> int:
        """0 if all pass, 1 if some fail or the canary stayed green, 2 if something is unknown and
        nothing failed.
        """
        # A canary that stays green means that the run could not have found that fault: its passes
        # are worth nothing.
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
        """Return the JSON report, schema 1: stable, keys may be added."""
        return {
            "schema": REPORT_SCHEMA,
            "subject": self.subject,
            "profile": self.profile,
            "seed": self.seed,
            "cases": self.cases,
            "flavours": list(self.flavours),
            "seconds": round(self.seconds, 3),
            "summary": self.summary,
            "checks": [
                _result_dict(
                    result, self.expected.get(result.id) if self._excused(result) else None
                )
                for result in self.results
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
        "flavours": {kind: list(names) for kind, names in result.flavours.items()},
        "findings": [finding_dict(finding) for finding in result.findings],
    }
    return out


def finding_dict(finding: Finding) -> dict[str, Any]:
    """Return the JSON form of a finding."""
    return {
        "title": finding.title,
        "kind": finding.kind,
        "where": dict(finding.where),
        "expected": finding.expected,
        "observed": finding.observed,
        "hint": finding.hint,
        "witness": finding.witness,
        "flavour": finding.flavour,
        "after": list(finding.after),
        "story": [moment_dict(moment) for moment in finding.story],
    }


def moment_dict(moment: Moment) -> dict[str, Any]:
    """Return a moment with the keys that say something."""
    out: dict[str, Any] = {
        "index": moment.index,
        "time": round(moment.time, 6),
        "text": moment.text,
    }
    if moment.broke:
        out["broke"] = True
    if moment.call is not None:
        out["call"] = moment.call
    if moment.server:
        out["server"] = moment.server
    return out
