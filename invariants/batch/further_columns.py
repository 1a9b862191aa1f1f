"""Checks on the further columns of a batch that a contract declares: values by token at their
places, the filler elsewhere, and values of a row with their row and group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollproof.core.batch_columns import Column, ColumnExtent
from rollproof.core.contract import Contract
from rollproof.core.records import ColumnArray, Rollout, Scalar
from rollproof.invariants._shared.phrases import count, ranges, share
from rollproof.invariants.batch.batch_rows import Conversion, Placed, Places, batch_check
from rollproof.judging.checks import Collector

__all__ = ["batch_column_filler", "batch_columns", "batch_values"]

_NEEDS = "Batch events whose samples have the further columns that the contract declares"
_ROUNDED = 1e-2
"""Relative error of a value in bfloat16, which keeps two to three digits."""


def _has_placed(contract: Contract) -> str | None:
    if any(column.extent.placed for column in contract.columns):
        return None
    return "the contract declares no further columns by token"


def _has_filler(contract: Contract) -> str | None:
    if any(column.filler is not None for column in contract.columns):
        return None
    return "the contract declares no filler of a further column"


def _has_values(contract: Contract) -> str | None:
    if any(not column.extent.placed for column in contract.columns):
        return None
    return "the contract declares no further values of a row"


@dataclass(frozen=True, eq=False)
class _Judged:
    """The tokens of a sample that a column is judged at, and their values."""

    placed: Placed
    column: Column
    actual: ColumnArray
    """``(places,)``: the column in the row."""
    tokens: Places
    """``(judged,)``: indexes over prompt and response."""
    values: npt.NDArray[np.float64]
    """``(judged,)``: the sample's."""

    @property
    def filler_places(self) -> Places:
        """The places that no value belongs to."""
        placed = self.placed
        padded = np.setdiff1d(np.flatnonzero(placed.row.attention == 0), placed.unattended)
        if self.column.extent is ColumnExtent.TOKENS:
            return padded
        prompt = placed.places[: len(placed.sample.prompt_ids)]
        between = placed.response_places[:0]
        if self.column.extent is ColumnExtent.LAST:
            # behind the last trained token both conventions may have put it
            last_trained = np.flatnonzero(placed.trained)[-1:]
            between = placed.response_places[: last_trained[0] if len(last_trained) else 0]
        return np.concatenate([padded, prompt, between])


def _values_of(sample: Rollout, column: Column) -> ColumnArray | None:
    """Return the sample's values by token, ``(response,)`` or ``(prompt + response,)``; ``None`` if
    it has none, or not one for each.
    """
    response = len(sample.response_ids)
    if not column.extent.per_token:
        value = sample.values.get(column.name)
        return np.full(response, float(value)) if isinstance(value, int | float) else None
    values = sample.columns.get(column.name)
    length = sample.total if column.extent is ColumnExtent.TOKENS else response
    return values if values is not None and len(values) == length else None


def _judged(batch: Conversion, out: Collector) -> Iterator[_Judged]:
    """Yield each column of each sample that its row has in the row's length."""
    for placed in batch.sound:
        for column in batch.contract.columns:
            if not column.extent.placed:
                continue
            values = _values_of(placed.sample, column)
            actual = placed.row.columns.get(column.name)
            if values is None:
                out.absent(f"a sample has no {column.name} of its length")
            elif actual is not None and len(actual) == len(placed.row.token_ids):
                tokens = _judged_tokens(placed, column, values)
                start = 0 if column.extent is ColumnExtent.TOKENS else len(placed.sample.prompt_ids)
                yield _Judged(
                    placed, column, actual, tokens, values[tokens - start].astype(np.float64)
                )


def _judged_tokens(placed: Placed, column: Column, values: ColumnArray) -> Places:
    """Return the tokens whose value must reach the batch: of a response those that count in the
    loss, since a stack may multiply the others by its mask.
    """
    if column.extent is ColumnExtent.TOKENS:
        return np.flatnonzero(~np.isnan(values))
    tokens = np.flatnonzero(placed.counted & ~np.isnan(values))
    if column.extent is ColumnExtent.LAST:
        # where the last token is not trained, stacks differ in which one they take
        tokens = tokens[tokens == len(values) - 1]
    return tokens + len(placed.sample.prompt_ids)


