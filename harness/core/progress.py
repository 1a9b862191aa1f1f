"""Progress: how far a long run has come, for a door to show."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """``done`` of ``total`` steps are finished (``total`` 0: not known); ``what`` is being worked
    on.
    """

    done: int
    total: int
    what: str
