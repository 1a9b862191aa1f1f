"""Laid: the event of a trace about layouts: one call of one layout function of a subject, and what
it returned.
"""

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

    ``function`` is its name among ``rollproof.layouts.functions``, ``given`` the plain form of the
    ``Call`` that it was handed (from which inputs and reference are computed again), ``out`` what
    it returned, as arrays. ``refused`` is the error (class and text) where it raised, ``misfit``
    says why what it returned is not what such a function returns. ``changed`` names the arguments
    that the call changed.
    """

    kind: ClassVar[str] = "laid"
    function: str
    given: Mapping[str, Any] = field(default_factory=dict)
    out: tuple[IntArray, ...] = ()
    refused: str | None = None
    misfit: str | None = None
    changed: tuple[str, ...] = ()
