"""Exceptions and values of somebody else's code as one line of our own texts."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

__all__ = ["error_kind", "one_line", "show", "describe_error", "describe_error_with_place"]

_LONGEST = 2000
"""Characters of an exception's text that are told; some hold whole tensors."""


def describe_error(error: BaseException) -> str:
    """``Class: text``, in one line, without a closing period; the class alone where there is no
    text or it cannot be made.
    """
    try:
        text = one_line(str(error))
    except Exception:  # noqa: BLE001 - a ``__str__`` of the user's may raise whatever it likes
        text = ""
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        text = f"{text}: {describe_error(error.exceptions[0])}"
    name = type(error).__name__
    return f"{name}: {text.removesuffix('.')}" if text else name


def describe_error_with_place(error: BaseException) -> str:
    """As ``describe_error``, with the last line of somebody's own code that the exception came through, such
    as ``(client.py:31, in generate)``.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "rollproof" and package not in sys.stdlib_module_names:
            return (
                f"{describe_error(error)} ({Path(frame.f_code.co_filename).name}:{line}, in"
                f" {frame.f_code.co_name})"
            )
    return describe_error(error)


_PLACED = re.compile(r"\(([^():]+):\d+, in ([^()]+)\)$")


def error_kind(text: str) -> str:
    """What ``describe_error_with_place`` said, without the words and numbers of this very error: ``TypeError
    (client.py, in generate)``.
    """
    place = _PLACED.search(text)
    return text.partition(":")[0].partition(" ")[0] + (
        f" ({place[1]}, in {place[2]})" if place else ""
    )


def one_line(text: str) -> str:
    """``text`` with its lines joined, cut where it is very long."""
    joined = " ".join(text.split())
    return (
        joined
        if len(joined) <= _LONGEST
        else f"{joined[:_LONGEST]}... ({len(joined):,} characters)"
    )


def show(value: object) -> str:
    """Return a value for an error's text: short, ASCII, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, Mapping | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
