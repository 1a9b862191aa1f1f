"""A dead server has no requests in flight, so the least-loaded balancer sends every new request to it."""

import asyncio
import random

from verl_stub import VERSION, Balancer, Client, Handle, Server, config


class Dead(Server):
    async def generate(self, **_):
        raise ConnectionError("actor died")


class Busy(Server):
    async def generate(self, **call):
        await asyncio.sleep(0.05)
        return await super().generate(**call)


random.seed(0)  # since 0.9.1 the balancer draws among equals


async def main():
    script = [(1, "completed", 1)] * 20
    balancer = Handle(
        Balancer({"dead": Handle(Dead()), "alive": Handle(Busy(*script, routes=lambda rows: None))})
    )
    client = Client(config=config(), load_balancer_handle=balancer)

    async def one(i):
        await asyncio.sleep(i * 0.001)
        return await client.generate(f"r{i}", prompt_ids=[1], sampling_params={"max_tokens": 2})

    results = await asyncio.gather(*(one(i) for i in range(20)), return_exceptions=True)
    print(
        VERSION,
        "1 of 2 servers is dead:",
        sum(isinstance(r, ConnectionError) for r in results),
        "of 20 requests failed",
    )


asyncio.run(main())
