"""A stand-in for runs with verdicts at will: tests of the pytest plugin need no fleet.

Self-contained, so that its source can be written into the folder of an inner pytest run, which has
processes of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollproof.errors import SubjectError
from rollproof.judging.checks import CheckResult, Finding, Verdict, request_check
from rollproof.judging.known_failures import apply_known_failures
from rollproof.judging.registry import Registry
from rollproof.judging.report import Canary, Report
from rollproof.pytest_plugin import decorators, items, session_state
from rollproof.verification.options import Options

__all__ = ["REGISTRY", "install", "run"]

REGISTRY = Registry(
    request_check(
        check_id, promise=f"Promise of {check_id}.", needs="a trace", exercised_by="events"
    )(lambda view, out: None)
    for check_id in ("stitch.a", "stitch.b", "routes.c", "routes.d")
)


def run(
    kind: str,
    factory: Any,
    options: Options,
) -> Report:
    """Return the verdicts that ``factory.verdicts`` names, and ``pass`` for the other checks.

    Appends a line to $RUNS, from which a test reads how often it was called, and with what.
    """
    name, profile, seed, only = options.name, options.profile, options.seed, options.only
    folder = options.counterexample_dir
    if "RUNS" in os.environ:
        with Path(os.environ["RUNS"]).open("a", encoding="utf-8") as file:
            picked = "" if len(only) == len(REGISTRY) else ",".join(only)
            file.write(f"{name} {profile} {seed} {picked} {folder.name if folder else '-'}\n")
    verdicts = getattr(factory, "verdicts", {})
    if verdicts == "broken":
        raise SubjectError(f"{name}.start raised ValueError: no config.")
    if verdicts == "bug":
        raise ZeroDivisionError("division by zero")
    registry = REGISTRY.select(only) if only else REGISTRY
    report = Report(
        subject=str(name),
        profile=profile,
        seed=seed,
        results=tuple(
            _result(check, Verdict(verdicts.get(check.id, "pass")), getattr(factory, "kinds", 1))
            for check in registry
        ),
        exercised={"aborts mid-decode": 7},
        canary=Canary(planted="a row repeated", expected_by="routes.c", red=True),
        expected={
            check_id: reason
            for check_id, reason in options.expected.items()
            if check_id in registry.ids
        },
        cases=12,
    )
    return apply_known_failures(report, options.known_failures)


def _result(check: Any, verdict: Verdict, kinds: int) -> CheckResult:
    findings = tuple(
        Finding(
            check_id=check.id,
            title=f"Title of {check.id}",
            expected="9 rows",
            observed="16 rows",
            where={"request": "r0"},
            hint="Keep them.",
            kind=f"kind {number}",
        )
        for number in range(kinds)
    )
    return CheckResult(
        check=check,
        verdict=verdict,
        reason={
            "fail": "1 finding",
            "unknown": "not exercised: no events occurred",
            "not applicable": "no routes",
        }.get(verdict, ""),
        exercised={"events": 3} if verdict in ("pass", "fail") else {},
        findings=findings if verdict is Verdict.FAIL else (),
        kinds={finding.kind: 1 for finding in findings if verdict is Verdict.FAIL},
        found=kinds * int(verdict is Verdict.FAIL),
    )


def install() -> None:
    """Take the place of ``run`` and of the registry, for the whole process."""
    from rollproof.verification import expected_failures

    items.run = run
    for module in (decorators, items, session_state, expected_failures):
        module.default_registry = lambda: REGISTRY
