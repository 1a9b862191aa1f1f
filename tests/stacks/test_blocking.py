"""A process that blocks while others run, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rollproof.simulation import virtual_loop
from rollproof.stacks._support.blocking import BlockingProcess


def test_what_blocking_code_waits_for_takes_virtual_time_in_which_others_run() -> None:
    """The code sees the time pass, others act meanwhile, and each run is the same."""

    async def main() -> list[str]:
        seen: list[str] = []
        process, loop = BlockingProcess(), asyncio.get_running_loop()

        async def work() -> None:
            await asyncio.sleep(2)
            seen.append(f"work at {loop.time():.0f}")

        async def other() -> None:
            await asyncio.sleep(1)
            seen.append(f"other at {loop.time():.0f}")

        def code() -> None:
            seen.append("code begins")
            process.wait(work())
            seen.append("code ends")

        await asyncio.gather(process.run(code), other())
        return seen

    begun = ["code begins", "other at 1", "work at 2", "code ends"]
    assert [begun] * 2 == [virtual_loop.run(main) for _ in range(2)]


def test_errors_reach_the_code_and_those_of_the_code_its_caller() -> None:
    """A failure of what it waits for is raised where it waits; what the code does not catch is
    raised by ``run``, a cancellation too.
    """

    async def main() -> list[str]:
        process, seen = BlockingProcess(), list[str]()

        async def fail() -> None:
            raise ValueError("transfer")

        def code() -> None:
            try:
                process.wait(fail())
            except ValueError as error:
                seen.append(str(error))
            process.wait(asyncio.sleep(5))

        task = asyncio.create_task(process.run(code))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ZeroDivisionError):
            await process.run(lambda: 1 // 0)
        return seen

    assert ["transfer"] == virtual_loop.run(main)
