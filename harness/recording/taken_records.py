"""Records as they were when a production loop handed them over, which may go on to change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.error_text import describe_error
from rollproof.core.events.rollout import Observation
from rollproof.core.records import BatchRow, EngineOutput, Request, Rollout
from rollproof.core.sampling_masks import SamplingMask
from rollproof.errors import SubjectError
from rollproof.recording.recorder import EngineCall

__all__ = ["Taken", "copied"]

_NUMBER = 8
"""Bytes that one number of a list is taken to have."""


class Taken:
    """A record as it was when it was taken: lists and arrays of it are copied at once, and the
    record is made of them by the thread that writes it.

    Attributes:
        size: about how many bytes it has.
        request_id: the request that it names; empty if it names none.
    """

    __slots__ = ("_changed", "_record", "_trouble", "request_id", "size")

    def __init__(self, record: Any) -> None:
        self._record = record
        self._changed: dict[str, Any] | None = None
        self._trouble = ""
        self.size: int = 0
        self.request_id: str = ""
        try:
            request_id = getattr(record, "request_id", None)
            self.request_id = request_id if isinstance(request_id, str) else ""
            self._take(record)
        # lists that hold themselves, tensors of a device that failed: an error now would be the
        # loop's
        except Exception as error:  # noqa: BLE001
            self._trouble = f"a {type(record).__name__} cannot be copied: {describe_error(error)}"

    def _take(self, record: Any) -> None:
        changed: dict[str, Any] | None = None
        size = 0
        for name in _MUTABLE.get(type(record), ()):
            item = getattr(record, name)
            kind = type(item)
            if kind is tuple:
                size += _NUMBER * len(item)
            elif item is not None:
                copy = item.copy() if kind is _ARRAY else copied(item)
                size += copy.nbytes if kind is _ARRAY else _size_of(copy)
                if changed is None:
                    changed = {}
                changed[name] = copy
        self._changed = changed
        self.size = size

    def record(self) -> Any:
        """Return the record. Raises ``SubjectError`` if it could not be copied."""
        if self._trouble:
            raise SubjectError(f"{self._trouble}.")
        return self._record if self._changed is None else replace(self._record, **self._changed)


_ARRAY = np.ndarray
_PLAIN = frozenset((int, float, str, bool, type(None), bytes))
_MUTABLE: Mapping[type, tuple[str, ...]] = {
    Request: ("prompt_ids", "sampling", "turns"),
    EngineCall: ("prompt_ids", "sampling"),
    EngineOutput: ("token_ids", "logprobs", "routes", "spans", "sampling_mask"),
    Rollout: (
        "prompt_ids",
        "response_ids",
        "logprobs",
        "loss_mask",
        "routes",
        "call_versions",
        "spans",
        "token_versions",
        "extra",
        "columns",
        "values",
        "sampling_mask",
    ),
    BatchRow: (
        "token_ids",
        "attention",
        "loss_mask",
        "logprobs",
        "routes",
        "routed",
        "columns",
        "values",
        "sampling_mask",
    ),
    Observation: ("token_ids",),
}
"""Fields that may hold a list or an array, or another thing that its owner may go on to change."""


def copied(value: Any) -> Any:
    """Return a copy of a list, a mapping, an array or a tensor; anything else as it is."""
    if type(value) is dict:
        # the arrays of columns are as mutable as those of fields
        return {
            name: item if type(item) in _PLAIN else copied(item) for name, item in value.items()
        }
    # its arrays may be lists or tensors still
    if type(value) is SamplingMask:
        return SamplingMask(counts=copied(value.counts), token_ids=copied(value.token_ids))
    # the first item speaks for all: a look at each token would cost the loop time
    if type(value) is list and value and type(value[0]) not in _PLAIN:
        return [*map(copied, value)]
    copy = getattr(value, "clone", None) or getattr(value, "copy", None)
    return copy() if callable(copy) else value


def _size_of(values: Any) -> int:
    """Return the bytes that numbers in a list or the like are taken to have; 0 if it has no
    length.
    """
    if type(values) is SamplingMask:
        return _size_of(values.counts) + _size_of(values.token_ids)
    try:
        return _NUMBER * len(values)
    except TypeError:
        return 0
