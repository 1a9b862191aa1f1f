"""Detect changes that a stack makes to the objects that its caller passed to it."""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["WATCH", "Watch", "changed_rows", "lend"]

_T = TypeVar("_T")


class Watch:
    """The objects passed to a stack during one rollout, each with a copy of its first state."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, Any, Any]] = []

    def lend(self, name: str, value: _T) -> _T:
        """Watch ``value`` under ``name``, and return it."""
        self._watched.append((name, value, copy.deepcopy(value)))
        return value

    def changed(self) -> tuple[str, ...]:
        """Return the names of the objects that no longer equal their copies, and the changes."""
        return tuple(
            f"{name}: {_difference(before, now)}"
            for name, now, before in self._watched
            if not same(before, now)
        )


WATCH: ContextVar[Watch | None] = ContextVar("rollproof_watch", default=None)
"""The watch of the rollout in which context code runs."""


def lend(name: str, value: _T) -> _T:
    """Return ``value``, and let the runner report it under ``name`` if the stack changes it.

    Outside of a run nothing is watched.
    """
    watch = WATCH.get()
    return value if watch is None else watch.lend(name, value)


def same(a: Any, b: Any) -> bool:
    """Compare deeply: arrays are equal in dtype, shape and elements, and NaN equals NaN."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (
            isinstance(a, np.ndarray)
            and isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def changed_rows(before: npt.NDArray[Any] | None, now: npt.NDArray[Any]) -> str:
    """Return how many rows of an array were overwritten, in words; empty if none was.

    Another shape of the same values is no change.
    """
    if before is None or not before.size or before.size != now.size:
        return ""
    rows = len(before)
    old, new = before.reshape(rows, -1), now.reshape(rows, -1)
    changed = (old != new).any(axis=1)
    if not changed.any():
        return ""
    same_values = np.array_equal(np.sort(old, axis=None), np.sort(new, axis=None))
    what = "the same values in another order" if same_values else "other values"
    return f"{int(changed.sum())} of {rows} rows have {what}"


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        removed = [f"{key!r} was removed" for key in before if key not in now]
        added = [f"{key!r} was added ({now[key]!r})" for key in now if key not in before]
        changed = [
            f"{key!r} went from {before[key]!r} to {now[key]!r}"
            for key in before
            if key in now and not same(before[key], now[key])
        ]
        return ", ".join(removed + added + changed)
    if isinstance(before, list) and isinstance(now, list) and len(before) != len(now):
        return f"went from {len(before)} to {len(now)} items"
    return "its contents changed"
