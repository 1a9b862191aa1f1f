"""The event of a trace about layouts: a call of a layout function of a subject, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollproof.core.events.base import Event
from rollproof.core.records import IntArray

__all__ = ["Laid"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Laid(Event):
    """A layout function was called.

    Attributes:
        function: Its name among ``rollproof.layouts.functions``.
        given: The JSON form of the ``Call`` that it got, from which inputs and reference are
            computed again.
        out: What it returned, as arrays.
        refused: The error (class and text) if it raised.
        misfit: Why its result is not what such a function returns.
        changed: Names of the arguments that the call changed.
    """

    kind: ClassVar[str] = "laid"
    function: str
    given: Mapping[str, Any] = field(default_factory=dict)
    out: tuple[IntArray, ...] = ()
    refused: str | None = None
    misfit: str | None = None
    changed: tuple[str, ...] = ()