@batch_check(
    "batch.columns",
    promise=(
        "Each further column that the contract declares has every token's own value at the token's"
        " place."
    ),
    needs=_NEEDS,
    exercised_by="values compared",
    applies=_has_placed,
)
def batch_columns(batch: Conversion, out: Collector) -> None:
    """Compare the values of further columns with the sample's."""
    for placed in batch.sound:
        _report_misfits(batch, out, placed)
    for judged in _judged(batch, out):
        column, placed = judged.column, judged.placed
        out.exercised("values compared", len(judged.tokens))
        actual = judged.actual[placed.places[judged.tokens]].astype(np.float64)
        wrong = np.flatnonzero(~column.equal(actual, judged.values))
        if not len(wrong):
            continue
        first = int(wrong[0])
        position = int(judged.tokens[first])
        cause, hint = _explained(batch, judged, float(actual[first]), first)
        out.finding(
            f"{column.name} are not at their tokens",
            expected=f"{judged.values[first]:g} at position {position}",
            observed=(
                f"{actual[first]:g}{cause}; so at {share(len(wrong), len(judged.tokens), 'token')}"
            ),
            where=batch.place(placed.sample, position=position),
            hint=hint,
        )


def _report_misfits(batch: Conversion, out: Collector, placed: Placed) -> None:
    """Report columns that a row lacks, or has in another length."""
    places = len(placed.row.token_ids)
    for column in batch.contract.columns:
        values = _values_of(placed.sample, column) if column.extent.placed else None
        actual = placed.row.columns.get(column.name)
        if values is None or not len(values) or (actual is not None and len(actual) == places):
            continue
        out.finding(
            f"the {column.name} of a sample are gone"
            if actual is None
            else f"{column.name} of another length than their row",
            expected=f"{count(places, 'place')}",
            observed="none" if actual is None else f"{len(actual)}",
            where=batch.place(placed.sample),
            hint="Pad, cut, stack and select all columns of a batch together.",
        )


def _explained(batch: Conversion, judged: _Judged, actual: float, first: int) -> tuple[str, str]:
    """Return the cause of a wrong value, as a clause, and the hint that fits it."""
    column, placed = judged.column, judged.placed
    token = int(judged.tokens[first])
    if column.filler is not None and column.is_filler(actual):
        return ", the filler", (
            "The values were placed by the mask or padding of another row: place and mask each row"
            " by its own (SkyRL #1507)."
        )
    for other in batch.contract.columns:
        values = _values_of(placed.sample, other) if other.extent.placed else None
        start = 0 if other.extent is ColumnExtent.TOKENS else len(placed.sample.prompt_ids)
        if (
            values is not None
            and 0 <= token - start < len(values)
            and column.equal(values[token - start], actual)
        ):
            return f", which is its {other.name}", "Two columns were exchanged."
    own = [placed.sample]
    others = [sample for sample in batch.event.samples if sample is not placed.sample]
    for sample in own + others:
        values = _values_of(sample, column)
        if values is None or not column.equal(values, actual).any():
            continue
        start = 0 if column.extent is ColumnExtent.TOKENS else len(sample.prompt_ids)
        place = start + int(np.argmax(column.equal(values, actual)))
        if sample is placed.sample:
            return f", which is that of token {place}", (
                "Shift and pad this column as the tokens are: where a line holds labels, shift all"
                " columns or none."
            )
        return f", which is that of token {place} of {sample.request_id}", (
            "Sort, split, balance and select all columns of a batch together, and by ids: a slice"
            " of a fixed size takes rows of another sample."
        )
    if np.isclose(judged.values[first], actual, rtol=_ROUNDED, atol=0.0):
        return ", rounded", f"The contract declares that values pass {column.dtype} unharmed."
    return "", "Carry the values as they are: clipping and scaling belong to the loss, if anywhere."


@batch_check(
    "batch.column-filler",
    promise=(
        "Further columns hold their declared filler at places that no value of theirs belongs to."
    ),
    needs=_NEEDS,
    exercised_by="filler places compared",
    applies=_has_filler,
)
def batch_column_filler(batch: Conversion, out: Collector) -> None:
    """Compare the places without a value with the declared filler."""
    for judged in _judged(batch, out):
        column = judged.column
        if column.filler is None:
            continue
        places = judged.filler_places
        out.exercised("filler places compared", len(places))
        wrong = places[~column.is_filler(judged.actual[places])]
        if len(wrong):
            out.finding(
                f"{column.name} have another filler",
                expected=f"{column.filler:g} where no value belongs",
                observed=(
                    f"{judged.actual[wrong[0]]:g}; so at {count(len(wrong), 'place')}"
                    f" ({ranges(sorted(wrong.tolist()))})"
                ),
                where=batch.place(judged.placed.sample, position=int(wrong.min())),
                hint=(
                    "Whoever reads the column takes the number for a value: 0 is the version of the"
                    " first weights, and an advantage in padding reaches a mean over all places."
                ),
            )


