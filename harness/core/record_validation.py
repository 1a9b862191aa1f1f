"""Validate the records that a user's code made, field by field.

Wrong types, ranks and ranges are refused here, while the method that made the record can be named:
later a check would crash on them, or the trace could not be written. Lengths that disagree are
faults of the stack, which the checks find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from rollproof.core.batch_columns import Column
from rollproof.core.contract import Contract
from rollproof.core.error_text import show
from rollproof.core.json_codec import misfit_of
from rollproof.core.number_arrays import FLOATS, INTEGERS, MASKS, to_array
from rollproof.core.records import (
    BatchRow,
    ColumnArray,
    EngineOutput,
    FinishReason,
    IntArray,
    Request,
    Rollout,
    Scalar,
    as_column,
    as_logprobs,
    as_mask,
    as_routes,
    as_tokens,
)
from rollproof.core.sampling_masks import as_sampling_mask
from rollproof.errors import SubjectError

__all__ = [
    "ARRAYS",
    "converted",
    "validate_output",
    "validate_request",
    "validate_rollout",
    "validate_row",
    "validate_samples",
]

ARRAYS = ("logprobs", "loss_mask", "routes")
"""The fields of a ``Rollout`` that are arrays."""
_CONVERTERS: Mapping[str, Callable[..., Any]] = {
    "logprobs": as_logprobs,
    "loss_mask": as_mask,
    "routes": as_routes,
    "prompt_ids": as_tokens,
    "response_ids": as_tokens,
    "token_ids": as_tokens,
    "sampling_mask": as_sampling_mask,
}
"""The fields of numbers: lists, arrays and tensors become what a record holds."""
_ROW_FIELDS = (
    ("token_ids", 1, INTEGERS),
    ("attention", 1, MASKS),
    ("loss_mask", 1, MASKS),
    ("logprobs", 1, FLOATS),
    ("routes", 3, INTEGERS),
    ("routed", 1, MASKS),
)
"""Fields of a ``BatchRow``: rank, and what they hold."""
_SAMPLED = ("response_ids", "token_ids")
"""Fields whose ``None`` says that nothing was sampled."""
_LISTS = ("call_versions", "token_versions", "spans", "turns")
_REASONS = frozenset(FinishReason)
_T = TypeVar("_T", bound=Any)


def validate_rollout(value: object, where: str, dtypes: Sequence[str] = ()) -> Rollout:
    """Return a rollout with arrays of its own.

    Args:
        value: What a method of the user's returned.
        where: The name of that method.
        dtypes: The types that the contract declares for routes. Plain lists, which have no type,
            become the first one that holds their numbers.

    Raises:
        SubjectError: It is no rollout, or no trace can hold it.
    """
    rollout: Rollout = _sound(value, Rollout, where)
    routes = rollout.routes
    if routes is None or not routes.size or not _is_untyped(getattr(value, "routes", None)):
        return rollout
    fitting = [name for name in dtypes if _holds(np.iinfo(name), routes)]
    return replace(rollout, routes=routes.astype(fitting[0])) if fitting else rollout


def validate_samples(value: object, where: str, contract: Contract) -> tuple[Rollout, ...]:
    """As ``validate_rollout``, for what a request delivered: one sample, or a list of several if
    the contract declares that.

    Raises:
        SubjectError: As ``validate_rollout``, or the list has something in it that is no sample, or
            one sample twice.
    """
    if not contract.delivers_several:
        if isinstance(value, list | tuple) and any(isinstance(item, Rollout) for item in value):
            raise SubjectError(
                f"{where} returned {len(value)} samples for one request, and the contract declares"
                " samples='request'. Declare samples='turn' if each turn is a sample of its own,"
                " samples='branch' otherwise."
            )
        return (validate_rollout(value, where, contract.dtypes),)
    if isinstance(value, Rollout):
        value = [value]
    if not isinstance(value, list | tuple):
        raise SubjectError(
            f"{where} must return a list of Rollouts, since the contract declares"
            f" samples={str(contract.samples)!r}, not {_described(value)}."
        )
    places: dict[int, int] = {}
    for place, sample in enumerate(value):
        first = places.setdefault(id(sample), place)
        # one object in two places is a sample that a list was extended by twice
        if first != place:
            raise SubjectError(
                f"{where} returned one Rollout twice, as [{first}] and [{place}]: each sample of a"
                " request must be a record of its own."
            )
    return tuple(
        validate_rollout(sample, f"{where}, sample [{place}],", contract.dtypes)
        for place, sample in enumerate(value)
    )


def _is_untyped(value: object) -> bool:
    """Return whether a value is a list of Python integers, or of such lists."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return type(value) is int


def _holds(limits: Any, numbers: IntArray) -> bool:
    return bool(limits.min <= numbers.min() and numbers.max() <= limits.max)


def validate_output(value: object, where: str) -> EngineOutput:
    """As ``validate_rollout``, for the output of an engine."""
    return _sound(value, EngineOutput, where)


def validate_request(value: object, where: str) -> Request:
    """As ``validate_rollout``, for a request of a caller."""
    return _sound(value, Request, where)


