"""Columns: what each column of a table of pairs may hold, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.errors import GapError
from rollproof.records import IntArray

__all__ = [
    "BoolArray", "FloatArray", "known", "labels", "logprobs", "mask_column", "never_positive", "same_length", "same_tokens", "side_column"
]  # fmt: skip

FloatArray: TypeAlias = "npt.NDArray[np.float64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

ROUNDING = 1e-3
"""A logprob up to here above 0 is the rounding of a fused kernel (flash-attention's cross-entropy gives 1e-6); above, it is no logprob."""
NOTHING = -9999.0
"""A logprob down here stands for minus infinity: vLLM's servers write this in its place, masked logits have the dtype's least number."""
_NUMBERS = ("position", "since_resume", "temperature")
_ROUTES = ("rollout_routes", "trainer_routes")


def logprobs(values: Any, name: str) -> FloatArray:
    """``(n,)`` float64; what stands for minus infinity as that."""
    _unmasked(values, name)
    try:
        given = np.asarray(values)
        array = given.astype(np.float64, casting="unsafe" if given.dtype.kind in "iufUSO" else "no", copy=False)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that requires grad
        raise GapError(f"{name} must hold numbers (NaN where one is missing): {error}.") from error
    if array.ndim != 1:
        raise GapError(
            f"{name} must have one axis (tokens), not shape {array.shape}: flatten the batch, and say in sequence_id what belongs together."
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
            f"{name} holds {len(wrong):,} of {whole:,} values above 0 (the first: {values[wrong[0]]:.4g} at row {wrong[0]:,}), but the"
            f" logarithm of a probability is at most 0: {likely}. Pass natural logarithms of probabilities."
        )


def mask_column(values: Any) -> BoolArray:
    """``(n,)`` bool."""
    if values is None:
        raise GapError("mask is missing: say of each token whether the loss counts it (np.ones(n) where it counts all).")
    _unmasked(values, "mask")
    array = np.asarray(values)
    if array.ndim != 1:
        raise GapError(f"mask must have one axis (tokens), not shape {array.shape}.")
    if array.dtype != np.bool_:
        try:
            numbers = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise GapError(f"mask must hold true and false, or 0 and 1: {error}.") from error
        if not np.isin(numbers, (0.0, 1.0)).all():
            raise GapError("mask must hold true and false, or 0 and 1: weights other than these would change what the metrics mean.")
        array = numbers == 1.0
    return array


def side_column(values: Any, name: str) -> npt.NDArray[Any]:
    """A column of ``COLUMNS`` but the first four, as numbers or as labels. Raises ``GapError`` where it holds something else."""
    _unmasked(values, name)
    if name == "current_logprob":
        return logprobs(values, name)
    if name in _ROUTES:
        return _routes(np.asarray(values), name)
    if name not in _NUMBERS:
        return labels(values, name, missing=name != "batch")
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise GapError(f"{name} must hold one number a token, not {array.dtype} of shape {array.shape}.")
    wrong = np.flatnonzero(~np.isfinite(array) if name != "temperature" else ~((array >= 0) & (array < np.inf)))
    if len(wrong):
        told = {
            "position": "a place in prompt + response",
            "since_resume": "-1 where no resume came before",
            "temperature": "at least 0",
        }[name]
        raise GapError(f"{name} must be a number ({told}); it is {array[wrong[0]]:g} in row {wrong[0]:,}.")
    return array


def labels(values: Any, name: str, *, missing: bool) -> npt.NDArray[Any]:
    """``(n,)`` of names: whole numbers or text, never both. ``missing`` ones stay ``None`` or NaN, or raise ``GapError``."""
    if values is None:
        raise GapError(f"{name} is missing: every token must have one.")
    _unmasked(values, name)
    array = np.asarray(values)
    if array.dtype.kind == "f" and not hasattr(values, "dtype") and all(isinstance(value, int) for value in values):
        array = np.array(values, dtype=object)  # of whole numbers beyond 2**63 numpy makes floats, of which several are equal
    if array.ndim != 1:
        raise GapError(f"{name} must have one axis (tokens), not shape {array.shape}.")
    if array.dtype.kind not in "iufbUSO":
        raise GapError(f"{name} must hold whole numbers or text, not {array.dtype}.")
    there = known(array)
    if not missing and not there.all():
        raise GapError(f"{name} holds missing values: every token must have one.")
    if array.dtype.kind != "O":
        return array
    found = array[there]
    exact = 1 << (63 if there.all() else 53)  # beyond it names are compared as text
    if all(isinstance(value, int | np.integer) and not isinstance(value, bool) and -exact <= value < exact for value in found):
        if there.all():
            return found.astype(np.int64)
        out: npt.NDArray[Any] = np.full(len(array), np.nan)
        out[there] = found.astype(np.float64)
        return out
    out = np.full(len(array), None, dtype=object)
    out[there] = [str(value) for value in found]
    return out


def _unmasked(values: Any, name: str) -> None:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise GapError(f"{name} is a masked array of numpy, whose mask nothing here looks at: fill it, and say in mask what counts.")


def known(column: npt.NDArray[Any]) -> BoolArray:
    """``(n,)``: where a label is told (neither ``None`` nor NaN)."""
    if column.dtype.kind == "O":
        return np.array([value is not None and value == value for value in column], dtype=bool)
    return np.asarray(column == column)


def same_length(columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ``GapError`` where the columns differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise GapError(f"The columns differ in length ({told}): each needs one entry per token, in one order.")


def same_tokens(given: Mapping[str, npt.NDArray[Any]], counted: BoolArray) -> None:
    """Raise ``GapError`` where a counted token is another on either side."""
    if "token_id" not in given or "trainer_token_id" not in given:
        return
    wrong = np.flatnonzero((given["token_id"] != given["trainer_token_id"]) & counted)
    if len(wrong):
        row = wrong[0]
        raise GapError(
            f"The two sides hold different tokens in {len(wrong):,} rows (the first: row {row:,}, {given['token_id'][row]} at the rollout,"
            f" {given['trainer_token_id'][row]} at the trainer). Logprobs of different tokens cannot be compared: score the"
            " rollout's own ids."
        )


def _routes(array: npt.NDArray[Any], name: str) -> IntArray:
    if array.ndim != 3 or array.dtype.kind not in "iu" or (len(array) and not array.size):
        raise GapError(f"{name} must be an integer array (tokens, layers, top_k), not shape {array.shape} of {array.dtype}.")
    return array
