from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollproof
from rollproof.core.events.corrections import Corrected, Purpose
from rollproof.core.trace import Trace
from rollproof.corrections import (
    Correction,
    CorrectionBatch,
    CorrectionTerms,
    Rejection,
    correction_contract,
    correction_function,
)
from rollproof.corrections.correction_cases import correction_cases
from rollproof.errors import SubjectError, UsageError
from rollproof.fakes.trainers.reference_corrections import REFERENCES, RowwiseCorrection
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.store import open_trace
from rollproof.store.arrow_format import TraceWriter
from rollproof.store.json_format import dump_trace
from rollproof.verification.corrections import judge_corrections, record_corrections
from rollproof.verification.traces import judge
from tests.support.random_corrections import random_terms


def _failed(report: Report) -> set[str]:
    return {result.id for result in report.failed}


def _tis(batch: CorrectionBatch) -> Correction:
    ratio = np.exp(np.where(batch.mask == 1, batch.old - batch.rollout, 0))
    return Correction(weights=np.minimum(ratio, 2.0))


TIS = correction_function(_tis, upper=2.0)


@pytest.mark.parametrize("name", REFERENCES)
def test_the_references_are_clean(name: str) -> None:
    """Nothing fails, nothing is unknown, and the planted fault is found."""
    report = judge_corrections(REFERENCES[name], name=name)
    assert 0 == report.exit_code
    assert report.canary is not None and report.canary.red


@pytest.mark.parametrize("seed", range(4))
def test_a_correct_implementation_of_random_terms_is_clean(seed: int) -> None:
    """Whatever is declared: two implementations that share nothing agree. 500 more contracts were
    run by hand.
    """
    contract = correction_contract(random_terms(seed))
    made = type("Random", (RowwiseCorrection,), {"contract": contract})
    assert 0 == judge_corrections(made, seed=seed).exit_code


@pytest.mark.parametrize("staleness", [0, 3, 20])
def test_versions_of_cases_count_from_0(staleness: int) -> None:
    """Tokens on both sides of any staleness have versions that a trainer may have."""
    terms = CorrectionTerms(upper=2.0, max_staleness=staleness, stale="drop")
    cases = [case for case in correction_cases(terms) if case.purpose is Purpose.STALE]
    assert cases
    for case in cases:
        ages = case.inputs.current_version - case.inputs.versions
        assert case.inputs.versions.min() >= 0 <= ages.min() <= staleness < ages.max()


def test_tensors_are_judged_with_their_gradients() -> None:
    """A contract that declares torch gets tensors; detached weights pass, others do not."""
    torch = pytest.importorskip("torch")

    def weights(batch: CorrectionBatch, *, detached: bool) -> Correction:
        gap = torch.where(batch.mask == 1, batch.current - batch.rollout, 0.0)
        made = gap.exp().clamp(max=2.0)
        made = made.detach() if detached else made
        own = torch.where(batch.mask == 1, made * batch.advantages * batch.current, 0.0)
        return Correction(weights=made, loss=-own.sum() / (batch.mask.sum() + 1e-8))

    terms = {"pair": "current/rollout", "upper": 2.0, "loss": "reinforce", "arrays": "torch"}
    right = judge_corrections(
        correction_function(lambda batch: weights(batch, detached=True), **terms)
    )
    assert 0 == right.exit_code
    wrong = judge_corrections(
        correction_function(lambda batch: weights(batch, detached=False), **terms)
    )
    assert {"correction.detached", "correction.gradient"} == _failed(wrong)
    # the same weights, declared as what they are
    open_ = {**terms, "gradient": "current", "loss": "none"}
    kept = correction_function(lambda batch: weights(batch, detached=False), **open_)
    assert 0 == judge_corrections(kept).exit_code


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("low", "high", "failed"),
    [
        (-20.0, 20.0, set()),
        # weights below the bound are as good as 0
        (-np.inf, 20.0, set()),
        (-20.0, np.inf, {"correction.bounds"}),
        (-5.0, 5.0, {"correction.bounds"}),
    ],
)
def test_a_log_bound_is_judged_where_no_upper_bound_hides_it(
    level: str, arrays: str, low: float, high: float, failed: set[str]
) -> None:
    """Another bound, or none, fails above it and below; declared gradients stop at it."""
    terms = {"pair": "current/rollout", "level": level, "log_bound": 20.0, "arrays": arrays}
    if arrays == "torch":
        pytest.importorskip("torch")
        terms["gradient"] = "current"

    def correct(batch: CorrectionBatch) -> Correction:
        logs = batch.mask * (batch.current - batch.rollout)
        if level != "token":
            logs = logs.sum(-1).reshape(-1, 1)
        if level == "geometric":
            logs = logs / batch.mask.sum(-1).clip(min=1).reshape(-1, 1)
        logs = logs.clip(low, high)
        return Correction(weights=np.exp(logs) if arrays == "numpy" else logs.exp())

    report = judge_corrections(correction_function(correct, **terms))
    # a clamp is in the gradient, too, and what is not bounded overflows float32
    assert failed == _failed(report) - {"correction.detached", "correction.finite"}


