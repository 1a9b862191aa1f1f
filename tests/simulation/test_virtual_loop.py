"""The virtual clock: free sleeping, repeatable order, and hangs that are seen."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from typing import Any

import pytest

from rollproof.errors import SubjectError
from rollproof.simulation import virtual_loop


def test_sleeping_takes_no_real_time() -> None:
    """A virtual day passes in less than a real second."""

    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    start = time.perf_counter()

    assert virtual_loop.run(main) == pytest.approx(86_400)
    assert 1 > time.perf_counter() - start


async def _race(log: list[tuple[float, int]], delays: list[float]) -> None:
    async def sleeper(number: int, delay: float) -> None:
        for _ in range(5):
            await asyncio.sleep(delay)
            log.append((asyncio.get_running_loop().time(), number))

    await asyncio.gather(*(sleeper(i, delay) for i, delay in enumerate(delays)))


def test_one_program_has_one_order() -> None:
    """Twenty runs of a program with colliding timers wake its tasks in one order."""
    delays = [random.Random(1).choice([0.5, 1.0, 1.5]) for _ in range(30)]
    logs = []
    for _ in range(20):
        log: list[tuple[float, int]] = []
        virtual_loop.run(lambda log=log: _race(log, delays))
        logs.append(log)

    assert [logs[0]] * 20 == logs


async def _order_in_a_set() -> list[str]:
    """The order in which a set of finished tasks is gone through."""
    waste = [bytearray(random.randrange(5_000)) for _ in range(200)]
    tasks = []
    for number in range(20):
        tasks.append(asyncio.get_running_loop().create_task(asyncio.sleep(0.01), name=str(number)))
        waste.pop(random.randrange(len(waste)))
    done, _ = await asyncio.wait(tasks)
    return [task.get_name() for task in done]


def test_one_program_has_one_order_in_sets_of_tasks() -> None:
    """The addresses of tasks, which differ between runs, do not decide it."""
    orders = {tuple(virtual_loop.run(_order_in_a_set)) for _ in range(20)}
    assert 1 == len(orders)


def test_a_real_loop_has_no_such_order_in_sets_of_tasks() -> None:
    """The twin of the test above."""
    assert 1 < len({tuple(asyncio.run(_order_in_a_set())) for _ in range(3)})


def test_a_real_loop_has_no_such_order() -> None:
    """Without the virtual clock the times differ from run to run: the property above is not
    vacuous.
    """
    logs = []
    for _ in range(2):
        log: list[tuple[float, int]] = []
        asyncio.run(_race(log, [0.0001, 0.0002]))
        logs.append(log)

    assert logs[0] != logs[1]


def test_a_timer_knows_nothing_of_its_instant() -> None:
    """News of an instant are known to what they lead to, also through other tasks, and not to a
    timer that fires in it.
    """
    found: dict[str, Any] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_loop.VirtualLoop)
        came = loop.create_future()

        async def bring() -> None:
            await asyncio.sleep(2)
            loop.learn((7, (1, 2)))
            came.set_result(None)

        async def wait(name: str, what: Any) -> None:
            await what
            await asyncio.sleep(0)
            found[name] = loop.unaware_of()

        tasks = [bring(), wait("waiter", came), wait("timer", asyncio.sleep(2))]
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        found["later"] = loop.unaware_of()

    virtual_loop.run(main)
    assert {"waiter": (), "timer": ((7, (1, 2)),), "later": ()} == found


def test_a_deadlock_is_seen_at_once() -> None:
    """Waiting for what nobody will ever set raises ``Stalled`` instead of waiting."""

    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(virtual_loop.Stalled, match="nothing is scheduled any more"):
        virtual_loop.run(main)


def test_a_busy_loop_is_seen() -> None:
    """Spinning without letting time pass raises ``Stalled``."""

    async def main() -> None:
        while True:  # noqa: ASYNC110 - the busy loop is what is tested
            await asyncio.sleep(0)

    with pytest.raises(virtual_loop.Stalled, match="busy loop"):
        virtual_loop.run(main)


def test_executors_run_inline() -> None:
    """Work for an executor runs on the loop's own thread, and its exceptions arrive through the
    future.
    """

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        return await loop.run_in_executor(None, threading.get_ident) == threading.get_ident()

    assert virtual_loop.run(main)


def test_threads_are_refused_with_advice() -> None:
    """Starting a thread inside a run raises, and names the ways out."""

    async def main() -> None:
        threading.Thread(target=print).start()

    with pytest.raises(SubjectError, match=r"uses a thread.*run_in_executor.*rollproof\.record"):
        virtual_loop.run(main)


@pytest.mark.parametrize("method", ["connect", "bind"])
def test_sockets_are_refused_with_advice(method: str) -> None:
    """Opening a socket inside a run raises, and names the ways out."""

    async def main() -> None:
        with socket.socket() as made:
            getattr(made, method)(("127.0.0.1", 0))

    with pytest.raises(SubjectError, match=rf"socket\.{method}.*rollproof\.record"):
        virtual_loop.run(main)


def test_threads_and_sockets_work_again_afterwards() -> None:
    """The guards are gone when the run is over."""

    async def main() -> None:
        return

    virtual_loop.run(main)
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))

        assert 0 < made.getsockname()[1]


def test_a_running_loop_is_refused() -> None:
    """From inside another loop the call is refused instead of nesting."""

    async def inner() -> None:
        return

    async def outer() -> None:
        virtual_loop.run(inner)

    with pytest.raises(SubjectError, match="call it from sync code"):
        asyncio.run(outer())


def test_a_wait_is_described_down_to_its_innermost_await() -> None:
    """A hang names the chain of functions that waits."""

    async def innermost() -> None:
        await asyncio.get_running_loop().create_future()

    async def outermost() -> None:
        await innermost()

    async def main() -> str:
        task = asyncio.get_running_loop().create_task(outermost())
        await asyncio.sleep(0)
        text = virtual_loop.describe_wait(task)
        task.cancel()
        return text

    text = virtual_loop.run(main)

    assert text.startswith("outermost (test_virtual_loop.py:")
    assert "> innermost (test_virtual_loop.py:" in text
