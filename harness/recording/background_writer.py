"""A thread that takes what a loop records, so that the loop waits for nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["BackgroundWriter", "Dropped"]

_FLUSH_SECONDS = 0.5
"""A process that is killed loses what was recorded in at most twice this time."""
_ITEM_BYTES = 256
"""What an item takes, next to its payload."""


@dataclass(slots=True)
class Dropped:
    """In place of ``count`` items for which the queue had no room."""

    count: int = 0


class BackgroundWriter:
    """Calls ``handle`` with each item, in order, in a thread of its own.

    Args:
        handle: takes an item, or a ``Dropped`` in place of those that found no room. What it raises
            ends nothing: ``on_error`` gets it.
        flush: is called about twice a second.
        on_error: takes an exception of either.
        max_bytes: the payload that may wait.
        name: of the thread.

    Attributes:
        dropped: items that found no room.
    """

    def __init__(
        self,
        handle: Callable[[Any], None],
        flush: Callable[[], None],
        on_error: Callable[[Exception], None],
        *,
        max_bytes: int,
        name: str = "rollproof-writer",
    ) -> None:
        self.dropped: int = 0
        self._handle, self._flush, self._on_error = handle, flush, on_error
        self._max_bytes = max_bytes
        # no bound of its own: `put` counts bytes instead, and must never block the loop
        self._queue: queue.SimpleQueue[tuple[Any, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._last_drop: Dropped | None = None
        self._closed = False
        # a daemon: a program that ends without closing it must not hang
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Any, size: int = 0, *, small: bool = False) -> bool:
        """Queue an item of ``size`` bytes; never blocks. Returns whether there was room.

        ``small`` items are few, and are always taken: what others mean depends on them.
        """
        size += _ITEM_BYTES
        with self._lock:
            if self._closed:
                return False
            if self._put_bytes - self._taken_bytes + size > self._max_bytes and not small:
                self.dropped += 1
                # one mark for neighbours, where the first was: the trace says where its hole begins
                if self._last_drop is None:
                    self._last_drop = Dropped()
                    self._queue.put((self._last_drop, 0))
                self._last_drop.count += 1
                return False
            self._last_drop = None
            self._put_bytes += size
            self._queue.put((item, size))
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Handle what waits, and end the thread; returns whether it has ended in time."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                taken = self._queue.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                taken = (None, 0)
            if taken is None:
                break
            item, size = taken
            if item is not None:
                if isinstance(item, Dropped):
                    with self._lock:
                        # no more may be added to it
                        if self._last_drop is item:
                            self._last_drop = None
                self._attempt(partial(self._handle, item))
                # without the lock: no other thread writes it. Until here the payload is in memory
                self._taken_bytes += size
            if time.monotonic() >= due:
                self._attempt(self._flush)
                due = time.monotonic() + _FLUSH_SECONDS
        self._attempt(self._flush)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - recording must not end what is recorded
            self._on_error(error)
