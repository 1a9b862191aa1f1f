"""A check that is known to fail in one way still fails if it fails in a new way."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollproof.invariants
from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import EngineOutput, Request, Rollout
from rollproof.fakes.clients.reference_clients import AsSampled, PartialSample
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Finding, Verdict
from rollproof.judging.known_failures import KnownFailure, apply_known_failures
from rollproof.judging.report import Report
from rollproof.judging.situation_names import SITUATIONS
from rollproof.store import load_trace
from rollproof.verification.reports import merge_reports
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.traces import judge
from tests.support.faulty_subjects import Concat

REQUEST = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=5)
PLAIN = Case(flavour="sglang", requests=(REQUEST,))
RESUMED = Case(
    flavour="sglang",
    requests=(REQUEST,),
    actions=(Action(when=Trigger(request="r0", tokens=2), do=ActionKind.ABORT),),
)
KNOWN_FAILURE = KnownFailure(reason="verl#6029", kinds=("too many route rows",), after=("resumes",))


class LosesARow(Concat):
    """A second fault of the same check, of another kind: the first row of a call that was not
    resumed is lost.
    """

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().merge_routes(sample, sent, output)
        if (
            output.finish_reason is not rollproof.FinishReason.ABORT
            and sent == len(sample.request.prompt_ids)
            and sample.rows is not None
        ):
            sample.rows = sample.rows[1:]


class DoublesAlways(Concat):
    """A second fault of the same check and the same kind, where the known one cannot be: nothing
    was resumed.
    """

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().merge_routes(sample, sent, output)
        if sent == len(sample.request.prompt_ids) and sample.rows is not None:
            sample.rows = np.concatenate([sample.rows, sample.rows])


def _judged(
    subject: type, witness_dir: Path | None = None, way: KnownFailure = KNOWN_FAILURE
) -> Report:
    return run_conformance(
        subject,
        cases=[RESUMED, PLAIN],
        only=["routes.rows"],
        expected={"routes.rows": "verl#6029"},
        ways={"routes.rows": (way,)},
        witness_dir=witness_dir,
        canary=False,
    )


def test_the_known_fault_alone_is_expected() -> None:
    """Findings of the known kind, each in a case with the known situation, fail nothing; their
    reason is reported.
    """
    report = _judged(Concat)
    (result,) = report.results

    assert (0, 1) == (report.summary["fail"], report.summary["expected_fail"])
    assert (("verl#6029",), {}, {"too many route rows": result.found}) == (
        result.known,
        result.otherwise,
        result.kinds,
    )


@pytest.mark.parametrize(
    ("subject", "kind"), [(LosesARow, "too few route rows"), (DoublesAlways, "too many route rows")]
)
def test_a_second_fault_of_the_same_check_fails(subject: type, kind: str, tmp_path: Path) -> None:
    """Of another kind, or in another situation: it is counted, shrunk, shown and written, and the
    check fails.
    """
    report = _judged(subject, tmp_path)
    (result,) = report.failed

    assert {kind: 1} == result.otherwise
    assert {kind} == {finding.kind for finding in result.findings}
    witness = load_trace(tmp_path / "routes.rows.json")
    assert () == Case.from_dict(dict(witness.header.case or {})).actions
    assert "routes.rows" in judge(witness).failed
    assert "fail" == report.to_dict()["checks"][0]["verdict"]
    assert 1 == report.exit_code


def test_without_ways_whatever_a_check_finds_is_expected() -> None:
    """Who only says that a check fails is taken at their word."""
    report = run_conformance(
        LosesARow,
        cases=[RESUMED, PLAIN],
        only=["routes.rows"],
        expected={"routes.rows": "known"},
        canary=False,
    )

    assert (0, 1) == (report.summary["fail"], report.summary["expected_fail"])


def test_a_report_is_held_to_kinds_alone() -> None:
    """Where the cases are not known, a way that names no situation covers its kinds, and one that
    does covers none.
    """
    report = run_conformance(
        Concat,
        cases=[RESUMED],
        only=["routes.rows"],
        expected={"routes.rows": "known"},
        canary=False,
    )

    assert (
        ()
        == apply_known_failures(
            report, {"routes.rows": (KnownFailure(reason="r", kinds=KNOWN_FAILURE.kinds),)}
        ).failed
    )
    assert ("routes.rows",) == tuple(
        result.id
        for result in apply_known_failures(report, {"routes.rows": (KNOWN_FAILURE,)}).failed
    )


def test_an_unexpected_failure_of_one_part_is_not_excused_by_another() -> None:
    """Reports of several subjects put together: what one is known to fail, and another fails
    unexpectedly, fails.
    """
    merged = merge_reports("both", [_judged(Concat), _judged(LosesARow)])

    assert ("routes.rows",) == tuple(result.id for result in merged.failed)
    assert {"too few route rows": 1} == dict(merged.results[0].otherwise)


def test_kinds_that_are_too_many_are_no_known_ones() -> None:
    """A stack with counters of other names in each case: what is not counted apart is covered by
    nothing, and fails.
    """
    numbers = itertools.count()

    class Leaky(AsSampled):
        def start(self, fleet: Any) -> None:
            super().start(fleet)
            self.number, self.ended = next(numbers), 0

        async def rollout(self, request: Request) -> Rollout | None:
            self.ended = 1
            return await super().rollout(request)

        def gauges(self) -> dict[str, float]:
            return {f"c{self.number}-{i}": self.ended for i in range(40)}

    check = "lifecycle.counters-return"
    kinds = tuple(
        f"counter 'c{number}-{i}' did not return to its start"
        for number in range(3)
        for i in range(40)
    )
    report = run_conformance(
        Leaky,
        cases=[PLAIN] * 3,
        only=[check],
        expected={check: "r"},
        ways={check: (KnownFailure(reason="r", kinds=kinds),)},
        canary=False,
    )

    assert {"a kind beyond the first 64": 56} == report.failed[0].otherwise
    assert report.failed[0].findings


def test_a_failure_that_does_not_show_again_keeps_its_findings() -> None:
    """A stack that does not repeat itself: the report says what was found, and that it was not
    found again.
    """
    numbers = itertools.count()

    class Flaky(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            if not next(numbers):
                raise ValueError("once")
            return await super().rollout(request)

    report = run_conformance(
        Flaky, cases=[PLAIN] * 2, only=["lifecycle.no-error-without-fault"], canary=False
    )

    assert ["ValueError: once"] == [
        finding.observed.partition(" (")[0] for finding in report.failed[0].findings
    ]
    assert (
        "lifecycle.no-error-without-fault failed, but not when its case was run again"
        in report.notes[0]
    )


def test_what_is_not_known_is_told_first() -> None:
    """A report shows the first few findings: those of the known fault do not hide the others, in
    one part or in several.
    """
    check = default_registry()["routes.rows"]
    known = [
        Finding(
            check_id="routes.rows",
            title=str(i),
            expected="",
            observed="",
            kind="too many route rows",
        )
        for i in range(8)
    ]
    other = Finding(
        check_id="routes.rows", title="other", expected="", observed="", kind="too few route rows"
    )
    kinds = {"too many route rows": 8, "too few route rows": 1}
    failures = {"routes.rows": (KnownFailure(reason="r", kinds=KNOWN_FAILURE.kinds),)}

    def compared(findings: Sequence[Finding]) -> Report:
        taken = {
            kind: count
            for kind, count in kinds.items()
            if any(finding.kind == kind for finding in findings)
        }
        result = CheckResult(
            check=check,
            verdict=Verdict.FAIL,
            reason="",
            findings=tuple(findings),
            found=len(findings),
            kinds=taken,
        )
        return apply_known_failures(
            Report(
                subject="x", profile="pr", seed=0, results=(result,), expected={"routes.rows": "r"}
            ),
            failures,
        )

    assert "other" == compared([*known, other]).results[0].findings[0].title
    assert (
        "other"
        == merge_reports("both", [compared(known), compared([other])]).results[0].findings[0].title
    )


def test_every_situation_that_is_counted_is_a_known_name() -> None:
    """What a way may name is what runs count."""
    source = Path(str(rollproof.__file__)).parent / "judging" / "situations.py"
    calls = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    counted = {
        text.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "_add"
        for text in ast.walk(call)
        if isinstance(text, ast.Constant)
        and isinstance(text.value, str)
        and " " in text.value
        and not text.value.endswith(" ")
    }

    assert 25 < len(counted)
    assert set() == counted - SITUATIONS


def test_kinds_hold_no_counts() -> None:
    """Each finding with a title that is put together says its kind, or its parts are few: no kind
    has a number from the data in it.
    """
    bare, paths = [], sorted(Path(str(rollproof.invariants.__file__)).parent.rglob("*.py"))
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "finding"
                and node.args
            ):
                counting = any(
                    isinstance(part, ast.Name) and part.id in ("count", "share", "len")
                    for part in ast.walk(node.args[0])
                )
                kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
                bare += [f"{path.name}:{node.lineno}"] if counting and not kinds else []
                bare += [
                    f"{path.name}:{node.lineno}"
                    for kind in kinds
                    for part in ast.walk(kind)
                    if isinstance(part, ast.Name) and part.id in ("count", "share")
                ]

    assert [] == bare
    assert 30 < len(paths)
