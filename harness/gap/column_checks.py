"""Columns: what each column of a table of pairs may hold, and what is refused with which words."""

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
    "counted",
    "known",
    "labels",
    "listed",
    "logprobs",
    "mask_column",
    "never_positive",
    "same_length",
    "same_tokens",
    "side_column",
    "some_of",
]

FloatArray: TypeAlias = "npt.NDArray[np.float64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

ROUNDING = 1e-3
"""A logprob up to here above 0 is the rounding of a fused kernel (flash-attention's cross-entropy
gives 1e-6); above, it is no logprob.
"""
NOTHING = -9999.0
"""A logprob down here stands for minus infinity: vLLM's servers write this in its place, masked
logits have the dtype's least number.
"""
_EXACT = 1 << 53
"""Whole numbers from here on are not exact in float64."""
_NUMBERS: Mapping[str, str] = {
    "position": "a whole number of at least 0 (the place in prompt + response)",
    "since_resume": "a whole number (-1 where no resume came before)",
    "temperature": "a number of at least 0",
}
_ROUTES = ("rollout_routes", "trainer_routes")


def logprobs(values: Any, name: str) -> FloatArray:
    """``(n,)`` float64; what stands for minus infinity as that."""
    given = _array(values, name)
    try:
        array = given.astype(
            np.float64, casting="unsafe" if given.dtype.kind in "iufUSO" else "no", copy=False
        )
    except (TypeError, ValueError) as error:
        raise GapError(
            f"{name} must hold numbers (NaN where one is missing): {one_line(str(error))}."
        ) from error
    if array.ndim != 1:
        raise GapError(
            f"{name} must have one axis (tokens), not shape {array.shape}: flatten the batch, and"
            " say in sequence_id what belongs together."
        )
    with np.errstate(invalid="ignore"):
        least = array <= NOTHING
    return np.where(least, -np.inf, array) if least.any() else array


def never_positive(values: FloatArray, counted: BoolArray, name: str) -> None:
    """Raise ``GapError`` where a counted token has a logprob above 0."""
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero((values > ROUNDING) & counted)
    if len(wrong):
        whole = int(counted.sum())
        likely = (
            "they look like probabilities, or like losses with the sign flipped"
            if len(wrong) > whole / 2
            else "a few tokens hold something else"
        )
        raise GapError(
            f"{name} holds {len(wrong):,} of {whole:,} values above 0 (the first:"
            f" {values[wrong[0]]:.4g} at row {wrong[0]:,}), but the logarithm of a probability is"
            f" at most 0: {likely}. Pass natural logarithms of probabilities."
        )


def mask_column(values: Any) -> BoolArray:
    """``(n,)`` bool."""
    if values is None:
        raise GapError(
            "mask is missing: say of each token whether the loss counts it (np.ones(n) where it"
            " counts all)."
        )
    array = _array(values, "mask")
    if array.ndim != 1:
        raise GapError(f"mask must have one axis (tokens), not shape {array.shape}.")
    if array.dtype != np.bool_:
        try:
            numbers = array.astype(
                np.float64, casting="unsafe" if array.dtype.kind in "iufUSO" else "no"
            )
        except (TypeError, ValueError) as error:
            raise GapError(
                f"mask must hold true and false, or 0 and 1: {one_line(str(error))}."
            ) from error
        if not np.isin(numbers, (0.0, 1.0)).all():
            raise GapError(
                "mask must hold true and false, or 0 and 1: weights other than these would change"
                " what the metrics mean."
            )
        array = numbers == 1.0
    return array


def side_column(values: Any, name: str) -> npt.NDArray[Any]:
    """A column of ``COLUMNS`` but the first four, as numbers or as labels. Raises ``GapError``
    where it holds something else.
    """
    if name == "current_logprob":
        return logprobs(values, name)
    if name in _ROUTES:
        return _routes(_array(values, name), name)
    if name not in _NUMBERS:
        return labels(values, name, missing=name != "batch")
    array = _array(values, name)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise GapError(
            f"{name} must hold one number a token, not {array.dtype} of shape {array.shape}."
        )
    wrong = np.flatnonzero(~_meant(array, name))
    if len(wrong):
        raise GapError(
            f"{name} must be {_NUMBERS[name]}; it is {array[wrong[0]]:g} in row {wrong[0]:,}."
        )
    return array


def _meant(array: npt.NDArray[Any], name: str) -> BoolArray:
    """``(n,)``: where a column of numbers holds what it can mean."""
    with np.errstate(invalid="ignore"):
        if name == "temperature":
            return np.asarray((array >= 0) & (array < np.inf))
        least = 0 if name == "position" else -_EXACT
        array = (
            array.astype(np.float64) if array.dtype.kind == "f" else array
        )  # of float16 the bounds are beyond its range
        return np.asarray((array >= least) & (array < _EXACT) & (array == np.floor(array)))


