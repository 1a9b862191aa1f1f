"""The verdicts on a recorded trace, and the exceptions by which a test ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollproof.core.trace import Trace
from rollproof.errors import ExpectationError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.judging.registry import Registry
from rollproof.judging.report import Report
from rollproof.judging.situations import SituationCounter
from rollproof.verification.argument_checks import as_names
from rollproof.verification.canary import SAMPLE_PLANTS, try_canary
from rollproof.verification.options import ROLLOUTS
from rollproof.verification.reports import raise_for_failures
from rollproof.verification.traces import judge

__all__ = ["checks_of_rollouts", "raise_for_verdicts", "report_of"]


def checks_of_rollouts(only: Iterable[str]) -> Registry:
    """Return the checks that ``only`` names, or all of rollouts. Raises ``UsageError``."""
    registry, selected = default_registry(), as_names(only, "only")
    if selected:
        return registry.select(selected)
    return Registry([check for check in registry if check.judges(ROLLOUTS)])


def report_of(trace: Trace, registry: Registry, expected: Mapping[str, str]) -> Report:
    """Judge a recorded trace, and plant the self-test into it if it can show anything.

    Args:
        trace: What was recorded.
        registry: The checks.
        expected: Ids of checks that are known to fail, with the reason.
    """
    situations = SituationCounter()
    for event in trace.events:
        situations.event(event)
    results = judge(trace, registry).results
    passed = Registry([result.check for result in results if result.verdict is Verdict.PASS])
    # A canary in a trace that fails already shows nothing, unless its own check passes.
    plantable = any(plant.check_id in passed.ids for plant in SAMPLE_PLANTS) or all(
        result.verdict is not Verdict.FAIL for result in results
    )
    return Report(
        subject=trace.header.subject,
        profile="recorded",
        seed=trace.header.seed,
        results=results,
        exercised=situations.counts,
        canary=try_canary([trace] if plantable else [], passed, SAMPLE_PLANTS),
        expected=expected,
        cases=1,
    )


def raise_for_verdicts(report: Report) -> None:
    """Raise ``ConformanceError`` with the findings of a report, if it has any, and
    ``ExpectationError`` if a check passes that is expected to fail.
    """
    __tracebackhide__ = True
    raise_for_failures(report)
    # Strict like a file of expected failures.
    stale = [
        result.id
        for result in report.results
        if result.id in report.expected and result.verdict is Verdict.PASS
    ]
    if stale:
        raise ExpectationError(
            f"Expected to fail, but passing: {', '.join(stale)}. Remove them from `expected`."
        )
