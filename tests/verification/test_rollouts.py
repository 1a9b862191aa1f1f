"""Campaigns: schedules run, verdicts added up, counterexamples shrunk and written, the canary
planted.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import EngineOutput, Request, Rollout
from rollproof.errors import UsageError
from rollproof.fakes.clients.reference_clients import (
    AsSampled,
    EngineKeep,
    PartialOffSurfaced,
    PartialSample,
)
from rollproof.fakes.clients.resuming import ClientOptions
from rollproof.invariants import default_registry
from rollproof.judging.checks import (
    CheckResult,
    Collector,
    Finding,
    Verdict,
    request_check,
)
from rollproof.judging.registry import Registry
from rollproof.judging.report import Report
from rollproof.judging.request_view import RequestView
from rollproof.store import load_trace
from rollproof.verification.canary import SAMPLE_PLANTS, try_canary
from rollproof.verification.contract_probe import probe
from rollproof.verification.reports import merge_reports
from rollproof.verification.rollouts import cases_for, run_conformance
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import LATER_REQUEST, profile_named, scope_families
from rollproof.verification.traces import judge

REQUEST = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=5)


def _case(*tokens: int, kind: ActionKind = ActionKind.ABORT, **fields: Any) -> Case:
    actions = tuple(Action(when=Trigger(request="r0", tokens=count), do=kind) for count in tokens)
    return Case(flavour="sglang", requests=(REQUEST,), actions=actions, **fields)


class Concatenates(AsSampled):
    """Appends the whole array of every resumed call, as verl 0.7.1 did."""

    def routes_start(self, sample: PartialSample) -> int:
        return 0

    def merge_routes(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        if output.routes is not None:
            sample.rows = (
                output.routes
                if sample.rows is None
                else np.concatenate([sample.rows, output.routes])
            )


def test_a_correct_subject_passes_and_its_canary_is_red() -> None:
    """A reference manager passes every check that was exercised, and the planted fault is seen."""
    report = run_conformance(
        AsSampled, cases=[_case(), _case(2), _case(0, 3, kind=ActionKind.SYNC)]
    )

    assert (0, 3) == (report.summary["fail"], report.cases)
    assert report.canary is not None
    assert (True, "routes.rows") == (report.canary.red, report.canary.expected_by)
    assert 1 <= report.exercised["resumes across a weight version"]


def test_a_fault_is_found_shrunk_and_written(tmp_path: Path) -> None:
    """The counterexample is small, on disk, and fails the same check when it is read back and
    judged.
    """
    crowd = replace(
        _case(1, 3),
        requests=(REQUEST, Request(request_id="r1", prompt_ids=(13,), max_tokens=9)),
        servers=2,
    )
    report = run_conformance(Concatenates, cases=[_case(), crowd], witness_dir=tmp_path)
    failed = {result.id: result for result in report.failed}

    assert "routes.rows" in failed
    witness = load_trace(tmp_path / "routes.rows.json")
    case = Case.from_dict(dict(witness.header.case or {}))
    assert (1, 1, 1) == (len(case.requests), len(case.actions), case.servers)
    assert "routes.rows" in judge(witness).failed
    assert {str(tmp_path / "routes.rows.json")} == {
        finding.witness for finding in failed["routes.rows"].findings
    }


@request_check("mine.kinds", promise="p", needs="n", exercised_by="requests")
def kinds_by_size(view: RequestView, out: Collector) -> None:
    """A long response is one kind of finding, an abort another one, on any engine."""
    replies = [reply for attempt in view.attempts for reply in attempt.replies]
    aborted = sum(reply.output.finish_reason == "abort" for reply in replies)
    if aborted:
        out.finding(f"{aborted} aborts", expected="e", observed="o", kind="aborts")
    if view.stitched.response_ids and len(view.stitched.response_ids) > 3:
        out.finding("long", expected="e", observed="o")


def test_each_kind_has_a_finding_and_a_counterexample(tmp_path: Path) -> None:
    """A check that finds two kinds shows both, each with a small case of its own and what preceded
    it; the flavours are those of the whole run.
    """
    cases = [_case(2), _case(), replace(_case(1), flavour="vllm")]

    def run() -> CheckResult:
        report = run_conformance(
            AsSampled,
            cases=cases,
            checks=[kinds_by_size],
            only=["mine.kinds"],
            witness_dir=tmp_path,
        )
        return report.results[0]

    result = run()
    findings = {finding.kind: finding for finding in result.findings}

    assert {"aborts": ("sglang", "vllm"), "long": ("sglang", "vllm")} == dict(result.flavours)
    assert {
        "aborts": str(tmp_path / "mine.kinds.json"),
        "long": str(tmp_path / "mine.kinds.2.json"),
    } == {kind: finding.witness for kind, finding in findings.items()}
    assert () == findings["long"].after
    (after,) = findings["aborts"].after
    assert after.startswith("abort of call 1 on s0 at ")
    for finding in findings.values():
        trace = load_trace(Path(finding.witness or ""))
        shown = judge(trace, Registry([kinds_by_size])).results[0]
        assert [finding.kind] == list(shown.kinds)

    cases = [replace(_case(2), requests=(replace(REQUEST, max_tokens=3),))]
    assert ["aborts"] == [finding.kind for finding in run().findings]
    assert ["mine.kinds.json"] == [path.name for path in tmp_path.iterdir()]


def test_the_counterexamples_of_what_passes_now_are_deleted(tmp_path: Path) -> None:
    """A fixed check leaves no counterexample behind; a file that rollproof did not write, or of
    another subject, stays.
    """
    run_conformance(
        Concatenates, name="mine", cases=[_case(2)], only=["routes.rows"], witness_dir=tmp_path
    )
    witness = tmp_path / "routes.rows.json"
    shutil.copy(witness, tmp_path / "kept.json")
    (tmp_path / "stitch.tokens.json").write_text("{}", encoding="utf-8")

    def again(name: str, keep: tuple[str, ...] = ()) -> None:
        run_conformance(
            AsSampled,
            name=name,
            cases=[_case(2)],
            only=["routes.rows", "stitch.tokens"],
            witness_dir=tmp_path,
            keep_witnesses=keep,
        )

    again("another")
    assert witness.exists()
    again("mine", ("routes.rows",))
    assert witness.exists()
    again("mine")
    assert {"kept.json", "stitch.tokens.json"} == {path.name for path in tmp_path.iterdir()}


def test_an_expected_failure_is_counted_apart() -> None:
    """A failure that was declared does not fail the run, and is not shrunk."""
    report = run_conformance(
        Concatenates,
        cases=[_case(2)],
        only=["routes.rows"],
        expected={"routes.rows": "verl#6029"},
        canary=False,
    )

    assert (1, 0) == (report.summary["expected_fail"], report.summary["fail"])
    assert "verl#6029" == report.to_dict()["checks"][0]["reason"]


def test_only_selects_and_own_checks_are_added() -> None:
    """``only`` takes ids and families, and a user's own check runs beside the shipped ones."""
    mine = request_check("mine.named", promise="p", needs="n", exercised_by="samples")(
        lambda view, out: out.exercised("samples")
    )
    report = run_conformance(
        AsSampled, cases=[_case()], only=["mine", "routes.rows"], checks=[mine]
    )

    assert [("mine.named", Verdict.PASS), ("routes.rows", Verdict.PASS)] == [
        (result.id, result.verdict) for result in report.results
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"profile": "nosuch"},
            r"No profile is named 'nosuch'; choose one of \['pr', 'nightly', 'soak'\]",
        ),
        ({"only": ["routes.row"]}, "Did you mean routes.rows"),
        ({"flavours": ["llama.cpp"]}, r"No engine flavour is named \['llama.cpp'\]; choose among"),
        ({"seed": -1}, "seed=-1 must be an integer >= 0"),
    ],
)
def test_arguments_that_do_not_exist_are_answered_with_those_that_do(
    arguments: dict[str, Any], message: str
) -> None:
    """Unknown names are refused with the valid ones."""
    with pytest.raises(UsageError, match=message):
        run_conformance(AsSampled, **arguments)


