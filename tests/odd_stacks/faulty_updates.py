"""Weight updates with one fault each."""

from __future__ import annotations

import asyncio

from tests.odd_stacks.bases.control import Control, CountsUpdates
from tests.odd_stacks.bases.thin import Thin, promise


class BusyServersLater(Control):
    """Servers with calls in flight are left for "the next idle moment", which nobody waits for: the
    update ends without them.
    """

    async def roll(self, weights, label, servers):
        idle = [s for s in servers if not s.in_flight]
        await super().roll(weights, label, idle or servers[:1])


class TransferTimesOut(Control):
    """A transfer that takes longer than one second is given up, and the timeout is only logged: the
    update returns as if it had loaded.
    """

    log = ()

    async def roll(self, weights, label, servers):
        async def load(s):
            try:
                await asyncio.wait_for(s.load(weights, label), 1)
            except TimeoutError:
                self.log += ("timeout",)

        try:
            await self.each(servers, lambda s: s.pause("abort", clear_cache=True))
            await self.each(servers, load)
        finally:
            await self.each(servers, lambda s: s.resume())


class OnlyTheFirstIsPaused(Control):
    """Only the first server is paused and cleared; the others load while calls run and keep their
    KV, against kv_policy=recompute.
    """

    async def roll(self, weights, label, servers):
        try:
            await self.each(servers[:1], lambda s: s.pause("abort", clear_cache=True))
            await self.each(servers, lambda s: s.load(weights, label))
        finally:
            await self.each(servers[:1], lambda s: s.resume())


class OnlyTheFirstClears(Control):
    """The prefix cache is cleared at the first update alone: a flag that is never set again."""

    clears = True

    async def roll(self, weights, label, servers):
        clear, self.clears = self.clears, False
        try:
            await self.each(servers, lambda s: s.pause("abort", clear_cache=clear))
            await self.each(servers, lambda s: s.load(weights, label))
        finally:
            await self.each(servers, lambda s: s.resume())


class OnlyBusyServersAreCleared(Control):
    """The cache of a server is dropped only if calls run on it: one that is idle keeps KV of the
    old weights.
    """

    async def roll(self, weights, label, servers):
        try:
            await self.each(servers, lambda s: s.pause("abort", clear_cache=bool(s.in_flight)))
            await self.each(servers, lambda s: s.load(weights, label))
        finally:
            await self.each(servers, lambda s: s.resume())


class UnlabelledTwiceIsOnce(Control):
    """An update with the same label as the last one is skipped as a repetition; two updates without
    a label have the same label None, so the second is lost.
    """

    last = "nothing"

    async def update_weights(self, version):
        if version == self.last:
            return
        await super().update_weights(version)
        self.last = version


class StaleWhenDelivered(Thin):
    """max_staleness=1 is promised, and only checked when a rollout begins (which is never stale): a
    rollout across two updates is delivered.
    """

    contract = promise(max_staleness=1)
    newest = 0

    async def rollout(self, request):
        begun = self.newest
        assert self.newest - begun <= 1
        return await super().rollout(request)

    async def update_weights(self, version):
        await self.fleet.sync(version)
        self.newest += 1


class RetryLeftBehind(Control):
    """A timer runs the update again if it takes longer than three seconds; nobody stops the timer
    when the update gets through.
    """

    async def update_weights(self, version):
        await super().update_weights(version)
        self.timer = asyncio.ensure_future(self.again(version))

    async def again(self, version):
        await asyncio.sleep(3)
        await super().update_weights(version)


class OneUpdateDrops(CountsUpdates):
    """max_staleness=1 is promised, and a sample is dropped as too old after a single update."""

    contract = promise(versions="token", max_staleness=1)

    async def rollout(self, request):
        before = self.updates
        sample = await super().rollout(request)
        return sample if self.updates == before else None


class OneUpdateSamplesAnew(CountsUpdates):
    """max_staleness=1 is promised, and a prompt is sampled again after a single update."""

    contract = promise(versions="token", max_staleness=1)

    async def rollout(self, request):
        before = None
        while before != self.updates:
            before = self.updates
            sample = await super().rollout(request)
        return sample
