"""Wording: the small phrases that findings are made of. They are read by people who have not read
our documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollproof.core.records import Version

if TYPE_CHECKING:
    from rollproof.judging.request_view import Attempt, RequestView

__all__ = [
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

_SHOWN = 6


def count(number: int, noun: str) -> str:
    """``1 token``, ``3 tokens``, ``no tokens``; an irregular plural is given after a bar:
    ``entry|entries``.
    """
    one, _, many = noun.partition("|")
    return f"{number or 'no'} {one if number == 1 else many or one + 's'}"


def share(part: int, whole: int, noun: str) -> str:
    """``3 of 48 layers``, ``1 of 1 token``."""
    one, _, many = noun.partition("|")
    return f"{part} of {whole} {one if whole == 1 else many or one + 's'}"


def ranges(indexes: Iterable[int], shown: int = _SHOWN) -> str:
    """Indexes as ranges: ``0-2, 5``; beyond ``shown`` ranges the rest is counted: ``0, 2, 4 and 7
    more``.
    """
    spans: list[list[int]] = []
    for index in sorted(set(indexes)):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:shown]]
    rest = sum(high - low + 1 for low, high in spans[shown:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "")


def window(values: Sequence[object], at: int = 0, width: int = _SHOWN) -> str:
    """The values around index ``at``, as a list with dots where it was cut: ``[..., 5, 6, 7,
    ...]``.
    """
    start = max(0, min(at - width // 2, len(values) - width))
    texts = [_value(value) for value in values[start : start + width]]
    return (
        "["
        + ", ".join(["..."] * (start > 0) + texts + ["..."] * (start + width < len(values)))
        + "]"
    )


def verb(number: int, one: str, many: str) -> str:
    """The form that agrees with a number."""
    return one if number == 1 else many


def listing(items: Iterable[object], last: str = "and") -> str:
    """``1``, ``1 and 2``, ``1, 2 and 3``."""
    texts = [str(item) for item in items]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def version_name(label: Version) -> str:
    """``version 3``, ``version "step-3"``, ``no version``."""
    if label is None:
        return "no version"
    return f'version "{label}"' if isinstance(label, str) else f"version {label}"


def call_name(attempt: Attempt) -> str:
    """``call 1 (to server s0)``: calls of a request count from 0."""
    return f"call {attempt.number} (to server {attempt.call.server_id})"


def segment_name(view: RequestView, attempt: int) -> str:
    """``segment 1`` for the attempt whose reply was the second to arrive; segments count from 0, as
    calls do.
    """
    order = [one.number for one in view.segments]
    return f"segment {order.index(attempt)}" if attempt in order else f"call {attempt}"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