def test_a_contract_of_ones_own_fixes_the_model_and_the_flavours() -> None:
    """A subject that declares its model's size is run on that size, on the flavours whose
    conventions fit.
    """

    class Fixed(AsSampled):
        def start(self, fleet: Any) -> None:
            super().start(fleet)
            self.contract = replace(
                self.contract,
                num_layers=4,
                moe_layers=(1, 2, 3),
                num_experts=16,
                top_k=4,
                dtype="int32",
            )

    seen = set()

    def watch(view: Any, out: Any) -> None:
        case = view.header.case
        seen.add((case["flavour"], case["model"]["num_experts"]))
        out.exercised("samples")

    mine = request_check("mine.watch", promise="p", needs="n", exercised_by="samples")(watch)
    some = islice(cases_for(Fixed, profile="pr", seed=0), 0, None, 40)
    run_conformance(Fixed, cases=some, only=["mine"], checks=[mine], canary=False)

    assert {16} == {experts for _, experts in seen}
    assert "sglang" in {flavour for flavour, _ in seen}
    assert "vllm" not in {flavour for flavour, _ in seen}


def test_merging_keeps_failures_and_adds_what_was_exercised() -> None:
    """In a merged report a check fails if it failed anywhere, and a subject without the check does
    not hide a pass.
    """
    good = run_conformance(AsSampled, cases=[_case(2)], only=["routes.rows", "stitch.tokens"])
    bad = run_conformance(Concatenates, cases=[_case(2)], only=["routes.rows", "stitch.tokens"])
    merged = merge_reports("both", [good, bad])

    assert {"routes.rows": Verdict.FAIL, "stitch.tokens": Verdict.PASS} == {
        result.id: result.verdict for result in merged.results
    }
    assert 2 == merged.cases
    assert good.exercised["resumes"] + bad.exercised["resumes"] == merged.exercised["resumes"]


