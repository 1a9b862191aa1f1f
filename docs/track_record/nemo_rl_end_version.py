"""A group that ends after the engines have loaded weights 1, and before the controller says so, has 0 for its newest version."""

import asyncio

from nemo_rl_stub import VERSION, controller, manager, say


async def main():
    kept, loaded, loop = [], asyncio.Event(), asyncio.get_running_loop()

    async def rolled_out(sample):
        await loaded.wait()
        return "sampled under 0 and 1"

    async def commit(group, record, **versions):
        kept.append((record, versions))

    def transfer(**_):  # in a thread, as the controller calls it
        loop.call_soon_threadsafe(loaded.set)
        asyncio.run_coroutine_threadsafe(asyncio.wait([running]), loop).result()

    rollouts = manager(rolled_out, commit)
    running = asyncio.create_task(rollouts.generate_and_push({}))
    await asyncio.sleep(0)
    await controller(rollouts, transfer)._sync_weights()
    say(f"nemo-rl {VERSION}: {kept[0][0]}: {kept[0][1]}")


asyncio.run(main())
