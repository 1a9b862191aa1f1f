"""Phrases that findings are made of. Their readers have not read our documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollproof.core.records import Version

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = [
    "call_id",
    "call_name",
    "count",
    "listing",
    "ranges",
    "segment_name",
    "share",
    "verb",
    "version_name",
    "window",
]

_MAX_ITEMS = 6


def count(number: int, noun: str) -> str:
    """Return ``1 token``, ``3 tokens`` or ``no tokens``. An irregular plural follows a bar:
    ``entry|entries``.
    """
    singular, _, plural = noun.partition("|")
    return f"{number or 'no'} {singular if number == 1 else plural or singular + 's'}"


def share(part: int, total: int, noun: str) -> str:
    """Return ``3 of 48 layers`` or ``1 of 1 token``."""
    singular, _, plural = noun.partition("|")
    return f"{part} of {total} {singular if total == 1 else plural or singular + 's'}"


def ranges(indexes: Iterable[int], limit: int = _MAX_ITEMS) -> str:
    """Return indexes as ranges: ``0-2, 5``. Beyond ``limit`` ranges the rest is counted: ``0, 2, 4
    and 7 more``.
    """
    spans: list[list[int]] = []
    for index in sorted(set(indexes)):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:limit]]
    rest = sum(high - low + 1 for low, high in spans[limit:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "")


def window(values: Sequence[object], index: int = 0, width: int = _MAX_ITEMS) -> str:
    """Return the values around index ``index`` as a list with dots where it was cut: ``[..., 5, 6,
    ...]``.
    """
    start = max(0, min(index - width // 2, len(values) - width))
    texts = [_value(value) for value in values[start : start + width]]
    return (
        "["
        + ", ".join(["..."] * (start > 0) + texts + ["..."] * (start + width < len(values)))
        + "]"
    )


def verb(number: int, singular: str, plural: str) -> str:
    """Return the form that agrees with a number."""
    return singular if number == 1 else plural


def listing(items: Iterable[object], last: str = "and") -> str:
    """Return ``1``, ``1 and 2`` or ``1, 2 and 3``."""
    texts = [str(item) for item in items]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def version_name(label: Version) -> str:
    """Return ``version 3``, ``version "step-3"`` or ``no version``."""
    if label is None:
        return "no version"
    return f'version "{label}"' if isinstance(label, str) else f"version {label}"


def call_id(view: RequestView, attempt: int) -> int:
    """Return the id that the call of an attempt has in the trace.

    Findings name calls by it, as their stories and the events before them do.
    """
    return view.attempts[attempt].call.call_id


def call_name(attempt: Attempt) -> str:
    """Return ``call 1 (to server s0)``, with the id of the call in the trace."""
    return f"call {attempt.call.call_id} (to server {attempt.call.server_id})"


def segment_name(view: RequestView, attempt: int) -> str:
    """Return ``segment 1`` for the attempt with the second reply to arrive."""
    # Turns of the environment have attempt -1; "call -1" would be no help to anybody.
    if attempt < 0:
        return "a turn of the environment"
    order = [segment.number for segment in view.segments]
    if attempt in order:
        return f"segment {order.index(attempt)}"
    return f"call {call_id(view, attempt)}"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
