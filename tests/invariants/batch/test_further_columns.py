"""Further columns of a batch: each value at its token, the filler elsewhere, values of a row with
their row and group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.batch_columns import Column, ColumnExtent
from rollproof.core.records import BatchRow, ColumnArray, Rollout
from rollproof.errors import SubjectError
from rollproof.fakes.trainers.reference_batches import CollatedBatch, ColumnCollator
from rollproof.judging.checks import Finding, Verdict
from rollproof.verification.batches import judge_batches, record_batches


def _columns(
    name: str, change: Callable[[ColumnArray], ColumnArray]
) -> Callable[[], ColumnCollator]:
    """Return a conversion that changes each row's column ``name``."""

    class Changed(ColumnCollator):
        def column(self, sample: Rollout, column: Column) -> ColumnArray:
            row = super().column(sample, column)
            return change(row) if column.name == name else row

    return Changed


def _values(change: Callable[[list[BatchRow]], list[dict[str, Any]]]) -> Callable[[], Any]:
    """Return a conversion whose rows have other values of a row."""

    class Changed(ColumnCollator):
        def rows(self, batch: CollatedBatch) -> list[BatchRow]:
            rows = super().rows(batch)
            return [
                replace(row, values={**row.values, **values})
                for row, values in zip(rows, change(rows), strict=True)
            ]

    return Changed


def _first(factory: Callable[[], Any], check: str) -> Finding:
    """Return the first finding of the only check that fails."""
    report = judge_batches(factory)
    assert [check] == [result.id for result in report.failed]
    return report.failed[0].findings[0]


@pytest.mark.parametrize(
    ("name", "change", "expected", "observed", "hint"),
    [
        (
            "versions",
            lambda row: np.where(row < 0, row, row + 1),
            "68 at position 0",
            "69, which is that of token 1; so at 7 of 7 tokens",
            "Shift and pad this column",
        ),
        (
            "outcome_advantages",
            np.zeros_like,
            "-0.976562 at position 3",
            "0, the filler; so at 4 of 4 tokens",
            "The values were placed by the mask or padding of another row",
        ),
        (
            "ref_logprobs",
            lambda row: row * 1.001,
            "-0.328125 at position 3",
            "-0.328453, rounded; so at 4 of 4 tokens",
            "The contract declares that values pass float32 unharmed",
        ),
        (
            "rm_scores",
            lambda row: row * 300,
            "0.320312 at position 6",
            "96.0938; so at 1 of 1 token",
            "Carry the values as they are",
        ),
    ],
)
def test_a_wrong_value_is_explained_by_what_it_is(
    name: str, change: Callable[[ColumnArray], ColumnArray], expected: str, observed: str, hint: str
) -> None:
    """That of another token, the filler, a rounded one, or another."""
    finding = _first(_columns(name, change), "batch.columns")
    assert (expected, observed) == (finding.expected, finding.observed)
    assert finding.hint.startswith(hint)


def test_a_value_of_another_sample_is_named() -> None:
    """Rows of a batch that exchange a column."""

    class Exchanged(ColumnCollator):
        def rows(self, batch: CollatedBatch) -> list[BatchRow]:
            rows = super().rows(batch)
            swapped = [rows[i - 1].columns["advantages"] for i in range(len(rows))]
            return [
                replace(row, columns={**row.columns, "advantages": values})
                for row, values in zip(rows, swapped, strict=True)
            ]

    report = judge_batches(Exchanged, only=["batch.columns"])
    first = report.failed[0].findings[0]
    assert "-0.0625, which is that of token 4 of r4; so at 4 of 4 tokens" == first.observed


def test_two_columns_that_were_exchanged_are_named() -> None:
    """The value is that of another column at the same token."""

    class Exchanged(ColumnCollator):
        def numbers(self, sample: Rollout, column: Column) -> ColumnArray:
            other = "ref_logprobs" if column.name == "advantages" else column.name
            return sample.columns[other]

    finding = _first(Exchanged, "batch.columns")
    assert "-0.328125, which is its ref_logprobs; so at 4 of 4 tokens" == finding.observed


@pytest.mark.parametrize(
    ("changed", "title", "observed"),
    [
        ({}, "the advantages of a sample are gone", "none"),
        ({"advantages": np.zeros(3)}, "advantages of another length than their row", "3"),
    ],
)
def test_a_column_that_is_gone_or_cut_is_found(
    changed: Mapping[str, ColumnArray], title: str, observed: str
) -> None:
    """Its places cannot be compared, and it is reported all the same."""

    class Changed(ColumnCollator):
        def rows(self, batch: CollatedBatch) -> list[BatchRow]:
            return [
                replace(
                    row,
                    columns={
                        **{name: row.columns[name] for name in row.columns if name != "advantages"},
                        **changed,
                    },
                )
                for row in super().rows(batch)
            ]

    finding = _first(Changed, "batch.columns")
    assert (title, "7 places", observed) == (finding.title, finding.expected, finding.observed)


