"""Checks of the columns of token pairs: what each may hold, and the errors when it does not.

Also the phrases that the messages of the gap are made of (``counted``, ``listed``, ``some_of``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.error_text import one_line
from rollproof.core.records import IntArray
from rollproof.errors import GapError

__all__ = [
    "BoolArray",
    "FloatArray",
    "IntArray",
    "check_optional",
    "counted",
    "is_present",
    "listed",
    "require_not_positive",
    "require_same_length",
    "require_same_tokens",
    "some_of",
    "to_labels",
    "to_logprobs",
    "to_mask",
]

FloatArray: TypeAlias = "npt.NDArray[np.float64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

# A logprob up to this much above 0 is rounding; above, it is no logprob
_ROUNDING = 1e-3
# A logprob of this or less stands for minus infinity
_MINUS_INFINITY = -9999.0
# Whole numbers from here on are not exact in float64
_MAX_EXACT = 1 << 53
_NUMBERS: Mapping[str, str] = {
    "position": "a whole number of at least 0 (the place in prompt + response)",
    "since_resume": "a whole number (-1 where no resume came before)",
    "temperature": "a number of at least 0",
    "pack_index": "a whole number of at least 0 (0 for the first sequence of each packed row)",
}
_ROUTES = ("rollout_routes", "trainer_routes")
_SINGULAR: Mapping[str, str] = {"are": "is", "have": "has", "were": "was"}
_MAX_LISTED = 6


def counted(number: int, noun: str, verb: str = "") -> str:
    """``1 token``, ``1,200 tokens``; with the verb ``have``: ``1 token has``, ``3 tokens have``."""
    singular = number == 1
    phrase = f"{number:,} {noun}{'' if singular else 's'}"
    return f"{phrase} {_SINGULAR[verb] if singular else verb}" if verb else phrase


def listed(names: Iterable[object]) -> str:
    """``1, 2, 3``; after six names dots stand for the rest."""
    texts = list(map(str, names))
    return ", ".join(texts[:_MAX_LISTED]) + (" ..." if len(texts) > _MAX_LISTED else "")


def some_of(indexes: Sequence[int], sequences: Sequence[Any]) -> str:
    """``2 of 64 sequences (7, 31)``: how many ``indexes`` of ``sequences``, and their names."""
    return (
        f"{len(indexes):,} of {counted(len(sequences), 'sequence')}"
        f" ({listed(sequences[index] for index in indexes)})"
    )


def to_logprobs(values: Any, name: str) -> FloatArray:
    """Return ``(n,)`` float64, with minus infinity in place of what stands for it."""
    raw = _to_array(values, name)
    castable = raw.dtype.kind in "iufUSO"
    try:
        array = raw.astype(np.float64, casting="unsafe" if castable else "no", copy=False)
    except (TypeError, ValueError) as error:
        raise GapError(
            f"{name} must hold numbers (NaN where one is missing): {one_line(str(error))}."
        ) from error
    if array.ndim != 1:
        raise GapError(
            f"{name} must have one axis (tokens), not shape {array.shape}: flatten the batch, and"
            " say in sequence_id what belongs together."
        )
    # vLLM's servers write -9999, and masked logits have the least number of their dtype
    with np.errstate(invalid="ignore"):
        low = array <= _MINUS_INFINITY
    return np.where(low, -np.inf, array) if low.any() else array


def require_not_positive(values: FloatArray, mask: BoolArray, name: str) -> None:
    """Raise ``GapError`` if a token of ``mask`` has a logprob above 0."""
    # a fused kernel may round above 0: flash-attention's cross-entropy gives 1e-6
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero((values > _ROUNDING) & mask)
    if len(wrong):
        total = int(mask.sum())
        likely = (
            "they look like probabilities, or like losses with the sign flipped"
            if len(wrong) > total / 2
            else "a few tokens hold something else"
        )
        raise GapError(
            f"{name} holds {len(wrong):,} of {total:,} values above 0 (the first:"
            f" {values[wrong[0]]:.4g} at row {wrong[0]:,}), but the logarithm of a probability is"
            f" at most 0: {likely}. Pass natural logarithms of probabilities."
        )


def to_mask(values: Any) -> BoolArray:
    """Return the mask as ``(n,)`` bool."""
    if values is None:
        raise GapError(
            "mask is missing: say of each token whether the loss counts it (np.ones(n) if it counts"
            " all)."
        )
    array = _to_array(values, "mask")
    if array.ndim != 1:
        raise GapError(f"mask must have one axis (tokens), not shape {array.shape}.")
    if array.dtype == np.bool_:
        return array
    castable = array.dtype.kind in "iufUSO"
    try:
        numbers = array.astype(np.float64, casting="unsafe" if castable else "no")
    except (TypeError, ValueError) as error:
        raise GapError(
            f"mask must hold true and false, or 0 and 1: {one_line(str(error))}."
        ) from error
    if not np.isin(numbers, (0.0, 1.0)).all():
        raise GapError(
            "mask must hold true and false, or 0 and 1: other weights would change what the"
            " metrics mean."
        )
    return np.asarray(numbers == 1.0)


def check_optional(values: Any, name: str) -> npt.NDArray[Any]:
    """Return an optional column of ``COLUMNS`` as numbers or as labels.

    Raises ``GapError`` if it holds something else.
    """
    if name in ("current_logprob", "previous_logprob"):
        return to_logprobs(values, name)
    if name in _ROUTES:
        return _check_routes(_to_array(values, name), name)
    if name not in _NUMBERS:
        return to_labels(values, name, missing=name != "batch")
    array = _to_array(values, name)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise GapError(
            f"{name} must hold one number a token, not {array.dtype} of shape {array.shape}."
        )
    wrong = np.flatnonzero(~_is_valid(array, name))
    if len(wrong):
        raise GapError(
            f"{name} must be {_NUMBERS[name]}; it is {array[wrong[0]]:g} in row {wrong[0]:,}."
        )
    return array


def _is_valid(array: npt.NDArray[Any], name: str) -> BoolArray:
    """``(n,)``: whether a column of numbers holds values that it can have."""
    with np.errstate(invalid="ignore"):
        if name == "temperature":
            return np.asarray((array >= 0) & (array < np.inf))
        lowest = 0 if name in ("position", "pack_index") else -_MAX_EXACT
        # the bounds are beyond the range of float16
        array = array.astype(np.float64) if array.dtype.kind == "f" else array
        return np.asarray((array >= lowest) & (array < _MAX_EXACT) & (array == np.floor(array)))


def to_labels(values: Any, name: str, *, missing: bool) -> npt.NDArray[Any]:
    """Return ``(n,)`` labels: whole numbers or text, never both.

    With ``missing`` absent labels stay ``None`` or NaN; without it they raise ``GapError``.
    """
    if values is None:
        raise GapError(f"{name} is missing: every token must have one.")
    array = _to_array(values, name)
    if array.ndim != 1:
        raise GapError(f"{name} must have one axis (tokens), not shape {array.shape}.")
    # numpy makes floats of whole numbers beyond 2**63, and several of those floats are equal
    made_float = array.dtype.kind == "f" and not hasattr(values, "dtype")
    if made_float and all(isinstance(value, int) for value in values):
        array = np.array(values, dtype=object)
    if array.dtype.kind not in "iufbUSO":
        raise GapError(f"{name} must hold whole numbers or text, not {array.dtype}.")
    present = is_present(array)
    if not missing and not present.all():
        raise GapError(f"{name} holds missing values: every token must have one.")
    if array.dtype.kind == "f":
        _require_whole(array[present], array, name)
    # numpy pads bytes with zeros and compares them with no text: they are decoded once here
    if array.dtype.kind == "S":
        return np.asarray(np.char.decode(array, "utf-8", "backslashreplace"))
    if array.dtype.kind != "O":
        return array
    return _object_labels(array, present, name)


def _object_labels(array: npt.NDArray[Any], present: BoolArray, name: str) -> npt.NDArray[Any]:
    """Return the labels of a column of Python objects."""
    labels = array[present]
    kinds = {type(value) for value in labels}
    containers = [
        kind
        for kind in kinds
        if issubclass(kind, Mapping | Sequence | set | np.ndarray)
        and not issubclass(kind, str | bytes)
    ]
    if containers:
        raise GapError(
            f"{name} must hold whole numbers or text, not values of type"
            f" {containers[0].__name__}: give one name a token."
        )
    if any(issubclass(kind, float | np.floating) for kind in kinds):
        floats = [value for value in labels if isinstance(value, float | np.floating)]
        _require_whole(np.array(floats, dtype=np.float64), array, name)
    # with a missing label the column becomes float64; larger numbers are compared as text
    bound = 1 << 63 if present.all() else _MAX_EXACT
    if all(
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and -bound <= value < bound
        for value in labels
    ):
        if present.all():
            return labels.astype(np.int64)
        numbers: npt.NDArray[Any] = np.full(len(array), np.nan)
        numbers[present] = labels.astype(np.float64)
        return numbers
    texts = np.full(len(array), None, dtype=object)
    texts[present] = [
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
        for value in labels
    ]
    return texts


def _require_whole(labels: FloatArray, array: npt.NDArray[Any], name: str) -> None:
    """Raise ``GapError`` for labels that are fractions, infinite or too large to be exact.

    Two such labels might be equal by rounding.
    """
    labels = labels.astype(np.float64)
    wrong = labels[~((np.abs(labels) <= _MAX_EXACT) & (labels == np.floor(labels)))]
    if len(wrong):
        row = int(np.flatnonzero(array == wrong[0])[0])
        inexact = abs(wrong[0]) > _MAX_EXACT
        hint = " (a float does not hold it exactly: give integers)" if inexact else ""
        raise GapError(
            f"{name} must hold whole numbers or text; it is {wrong[0]:g} in row {row:,}{hint}."
        )


def _to_array(values: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise GapError(
            f"{name} is a masked array of numpy, and its mask would be ignored: fill it, and say in"
            " mask what counts."
        )
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # RuntimeError: a tensor that requires grad
        hint = " Give x.detach().float().cpu() of a tensor." if hasattr(values, "detach") else ""
        raise GapError(
            f"{name} cannot be made an array of numpy:"
            f" {one_line(str(error)).removesuffix('.')}.{hint}"
        ) from error


def is_present(column: npt.NDArray[Any]) -> BoolArray:
    """``(n,)``: whether the token has a label (neither ``None`` nor NaN)."""
    if column.dtype.kind == "O":
        return np.array([_is_label(value) for value in column], dtype=bool)
    return np.asarray(column == column)


def _is_label(value: Any) -> bool:
    try:
        return value is not None and bool(np.all(value == value))
    except (TypeError, ValueError):  # pandas.NA is neither equal to itself nor not
        return False


def require_same_length(columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ``GapError`` if the columns differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        texts = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise GapError(
            f"The columns differ in length ({texts}): each needs one entry per token, in one order."
        )


def require_same_tokens(columns: Mapping[str, npt.NDArray[Any]], mask: BoolArray) -> None:
    """Raise ``GapError`` if a token of ``mask`` has different ids at rollout and trainer."""
    if "token_id" not in columns or "trainer_token_id" not in columns:
        return
    wrong = np.flatnonzero((columns["token_id"] != columns["trainer_token_id"]) & mask)
    if len(wrong):
        row = wrong[0]
        raise GapError(
            f"Rollout and trainer hold different tokens in {counted(len(wrong), 'row')} (the first:"
            f" row {row:,}, {columns['token_id'][row]} at the rollout,"
            f" {columns['trainer_token_id'][row]} at the trainer). Logprobs of different tokens"
            " cannot be compared: score the rollout's own ids."
        )


def _check_routes(array: npt.NDArray[Any], name: str) -> IntArray:
    if array.ndim != 3 or array.dtype.kind not in "iu" or (len(array) and not array.size):
        raise GapError(
            f"{name} must be an integer array (tokens, layers, top_k), not shape {array.shape} of"
            f" {array.dtype}."
        )
    return array
