"""The one converter of numbers that a user's code hands over: lists, tuples, arrays, tensors.

Torch tensors of any device and other arrays that speak DLPack are copied to the host. A jagged
list, with one array per engine call, is joined in order. What cannot be read is refused with the
name of the field and the place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollproof.core.error_text import describe_error, show
from rollproof.errors import SubjectError

__all__ = ["FLOATS", "INTEGERS", "MASKS", "Numbers", "to_array"]

_Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a field holds: the kinds of numpy types that fit, the type of an empty one, and words
    for messages.
    """

    kinds: str
    empty: type[np.generic]
    words: str


INTEGERS = Numbers(kinds="iu", empty=np.int64, words="integers")
MASKS = Numbers(kinds="iub", empty=np.int64, words="0 and 1")
FLOATS = Numbers(kinds="iuf", empty=np.float64, words="numbers or None")
_AXES = {1: "on one axis", 3: "(rows, layers, top_k)"}


def to_array(value: Any, *, name: str, rank: int, numbers: Numbers) -> _Array:
    """Return a copy of ``value`` as an array of this rank.

    A missing number (``None`` among floats) becomes NaN. An empty array of any type and rank is
    an array without rows.

    Raises:
        SubjectError: ``value`` holds something else; the text calls it ``name``.
    """
    array = _array(value, name, rank, numbers)
    if array.size == 0 and array.ndim != rank:
        return np.zeros((0,) * rank, numbers.empty)
    if array.ndim != rank:
        raise SubjectError(
            f"{name} must be {numbers.words} {_AXES[rank]}, not"
            f" {_described(array)}{_advice(array, rank)}"
        )
    if array.dtype.kind not in numbers.kinds:
        if array.size:
            raise SubjectError(f"{name} must be {numbers.words}, not {_described(array)}.")
        array = array.astype(numbers.empty)
    return array


def _array(value: Any, name: str, rank: int, numbers: Numbers) -> _Array:
    """Return the value as an array of numbers; of which kind and rank, the caller checks."""
    if isinstance(value, np.ndarray):
        return (
            _joined(list(value), name, rank, numbers) if value.dtype.kind == "O" else value.copy()
        )
    if isinstance(value, list | tuple):
        return _of_list(value, name, rank, numbers)
    if hasattr(value, "detach"):
        return _of_tensor(value, name, rank, numbers)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value, name)
    if hasattr(value, "tolist"):
        return _array(value.tolist(), name, rank, numbers)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return _of_list(list(value), name, rank, numbers)
    raise SubjectError(f"{name} must be a sequence of {numbers.words}, not {_described(value)}.")


def _of_list(value: Sequence[Any], name: str, rank: int, numbers: Numbers) -> _Array:
    if set(map(type, value)) <= {int, float}:  # nearly always: without a look at each number
        # numpy would make floats of mixed numbers, and of integers beyond 64 bits
        mixed = numbers.kinds != FLOATS.kinds and any(type(number) is float for number in value)
        if not mixed:
            array = np.array(value, dtype=None if value else numbers.empty)
            if array.dtype.kind != "O":
                return array
    elif rank > 1:
        try:
            array = np.array(value)
        except (TypeError, ValueError, RuntimeError):
            pass  # jagged, or with tensors: part by part, so that the error can name the place
        else:
            if array.dtype.kind in numbers.kinds and array.ndim == rank:
                return array
    return _joined(value, name, rank, numbers)


