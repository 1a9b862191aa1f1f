"""Reports of runs: put together from verdicts, and merged over several subjects."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import ConformanceError, UsageError
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import Canary, Report
from rollproof.judging.situations import ReplaySituationCounter, SituationCounter
from rollproof.reporting.text import check_lines, failure_headline, summary_text, text_of

__all__ = ["make_report", "merge_reports", "raise_for_failures", "situations", "situations_of"]


def make_report(
    results: tuple[CheckResult, ...],
    *,
    subject: str,
    profile: str,
    seed: int,
    started: float,
    cases: int,
    flavours: tuple[str, ...] = (),
    expected: Mapping[str, str],
    exercised: Mapping[str, int] | None = None,
    canary: Canary | None = None,
    notes: Iterable[str] = (),
    undelivered: str = "",
) -> Report:
    """Return the report of a run that began at ``started`` (``time.perf_counter()``).

    Entries of ``expected`` whose check did not run are left out: they say nothing of this run.
    """
    judged = {result.id for result in results}
    return Report(
        subject=subject,
        profile=profile,
        seed=seed,
        results=results,
        exercised=dict(exercised or {}),
        canary=canary,
        expected={check_id: why for check_id, why in expected.items() if check_id in judged},
        cases=cases,
        flavours=flavours,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        undelivered=undelivered,
    )


def situations_of(
    kind: str, header: Header | None = None
) -> SituationCounter | ReplaySituationCounter:
    """Return a counter of the situations that a trace of this kind of subject can show; some need
    its ``header``.
    """
    return ReplaySituationCounter() if kind == "replay" else SituationCounter(header)


def situations(events: Iterable[Event], kind: str, header: Header | None = None) -> dict[str, int]:
    """Return how often each situation arose among ``events``, of the trace with ``header``."""
    counter = situations_of(kind, header)
    for event in events:
        counter.event(event)
    return dict(counter.counts)


def merge_reports(subject: str, reports: Iterable[Report]) -> Report:
    """Return one report over several subjects, all judged by the same checks.

    A check fails if it failed anywhere, and passes if it passed somewhere and failed nowhere.
    Raises ``UsageError`` without a report.
    """
    reports = list(reports)
    if not reports:
        raise UsageError("There is no report to merge.")
    exercised: Counter[str] = Counter()
    for report in reports:
        exercised.update(report.exercised)
    return Report(
        subject=subject,
        profile=reports[0].profile,
        seed=reports[0].seed,
        results=tuple(
            _merged(results)
            for results in zip(*(report.results for report in reports), strict=True)
        ),
        exercised=dict(exercised),
        canary=_weakest([report.canary for report in reports if report.canary is not None]),
        expected=_expected_everywhere(reports),
        cases=sum(report.cases for report in reports),
        flavours=tuple(dict.fromkeys(name for report in reports for name in report.flavours)),
        seconds=sum(report.seconds for report in reports),
        notes=tuple(note for report in reports for note in report.notes),
    )


def _expected_everywhere(reports: list[Report]) -> dict[str, str]:
    """Return the expected failures, without those of checks that fail unexpectedly elsewhere."""
    unexpected = {result.id for report in reports for result in report.failed}
    return {
        check_id: reason
        for report in reports
        for check_id, reason in report.expected.items()
        if check_id not in unexpected
    }


_FINDINGS = 8
"""Findings of a check in a merged report; more if it has more kinds."""
_LEADING = (Verdict.FAIL, Verdict.PASS, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE)
"""Which verdict of several subjects stands for all of them."""


def _merged(results: Sequence[CheckResult]) -> CheckResult:
    leading = min(results, key=lambda result: _LEADING.index(result.verdict))
    crashed = [
        result
        for result in results
        if result.verdict is Verdict.UNKNOWN and "crashed" in result.reason
    ]
    if crashed and leading.verdict is not Verdict.FAIL:
        # a check that crashed on one subject must not pass because of another
        leading = crashed[0]
    exercised: Counter[str] = Counter()
    for result in results:
        exercised.update(result.exercised)
    unknown_failures_first = sorted(
        results, key=lambda result: bool(result.known) and not result.otherwise
    )
    findings = [finding for result in unknown_failures_first for finding in result.findings]
    first_of_kind = {finding.kind: finding for finding in reversed(findings)}
    # the first finding of each kind, so that none hides another one, and some more
    findings.sort(key=lambda finding: finding is not first_of_kind[finding.kind])
    flavours: dict[str, dict[str, None]] = {}
    for result in results:
        for kind, names in result.flavours.items():
            flavours.setdefault(kind, {}).update(dict.fromkeys(names))
    return replace(
        leading,
        exercised=dict(exercised),
        findings=tuple(findings[: max(_FINDINGS, len(first_of_kind))]),
        found=sum(result.found for result in results),
        kinds=_sum(result.kinds for result in results),
        known=tuple(dict.fromkeys(reason for result in results for reason in result.known)),
        otherwise=_sum(result.otherwise for result in results),
        flavours={kind: tuple(names) for kind, names in flavours.items()},
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _weakest(canaries: list[Canary]) -> Canary | None:
    """Return the self-test that stands for all: one that stayed green, if there is any."""
    planted = [canary for canary in canaries if canary.planted is not None]
    if planted:
        return min(planted, key=lambda canary: canary.red)
    return canaries[0] if canaries else None


def raise_for_failures(report: Report) -> None:
    """Raise ``ConformanceError`` with the findings of checks that failed unexpectedly, if any."""
    __tracebackhide__ = True
    if report.failed:
        data = report.to_dict()
        lines = [
            line
            for check in data["checks"]
            if check["verdict"] == "fail"
            for line in check_lines(check)
        ]
        raise ConformanceError(
            f"{report.subject}: {summary_text(data)}\n{text_of(lines)}", failure_headline(data)
        )
