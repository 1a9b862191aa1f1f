"""The version of a group is read when its first generation starts: later ones of the group carry it, whatever weights sampled them."""

import asyncio
from types import SimpleNamespace

import aiohttp
from http_stub import choice, serve
from trl_stub import VERSION, loop


async def main():
    version, sampled, stop = SimpleNamespace(value=3), [], asyncio.Event()

    def update(_path):  # the trainer publishes new weights after each call
        sampled.append(version.value)
        version.value += 1

    rollouts = loop(
        serve(choice([7, 9], "stop"), on_call=update),
        version,
        num_generations=3,
        max_inflight_tasks=1,
    )
    async with aiohttp.ClientSession() as rollouts.session:
        task = asyncio.ensure_future(rollouts._generate_loop(stop))
        group = await rollouts._groups_to_score.get()
        stop.set()
        await task
    print(
        f"trl {VERSION}: tags {[s.model_version for s in await rollouts._score_group(group)]}, sampled under {sampled[:3]}"
    )


asyncio.run(main())
