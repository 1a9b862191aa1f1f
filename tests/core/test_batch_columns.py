"""Further columns of a batch, as a contract declares them and records carry them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rollproof.core.batch_columns import Column, ColumnExtent
from rollproof.core.contract import Contract
from rollproof.core.record_validation import validate_rollout, validate_row
from rollproof.core.records import BatchRow, Rollout
from rollproof.errors import ContractError, SubjectError
from tests.support.trace_builder import contract

_DECLARED = (
    Column(name="advantages", filler=0.0),
    Column(name="versions", extent=ColumnExtent.TOKENS, filler=-1, dtype="int64"),
    Column(name="reward", extent=ColumnExtent.ROW),
)


def _row(**changes: Any) -> BatchRow:
    ids = np.array([7, 8, 9])
    return BatchRow(request_id="r0", token_ids=ids, attention=np.ones(3, np.int64), **changes)


def test_a_contract_takes_mappings_and_survives_json() -> None:
    """A filler of NaN compares equal after it was read back, so that contracts do."""
    declared = contract(columns=[{"name": "ref", "filler": "nan"}, *_DECLARED])
    assert declared == Contract.from_dict(json.loads(json.dumps(declared.to_dict())))
    first = declared.columns[0]
    assert first.filler is math.nan
    assert _DECLARED == declared.columns[1:]


def test_contracts_without_the_field_are_read() -> None:
    """Files that were written before it existed have batches without further columns."""
    data = contract().to_dict()
    del data["columns"]
    assert () == Contract.from_dict(data).columns


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (7, "columns=7 must be a tuple of Column"),
        (("advantages",), "must be a Column or a mapping of its fields"),
        (({"name": "x", "axis": 1},), "must be a Column or a mapping of its fields"),
        (({"name": ""},), "name='' must be a text"),
        (({"name": "x", "extent": "batch"},), "extent='batch' must be one of"),
        (({"name": "x", "dtype": "float8"},), "dtype='float8' must be one of"),
        (({"name": "x", "filler": "zero"},), "filler='zero' must be a number"),
        (({"name": "x", "filler": math.inf},), "filler=inf must be a number"),
        (({"name": "x", "filler": 10**400},), "must be a number that a float can be"),
        (({"name": "x", "dtype": ["int8"]},), "dtype=.*must be one of"),
        (({"name": "x", "filler": "nan", "dtype": "int8"},), "filler='nan' contradicts"),
        (({"name": "x", "filler": 0, "extent": "row"},), "filler=0 contradicts extent=row"),
        (({"name": "x"}, {"name": "x"}), r"columns declares \['x'\] more than once"),
    ],
)
def test_columns_that_cannot_be_declared_are_refused(columns: Any, problem: str) -> None:
    """The message names the field and what it may hold."""
    with pytest.raises(ContractError, match=problem):
        contract(columns=columns)


@pytest.mark.parametrize(
    ("dtype", "distance", "equal"),
    [
        ("float32", 1e-7, True),
        ("float32", 1e-5, False),
        ("bfloat16", 2.0**-8, True),
        ("bfloat16", 0.1, False),
        ("int64", 1e-9, False),
    ],
)
def test_values_may_differ_by_the_rounding_of_their_type(
    dtype: str, distance: float, equal: bool
) -> None:
    """Integers are exact, and NaN equals NaN."""
    column = Column(name="x", dtype=dtype)
    assert [equal, True] == column.equal([1 + distance, math.nan], [1.0, math.nan]).tolist()


def test_a_record_has_arrays_and_scalars_of_its_own() -> None:
    """Lists become arrays, scalars of numpy plain ones, and None among numbers NaN."""
    row = validate_row(
        _row(columns={"advantages": [0.5, None, 1]}, values={"reward": np.float32(0.25)}), "rows"
    )
    np.testing.assert_equal(np.array([0.5, math.nan, 1.0]), row.columns["advantages"])
    assert {"reward": 0.25} == row.values
    assert float is type(row.values["reward"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"columns": {"advantages": np.ones((3, 1))}}, r"columns\['advantages'\] must be numbers"),
        ({"columns": {"advantages": "abc"}}, r"columns\['advantages'\] must be a sequence"),
        ({"columns": [1.0]}, "columns must be a mapping of names to arrays, not list of 1"),
        (
            {"columns": {"returns": [1.0] * 3}},
            r"columns\['returns'\] is not declared: .*advantages",
        ),
        ({"columns": {"reward": [1.0] * 3}}, r"columns\['reward'\] is not declared"),
        ({"values": {"reward": [1.0]}}, r"values\['reward'\] must be a number, a text or None"),
        ({"values": {"uid": "a"}}, r"values\['uid'\] is not declared: .*\['reward'\]"),
        ({"values": 3}, "values must be a mapping of names to values, not int 3"),
    ],
)
def test_an_unusable_column_is_named(changes: Mapping[str, Any], problem: str) -> None:
    """The error says which row, which field and which name."""
    with pytest.raises(SubjectError, match=f"BatchRow for 'r0': {problem}"):
        validate_row(_row(**changes), "rows", _DECLARED)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"columns": {"ref": np.ones((1, 1))}}, r"columns\['ref'\] must be numbers"),
        ({"values": {"reward": object()}}, r"values\['reward'\] must be a number"),
    ],
)
def test_an_unusable_column_of_a_sample_is_named(changes: Mapping[str, Any], problem: str) -> None:
    """Samples of a recorded batch are users' input too."""
    sample = Rollout(
        request_id="r0", prompt_ids=(1,), response_ids=(2,), finish_reason=None, **changes
    )
    with pytest.raises(SubjectError, match=problem):
        validate_rollout(sample, "batch()")