def _joined(value: Sequence[Any], name: str, rank: int, numbers: Numbers) -> _Array:
    """Return the elements as one array: numbers, rows of equal shape, or arrays of parts."""
    depth = _depth(value)
    if depth <= 1:
        return _of_numbers(value, name, numbers)
    whole = depth > rank  # an array of each part, to be joined; else one of each row
    parts: list[_Array] = []
    for place, element in enumerate(value):
        if not _depth(element):
            raise SubjectError(
                f"{name}[{place}] must be an array like the other elements, not"
                f" {_described(element)}."
            )
        parts.append(_array(element, f"{name}[{place}]", rank if whole else rank - 1, numbers))
    filled = [(place, part) for place, part in enumerate(parts) if part.size or not whole]
    if not any(part.size for part in parts):
        return np.zeros((0,) * rank, numbers.empty)
    first_place, first = filled[0]
    for place, part in filled:
        axes, others = (part.shape[1:], first.shape[1:]) if whole else (part.shape, first.shape)
        if part.ndim != first.ndim or axes != others:
            raise SubjectError(
                f"{name}[{place}] has the shape {part.shape}, and {name}[{first_place}]"
                f" {first.shape}: they must be alike, so that the field is one array."
            )
    arrays = [part for _, part in filled]
    return np.concatenate(arrays) if whole else np.stack(arrays)


def _of_numbers(value: Sequence[Any], name: str, numbers: Numbers) -> _Array:
    """Return single numbers, which may be arrays and tensors without axes, as a 1-D array."""
    plain: list[Any] = []
    for place, number in enumerate(value):
        item = number.item() if hasattr(number, "item") else number
        if item is None and numbers is FLOATS:
            # engines have no logprob for a prompt's first token, and for tokens of a tool
            item = np.nan
        wanted = int | float if numbers is FLOATS else int
        if not isinstance(item, wanted) or (isinstance(item, bool) and numbers is not MASKS):
            raise SubjectError(f"{name}[{place}] must be {numbers.words}, not {_described(item)}.")
        plain.append(item)
    if numbers is FLOATS:
        return np.array(plain, dtype=np.float64)
    large = next((place for place, item in enumerate(plain) if not -(2**63) <= item < 2**63), None)
    if large is not None:
        raise SubjectError(f"{name}[{large}] must fit 64 bits, not be {show(plain[large])}.")
    return np.array(plain, dtype=numbers.empty)


def _of_tensor(value: Any, name: str, rank: int, numbers: Numbers) -> _Array:
    """Return a torch tensor of any device and layout."""
    # Without an import of torch: whoever hands a tensor over has imported it.
    try:
        tensor = value.detach()
        if getattr(tensor, "is_nested", False):
            return _joined(list(tensor.unbind()), name, rank, numbers)
        tensor = tensor.cpu()
        if tensor.is_floating_point():
            tensor = tensor.double()  # numpy has no bfloat16; float64 holds every float exactly
        return np.array(tensor.numpy())
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise SubjectError(
            f"{name} cannot be read as an array: {describe_error(error)}."
        ) from error


def _of_dlpack(value: Any, name: str) -> _Array:
    """Return an array of another library (JAX, CuPy) through DLPack, copied to the host."""
    problem: Exception | None = None
    attempts: tuple[dict[str, Any], ...] = ({}, {"device": "cpu", "copy": True})
    for options in attempts:
        try:
            return np.array(np.from_dlpack(value, **options))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            problem = problem or error
    try:
        return np.array(value.get() if hasattr(value, "get") else np.asarray(value))
    except (RuntimeError, TypeError, ValueError) as error:
        raise SubjectError(
            f"{name} cannot be read as an array: {describe_error(problem or error)}."
        ) from error


def _depth(element: Any) -> int:
    """Return how many axes an element has; 0 for a number."""
    if isinstance(element, list | tuple) or (
        isinstance(element, np.ndarray) and element.dtype.kind == "O"
    ):
        return 1 + max(map(_depth, element), default=0)
    return int(element.ndim) if hasattr(element, "ndim") and hasattr(element, "shape") else 0


def _advice(array: _Array, rank: int) -> str:
    if array.ndim == rank + 1 and len(array) == 1:
        return ": pass element 0, since a record holds one sample, and not a batch."
    return "."


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name} {value.shape}"
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, list | tuple | dict | set):
        return f"a {kind} of {len(value)}"
    return f"{kind} {show(value)}" if isinstance(value, int | float | str) else kind
