"""Lines of JSON, each checked against the fields that a dump must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollproof.errors import GapError

__all__ = ["first_line", "read_lines"]

_Line = TypeVar("_Line", bound=msgspec.Struct)
_LONGEST = 1 << 28
"""Bytes of a line that is read to find out what a file is."""


def first_line(path: Path) -> dict[str, Any]:
    """Return the first line of a file, or an empty dict if that is no JSON object."""
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(1) != "{":  # a binary file is not read up to a line's end
                return {}
            line = json.loads("{" + file.readline(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def read_lines(path: Path, kind: type[_Line]) -> Iterator[tuple[int, _Line]]:
    """Yield each line that is not blank with its number, counted from 1.

    ``NaN`` and ``Infinity`` are numbers, as in what Python's json module writes. Raises
    ``GapError`` naming the line that is cut, is not JSON or lacks a field.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, msgspec.convert(json.loads(line), kind)
            except msgspec.ValidationError as error:
                raise GapError(f"{path}, line {number}: {error}.") from error
            except (ValueError, RecursionError) as error:
                cut = "" if line.endswith(b"\n") else ", and the file ends within it"
                raise GapError(
                    f"{path}, line {number} is not JSON{cut} ({_one_line(error)}). If the run was"
                    " stopped while it wrote, remove that line."
                ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
