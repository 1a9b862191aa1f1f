"""Updates are not serialized: one that overlaps another loads into a serving replica, or is overwritten by older weights."""

import asyncio

from verl_stub import VERSION
from verl_update_stub import manager


async def second_starts_while_first_resumes():
    engine, replica = manager()
    first = asyncio.create_task(engine.update_weights(2))
    await asyncio.sleep(0.025)  # the first one is giving the KV cache back
    await asyncio.gather(first, engine.update_weights(3))
    print(
        VERSION,
        "the second update starts while the first resumes: the replica was",
        replica.loaded,
        "when its weights changed",
    )


async def both_start_at_once():
    engine, replica = manager(
        0.01, 0.01, 0.02
    )  # abort, abort, and a release that takes longer for the first update
    await asyncio.gather(engine.update_weights(2), engine.update_weights(3))
    print(VERSION, "updates to steps 2 and 3 at once: the replica ends on step", replica.step)


asyncio.run(second_starts_while_first_resumes())
asyncio.run(both_start_at_once())
