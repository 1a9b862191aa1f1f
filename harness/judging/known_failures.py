"""Ways: how a check is known to fail, so that another fault of the same check is told from the
known one.

A finding has a kind, which is the same from run to run, and a case in which certain situations
arose. A way names the kinds that the known fault shows, and, where it needs something to have
happened, the situations of which one must have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import Report

__all__ = ["Ledger", "Way", "Ways", "hold"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One fault that a check is known to find, for ``reason``: findings of ``kinds``, in cases in
    which one of ``after`` arose.

    ``after`` names situations as reports do (``aborts mid-decode``); an empty one asks for none.
    """

    reason: str
    kinds: tuple[str, ...]
    after: tuple[str, ...] = ()

    def covers(self, kind: str, situations: Collection[str]) -> bool:
        """Whether a finding of ``kind`` in a case with ``situations`` is this fault, as far as can
        be told.
        """
        return kind in self.kinds and (
            not self.after or any(name in situations for name in self.after)
        )


Ways: TypeAlias = "Mapping[str, Sequence[Way]]"
"""By the id of a check: the ways in which it is known to fail. A check that is not in it may fail
in any.
"""


class Ledger:
    """Holds the findings of a run to the known ways, case by case."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._strange: dict[str, dict[str, int]] = {}
        self._seen: dict[str, list[str]] = {}

    def concerns(self, check_id: str) -> bool:
        """Whether it is known in which ways the check fails."""
        return check_id in self._ways

    def strange(
        self, check_id: str, kinds: Iterable[str], situations: Collection[str]
    ) -> list[str]:
        """Those of ``kinds`` that no known way of the check covers in a case with ``situations``."""
        ways = self._ways.get(check_id)
        return (
            []
            if ways is None
            else [kind for kind in kinds if not any(way.covers(kind, situations) for way in ways)]
        )

    def take(self, check_id: str, kinds: Mapping[str, int], situations: Collection[str]) -> bool:
        """Take down how often a check found something of each kind in a case; whether the known
        ways cover all of it.
        """
        seen = self._seen.setdefault(check_id, [])
        for way in self._ways.get(check_id, ()):
            if way.reason not in seen and any(way.covers(kind, situations) for kind in kinds):
                seen.append(way.reason)
        strange = self.strange(check_id, kinds, situations)
        if strange:
            counts = self._strange.setdefault(check_id, {})
            for kind in strange:
                counts[kind] = counts.get(kind, 0) + kinds[kind]
        return not strange

    def settled(self, result: CheckResult) -> CheckResult:
        """The result with what it shows of the known ways, and what beside them, which is told
        first.
        """
        otherwise = dict(self._strange.get(result.id, {}))
        findings = tuple(sorted(result.findings, key=lambda finding: finding.kind not in otherwise))
        return replace(
            result,
            known=tuple(self._seen.get(result.id, ())),
            otherwise=otherwise,
            findings=findings,
        )


def hold(report: Report, ways: Ways) -> Report:
    """A report of a run whose cases are not known, held to the kinds of findings alone: a way that
    asks for a situation covers nothing.
    """
    if not ways:
        return report
    ledger = Ledger(ways)
    for result in report.results:
        if result.verdict is Verdict.FAIL:
            ledger.take(result.id, result.kinds, ())
    return replace(report, results=tuple(ledger.settled(result) for result in report.results))
