"""Returned: what a subject's layout function gave back, as arrays, or in words why it is not what
such a function gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from rollproof.core.records import IntArray

__all__ = [
    "Misfit",
    "Returned",
    "as_layers",
    "as_lists",
    "as_numbers",
    "as_pairs",
    "as_parts",
    "as_rows",
    "as_samples",
    "as_stored",
]

Returned: TypeAlias = "Callable[[Any], tuple[IntArray, ...]]"


class Misfit(Exception):
    """A function returned something of another type or rank; the text says what it is and what was
    wanted.
    """


def as_rows(value: Any) -> tuple[IntArray, ...]:
    """An array of rows, or a pair of it and a mask, lengths or labels."""
    if isinstance(value, tuple) and len(value) == 2:
        first, second = value
        return (
            _array(first, "rows", least=2),
            *(() if second is None else (_array(second, "what goes with the rows", least=1),)),
        )
    return (_array(value, "rows", least=2),)


def as_parts(value: Any) -> tuple[IntArray, ...]:
    """A list of arrays."""
    if not isinstance(value, list | tuple):
        raise Misfit(f"{_kind(value)}, where a list of arrays is wanted")
    return tuple(_array(part, f"part {i}", least=1) for i, part in enumerate(value))


def as_layers(value: Any) -> tuple[IntArray, ...]:
    """``(layers,)`` and one array per layer: its rows, or its column."""
    if not isinstance(value, Mapping):
        raise Misfit(f"{_kind(value)}, where a mapping from layers to rows is wanted")
    layers = _array(list(value), "the layers", least=1)
    return (layers, *(_array(rows, f"layer {layer}", least=0) for layer, rows in value.items()))


def as_numbers(value: Any) -> tuple[IntArray, ...]:
    """``(n,)``: a list of whole numbers; an int stands alone."""
    return (_array(value, "numbers", least=0),)


def as_pairs(value: Any) -> tuple[IntArray, ...]:
    """``(n, 2)``, a list of pairs (microbatch, chunk); or that and a number."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list | np.ndarray):
        return (*as_pairs(value[0]), _array(value[1], "the number left", least=0))
    array = _array(value, "pairs", least=1)
    if array.size and (array.ndim != 2 or array.shape[1] != 2):
        raise Misfit(f"{_kind(array)}, where pairs (microbatch, chunk) are wanted")
    return (array.reshape(-1, 2),)


def as_lists(value: Any) -> tuple[IntArray, ...]:
    """One ``(indexes,)`` per list."""
    if not isinstance(value, list | tuple):
        raise Misfit(f"{_kind(value)}, where a list of lists of sample indexes is wanted")
    return tuple(_array(part, f"list {i}", least=1) for i, part in enumerate(value))


def as_samples(value: Any) -> tuple[IntArray, ...]:
    """``(parts,)`` counts of samples, then tokens and routes of each sample in turn; a flat list of
    pairs is one part.
    """
    parts = [value] if isinstance(value, list | tuple) and value and _is_pair(value[0]) else value
    if not isinstance(parts, list | tuple) or not all(
        isinstance(part, list | tuple) for part in parts
    ):
        raise Misfit(f"{_kind(value)}, where lists of pairs (tokens, routes) are wanted")
    pairs = [pair for part in parts for pair in part]
    if not all(_is_pair(pair) for pair in pairs):
        raise Misfit("a list holds something other than pairs (tokens, routes)")
    flat = [_array(field, f"sample {i}", least=1) for i, pair in enumerate(pairs) for field in pair]
    return (np.array([len(part) for part in parts], dtype=np.int64), *flat)


def as_stored(value: Any) -> tuple[IntArray, ...]:
    """The array as it is stored."""
    return (_array(value, "ids", least=1),)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _array(value: Any, what: str, *, least: int) -> IntArray:
    """An integer or boolean array of its own. Raises ``Misfit``."""
    plain = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    try:
        array = np.array(plain)
    except (TypeError, ValueError) as error:
        raise Misfit(f"{_kind(value)} for {what}, which is no array: {error}") from error
    if not array.size and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise Misfit(f"{_kind(array)} for {what}, where whole numbers are wanted")
    if array.ndim < least:
        raise Misfit(f"{_kind(array)} for {what}, where at least {least} axes are wanted")
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"a {type(value).__name__}" if value is not None else "None"
