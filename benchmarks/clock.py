"""Virtual clocks side by side: rollproof's loop and looptime's, on the same program.

Prints one JSON line a clock: sleeps per second, whether 20 runs give the same order of events, what
a deadlock does, and whether an executor's work stays on the loop's thread. Run ``python
benchmarks/clock.py`` in an environment of its own with looptime installed (its pytest plugin breaks
sessions that lack pytest-asyncio).
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from rollproof.simulation import virtual_loop


async def program(log: list[tuple[float, int]], tasks: int = 50, sleeps: int = 100) -> None:
    """Fifty tasks that sleep seeded random virtual times and log when they wake."""

    async def one(number: int) -> None:
        draw = random.Random(number)
        for _ in range(sleeps):
            await asyncio.sleep(draw.random() * 10)
            log.append((round(asyncio.get_running_loop().time(), 6), number))

    await asyncio.gather(*(one(number) for number in range(tasks)))


def on_looptime(main: Callable[[], Any]) -> Any:
    """Run a coroutine function on looptime's patched loop."""
    import looptime

    loop = looptime.new_event_loop(start=0)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def judge(name: str, run: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
    """Figures of one clock."""
    logs = []
    start = time.perf_counter()
    for _ in range(20):
        log: list[tuple[float, int]] = []
        run(lambda log=log: program(log))
        logs.append(log)
    seconds = time.perf_counter() - start

    async def worker() -> bool:
        return (
            await asyncio.get_running_loop().run_in_executor(None, threading.get_ident)
            == threading.get_ident()
        )

    async def deadlock() -> str:
        try:
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 5 * 3600)
        except TimeoutError:
            return "times out in virtual time"
        return "returned"

    return {
        "clock": name,
        "sleeps_per_s": round(20 * 5000 / seconds),
        "identical": f"{sum(log == logs[0] for log in logs)} of 20",
        "executor_on_loop_thread": run(worker),
        "wait_for_5_hours": run(deadlock),
    }


if __name__ == "__main__":
    print(json.dumps(judge("rollproof", virtual_loop.run)))
    print(json.dumps(judge("looptime", on_looptime)))
