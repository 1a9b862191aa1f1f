"""Keeping: the trace of a server that runs for days, safe from a kill and from a full disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollproof.errors import RollproofError
from rollproof.trace import Event, TraceSink

__all__ = ["Kept"]

_EVERY = 1.0
"""Seconds after which what was recorded is handed to the operating system: a killed server loses no more than these."""


class Kept:
    """Hands events on to ``sink`` and has it flush every second; ``stop`` is called where it fails, and ``error`` is why."""

    def __init__(self, sink: TraceSink, stop: Callable[[], None]) -> None:
        self.error: RollproofError | None = None
        self._sink, self._stop = sink, stop
        self._flush: Callable[[], Any] | None = getattr(sink, "flush", None)
        self._waits: asyncio.TimerHandle | None = None

    def append(self, event: Event) -> None:
        """Take one event; after a failure none is taken any more."""
        if self.error is not None:
            return
        try:
            self._sink.append(event)
        except RollproofError as error:
            self._failed(error)
        if self._waits is None and self._flush is not None:
            self._waits = asyncio.get_running_loop().call_later(_EVERY, self._save)

    def _save(self) -> None:
        self._waits = None
        if self.error is None and self._flush is not None:
            try:
                self._flush()
            except RollproofError as error:
                self._failed(error)

    def _failed(self, error: RollproofError) -> None:
        self.error = error
        self._stop()
