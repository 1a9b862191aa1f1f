"""Base class of everything that a trace holds; its kinds are in the modules next to this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Event"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events. ``index`` and ``time`` are stamped by the ``Recorder``."""

    kind: ClassVar[str] = "event"
    index: int = -1
    time: float = 0.0
