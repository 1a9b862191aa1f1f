"""Hypothesis strategies for any record of a trace, from the types of its fields, and equality that
sees into arrays.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollproof.core import records
from rollproof.core.events.base import Event
from rollproof.core.trace import EVENT_KINDS, Header
from tests.support.trace_builder import contract

__all__ = ["alike", "any_event", "any_header", "records_of"]

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SCALARS: Mapping[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(width=64).filter(lambda x: x == x or str(x) == "nan"),
    str: _TEXT,
    type(None): st.none(),
}
_ALIASES = {
    name: eval(value, dict(vars(records)))  # noqa: S307 - annotations of our own module
    for name, value in vars(records).items()
    if name in records.__all__ and isinstance(value, str)
}
_JSON = st.recursive(
    st.one_of(*_SCALARS.values()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


def records_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint, as far as fields of records use them."""
    if hint is Any:
        return _JSON
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint, localns=_ALIASES)
        return st.builds(
            hint, **{field.name: records_of(hints[field.name]) for field in fields(hint)}
        )
    origin, args = get_origin(hint), get_args(hint)
    if hasattr(origin, "__value__"):  # NDArray of numpy 2.5
        return records_of(origin.__value__[args])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(records_of, args))
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(records_of(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(records_of, args))
    if origin is np.ndarray:
        return _arrays(get_args(args[1])[0])
    return st.dictionaries(records_of(args[0]), records_of(args[1]), max_size=3)


def _arrays(element: Any) -> st.SearchStrategy[Any]:
    if (get_origin(element) or element) is np.float64:
        return hnp.arrays(
            np.float64, hnp.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=5)
        )
    # masks are integer arrays, and may be boolean
    further = ("float32", "float64") if (get_origin(element) or element) is np.number else ("bool",)
    kinds = st.sampled_from(
        ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", *further]
    )
    return kinds.flatmap(
        lambda kind: hnp.arrays(
            kind, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=3)
        )
    )


def any_event(*kinds: str) -> st.SearchStrategy[Event]:
    """Events of the named kinds (default: of every kind), with a finite time as the recorder stamps
    them.
    """
    times = st.floats(allow_nan=False, allow_infinity=False)
    built = [_stamped(EVENT_KINDS[kind], times) for kind in kinds or EVENT_KINDS]
    return st.one_of(*built)


def _stamped(cls: type[Event], times: st.SearchStrategy[float]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(cls, localns=_ALIASES)
    chosen = {field.name: records_of(hints[field.name]) for field in fields(cls)}
    return st.builds(cls, **{**chosen, "time": times})


def any_header() -> st.SearchStrategy[Header]:
    """Headers of this schema with any free-form mappings."""
    free = st.none() | st.dictionaries(_TEXT, _JSON, max_size=3)
    return st.builds(
        Header,
        subject=_TEXT,
        contract=st.just(contract()),
        seed=st.integers(0, 2**31),
        profile=_TEXT,
        coding=free,
        case=free,
        recipe=free,
    )


def alike(a: Any, b: Any) -> bool:
    """Deep equality of records: types, fields, array bytes; NaN equals NaN."""
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    if type(a) is not type(b):
        return False
    if is_dataclass(a):
        return all(alike(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)
