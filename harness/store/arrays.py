"""Bytes of a trace file as arrays, and arrays as bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollproof.core.error_text import show
from rollproof.core.json_codec import DTYPES, AnyArray
from rollproof.errors import TraceError

__all__ = ["array_of", "stored_bytes", "stored_dtypes"]

_MAX_RANK = 8
_NARROWED_FROM = 1 << 10
"""Elements from which on an array of integers is stored in a narrower type."""


def stored_bytes(array: AnyArray) -> tuple[str, bytes]:
    """Return the name of an array's element type, and its bytes: little-endian, in C order.

    Many integers are stored in the smallest type that holds them, named behind their own
    (``int32/uint8``).
    """
    name = stored = array.dtype.name
    if array.dtype.kind in "iu" and array.size >= _NARROWED_FROM:
        # SGLang's rows are int32, of which a model with at most 256 experts uses a quarter
        least, most = np.min_scalar_type(array.min()), np.min_scalar_type(array.max())
        narrowest = np.promote_types(least, most)
        if narrowest.kind in "iu" and narrowest.itemsize < array.dtype.itemsize:
            stored = narrowest.name
            name = f"{name}/{stored}"
    return name, array.astype(DTYPES[stored], order="C", copy=False).tobytes()


def stored_dtypes(name: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the element type of an array and that of its bytes, by a name such as ``int32`` or
    ``int32/uint8``. Raises ``TraceError``.
    """
    own, _, stored = name.partition("/")
    dtypes = DTYPES.get(own), DTYPES.get(stored or own)
    if dtypes[0] is None or dtypes[1] is None or not np.can_cast(dtypes[1], dtypes[0], "safe"):
        raise TraceError(f"An array has element type {show(name)}; a trace holds {list(DTYPES)}.")
    return dtypes[0], dtypes[1]


def array_of(data: Any, dtype: np.dtype[Any], shape: Any) -> AnyArray:
    """Return a read-only view of a buffer as an array of ``shape``, a list of lengths.

    Raises:
        TraceError: the shape is none, or does not fit the number of bytes.
    """
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_RANK
        or any(type(length) is not int or length < 0 for length in shape)
    ):
        raise TraceError(
            f"The shape of an array must be at most {_MAX_RANK} lengths >= 0, not {show(shape)}."
        )
    size = memoryview(data).nbytes
    if math.prod(shape) * dtype.itemsize != size:
        raise TraceError(
            f"An array of {dtype.name} has the shape of {show(math.prod(shape))} elements, but"
            f" {size} bytes of data."
        )
    # numpy makes no array of an empty buffer
    flat: AnyArray = np.frombuffer(data, dtype) if size else np.zeros(0, dtype)
    try:
        array = flat.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"An empty array has an impossible shape: {show(str(error))}.") from None
    array.flags.writeable = False
    return array
