"""Control: Thin's rollouts with a tag per token, and a weight controller of its own."""

from __future__ import annotations

import asyncio
import contextlib

from tests.odd_stacks.bases.thin import Thin, promise


class Control(Thin):
    contract = promise(versions="token")

    def prepare(self):
        self.turnstile = asyncio.Lock()

    def tags(self, run):
        return {"token_versions": tuple(run.vers)}

    async def update_weights(self, version):
        async with self.turnstile:
            await self.roll(
                self.fleet.weights_of(version), version, [s for s in self.servers if s.alive]
            )

    async def roll(self, weights, label, servers):
        try:
            await self.each(servers, lambda s: s.pause("abort", clear_cache=True))
            await self.each(servers, lambda s: s.load(weights, label))
        finally:
            await self.each(servers, lambda s: s.resume())

    async def each(self, servers, do):
        async def one(server):
            if server.alive:
                with contextlib.suppress(ConnectionError):
                    await do(server)

        failed = [
            r
            for r in await asyncio.gather(*map(one, servers), return_exceptions=True)
            if isinstance(r, Exception)
        ]
        if failed:
            raise failed[0]


class CountsUpdates(Control):
    """Counts its updates, to see those that a rollout lived through."""

    updates = 0

    async def update_weights(self, version):
        self.updates += 1
        await super().update_weights(version)