def test_a_log_bound_that_no_weight_shows_is_not_judged() -> None:
    """An upper bound clamps the same weights before."""

    def correct(batch: CorrectionBatch) -> Correction:
        logs = np.where(batch.mask == 1, batch.old - batch.rollout, 0).sum(-1)
        return Correction(weights=np.minimum(np.exp(logs), 2.0))

    terms = {"level": "sequence", "upper": 2.0, "log_bound": 20.0}
    assert 0 == judge_corrections(correction_function(correct, **terms)).exit_code


def test_batches_are_wider_than_a_fixed_length() -> None:
    """Weights of 16 tokens and more are judged, in a wide batch those of short sequences too."""

    def correct(batch: CorrectionBatch, *, most: int) -> Correction:
        logs = np.where(batch.mask == 1, batch.old - batch.rollout, 0)
        total = logs[:, :most].sum(-1, keepdims=True)
        return Correction(weights=np.minimum(np.exp(total), 4.0))

    terms = {"level": "sequence", "upper": 4.0}
    right = correction_function(lambda batch: correct(batch, most=70), **terms)
    wrong = correction_function(lambda batch: correct(batch, most=32), **terms)
    assert 0 == judge_corrections(right).exit_code
    assert {"correction.weights", "correction.padding"} == _failed(judge_corrections(wrong))


def test_what_follows_from_another_pair_says_so() -> None:
    """Every finding of weights, masks and metrics refers to the check that names the pair."""

    def correct(batch: CorrectionBatch) -> Correction:
        trained = batch.mask == 1
        ratio = np.exp(np.where(trained, batch.current - batch.rollout, 0))
        rejected = trained & ((ratio < 0.5) | (ratio > 3.0))
        weights = np.where(rejected, 0, ratio) * trained
        return Correction(
            weights=weights,
            mask=trained & ~rejected,
            metrics={"mean": weights.sum() / trained.sum()},
        )

    terms = {"rejections": Rejection(lower=0.5, upper=3.0), "rejects_by": "both"}
    report = judge_corrections(
        correction_function(correct, **terms, masked="zero", metrics={"mean": "weights-mean"})
    )
    assert {
        f"correction.{name}"
        for name in ("direction", "mask", "metrics", "padding", "rows", "weights")
    } == _failed(report)
    direction, *others = sorted(report.failed, key=lambda result: result.id)
    assert "the ratio is of another pair of logprobs" == direction.findings[0].title
    hints = {finding.hint for result in others for finding in result.findings}
    assert hints == {
        (
            "All weights of this batch are of current over rollout: see correction.direction, and"
            " repair that."
        )
    }


def test_a_subject_gets_arrays_of_its_own() -> None:
    """What it writes is reported, and reaches no later batch and no trace."""

    def writes(batch: CorrectionBatch) -> Correction:
        found = _tis(batch)
        batch.rollout[:] = 0
        return found

    report = judge_corrections(correction_function(writes, upper=2.0))
    assert {"correction.input"} == _failed(report)
    assert "rollout changed" == report.failed[0].findings[0].observed


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "a NoneType: expected a rollproof.corrections.Correction"),
        (Correction(), "a correction without weights"),
        (Correction(weights=np.ones(7)), r"the weights of shape \(7,\): expected \(1, 1\), or one"),
        (Correction(weights="high"), "the weights, a str 'high': expected numbers"),
        (Correction(weights=[[1, 2], [3]]), "the weights, a list a list of 2, is no array"),
    ],
)
def test_results_of_another_kind(result: Any, words: str) -> None:
    """The finding says what came, and what was expected."""
    report = judge_corrections(correction_function(lambda batch: result, upper=2.0))
    (check,) = (check for check in report.results if check.id == "correction.returns")
    assert re.search(words, check.findings[0].observed)
    assert {"correction.returns"} == _failed(report)


def test_coroutines_are_no_result() -> None:
    """And are closed: nobody awaits them."""

    async def later(batch: CorrectionBatch) -> Correction:
        return _tis(batch)

    report = judge_corrections(correction_function(later, upper=2.0))  # type: ignore[arg-type]  # the mistake
    assert {"correction.returns"} == _failed(report)


def test_missing_metrics_are_named() -> None:
    """A promise that is not there is no pass."""
    report = judge_corrections(
        correction_function(_tis, upper=2.0, metrics={"is_mean": "weights-mean"})
    )
    finding = next(check for check in report.failed if check.id == "correction.returns").findings[0]
    assert "a correction without metrics['is_mean']" == finding.observed


