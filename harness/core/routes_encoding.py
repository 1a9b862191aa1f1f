"""How servers write routes into JSON, and how clients read them.

SGLang sends base64 of raw int32 without a shape, newer releases a compact type with its name next
to it; vLLM's own endpoint sends a NumPy file in base64; others send a mapping with shape and dtype.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64
from numpy.lib import format as npy

from rollproof.core.error_text import describe_error, show
from rollproof.core.records import IntArray

__all__ = [
    "as_described",
    "as_int32",
    "as_npy",
    "compact",
    "from_described",
    "from_flat",
    "from_npy",
    "integer_type",
]

_INTEGER_TYPE = re.compile(r"[<>|=]?[iu][1248]|u?int(8|16|32|64)")


def as_int32(routes: IntArray) -> str:
    """Return base64 of the rows as little-endian int32 in C order, without a shape: SGLang's
    ``meta_info["routed_experts"]``.
    """
    # no shape and no header: a client must know layers and top-k from the model, not from the size
    return pybase64.b64encode_as_string(np.ascontiguousarray(routes, dtype="<i4").data)


def compact(routes: IntArray) -> tuple[str, str]:
    """Return base64 of the rows in the smallest unsigned type that holds them, and its name; int32
    if an id is negative or too large.
    """
    low, high = (int(routes.min()), int(routes.max())) if routes.size else (0, 0)
    # as SGLang falls back: -1 marks padded rows (sglang#36404)
    name = "int32" if low < 0 or high > 65_535 else "uint8" if high <= 255 else "uint16"
    dtype = np.dtype(name).newbyteorder("<")
    return pybase64.b64encode_as_string(np.ascontiguousarray(routes, dtype=dtype).data), name


def as_npy(routes: IntArray) -> str:
    """Return base64 of a ``.npy`` file of the array as it is."""
    file = io.BytesIO()
    # no pickle: a client that allowed it would run code of the server
    np.save(file, np.ascontiguousarray(routes), allow_pickle=False)
    return pybase64.b64encode_as_string(file.getvalue())


def as_described(routes: IntArray, **extra: Any) -> dict[str, Any]:
    """Return base64 of the raw bytes, ``data`` first, with shape and dtype; ``extra`` is what a
    sender adds, such as prime-rl's ``start``.
    """
    return {
        "data": pybase64.b64encode_as_string(np.ascontiguousarray(routes).data),
        "shape": list(routes.shape),
        "dtype": str(routes.dtype),
        **extra,
    }


def from_flat(text: str, layers: int, top_k: int, dtype: str = "int32") -> IntArray:
    """Read ``as_int32`` or ``compact`` as an array of (rows, layers, top_k).

    Raises:
        ValueError: the bytes do not fit.
    """
    flat = np.frombuffer(pybase64.b64decode(text, validate=True), dtype=integer_type(dtype))
    return flat.reshape(-1, layers, top_k)


def from_npy(text: str) -> IntArray:
    """Read ``as_npy``.

    Raises:
        ValueError: it is no ``.npy`` file.
    """
    data = pybase64.b64decode(text, validate=True)
    file = io.BytesIO(data)
    # not np.load: it makes room for the shape that the header names before it looks at the rest
    try:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version[0] == 1 else npy.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
    # the header is a literal of Python, of which the parser says whatever it likes
    except Exception as error:
        raise ValueError(f"it is no .npy file: {describe_error(error)}") from error
    flat = np.frombuffer(data, dtype=integer_type(dtype.str), offset=file.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def from_described(encoded: Mapping[str, Any]) -> IntArray:
    """Read ``as_described``.

    Raises:
        KeyError: a key is missing.
        ValueError: the bytes do not fit the shape.
    """
    data = pybase64.b64decode(encoded["data"], validate=True)
    return np.frombuffer(data, dtype=integer_type(encoded["dtype"])).reshape(encoded["shape"])


def integer_type(name: object) -> np.dtype[Any]:
    """Return the type of whole numbers of this name, little-endian unless the name says otherwise.

    Raises:
        ValueError: it is no such name.
    """
    # a server's own text: numpy also makes types of structures and of Python objects
    match = _INTEGER_TYPE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"{show(name)} is no type of whole numbers")
    dtype = np.dtype(match[0])
    return dtype.newbyteorder("<") if dtype.isnative else dtype
