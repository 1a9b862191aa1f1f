"""Checksums in JSON files, by which a reader notices that a file was damaged on its way.

A checksum is of the values, not of their text: a file that is only formatted anew keeps it. It
says nothing of who wrote the file: whoever edits it can renew the checksum (``rollproof seal``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rollproof.errors import TraceError

__all__ = ["KEY", "checksum_of", "fits", "with_checksum"]

KEY = "checksum"
"""The key of a file's object that has its checksum."""


def checksum_of(data: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON object, without the one that it may have. Raises ``TraceError``
    if it is nested too deeply.
    """
    values = {name: value for name, value in data.items() if name != KEY}
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise TraceError("The JSON is nested too deeply.") from None
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def fits(data: Mapping[str, Any]) -> bool | None:
    """Return whether an object is as it was when its checksum was made; ``None`` if it has none."""
    return data[KEY] == checksum_of(data) if KEY in data else None


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object that is to be written as JSON, with its checksum as the last key."""
    # as a reader will see it: with text for keys, and lists for tuples
    values: dict[str, Any] = json.loads(json.dumps(data))
    return {**values, KEY: checksum_of(values)}
