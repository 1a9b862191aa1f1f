"""Watching: whether the clients of requests under way are still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["Watch", "Watches"]

_AFTER = 0.05
"""Seconds after which somebody looks for the client of a request: a task for that costs more than a
short call takes.
"""


class Watches:
    """The requests under way. One sweep looks after all of them: a timer for each would cost as
    much as reading it.
    """

    def __init__(self) -> None:
        self._young: dict[Watch, None] = {}
        self._old: dict[Watch, None] = {}
        self._sweeping = False

    def add(self, watch: Watch) -> None:
        """A request is worked on."""
        self._young[watch] = None
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(_AFTER, self._sweep)

    def end(self, watch: Watch) -> None:
        """It is answered."""
        if self._young.pop(watch, watch) is watch:
            self._old.pop(watch, None)
        watch.end()

    def _sweep(self) -> None:
        """Whoever was under way at the last sweep already is watched from now on."""
        for watch in self._old:
            watch.begin()
        self._old, self._young = self._young, {}
        self._sweeping = bool(self._old)
        if self._sweeping:
            asyncio.get_running_loop().call_later(_AFTER, self._sweep)


class Watch:
    """Waits for the client to go away, and then cancels ``task``, which works for it; ``vanished``
    says that it did.
    """

    __slots__ = ("_receive", "_task", "_waiting", "vanished")

    def __init__(
        self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], task: asyncio.Task[Any]
    ) -> None:
        self._receive, self._task = receive, task
        self._waiting: asyncio.Task[None] | None = None
        self.vanished: bool = False

    def begin(self) -> None:
        """Wait from now on."""
        self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def end(self) -> None:
        """Nobody needs to know any more."""
        waiting, self._waiting = (
            self._waiting,
            None,
        )  # a task that was cancelled leads back here by its traceback
        if waiting is not None and waiting is not asyncio.current_task():
            waiting.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._task.done():
            self.vanished = True
            self._task.cancel()
