"""Unread: the events of a streamed sample that nobody has read so far."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Unread"]


class Unread:
    """Events of one sample, each of which makes ``ready`` hold this once.

    ``newest``: an event takes the place of one that waits, as SGLang has it where each holds all
    tokens so far (``_wait_one_response`` of its tokenizer_manager.py): thousands that wait for a
    slow reader would take hundreds of megabytes. ``fresh`` is whether the next event will be the
    first that is read.
    """

    def __init__(self, ready: asyncio.Queue[Unread | None], *, newest: bool) -> None:
        self.fresh: bool = True
        self._ready = ready
        self._newest = newest
        self._events: deque[bytes] = deque()

    def put(self, event: bytes) -> None:
        """Let it be read."""
        if self._newest and self._events:
            self._events[0] = event
            return
        self._events.append(event)
        self.fresh = self.fresh and self._newest
        self._ready.put_nowait(self)

    def take(self) -> bytes:
        """The oldest, which is read now."""
        self.fresh = False
        return self._events.popleft()
