"""Weight updates that are unusual and keep their contracts."""

from __future__ import annotations

import asyncio

from rollproof.fakes.engine.exceptions import TransferFailed
from tests.odd_stacks.bases.control import Control
from tests.odd_stacks.bases.thin import promise


class RollingUpdate(Control):
    """One server after the other: drained (wait), loaded, resumed; the others go on serving. The
    update returns when the last one has the weights.
    """

    async def roll(self, weights, label, servers):
        for s in servers:
            try:
                await s.pause("wait", clear_cache=True)
                await s.load(weights, label)
            except ConnectionError:
                continue
            finally:
                if s.alive:
                    await s.resume()


class TransfersRetried(Control):
    """A transfer that breaks is tried again on that server, with a growing wait; after the fourth
    failure the update raises, and all servers are resumed.
    """

    async def each(self, servers, do):
        async def patient(server):
            for n in range(4):
                try:
                    return await do(server)
                except TransferFailed:
                    if n == 3:
                        raise
                    await asyncio.sleep(2**n)
            return None

        await super().each(servers, patient)


class GateDuringUpdates(Control):
    """Calls are held at a gate while an update runs; the update waits until the calls in flight have
    ended by themselves (no abort at all).
    """

    def prepare(self):
        super().prepare()
        self.gate, self.flying, self.idle = asyncio.Event(), 0, asyncio.Event()
        self.gate.set()
        self.idle.set()

    async def ask(self, run, sent, left):
        while not self.gate.is_set():
            await self.gate.wait()
        self.flying += 1
        self.idle.clear()
        try:
            return await super().ask(run, sent, left)
        finally:
            self.flying -= 1
            if not self.flying:
                self.idle.set()

    async def roll(self, weights, label, servers):
        self.gate.clear()
        try:
            await self.idle.wait()
            await super().roll(weights, label, servers)
        finally:
            self.gate.set()


class ReplicasInTwoGroups(Control):
    """Replicas in two groups (even and odd); a request belongs to one group by its id and never
    leaves it unless all of it is dead. Updates go to one group after the other.
    """

    def prepare(self):
        super().prepare()
        self.groups = [g for g in (self.servers[::2], self.servers[1::2]) if g]

    def server(self, run):
        g = self.groups[sum(map(ord, run.request.request_id)) % len(self.groups)]
        living = [s for s in g if s.alive] or [s for s in self.servers if s.alive] or self.servers
        return living[run.attempt % len(living)]

    async def roll(self, weights, label, servers):
        for group in self.groups:
            await super().roll(weights, label, [s for s in group if s in servers and s.alive])


class SkipsEqualWeights(Control):
    """Weights that all servers have are not loaded again; their new label is published."""

    async def update_weights(self, version):
        weights = self.fleet.weights_of(version)
        async with self.turnstile:
            living = [s for s in self.servers if s.alive]
            if all(s.version == weights for s in living):
                for server in living:
                    server.relabel(version)
            else:
                await self.roll(weights, version, living)


class StringLabels(Control):
    """The stack's labels are strings ("step-00012"), published with the weights; the tags are what
    the engines showed, whatever their type.
    """

    async def update_weights(self, version):
        async with self.turnstile:
            label = None if version is None else f"step-{version:05}"
            await self.roll(
                self.fleet.weights_of(version), label, [s for s in self.servers if s.alive]
            )


class UpdatesMerged(Control):
    """Updates that are asked for while one runs are merged: one more update brings the newest of
    them, and all callers wait for it.
    """

    def prepare(self):
        super().prepare()
        self.wanted, self.number, self.done_up_to = [], 0, 0

    async def update_weights(self, version):
        self.number += 1
        mine = self.number
        self.wanted.append((self.fleet.weights_of(version), mine, version))
        async with self.turnstile:
            if self.done_up_to >= mine:
                return
            upto, (weights, _, label) = self.number, max(self.wanted, key=lambda w: w[:2])
            await self.roll(weights, label, [s for s in self.servers if s.alive])
            self.done_up_to = upto
            self.wanted = [w for w in self.wanted if w[1] > upto]


class LoadedTwice(Control):
    """Each update loads a second time, to be sure: the weights are the same."""

    async def roll(self, weights, label, servers):
        await super().roll(weights, label, servers)
        await super().roll(weights, label, [s for s in servers if s.alive])


class UpdateRetriedEverywhere(Control):
    """If the transfer to one server breaks, the update is run again for all of them, before the
    next one begins.
    """

    def prepare(self):
        super().prepare()
        self.one_update = asyncio.Lock()

    async def update_weights(self, version):
        async with self.one_update:
            for attempt in range(4):
                try:
                    await super().update_weights(version)
                except TransferFailed:
                    if attempt == 3:
                        raise
                    await asyncio.sleep(2)
                else:
                    return


class TooOldIsDropped(Control):
    """A bound on staleness that a rollout is held to when its last call has ended: by the label
    that the trainer published last, and the oldest one of its tokens. A sample that came to be too
    old is dropped. An update without a label, which no token would show, waits until nothing runs:
    tokens that show none are of the weights that were loaded last without one.
    """

    contract = promise(versions="token", max_staleness=1)

    def prepare(self):
        super().prepare()
        self.newest = self.fleet.case.first_version
        self.labels, self.unnamed = {self.newest: self.newest}, None
        self.running = self.unlabelled = 0
        self.changed = asyncio.Condition()

    async def update_weights(self, version):
        if version is not None:
            self.newest = max(self.newest, version)
            await super().update_weights(version)
            return
        self.unlabelled += 1
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.running)
            await super().update_weights(None)
        finally:
            self.unlabelled -= 1
            async with self.changed:
                self.changed.notify_all()

    async def roll(self, weights, label, servers):
        if label is None:
            self.unnamed = weights
        else:
            self.labels.setdefault(weights, label)
        await super().roll(weights, label, servers)

    async def rollout(self, request):
        async with self.changed:
            await self.changed.wait_for(lambda: not self.unlabelled)
            self.running += 1
        try:
            return await self.fresh(request)
        finally:
            self.running -= 1
            async with self.changed:
                self.changed.notify_all()

    async def fresh(self, request):
        sample = await super().rollout(request)
        return sample if self.newest - self.oldest(sample["token_versions"]) <= 1 else None

    def oldest(self, tags):
        # weights may have a label, and be loaded again without it
        labels = [self.labels.get(self.unnamed) if tag is None else tag for tag in tags]
        return min((label for label in labels if label is not None), default=self.newest)


class TooOldIsSampledAnew(TooOldIsDropped):
    """Its prompt is sampled again, if there were new weights meanwhile: a server that missed them
    would give such a sample again.
    """

    async def fresh(self, request):
        while True:
            newest = self.newest
            sample = await super().fresh(request)
            if sample is not None or newest == self.newest:
                return sample