def validate_row(row: BatchRow, where: str, declared: Sequence[Column] | None = None) -> BatchRow:
    """Return the row with numpy arrays of its own.

    Args:
        row: A row of a batch.
        where: The name of the method of the user's that made it.
        declared: The further columns of the contract; ``None``: any name will do.

    Raises:
        SubjectError: A field is no array of the right rank and type, or a column is not declared.
    """
    # Lengths that disagree stay: they are the stack's fault, and the checks find them. Only
    # ``attention`` must fit, because without it padding cannot be recognised.
    values: dict[str, Any] = {}
    problems = []
    for name, rank, numbers in _ROW_FIELDS:
        value = getattr(row, name)
        if value is None:
            continue
        try:
            array = to_array(value, name=name, rank=rank, numbers=numbers)
        except SubjectError as error:
            problems.append(str(error).removesuffix("."))
            continue
        values[name] = array.astype(np.float64, copy=False) if numbers is FLOATS else array
    if not problems and values["attention"].shape != values["token_ids"].shape:
        problems.append(
            f"attention has the shape {values['attention'].shape}, and token_ids has"
            f" {values['token_ids'].shape}"
        )
    values["columns"] = _columns_of(row.columns, problems)
    values["values"] = _values_of(row.values, problems)
    try:
        values["sampling_mask"] = as_sampling_mask(row.sampling_mask)
    except SubjectError as error:
        problems.append(str(error).removesuffix("."))
    if declared is not None:
        problems += _undeclared(values, declared)
    if problems:
        raise SubjectError(
            f"{where} returned an unusable BatchRow for {row.request_id!r}: {'; '.join(problems)}."
        )
    return replace(row, **values)


def _columns_of(columns: object, problems: list[str]) -> Mapping[str, ColumnArray]:
    """Return further columns as arrays of the record's own."""
    if not isinstance(columns, Mapping):
        problems.append(f"columns must be a mapping of names to arrays, not {_described(columns)}")
        return {}
    arrays: dict[str, ColumnArray] = {}
    for name, column in columns.items():
        try:
            arrays[str(name)] = as_column(column, what=f"columns[{show(name)}]")
        except SubjectError as error:
            problems.append(str(error).removesuffix("."))
    return arrays


def _values_of(values: object, problems: list[str]) -> Mapping[str, Scalar]:
    """Return further values of a sample or row as plain scalars."""
    if not isinstance(values, Mapping):
        problems.append(f"values must be a mapping of names to values, not {_described(values)}")
        return {}
    scalars: dict[str, Scalar] = {}
    for name, value in values.items():
        # also a tensor without axes
        item = value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value
        if item is not None and not isinstance(item, int | float | str):
            problems.append(
                f"values[{show(name)}] must be a number, a text or None, not {_described(value)}"
            )
            continue
        scalars[str(name)] = item
    return scalars


def _undeclared(row: Mapping[str, Any], declared: Sequence[Column]) -> list[str]:
    """Return a problem for each column and value of a row that the contract does not declare."""
    placed = {column.name for column in declared if column.extent.placed}
    single = {column.name for column in declared if not column.extent.placed}
    return [
        f"{field}[{show(name)}] is not declared: the contract's columns with"
        f" {'a value for each place' if names is placed else 'one value of a row'} are"
        f" {sorted(names)}"
        for field, names in (("columns", placed), ("values", single))
        for name in row[field]
        if name not in names
    ]


def _sound(value: object, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise SubjectError(
            f"{where} must return {article} {kind.__name__}, not {_described(value)}."
        )
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name in _names(kind):  # type: ignore[arg-type]  # a class is hashable
        item = values[name] = getattr(value, name)
        if name in _CONVERTERS:
            values[name] = _converted(name, item, problems)
        elif name == "columns":
            values[name] = _columns_of(item, problems)
        elif name == "values":
            values[name] = _values_of(item, problems)
        elif name in _LISTS and item is not None:
            values[name] = _tuple_of(item)
        elif isinstance(item, np.integer):
            item = values[name] = int(item)
        # numpy would count a negative one from the end
        if name == "routes_start" and type(item) is int and item < 0:
            problems.append(f"{name} must be a position >= 0, not {show(item)}")
        elif name == "finish_reason" and isinstance(item, str) and item in _REASONS:
            values[name] = FinishReason(item)
    record: _T = kind(**values)
    if not problems and (misfit := misfit_of(record)) is not None:
        problems.append(misfit)
    if problems:
        raise SubjectError(f"{where} returned an unusable {kind.__name__}: {'; '.join(problems)}.")
    return record


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def converted(name: str, value: Any) -> Any:
    """Return a copy of the value of a field as the record holds it. Raises ``SubjectError``."""
    if value is None:
        return () if name in _SAMPLED else None
    return _CONVERTERS[name](value, what=name)


def _converted(name: str, value: Any, problems: list[str]) -> Any:
    if value is None and name == "prompt_ids":
        problems.append("prompt_ids is None: every request has a prompt, if only an empty one, ()")
        return value
    try:
        result = converted(name, value)
    except SubjectError as error:
        problems.append(str(error).removesuffix("."))
        return value
    if isinstance(result, tuple) and result and not -(2**63) <= min(result) <= max(result) < 2**63:
        # an Arrow column of a trace holds no more
        problems.append(f"{name} must be integers of 64 bits")
    return result


def _tuple_of(value: Any) -> Any:
    """Return a list or a 1-D array as a tuple of plain values, and anything else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return value
    return tuple(
        item.item() if isinstance(item, np.generic) else tuple(item) if type(item) is list else item
        for item in value
    )


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name} {value.shape}"
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict | set):
        return f"{kind} of {len(value)}"
    return f"{kind} {show(value)}" if isinstance(value, int | float | str) else kind