@pytest.mark.parametrize("plant", SAMPLE_PLANTS, ids=lambda plant: plant.check_id)
def test_every_canary_is_red_on_its_own(plant: Any) -> None:
    """Each planted fault is found by its check alone, whichever checks a user selects."""
    trace = run_case(AsSampled, _case(2))
    canary = try_canary([trace], Registry([default_registry()[plant.check_id]]), SAMPLE_PLANTS)

    assert (True, plant.fault) == (canary.red, canary.planted)


def test_a_canary_that_nobody_sees_is_told() -> None:
    """A check that went blind makes the run untrustworthy, and the report says so."""
    blind = request_check("routes.rows", promise="p", needs="n", exercised_by="samples")(
        lambda view, out: out.exercised("samples")
    )
    canary = try_canary([run_case(AsSampled, _case(2))], Registry([blind]), SAMPLE_PLANTS)

    assert not canary.red
    assert "cannot be trusted" in canary.reason


def test_engine_side_resume_is_run_without_aborts_that_nobody_survives() -> None:
    """An engine-side subject passes on the pause modes that its contract allows."""
    cases = list(cases_for(EngineKeep, profile="pr", seed=0, flavours=["vllm"]))[::15]
    report = run_conformance(EngineKeep, cases=cases, canary=False)

    assert [] == [(result.id, result.findings[0].title) for result in report.failed]


def test_an_option_of_a_manager_is_part_of_its_contract() -> None:
    """References declare what they do: an untagged one has no version checks to pass."""

    def untagged() -> AsSampled:
        return AsSampled(ClientOptions(versions="none"))  # type: ignore[arg-type]

    report = run_conformance(untagged, cases=[_case(2)], only=["versions.min-max"])

    assert Verdict.NOT_APPLICABLE is report.results[0].verdict


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"only": "stitch"}, r"only='stitch' is a string: write only=\['stitch'\]"),
        ({"only": [1]}, "only must hold names, not 1"),
        ({"only": 7}, "only must be a list of names, not 7"),
        (
            {"keep_witnesses": "routes.rows"},
            r"keep_witnesses='routes\.rows' is a string: write keep_witnesses=\['routes\.rows'\]",
        ),
        ({"witness_dir": 5}, r"witness_dir must be a path, such as 'out/trace\.json', not 5"),
        ({"witness_dir": "a\0b"}, "witness_dir must be a path"),
        ({"checks": 5}, "checks must be a list of Check, not 5"),
        (
            {"checks": ["routes.rows"]},
            r"checks must hold rollproof\.Check, not 'routes\.rows'; .* chosen by id with `only`",
        ),
        ({"progress": 5}, "progress must be a function of one Progress, not 5"),
        ({"flavours": ["vllm", 3]}, "flavours must hold names, not 3"),
        ({"seed": "a"}, "seed='a' must be an integer >= 0, such as 0 or 12345"),
        ({"seed": -1}, "seed=-1 must be an integer >= 0"),
        ({"seed": True}, "seed=True must be an integer >= 0"),
        ({"seed": 2**63}, r"must be an integer >= 0, such as 0 or 12345, below 2\*\*63"),
        ({"name": 5}, "name must be text, not 5"),
        ({"recipe": 5}, "recipe must be a mapping such as .*, not 5"),
        ({"cases": []}, "cases is empty, so nothing would be judged"),
        (
            {"cases": None, "flavours": []},
            "flavours is empty, so nothing would be judged",
        ),
        (
            {"cases": [1]},
            r"cases must be rollproof\.Case objects, not 1; Case\.from_dict reads the JSON form",
        ),
        ({"cases": 1}, "cases must be a list of Case, not 1"),
        (
            {"expected": {"routes.row": "known"}},
            r"No check or family is named 'routes\.row'\. Did you mean routes\.rows",
        ),
        ({"expected": {"routes": "known"}}, "No check or family is named 'routes'"),
        (
            {"expected": {"routes.rows": ""}},
            r"expected\['routes\.rows'\] must say why the check is known to fail",
        ),
        ({"expected": ["routes.rows"]}, "expected must map ids of checks to reasons"),
        ({"profile": "nosuch"}, "No profile is named 'nosuch'"),
        ({"profile": []}, "No profile is named"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(wrong: Any, told: str) -> None:
    """Each is told before anything runs, with what to write instead."""
    with pytest.raises(UsageError, match=told):
        run_conformance(AsSampled, **{"cases": [_case()], **wrong})


def test_a_subject_is_given_as_a_factory() -> None:
    """A subject in place of its class would be shared by all cases."""
    with pytest.raises(
        UsageError,
        match=(
            r"run_conformance\(\) takes a factory, such as the subject's class, not <.*each case"
            r" starts from"
        ),
    ):
        run_conformance(AsSampled())


def test_a_folder_that_cannot_be_written_to_is_told_before_the_run(tmp_path: Path) -> None:
    """No case is run for findings whose counterexamples could not be kept."""
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match=r"Cannot write into .*file: Not a directory"):
        run_conformance(AsSampled, cases=iter([pytest.fail]), witness_dir=tmp_path / "file")  # type: ignore[list-item]