def test_what_a_mask_hides_is_not_judged() -> None:
    """A stack may multiply a column by its loss mask, or leave numbers at masked tokens."""

    class Masked(ColumnCollator):
        def column(self, sample: Rollout, column: Column) -> ColumnArray:
            row = super().column(sample, column)
            trained = self.loss_mask(sample)
            return row * trained if column.name == "advantages" else row

    assert 0 == judge_batches(Masked).exit_code


def test_another_filler_is_found_at_its_first_place() -> None:
    """Padding of any side, and the prompt in a column of the response."""
    finding = _first(
        _columns("advantages", lambda row: np.where(row == 0, 9, row)), "batch.column-filler"
    )
    assert ("advantages have another filler", "0 where no value belongs") == (
        finding.title,
        finding.expected,
    )
    assert "9; so at 3 places (0-2)" == finding.observed


def test_a_column_without_a_declared_filler_may_have_any() -> None:
    """Nobody reads what a mask hides."""

    class NoFiller(ColumnCollator):
        contract = replace(
            ColumnCollator.contract,
            columns=tuple(replace(c, filler=None) for c in ColumnCollator.contract.columns),
        )

    results = {result.id: result for result in judge_batches(NoFiller).results}
    assert Verdict.PASS is results["batch.columns"].verdict
    assert Verdict.NOT_APPLICABLE is results["batch.column-filler"].verdict
    assert (
        "the contract declares no filler of a further column"
        == results["batch.column-filler"].reason
    )


def test_groups_may_be_renamed() -> None:
    """Only which samples share a label is compared."""
    renamed = _values(lambda rows: [{"group": f"x{row.values['group']}"} for row in rows])
    assert 0 == judge_batches(renamed).exit_code


@pytest.mark.parametrize(
    ("change", "title", "observed"),
    [
        (lambda rows: [{"group": i} for i, _ in enumerate(rows)], "a group fell apart", "1 and 2"),
        (
            lambda rows: [{"group": 0} for _ in rows],
            "samples of two groups share a group",
            "0 and 0",
        ),
        (lambda rows: [{"group": None} for _ in rows], "the group of a sample is gone", "none"),
        (
            lambda rows: [{"reward": 5} for _ in rows],
            "a row has another reward than its sample",
            "5",
        ),
        (lambda rows: [{"reward": None} for _ in rows], "the reward of a sample is gone", "none"),
    ],
)
def test_a_value_of_a_row_that_is_wrong_is_found(
    change: Callable[[list[BatchRow]], list[dict[str, Any]]], title: str, observed: str
) -> None:
    """A group that fell apart or was joined with another, a lost or foreign value."""
    finding = _first(_values(change), "batch.values")
    assert (title, observed) == (finding.title, finding.observed)


def test_an_undeclared_column_is_refused() -> None:
    """The error names the method, the row, the column and those that are declared."""

    class Undeclared(ColumnCollator):
        def rows(self, batch: CollatedBatch) -> list[BatchRow]:
            return [
                replace(row, columns={**row.columns, "returns": row.columns["advantages"]})
                for row in super().rows(batch)
            ]

    with pytest.raises(
        SubjectError, match=r"rows returned .* 'r0': columns\['returns'\] is not declared: .*'adv"
    ):
        judge_batches(Undeclared)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8"])
def test_cases_have_distinct_numbers_that_the_type_holds(dtype: str) -> None:
    """None of them is the filler, so that neither can be taken for the other."""
    filler = 3 if "int" in dtype else -1 / 256

    class All(ColumnCollator):
        contract = replace(
            ColumnCollator.contract,
            columns=tuple(
                Column(
                    name=extent,
                    extent=extent,
                    filler=filler if extent.placed else None,
                    dtype=dtype,
                )
                for extent in ColumnExtent
            ),
        )

    assert not judge_batches(All).failed
    for event in record_batches(All).events:
        for name in ("response", "tokens"):
            numbers = [n for sample in event.samples for n in sample.columns[name]]
            assert filler not in numbers
            assert len(numbers) == len(set(numbers)) or event.defect


def test_columns_that_the_conversion_writes_into_are_found() -> None:
    """Samples are used again."""

    class Writes(ColumnCollator):
        def numbers(self, sample: Rollout, column: Column) -> ColumnArray:
            values = sample.columns[column.name].copy()
            if sample.columns[column.name].flags.writeable:
                sample.columns[column.name][:] = 0
            return values

    finding = _first(Writes, "batch.input")
    assert finding.observed.startswith("changed: advantages of r0, ref_logprobs of r0")