@batch_check(
    "batch.values",
    promise=(
        "Further values of a sample reach its own row, and samples of one group stay one group."
    ),
    needs=_NEEDS,
    exercised_by=("values of rows compared", "groups compared"),
    applies=_has_values,
)
def batch_values(batch: Conversion, out: Collector) -> None:
    """Compare the further values of rows with those of their samples."""
    for column in batch.contract.columns:
        if column.extent is ColumnExtent.ROW:
            _compare_values(batch, out, column)
        elif column.extent is ColumnExtent.GROUP:
            _compare_groups(batch, out, column)


def _with_value(batch: Conversion, out: Collector, column: Column) -> Iterator[Placed]:
    """Yield samples that have a value; those whose row lacks it are reported."""
    for placed in batch.placed:
        expected = placed.sample.values.get(column.name)
        if expected is None:
            out.absent(f"a sample has no {column.name}")
        elif placed.row.values.get(column.name) is None:
            out.finding(
                f"the {column.name} of a sample is gone",
                expected=f"{expected!r}",
                observed="none",
                where=batch.place(placed.sample),
                hint="Carry the values of rows wherever their tokens go.",
            )
        else:
            yield placed


def _compare_values(batch: Conversion, out: Collector, column: Column) -> None:
    for placed in _with_value(batch, out, column):
        out.exercised("values of rows compared")
        expected, actual = placed.sample.values[column.name], placed.row.values[column.name]
        if _equal(column, actual, expected):
            continue
        owner = next(
            (
                sample.request_id
                for sample in batch.event.samples
                if _equal(column, actual, sample.values.get(column.name))
            ),
            None,
        )
        out.finding(
            f"a row has another {column.name} than its sample",
            expected=f"{expected!r}",
            observed=f"{actual!r}{'' if owner is None else f', which is that of {owner}'}",
            where=batch.place(placed.sample),
            hint=(
                "Sort, split and balance values together with their rows; a list in the order of"
                " the samples belongs to other rows after that (cf. slime's local_raw_reward)."
            ),
        )


def _equal(column: Column, actual: Scalar, expected: Scalar) -> bool:
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        return bool(column.equal(actual, expected))
    return actual == expected


def _compare_groups(batch: Conversion, out: Collector, column: Column) -> None:
    members: dict[Scalar, list[Placed]] = {}
    for placed in _with_value(batch, out, column):
        members.setdefault(placed.sample.values[column.name], []).append(placed)
    # a label may be renamed: only which samples share one is compared
    owners: dict[Scalar, Placed] = {}
    for samples in members.values():
        out.exercised("groups compared")
        first = samples[0]
        labels = [placed.row.values[column.name] for placed in samples]
        apart = next((i for i, label in enumerate(labels) if label != labels[0]), None)
        if apart is not None:
            _report_group(batch, out, column, first, samples[apart], joined=False)
        stranger = next((owners[label] for label in labels if label in owners), None)
        if stranger is not None:
            _report_group(batch, out, column, stranger, first, joined=True)
        for label, placed in zip(labels, samples, strict=True):
            owners.setdefault(label, placed)


def _report_group(
    batch: Conversion,
    out: Collector,
    column: Column,
    first: Placed,
    second: Placed,
    *,
    joined: bool,
) -> None:
    name = column.name
    out.finding(
        f"samples of two groups share a {name}" if joined else f"a {name} fell apart",
        expected=(
            f"{'two labels' if joined else 'one label'} for {first.sample.request_id} of"
            f" {first.sample.values[name]!r} and {second.sample.request_id} of"
            f" {second.sample.values[name]!r}"
        ),
        observed=f"{first.row.values[name]!r} and {second.row.values[name]!r}",
        where=batch.place(second.sample),
        hint=(
            "Find groups by their label, not by a fixed number of rows: a group may have lost a"
            " sample (AReaL #1419), and rows may be reordered."
        ),
    )
