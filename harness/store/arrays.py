"""Arrays: the element types that a trace can hold, and bytes of a trace as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.errors import TraceError
from rollproof.store.packed_dtype import Narrow
from rollproof.store.values import show

__all__ = ["DTYPES", "AnyArray", "as_array", "name_of", "stored_as", "stored_in"]

AnyArray: TypeAlias = "npt.NDArray[Any]"
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", *_INTEGERS, "float16", "float32", "float64")
}
"""The element types that a trace can hold, by name, as they are stored. There is no ``object``."""
_MAX_RANK = 8


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """The name of an element type, of either byte order."""
    return dtype.name


_WORTH = 1 << 10
"""Elements from which on an array is looked at for a narrower type."""
_Way: TypeAlias = "tuple[np.dtype[Any], str]"
_NARROW = tuple(
    (DTYPES[name], int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32")
)


def stored_in(array: AnyArray) -> _Way:
    """The type that the bytes of an array are stored in, and how a trace names both types
    (``stored_as``).

    Of integers, where they are many, it is the smallest that holds them, else their own: SGLang's
    rows are int32, of which a model with at most 256 experts uses a quarter, and the rest need not
    be copied, summed and written.
    """
    if type(array) is Narrow:
        return _way(array.shown_as, array.dtype)
    own, narrower = _ways(array.dtype)
    if not narrower or array.size < _WORTH:
        return own
    low, high = (
        0,
        int(np.bitwise_or.reduce(array, axis=None)),
    )  # of numbers from 0 on it has the bits of the largest
    if high < 0:
        low, high = (
            int(np.minimum.reduce(array, axis=None)),
            int(np.maximum.reduce(array, axis=None)),
        )
    return next((way for way, least, most in narrower if least <= low and high <= most), own)


@cache
def _ways(kind: np.dtype[Any]) -> tuple[_Way, tuple[tuple[_Way, int, int], ...]]:
    """How arrays of this type can be stored: as they are, or in narrower types, from the narrowest
    on, with what those hold.
    """
    narrower = [
        small for small in _NARROW if kind.kind in "iu" and small[0].itemsize < kind.itemsize
    ]
    return _way(kind, kind), tuple(
        (_way(kind, small), least, most) for small, least, most in narrower
    )


@cache
def _way(wide: np.dtype[Any], small: np.dtype[Any]) -> _Way:
    names = name_of(wide), name_of(small)
    return DTYPES[names[1]], names[0] if names[0] == names[1] else "/".join(names)


def stored_as(name: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The element type of an array and that of its bytes, by a name such as ``int32`` or
    ``int32/uint8``. Raises ``TraceError``.
    """
    wide, _, small = name.partition("/")
    kinds = DTYPES.get(wide), DTYPES.get(small or wide)
    if kinds[0] is None or kinds[1] is None or not np.can_cast(kinds[1], kinds[0], "safe"):
        raise TraceError(f"An array has element type {show(name)}; a trace holds {list(DTYPES)}.")
    return kinds[0], kinds[1]


def as_array(
    data: Any, dtype: np.dtype[Any], shape: Any, start: int = 0, size: int | None = None
) -> AnyArray:
    """A read-only view of ``size`` bytes of a buffer as an array of ``shape``, a list of lengths.
    Raises ``TraceError``.
    """
    size = len(data) - start if size is None else size
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_RANK
        or any(type(n) is not int or n < 0 for n in shape)
    ):
        raise TraceError(
            f"The shape of an array must be at most {_MAX_RANK} lengths >= 0, not {show(shape)}."
        )
    if math.prod(shape) * dtype.itemsize != size:
        raise TraceError(
            f"An array of {dtype.name} claims {show(math.prod(shape))} elements by its shape, and"
            f" has {size} bytes."
        )
    flat: AnyArray = (
        np.frombuffer(data, dtype, size // dtype.itemsize, start) if size else np.zeros(0, dtype)
    )
    try:
        array = flat.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"An empty array claims impossible lengths: {show(str(error))}.") from None
    array.flags.writeable = False
    return array
