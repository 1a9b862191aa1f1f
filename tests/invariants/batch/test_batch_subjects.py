"""Batch subjects that cannot be judged, and traces about batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.records import BatchRow, Rollout
from rollproof.errors import SubjectError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.verification.batch_cases import batch_cases
from rollproof.verification.batches import judge_batches, record_batches
from rollproof.verification.traces import judge
from tests.odd_stacks.faulty_batches import SurplusRowsSpill
from tests.support.padded_batches import Padder, padded_contract
from tests.support.trace_builder import TraceBuilder, contract


def _raises() -> Padder:
    raise RuntimeError("no tokenizer")


class _NoMethod:
    contract = padded_contract()

    def collate(self, samples: list[Rollout]) -> list[Rollout]:
        return samples


class _BadRows(Padder):
    def rows(self, batch: list[BatchRow]) -> Any:
        return {"rows": batch}


class _BadShape(Padder):
    def rows(self, batch: list[BatchRow]) -> list[BatchRow]:
        return [replace(row, attention=row.attention[:-1]) for row in batch]


class _BadRank(Padder):
    def rows(self, batch: list[BatchRow]) -> list[BatchRow]:
        return [replace(row, routes=np.zeros((2, 2))) for row in batch]  # type: ignore[arg-type]


class _RaisesInRows(Padder):
    def rows(self, batch: list[BatchRow]) -> list[BatchRow]:
        raise KeyError("responses")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (_raises, "could not be created: RuntimeError: no tokenizer"),
        (_NoMethod, r"without \['rows'\]: a BatchSubject has"),
        (_BadRows, "must return a list of BatchRow, not dict"),
        (
            _BadRank,
            r"routes must be integers \(rows, layers, top_k\), not an array of float64 \(2, 2\)",
        ),
        (_BadShape, r"attention has the shape \(17,\), and token_ids has \(18,\)"),
        (
            _RaisesInRows,
            r"rows raised KeyError: 'responses' \(test_batch_subjects.py:52, in rows\) on",
        ),
    ],
)
def test_an_unusable_subject_gets_one_clear_error(factory: Callable[[], Any], message: str) -> None:
    """Faults of the adapter are distinguished from faults of the stack."""
    with pytest.raises(SubjectError, match=message):
        judge_batches(factory)


def test_batch_checks_judge_traces_about_batches_only() -> None:
    """In a trace of rollouts they do not apply, and in a trace of batches nothing else does."""
    rollouts = judge(TraceBuilder(contract()).submit().result((3,)).trace(), default_registry())
    batches = judge(record_batches(Padder), default_registry())
    assert rollouts["batch.tokens"].verdict is Verdict.NOT_APPLICABLE
    assert rollouts["batch.tokens"].reason == "it judges batches, and this trace is about rollouts"
    assert {
        r.id.partition(".")[0] for r in batches.results if r.verdict is not Verdict.NOT_APPLICABLE
    } == {"batch"}


def test_cases_say_what_is_wrong_with_them() -> None:
    """Malformed cases name the defect and the sample; nothing else of theirs is malformed."""
    cases = batch_cases(padded_contract())
    assert [case.name for case in cases if not case.defect][:3] == [
        "one sample",
        "several lengths",
        "equal lengths",
    ]
    for case in cases:
        for sample in case.samples:
            total, response = len(sample.prompt_ids + sample.response_ids), len(sample.response_ids)
            sound = (
                (sample.routes is None or len(sample.routes) == total - 1)
                and (sample.logprobs is not None and len(sample.logprobs) == response)
                and (sample.loss_mask is not None and len(sample.loss_mask) == response)
            )
            assert sound == (sample.request_id != case.defective)


def test_an_untrained_sample_is_among_others_if_masks_are_declared() -> None:
    """It has response tokens, and a mask of zeros."""
    name = "a sample without trained tokens"
    (case,) = (case for case in batch_cases(padded_contract()) if case.name == name)
    assert [True, False, True] == [bool(np.any(sample.loss_mask)) for sample in case.samples]
    assert all(sample.response_ids for sample in case.samples)
    without = replace(padded_contract(), loss_mask=False)
    assert name not in {case.name for case in batch_cases(without)}


def _width(limit: int, *, cuts: bool = False) -> type[Padder]:
    """Return a conversion whose lines hold ``limit`` tokens of a sample."""

    class Narrow(Padder):
        prompt_width, response_width = 16, 48

        def collate(self, samples: list[Rollout]) -> list[BatchRow]:
            if max(sample.total for sample in samples) <= limit:
                return super().collate(samples)
            if not cuts:
                raise ValueError(f"a line holds {limit} tokens")
            return super().collate([self._cut(sample) for sample in samples])

        def _cut(self, sample: Rollout) -> Rollout:
            left = limit - len(sample.prompt_ids)
            return replace(
                sample,
                response_ids=sample.response_ids[:left],
                logprobs=None if sample.logprobs is None else sample.logprobs[:left],
                loss_mask=None if sample.loss_mask is None else sample.loss_mask[:left],
                routes=None if sample.routes is None else sample.routes[: limit - 1],
            )

    return Narrow


def _failed(factory: type[Padder]) -> dict[str, str]:
    return {result.id: result.findings[0].hint for result in judge_batches(factory).failed}


def test_a_long_sample_may_be_refused_and_not_cut() -> None:
    """A width of the stack's own is its choice, from 16 tokens on; that a sample is cut to it
    without a word is named.
    """
    assert {} == _failed(_width(16))
    assert {"batch.accepts"} == set(_failed(_width(9)))
    cut = _failed(_width(16, cuts=True))
    assert {"batch.tokens"} == set(cut)
    assert cut["batch.tokens"].startswith("The sample was cut to a width without a word")


def _with_logprobs(change: Callable[[np.ndarray], np.ndarray]) -> type[Padder]:
    class Changed(Padder):
        prompt_width, response_width = 16, 48

        def row(self, sample: Rollout) -> BatchRow:
            row = super().row(sample)
            assert row.logprobs is not None
            return replace(row, logprobs=change(row.logprobs))

    return Changed


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda values: np.roll(values, -1), "Pad logprobs on the side on which the response"),
        (lambda values: values * (1 + 2**-9), "Keep float32: bfloat16 and float16 round logprobs"),
        (lambda values: np.maximum(values, -20.0), "Carry the values as they are"),
    ],
    ids=["shifted", "rounded", "clipped"],
)
def test_wrong_logprobs_are_explained_by_what_they_are(
    change: Callable[[np.ndarray], np.ndarray], hint: str
) -> None:
    """The first wrong value shows whether it is that of another token, rounded, or another."""
    failed = _failed(_with_logprobs(change))
    assert {"batch.logprobs"} == set(failed)
    assert failed["batch.logprobs"].startswith(hint)


@pytest.mark.parametrize(
    ("change", "title"),
    [
        (lambda values: values.astype(np.float16).astype(np.float64), "logprobs are rounded"),
        (lambda values: np.roll(values, -1), "logprobs are not at their tokens"),
    ],
    ids=["rounded", "shifted"],
)
def test_the_title_tells_rounded_logprobs_from_misplaced_ones(
    change: Callable[[np.ndarray], np.ndarray], title: str
) -> None:
    """Both are wrong numbers, and are repaired in different places."""
    (result,) = judge_batches(_with_logprobs(change)).failed
    assert title == result.findings[0].title


def test_rows_beyond_the_tokens_are_found_behind_the_sample() -> None:
    """A wide batch has room for them, so that no array refuses what the conversion never counts."""
    (result,) = judge_batches(SurplusRowsSpill).failed
    assert "9 route rows for 7 tokens: accepted" == result.findings[0].title
    assert (
        "of 9 rows those beyond the tokens stand behind the sample" == result.findings[0].observed
    )
