"""Describe exceptions and values of other people's code in one line."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

__all__ = [
    "describe_error",
    "describe_error_with_place",
    "error_kind",
    "one_line",
    "show",
    "user_frames",
]

_LONGEST = 2000
"""Characters of an exception's text that are shown: some texts hold complete tensors."""


def describe_error(error: BaseException) -> str:
    """Return ``Class: text``, in one line, without a closing period; the class alone if there is no
    text, or making it fails.
    """
    try:
        text = one_line(str(error))
    except Exception:  # noqa: BLE001 - a ``__str__`` of the user's may raise whatever it likes
        text = ""
    # the text of a group counts its exceptions, and names none
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        text = f"{text}: {describe_error(error.exceptions[0])}"
    name = type(error).__name__
    return f"{name}: {text.removesuffix('.')}" if text else name


def describe_error_with_place(error: BaseException) -> str:
    """Return the same with the last line of user code in the traceback: ``KeyError: 'x'
    (client.py:31, in generate)``.
    """
    frames = user_frames(error)
    if not frames:
        return describe_error(error)
    frame, line = frames[-1]
    return (
        f"{describe_error(error)} ({Path(frame.f_code.co_filename).name}:{line}, in"
        f" {frame.f_code.co_name})"
    )


def user_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of user code in the traceback with their lines, the innermost last."""
    # frames of the standard library (asyncio, json) say nothing of the code under test
    return [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if (package := str(frame.f_globals.get("__name__", "")).partition(".")[0]) != "rollproof"
        and package not in sys.stdlib_module_names
    ]


_PLACED = re.compile(r"\(([^():]+):\d+, in ([^()]+)\)$")


def error_kind(text: str) -> str:
    """Shorten a text of ``describe_error_with_place`` to what similar errors share: ``TypeError
    (client.py, in generate)``.
    """
    place = _PLACED.search(text)
    return text.partition(":")[0].partition(" ")[0] + (
        f" ({place[1]}, in {place[2]})" if place else ""
    )


def one_line(text: str) -> str:
    """Join the lines of ``text``, and cut it if it is very long."""
    joined = " ".join(text.split())
    return (
        joined
        if len(joined) <= _LONGEST
        else f"{joined[:_LONGEST]}... ({len(joined):,} characters)"
    )


def show(value: object) -> str:
    """Return a value for an error's text: short, ASCII, whatever it is."""
    # Python refuses to print an int of more than 4300 digits
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        # not its text: a list may hold a million tokens
        if isinstance(value, Mapping | list | tuple | set):
            return f"a {type(value).__name__} of {len(value)}"
        # ascii: a hostile text could hold terminal escapes
        text = ascii(value)
    except Exception:  # noqa: BLE001 - a ``__repr__`` of the user's may raise whatever it likes
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
