"""What of a report on a trainer fails its GPU test: what failed, what stayed unknown, a canary that
was missed.
"""

from __future__ import annotations

import pytest

from rollproof.gpu_suites.known_engine_failures import COARSE, require_pass
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Finding, Verdict
from rollproof.judging.report import Canary, Report

CHECKS = {check.id: check for check in default_registry().select(["replay"])}
RED = Canary(planted="a fault", expected_by="replay.executed", red=True)


def report(canary: Canary | None = RED, **verdicts: Verdict) -> Report:
    """All replay checks passed, but for ``verdicts`` (by the id's last part, ``_`` for ``-``)."""
    results = []
    for name, check in CHECKS.items():
        verdict = verdicts.get(name.partition(".")[2].replace("-", "_"), Verdict.PASS)
        findings = (
            (Finding(check_id=name, title="a fault", expected="1", observed="2"),)
            if verdict is Verdict.FAIL
            else ()
        )
        results.append(
            CheckResult(
                check=check,
                verdict=verdict,
                reason=f"{verdict} of {name}",
                findings=findings,
                found=len(findings),
            )
        )
    return Report(subject="hf", profile="pr", seed=0, results=tuple(results), canary=canary)


def test_what_passes_is_not_told() -> None:
    """So is what a trainer's contract rules out."""
    require_pass(report(reference=Verdict.NOT_APPLICABLE))


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_what_stays_unknown_fails_but_for_what_bfloat16_is_too_coarse_for(name: str) -> None:
    """With its reason. In bfloat16 two named checks may stay unknown, and no other; in float32
    none.
    """
    unknown = report(**{name.partition(".")[2].replace("-", "_"): Verdict.UNKNOWN})
    with pytest.raises(AssertionError, match=f"unknown of {name}"):
        require_pass(unknown)
    if name in COARSE:
        require_pass(unknown, COARSE)
    else:
        with pytest.raises(AssertionError, match=f"unknown of {name}"):
            require_pass(unknown, COARSE)


def test_what_may_stay_unknown_may_not_fail() -> None:
    """A fault is one in every dtype."""
    with pytest.raises(AssertionError, match="a fault: 2"):
        require_pass(report(reference=Verdict.FAIL), COARSE)


@pytest.mark.parametrize(
    "canary", [None, Canary(planted="a fault", expected_by="replay.executed", red=False)]
)
def test_a_canary_that_was_not_seen_fails(canary: Canary | None) -> None:
    """Or that was not planted at all."""
    with pytest.raises(AssertionError):
        require_pass(report(canary))


def test_the_rule_names_checks_that_exist() -> None:
    """An id that was renamed would excuse nothing, and fail every run in bfloat16."""
    assert set(COARSE) < set(CHECKS)
