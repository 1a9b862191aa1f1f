"""Wire: how routes are written into JSON by those who send them.

SGLang sends base64 of raw int32 without a shape, newer ones a compact type with its name beside it; vLLM's own endpoint
sends a NumPy file in base64; others a mapping with shape and dtype.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from rollproof.records import IntArray

__all__ = ["as_described", "as_int32", "as_npy", "compact"]


def as_int32(routes: IntArray) -> str:
    """Base64 of the rows as little-endian int32 in C order, without a shape: SGLang's ``meta_info["routed_experts"]``."""
    return base64.b64encode(np.ascontiguousarray(routes, dtype="<i4").tobytes()).decode("ascii")


def compact(routes: IntArray) -> tuple[str, str]:
    """The rows in the smallest unsigned type that holds them, and its name; int32 where an id is negative or too large."""
    low, high = (int(routes.min()), int(routes.max())) if routes.size else (0, 0)
    name = "int32" if low < 0 or high > 65_535 else "uint8" if high <= 255 else "uint16"
    kind = np.dtype(name).newbyteorder("<")
    return base64.b64encode(np.ascontiguousarray(routes, dtype=kind).tobytes()).decode("ascii"), name


def as_npy(routes: IntArray) -> str:
    """Base64 of a ``.npy`` file of the array as it is."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(routes), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def as_described(routes: IntArray) -> dict[str, Any]:
    """Base64 of the raw bytes, with shape and dtype beside them."""
    return {
        "data": base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode("ascii"),
        "shape": list(routes.shape),
        "dtype": str(routes.dtype),
    }
