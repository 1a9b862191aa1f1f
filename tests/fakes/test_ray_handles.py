"""Ray-style handles call methods like an actor handle: at once, with results and errors in a
future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollproof.fakes.engine.ray_handles import RayHandle
from tests.support.engine_driver import on_clock


class _Actor:
    limit = 3

    def __init__(self) -> None:
        self.seen: list[str] = []

    def add(self, a: int, b: int = 1) -> int:
        """Sync method."""
        self.seen.append("add")
        return a + b

    async def slow(self, value: int) -> int:
        """Async method."""
        self.seen.append("slow")
        await asyncio.sleep(1)
        return value

    def broken(self) -> None:
        """Raise at once."""
        raise KeyError("sync")

    async def broken_later(self) -> None:
        """Raise in the coroutine."""
        raise KeyError("async")


def _check(main: Coroutine[Any, Any, None]) -> None:
    on_clock(lambda: main)


def test_sync_and_async_methods() -> None:
    """Both return an awaitable, and take positional and keyword arguments."""

    async def main() -> None:
        handle = RayHandle(_Actor())
        assert await handle.add.remote(2, b=5) == 7
        assert await handle.slow.remote(4) == 4

    _check(main())


def test_a_call_starts_without_being_awaited() -> None:
    """Fire and forget works: the method runs although its future is dropped, and its error causes
    no warning.
    """

    async def main() -> None:
        actor = _Actor()
        handle = RayHandle(actor)
        handle.add.remote(1)
        handle.slow.remote(1)
        handle.broken.remote()
        handle.broken_later.remote()
        await asyncio.sleep(2)
        assert actor.seen == ["add", "slow"]

    _check(main())


@pytest.mark.parametrize("method", ["broken", "broken_later"])
def test_errors_arrive_on_await(method: str) -> None:
    """``remote`` itself never raises what the method raises."""

    async def main() -> None:
        future = getattr(RayHandle(_Actor()), method).remote()
        with pytest.raises(KeyError, match="async" if "later" in method else "sync"):
            await future

    _check(main())


def test_calls_run_together() -> None:
    """Calls that were started before they are awaited overlap."""

    async def main() -> None:
        handle = RayHandle(_Actor())
        began = asyncio.get_running_loop().time()
        assert await asyncio.gather(*(handle.slow.remote(i) for i in range(3))) == [0, 1, 2]
        assert asyncio.get_running_loop().time() - began == 1.0

    _check(main())


def test_misuse_raises() -> None:
    """Calling a method directly, reading an attribute, or naming a method that does not exist
    raises.
    """

    async def main() -> None:
        handle = RayHandle(_Actor())
        with pytest.raises(TypeError, match=r"called with \.remote"):
            handle.add(1)
        with pytest.raises(AttributeError, match=r"_Actor\.limit is not a method"):
            _ = handle.limit
        with pytest.raises(AttributeError, match="nothing"):
            _ = handle.nothing

    _check(main())
