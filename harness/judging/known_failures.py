"""How checks are known to fail, so that a new fault of the same check is not taken for the known
one.

A finding has a kind, which is the same from run to run, and a case in which certain situations
occurred. A known failure names the kinds of its findings and, if it needs something to have
happened, the situations of which one must have occurred.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import Report

__all__ = ["KnownFailure", "KnownFailureLedger", "KnownFailures", "apply_known_failures"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFailure:
    """One fault that a check is known to find.

    reason: Why the check fails, for the report.
    kinds: The kinds of findings that the fault causes.
    after: Situations as reports name them (``aborts mid-decode``), of which one must have occurred
        in the case; empty if the fault needs none.
    """

    reason: str
    kinds: tuple[str, ...]
    after: tuple[str, ...] = ()

    def covers(self, kind: str, situations: Collection[str]) -> bool:
        """Return whether a finding of ``kind`` in a case with ``situations`` can be this fault."""
        return kind in self.kinds and (
            not self.after or any(name in situations for name in self.after)
        )


KnownFailures: TypeAlias = "Mapping[str, Sequence[KnownFailure]]"
"""The known failures by the id of their check. A check without an entry may fail in any way."""


class KnownFailureLedger:
    """Compares the findings of a run with the known failures, case by case."""

    def __init__(self, failures: KnownFailures) -> None:
        self._failures = failures
        self._unexplained: dict[str, dict[str, int]] = {}
        self._seen: dict[str, list[str]] = {}

    def covers_check(self, check_id: str) -> bool:
        """Return whether known failures are listed for the check."""
        return check_id in self._failures

    def unexplained(
        self, check_id: str, kinds: Iterable[str], situations: Collection[str]
    ) -> list[str]:
        """Return those of ``kinds`` that no known failure of the check explains in such a case."""
        failures = self._failures.get(check_id)
        return (
            []
            if failures is None
            else [
                kind
                for kind in kinds
                if not any(failure.covers(kind, situations) for failure in failures)
            ]
        )

    def record(self, check_id: str, kinds: Mapping[str, int], situations: Collection[str]) -> bool:
        """Record how often a check found each kind in a case.

        Returns:
            Whether the known failures explain all of them.
        """
        seen = self._seen.setdefault(check_id, [])
        for failure in self._failures.get(check_id, ()):
            if failure.reason not in seen and any(
                failure.covers(kind, situations) for kind in kinds
            ):
                seen.append(failure.reason)
        # The same kind of finding in a case without the known cause is a new fault that only looks
        # like the old one.
        unexplained = self.unexplained(check_id, kinds, situations)
        if unexplained:
            counts = self._unexplained.setdefault(check_id, {})
            for kind in unexplained:
                counts[kind] = counts.get(kind, 0) + kinds[kind]
        return not unexplained

    def annotated(self, result: CheckResult) -> CheckResult:
        """Return the result with the known failures that it shows and the findings that they do not
        explain, which come first.
        """
        otherwise = dict(self._unexplained.get(result.id, {}))
        # A reader looks at the first finding, so the new ones come before the known ones.
        findings = tuple(sorted(result.findings, key=lambda finding: finding.kind not in otherwise))
        return replace(
            result,
            known=tuple(self._seen.get(result.id, ())),
            otherwise=otherwise,
            findings=findings,
        )


def apply_known_failures(report: Report, failures: KnownFailures) -> Report:
    """Compare a finished report with the known failures by the kinds of its findings alone.

    The situations of its cases are not known, so a failure that names situations explains nothing.
    """
    if not failures:
        return report
    ledger = KnownFailureLedger(failures)
    for result in report.results:
        if result.verdict is Verdict.FAIL:
            ledger.record(result.id, result.kinds, ())
    return replace(report, results=tuple(ledger.annotated(result) for result in report.results))