def test_an_exception_is_a_refusal() -> None:
    """Each kind once, with the line of the user's code."""

    def refuses(batch: CorrectionBatch) -> Correction:
        if not batch.mask.any(axis=1).all():
            raise ValueError("every row needs a token")
        return _tis(batch)

    report = judge_corrections(correction_function(refuses, upper=2.0))
    assert {"correction.accepts"} == _failed(report)
    found = report.failed[0].findings[0]
    assert "ValueError: every row needs a token" in found.observed
    # one that declares it is not asked
    declared = correction_function(refuses, upper=2.0, empty_rows=False)
    assert 0 == judge_corrections(declared).exit_code


def test_one_weight_per_sequence_is_enough() -> None:
    """(sequences, 1) and (sequences,) stand for every token; a mask is multiplied by the given
    one.
    """

    def rows(batch: CorrectionBatch) -> Correction:
        gap = np.where(batch.mask == 1, batch.old - batch.rollout, 0).sum(axis=1)
        return Correction(weights=np.minimum(np.exp(gap), 4.0), mask=(np.abs(gap) < 1)[:, None])

    rejection = Rejection(
        aggregate="sum",  # type: ignore[arg-type]  # a text
        lower=float(np.exp(-1)),
        upper=float(np.exp(1)),
    )
    made = correction_function(rows, level="sequence", upper=4.0, rejections=rejection)
    assert 0 == judge_corrections(made).exit_code


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: object(), "made a object without `correct` or a `contract`"),
        (lambda: 1 / 0, "could not be created: ZeroDivisionError"),
        (
            lambda: type(
                "Other", (), {"contract": rollproof.contracts.verl(), "correct": lambda self, b: b}
            )(),
            "declares no correction terms",
        ),
    ],
)
def test_subjects_that_are_none(made: Any, words: str) -> None:
    """The error names what is missing."""
    with pytest.raises(SubjectError, match=words):
        judge_corrections(made)


def test_profiles_and_checks_that_do_not_exist() -> None:
    """A misspelt name is an error, no empty run."""
    with pytest.raises(UsageError, match="No profile is named 'quick'"):
        judge_corrections(TIS, profile="quick")
    with pytest.raises(UsageError, match=r"No check or family is named 'correction\.weigths'"):
        judge_corrections(TIS, only=["correction.weigths"])


def test_more_draws_and_other_seeds_are_other_batches() -> None:
    """The first batches of a longer run are those of the shorter one; one seed gives one run."""
    terms = TIS().contract.correction
    assert terms is not None
    short = [case.name for case in correction_cases(terms, draws=1)]
    first = list(correction_cases(terms, draws=2))
    assert set(short) < {case.name for case in first}
    again = list(correction_cases(terms, draws=2))
    other = list(correction_cases(terms, seed=1, draws=2))
    pairs = [
        (case.inputs.rollout, twin.inputs.rollout) for case, twin in zip(first, again, strict=True)
    ]
    assert all(np.array_equal(one, two) for one, two in pairs)
    assert any(
        not np.array_equal(case.inputs.rollout, twin.inputs.rollout)
        for case, twin in zip(first, other, strict=True)
    )


@pytest.mark.parametrize("ending", ["json", "arrow"])
def test_a_trace_of_corrections_can_be_stored(tmp_path: Path, ending: str) -> None:
    """What is read again is judged alike."""
    trace = record_corrections(REFERENCES["token-tis-correction"], profile="pr")
    spoiled = trace.with_events(
        replace(event, weights=event.weights * np.where(np.arange(event.mask.shape[1]) == 0, 2, 1))
        if isinstance(event, Corrected) and event.purpose is Purpose.PADDING
        else event
        for event in trace
    )
    path = tmp_path / f"trace.{ending}"
    if ending == "json":
        dump_trace(spoiled, path)
    else:
        with TraceWriter(path, spoiled.header) as writer:
            for event in spoiled:
                writer.append(event)
    read = open_trace(path)
    again = judge(Trace(header=read.header, events=tuple(read)))
    assert ("correction.padding",) == judge(spoiled).failed == again.failed


def test_terms_that_a_trace_lacks_leave_everything_unknown() -> None:
    """A foreign trace without them is no crash."""
    trace = record_corrections(TIS)
    header = replace(trace.header, contract=replace(trace.header.contract, correction=None))
    results = judge(replace(trace, header=header)).results
    own = {result.id: result for result in results if result.check.about == "corrections"}
    assert {Verdict.UNKNOWN, Verdict.NOT_APPLICABLE} == {result.verdict for result in own.values()}
    reason = "the contract of the trace declares no correction terms"
    assert reason == own["correction.weights"].reason == own["correction.accepts"].reason


def test_the_page_runs() -> None:
    """The example of docs/corrections.md is correct, as it is printed."""
    pytest.importorskip("torch")
    page = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "corrections.md", "exec"), {})  # noqa: S102 - our own page
