"""How servers write routes into JSON, and how clients read them.

SGLang sends base64 of raw int32 without a shape, newer releases a compact type with its name next
to it; vLLM's own endpoint sends a NumPy file in base64; others send a mapping with shape and dtype.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

from rollproof.core.records import IntArray

__all__ = [
    "as_described",
    "as_int32",
    "as_npy",
    "compact",
    "from_described",
    "from_flat",
    "from_npy",
]


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
    return np.frombuffer(
        pybase64.b64decode(text, validate=True), dtype=np.dtype(dtype).newbyteorder("<")
    ).reshape(-1, layers, top_k)


def from_npy(text: str) -> IntArray:
    """Read ``as_npy``.

    Raises:
        ValueError: it is no ``.npy`` file.
    """
    array: IntArray = np.load(
        io.BytesIO(pybase64.b64decode(text, validate=True)), allow_pickle=False
    )
    return array


def from_described(encoded: Mapping[str, Any]) -> IntArray:
    """Read ``as_described``.

    Raises:
        KeyError: a key is missing.
        ValueError: the bytes do not fit the shape.
    """
    dtype = np.dtype(encoded["dtype"]).newbyteorder("<")
    return np.frombuffer(pybase64.b64decode(encoded["data"], validate=True), dtype=dtype).reshape(
        encoded["shape"]
    )
