"""Validate the records that a user's code made, field by field.

Wrong types, ranks and ranges are refused here, while the method that made the record can be named:
later a check would crash on them, or the trace could not be written. Lengths that disagree are
faults of the stack, which the checks find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

import numpy as np

from rollproof.core.error_text import show
from rollproof.core.json_codec import misfit_of
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.errors import SubjectError

__all__ = ["ARRAYS", "validate_output", "validate_request", "validate_rollout"]

ARRAYS = ("logprobs", "loss_mask", "routes")
"""The fields of a ``Rollout`` that are arrays."""
_SHAPES: Mapping[str, tuple[int, str, str]] = {
    "logprobs": (1, "f", "floats"),
    "loss_mask": (1, "iub", "0 and 1"),
    "routes": (3, "iu", "integers"),
}
"""For each array field its rank, the kinds of its dtype, and their name in a message."""
_LISTS = ("prompt_ids", "response_ids", "token_ids")
_REASONS = frozenset(FinishReason)
_T = TypeVar("_T", bound=Any)


def validate_rollout(value: object, where: str) -> Rollout:
    """Return a rollout with arrays of its own.

    Args:
        value: What a method of the user's returned.
        where: The name of that method.

    Raises:
        SubjectError: It is no rollout, or no trace can hold it.
    """
    return _sound(value, Rollout, where)


def validate_output(value: object, where: str) -> EngineOutput:
    """As ``validate_rollout``, for the output of an engine."""
    return _sound(value, EngineOutput, where)


def validate_request(value: object, where: str) -> Request:
    """As ``validate_rollout``, for a request of a caller."""
    return _sound(value, Request, where)


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
        if name in _SHAPES and item is not None:
            values[name] = _copied(name, item, problems)
        elif name in _LISTS and not _are_tokens(item):
            problems.append(
                f"{name} must be a tuple of ints of 64 bits (rollproof.core.records.as_tokens makes"
                f" one), not {_described(item)}"
            )
        # numpy would count a negative one from the end
        elif name == "routes_start" and type(item) is int and item < 0:
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


def _copied(name: str, value: Any, problems: list[str]) -> Any:
    """Return a copy of an array, in the type that records have."""
    # a view of a stack's buffer would change with it
    rank, kinds, elements = _SHAPES[name]
    if not isinstance(value, np.ndarray) or value.ndim != rank or value.dtype.kind not in kinds:
        problems.append(
            f"{name} must be an array of rank {rank} of {elements}, not {_described(value)}"
        )
        return value
    if name == "logprobs":
        # a longdouble would lose digits, narrower floats are exact
        if value.dtype.itemsize > 8:
            problems.append(f"{name} must fit float64, not be {value.dtype.name}")
            return value
        return value.astype(np.float64)
    return value.copy()


def _are_tokens(value: object) -> bool:
    if not isinstance(value, tuple) or not set(map(type, value)) <= {int}:
        return False
    # an Arrow column of a trace holds no more
    return not value or (min(value) >= -(2**63) and max(value) < 2**63)


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name} {value.shape}"
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict | set):
        return f"{kind} of {len(value)}"
    return f"{kind} {show(value)}" if isinstance(value, int | float | str) else kind
