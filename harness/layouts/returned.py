"""Convert what a layout function returned into arrays, or say why it is of the wrong type."""

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
    """A function returned another type or rank than expected; the text names both."""


def as_rows(value: Any) -> tuple[IntArray, ...]:
    """Read an array of rows, or a pair of it and a mask, lengths or labels."""
    if isinstance(value, tuple) and len(value) == 2:
        first, second = value
        return (
            _array(first, "rows", min_axes=2),
            *(() if second is None else (_array(second, "the companion of the rows", min_axes=1),)),
        )
    return (_array(value, "rows", min_axes=2),)


def as_parts(value: Any) -> tuple[IntArray, ...]:
    """Read a list of arrays."""
    if not isinstance(value, list | tuple):
        raise Misfit(f"{_kind(value)}: expected a list of arrays")
    return tuple(_array(part, f"part {i}", min_axes=1) for i, part in enumerate(value))


def as_layers(value: Any) -> tuple[IntArray, ...]:
    """Read a mapping as ``(layers,)`` and one array per layer: its rows, or its column."""
    if not isinstance(value, Mapping):
        raise Misfit(f"{_kind(value)}: expected a mapping from layers to rows")
    layers = _array(list(value), "the layers", min_axes=1)
    return (layers, *(_array(rows, f"layer {layer}", min_axes=0) for layer, rows in value.items()))


def as_numbers(value: Any) -> tuple[IntArray, ...]:
    """Read a list of whole numbers as ``(n,)``, or a single int as ``()``."""
    return (_array(value, "numbers", min_axes=0),)


def as_pairs(value: Any) -> tuple[IntArray, ...]:
    """Read a list of pairs (microbatch, chunk) as ``(n, 2)``; or that and a number."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list | np.ndarray):
        return (*as_pairs(value[0]), _array(value[1], "the number left", min_axes=0))
    array = _array(value, "pairs", min_axes=1)
    if array.size and (array.ndim != 2 or array.shape[1] != 2):
        raise Misfit(f"{_kind(array)}: expected pairs (microbatch, chunk)")
    return (array.reshape(-1, 2),)


def as_lists(value: Any) -> tuple[IntArray, ...]:
    """Read a list of lists as one ``(indexes,)`` per list."""
    if not isinstance(value, list | tuple):
        raise Misfit(f"{_kind(value)}: expected a list of lists of sample indexes")
    return tuple(_array(part, f"list {i}", min_axes=1) for i, part in enumerate(value))


def as_samples(value: Any) -> tuple[IntArray, ...]:
    """Read lists of samples: ``(parts,)`` counts, then tokens and routes of each sample in turn.

    A flat list of pairs is one part.
    """
    parts = [value] if isinstance(value, list | tuple) and value and _is_pair(value[0]) else value
    if not isinstance(parts, list | tuple) or not all(
        isinstance(part, list | tuple) for part in parts
    ):
        raise Misfit(f"{_kind(value)}: expected lists of pairs (tokens, routes)")
    pairs = [pair for part in parts for pair in part]
    if not all(_is_pair(pair) for pair in pairs):
        raise Misfit("a list holds something other than pairs (tokens, routes)")
    flat = [
        _array(field, f"sample {i}", min_axes=1) for i, pair in enumerate(pairs) for field in pair
    ]
    return (np.array([len(part) for part in parts], dtype=np.int64), *flat)


def as_stored(value: Any) -> tuple[IntArray, ...]:
    """Read an array in the type in which it is stored."""
    return (_array(value, "ids", min_axes=1),)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _array(value: Any, name: str, *, min_axes: int) -> IntArray:
    """Copy an integer or boolean array with at least ``min_axes`` axes. Raises ``Misfit``."""
    plain = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    try:
        array = np.array(plain)
    except (TypeError, ValueError) as error:
        raise Misfit(f"{_kind(value)} for {name} is not an array: {error}") from error
    # an empty list becomes an array of floats
    if not array.size and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise Misfit(f"{_kind(array)} for {name}: expected whole numbers")
    if array.ndim < min_axes:
        raise Misfit(f"{_kind(array)} for {name}: expected at least {min_axes} axes")
    # masks may be boolean or 0 and 1: both are the same answer
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"a {type(value).__name__}" if value is not None else "None"
