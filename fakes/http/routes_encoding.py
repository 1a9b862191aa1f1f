"""Wire: how routes are written into JSON by those who send them, and read by those who get them.

SGLang sends base64 of raw int32 without a shape, newer ones a compact type with its name beside it;
vLLM's own endpoint sends a NumPy file in base64; others a mapping with shape and dtype.
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


def as_int32(routes: IntArray) -> bytes:
    """Base64 of the rows as little-endian int32 in C order, without a shape: SGLang's
    ``meta_info["routed_experts"]``.
    """
    return pybase64.b64encode(np.ascontiguousarray(routes, dtype="<i4").data)


def compact(routes: IntArray) -> tuple[bytes, str]:
    """The rows in the smallest unsigned type that holds them, and its name; int32 where an id is
    negative or too large.
    """
    low, high = (int(routes.min()), int(routes.max())) if routes.size else (0, 0)
    name = "int32" if low < 0 or high > 65_535 else "uint8" if high <= 255 else "uint16"
    kind = np.dtype(name).newbyteorder("<")
    return pybase64.b64encode(np.ascontiguousarray(routes, dtype=kind).data), name


def as_npy(routes: IntArray) -> str:
    """Base64 of a ``.npy`` file of the array as it is."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(routes), allow_pickle=False)
    return pybase64.b64encode_as_string(file.getvalue())


def as_described(routes: IntArray, **more: Any) -> dict[str, Any]:
    """Base64 of the raw bytes, with shape and dtype beside them, ``data`` first; ``more`` is what a
    sender adds (prime-rl's ``start``).
    """
    return {
        "data": pybase64.b64encode_as_string(np.ascontiguousarray(routes).data),
        "shape": list(routes.shape),
        "dtype": str(routes.dtype),
        **more,
    }


def from_flat(text: str, layers: int, top_k: int, dtype: str = "int32") -> IntArray:
    """Read ``as_int32`` or ``compact``: ``(rows, layers, top_k)``. Raises ``ValueError`` where the
    bytes do not fit.
    """
    return np.frombuffer(
        pybase64.b64decode(text, validate=True), dtype=np.dtype(dtype).newbyteorder("<")
    ).reshape(-1, layers, top_k)


def from_npy(text: str) -> IntArray:
    """Read ``as_npy``. Raises ``ValueError`` where it is none."""
    array: IntArray = np.load(
        io.BytesIO(pybase64.b64decode(text, validate=True)), allow_pickle=False
    )
    return array


def from_described(wire: Mapping[str, Any]) -> IntArray:
    """Read ``as_described``. Raises ``ValueError`` where the bytes do not fit, ``KeyError`` where a
    key is missing.
    """
    kind = np.dtype(wire["dtype"]).newbyteorder("<")
    return np.frombuffer(pybase64.b64decode(wire["data"], validate=True), dtype=kind).reshape(
        wire["shape"]
    )