def labels(values: Any, name: str, *, missing: bool) -> npt.NDArray[Any]:
    """``(n,)`` of names: whole numbers or text, never both. ``missing`` ones stay ``None`` or NaN,
    or raise ``GapError``.
    """
    if values is None:
        raise GapError(f"{name} is missing: every token must have one.")
    array = _array(values, name)
    if array.ndim != 1:
        raise GapError(f"{name} must have one axis (tokens), not shape {array.shape}.")
    if (
        array.dtype.kind == "f"
        and not hasattr(values, "dtype")
        and all(isinstance(value, int) for value in values)
    ):
        array = np.array(
            values, dtype=object
        )  # of whole numbers beyond 2**63 numpy makes floats, of which several are equal
    if array.dtype.kind not in "iufbUSO":
        raise GapError(f"{name} must hold whole numbers or text, not {array.dtype}.")
    there = known(array)
    if not missing and not there.all():
        raise GapError(f"{name} holds missing values: every token must have one.")
    if array.dtype.kind == "f":
        _whole(array[there], array, name)
    if array.dtype.kind == "S":
        return np.asarray(np.char.decode(array, "utf-8", "backslashreplace"))
    if array.dtype.kind != "O":
        return array
    found = array[there]
    kinds = {type(value) for value in found}
    strange = [
        kind
        for kind in kinds
        if issubclass(kind, Mapping | Sequence | set | np.ndarray)
        and not issubclass(kind, str | bytes)
    ]
    if strange:
        raise GapError(
            f"{name} must hold whole numbers or text, not values of type {strange[0].__name__}:"
            " give one name a token."
        )
    if any(issubclass(kind, float | np.floating) for kind in kinds):
        _whole(
            np.array(
                [value for value in found if isinstance(value, float | np.floating)],
                dtype=np.float64,
            ),
            array,
            name,
        )
    exact = 1 << 63 if there.all() else _EXACT  # beyond it names are compared as text
    if all(
        isinstance(value, int | np.integer)
        and not isinstance(value, bool)
        and -exact <= value < exact
        for value in found
    ):
        if there.all():
            return found.astype(np.int64)
        out: npt.NDArray[Any] = np.full(len(array), np.nan)
        out[there] = found.astype(np.float64)
        return out
    out = np.full(len(array), None, dtype=object)
    out[there] = [
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
        for value in found
    ]
    return out


def _whole(found: FloatArray, array: npt.NDArray[Any], name: str) -> None:
    """Raise ``GapError`` for names that are fractions, infinite or too large to be exact: of such
    no two are surely one.
    """
    found = found.astype(np.float64)
    wrong = found[~((np.abs(found) <= _EXACT) & (found == np.floor(found)))]
    if len(wrong):
        row = int(np.flatnonzero(array == wrong[0])[0])
        far = " (a float does not hold it exactly: give integers)" if abs(wrong[0]) > _EXACT else ""
        raise GapError(
            f"{name} must hold whole numbers or text; it is {wrong[0]:g} in row {row:,}{far}."
        )


def _array(values: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise GapError(
            f"{name} is a masked array of numpy, whose mask nothing here looks at: fill it, and say"
            " in mask what counts."
        )
    try:
        return np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: a tensor that requires grad
        hint = " Give x.detach().float().cpu() of a tensor." if hasattr(values, "detach") else ""
        raise GapError(
            f"{name} cannot be made an array of numpy:"
            f" {one_line(str(error)).removesuffix('.')}.{hint}"
        ) from error


def known(column: npt.NDArray[Any]) -> BoolArray:
    """``(n,)``: where a label is told (neither ``None`` nor NaN)."""
    if column.dtype.kind == "O":
        return np.array([_told(value) for value in column], dtype=bool)
    return np.asarray(column == column)


def _told(value: Any) -> bool:
    try:
        return value is not None and bool(np.all(value == value))
    except (TypeError, ValueError):  # pandas.NA is neither equal to itself nor not
        return False


def same_length(columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ``GapError`` where the columns differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise GapError(
            f"The columns differ in length ({told}): each needs one entry per token, in one order."
        )


def same_tokens(given: Mapping[str, npt.NDArray[Any]], kept: BoolArray) -> None:
    """Raise ``GapError`` where a token of those kept is another on either side."""
    if "token_id" not in given or "trainer_token_id" not in given:
        return
    wrong = np.flatnonzero((given["token_id"] != given["trainer_token_id"]) & kept)
    if len(wrong):
        row = wrong[0]
        raise GapError(
            f"The two sides hold different tokens in {counted(len(wrong), 'row')} (the first: row"
            f" {row:,}, {given['token_id'][row]} at the rollout, {given['trainer_token_id'][row]}"
            " at the trainer). Logprobs of different tokens cannot be compared: score the"
            " rollout's own ids."
        )


def _routes(array: npt.NDArray[Any], name: str) -> IntArray:
    if array.ndim != 3 or array.dtype.kind not in "iu" or (len(array) and not array.size):
        raise GapError(
            f"{name} must be an integer array (tokens, layers, top_k), not shape {array.shape} of"
            f" {array.dtype}."
        )
    return array


_ONE: Mapping[str, str] = {"are": "is", "have": "has", "were": "was"}
_SHOWN = 6


def counted(number: int, noun: str, verb: str = "") -> str:
    """``1 token``, ``1,200 tokens``; with the verb ``have``: ``1 token has``, ``3 sequences have``."""
    one = number == 1
    told = f"{number:,} {noun}{'' if one else 's'}"
    return f"{told} {_ONE[verb] if one else verb}" if verb else told


def listed(names: Iterable[object]) -> str:
    """``1, 2, 3``; beyond six names dots stand for the rest."""
    told = list(map(str, names))
    return ", ".join(told[:_SHOWN]) + (" ..." if len(told) > _SHOWN else "")


def some_of(chosen: Sequence[int], sequences: Sequence[Any]) -> str:
    """``2 of 64 sequences (7, 31)``: those ``chosen`` by index, the first of them by name."""
    return (
        f"{len(chosen):,} of {counted(len(sequences), 'sequence')}"
        f" ({listed(sequences[index] for index in chosen)})"
    )