def test_hangs_of_one_kind_end_a_campaign() -> None:
    """A rollout that polls for ever costs real time in each case: after ten alike the campaign says
    that it stops.
    """

    class Polls(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            while True:  # noqa: ASYNC110 - polling for ever is what is tested
                await asyncio.sleep(9.0)

    report = run_conformance(
        Polls,
        cases=[replace(_case(), seed=seed, deadline=90.0) for seed in range(40)],
        only=["lifecycle"],
    )

    assert 10 == report.cases
    assert "lifecycle.no-hang" in {result.id for result in report.failed}
    assert "stopped after 10 of 40 cases: 10 rollouts hung alike, awaiting " in report.notes[0]
    assert "What the other cases would have shown is not known" in report.notes[0]


def test_hangs_that_are_seen_at_once_end_no_campaign() -> None:
    """A deadlock costs nothing, so every case is run."""

    class Waits(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            await asyncio.Event().wait()
            return None

    report = run_conformance(
        Waits, cases=[replace(_case(), seed=seed) for seed in range(15)], only=["lifecycle"]
    )

    assert (15, ()) == (report.cases, report.notes)


def test_thinning_keeps_every_case_with_a_later_request() -> None:
    """They are few, and no other case shows what they show of a stack that resumes nothing."""
    flavour, contract, model = probe(PartialOffSurfaced, ["vllm"])[0]
    whole, thin = (
        [
            repr(case)
            for case in cases_for(
                PartialOffSurfaced, profile="pr", seed=0, flavours=["vllm"], thin=n
            )
        ]
        for n in (1, 25)
    )
    families = dict(scope_families(flavour, contract, scope=profile_named("pr").scope, model=model))
    later = {repr(case) for case in families[LATER_REQUEST]}
    assert later and later <= set(thin) < set(whole)
    assert len(thin) - len(later) < len(whole) / 10


def test_a_merged_report_hides_no_kind() -> None:
    """Many findings of one subject leave room for the one of another; flavours are joined."""

    def of(flavour: str, *kinds: str) -> Report:
        findings = tuple(
            Finding(check_id="mine.kinds", title=kind, expected="e", observed="o", kind=kind)
            for kind in kinds
        )
        result = CheckResult(
            check=kinds_by_size,
            verdict=Verdict.FAIL,
            reason="",
            findings=findings,
            found=len(kinds),
            flavours=dict.fromkeys(kinds, (flavour,)),
        )
        return Report(subject="one", profile="pr", seed=0, results=(result,))

    merged = merge_reports("both", [of("vllm", *["long"] * 9), of("sglang", "aborts", "long")])
    (result,) = merged.results

    assert ["long", "aborts"] == [finding.kind for finding in result.findings[:2]]
    assert (8, 11) == (len(result.findings), result.found)
    assert {"long": ("vllm", "sglang"), "aborts": ("sglang",)} == dict(result.flavours)
