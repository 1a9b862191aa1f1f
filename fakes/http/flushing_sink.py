"""Keeping: the trace of a server that runs for days, safe from a kill and from a full disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollproof.core.events.base import Event
from rollproof.core.trace import TraceSink
from rollproof.errors import RollproofError

__all__ = ["Kept"]

_EVERY = 1.0
"""Seconds after which what was recorded is handed to the operating system: a killed server loses no
more than these.
"""
_TOGETHER = 64
"""Events that are handed on together: one by one, between whatever else a request needs, each takes
half as long again.
"""


class Kept:
    """Hands events on to ``sink`` and has it flush every second; ``stop`` is called where it fails,
    and ``error`` is why.

    What events hold must not be written to any more: they are handed on some moments later, in
    their order, and at ``end``.
    """

    def __init__(self, sink: TraceSink, stop: Callable[[], None]) -> None:
        self.error: RollproofError | None = None
        self.takes_narrow: bool = getattr(sink, "takes_narrow", False)
        self._sink, self._stop = sink, stop
        self._held: list[Event] = []
        self._flush: Callable[[], Any] | None = getattr(sink, "flush", None)
        self._waits: asyncio.TimerHandle | None = None

    def append(self, event: Event) -> None:
        """Take one event; after a failure none is taken any more."""
        if self.error is not None:
            return
        self._held.append(event)
        if len(self._held) >= _TOGETHER:
            self._hand_on()
        if self._waits is None:
            self._waits = asyncio.get_running_loop().call_later(_EVERY, self._save)

    def end(self) -> None:
        """Hand on what is left. Raises what the sink failed with, now or before."""
        self._hand_on()
        if self.error is not None:
            raise self.error

    def _save(self) -> None:
        self._waits = None
        self._hand_on(self._flush)

    def _hand_on(self, after: Callable[[], Any] | None = None) -> None:
        held, self._held = self._held, []
        try:
            for event in held if self.error is None else ():
                self._sink.append(event)
            if after is not None and self.error is None:
                after()
        except RollproofError as error:
            self.error = error
            self._stop()
