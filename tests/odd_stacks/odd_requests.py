"""Requests that are handled in unusual ways: queues, groups, draws, prefills."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from tests.odd_stacks.bases.control import Control
from tests.odd_stacks.bases.thin import Thin, promise


class PriorityQueue(Thin):
    """Calls wait in a queue, the longest response first, with two dispatchers a server."""

    def prepare(self):
        self.queue, self.serial = asyncio.PriorityQueue(), itertools.count()
        self.workers = [
            asyncio.ensure_future(self.work(server)) for server in self.servers for _ in range(2)
        ]

    async def work(self, server):
        while True:
            _, _, body, ready = await self.queue.get()
            try:
                ready.set_result(await server.generate(**body))
            except (ConnectionError, RuntimeError):
                ready.set_result(None)
                await asyncio.sleep(1)

    async def ask(self, run, sent, left):
        ready = asyncio.get_running_loop().create_future()
        run.attempt += 1
        body = dict(
            prompt_ids=sent,
            max_tokens=left,
            request_id=self.key(run),
            sampling=self.params(run),
            media=run.request.media,
            **self.wants(run),
        )
        self.queue.put_nowait((-len(run.ids), next(self.serial), body, ready))
        out = await ready
        if out is None:
            await self.after_failure(run)
        return out

    async def stop(self):
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)


class DrawsOfItsOwn(Thin):
    """All calls of a request pass the same draw."""

    def wants(self, run):
        return {**super().wants(run), "draw": 3}


class GroupLeader(Thin):
    """The task of a group's first request runs those of the others."""

    def prepare(self):
        self.groups = {}

    async def rollout(self, request):
        if request.group is None:
            return await super().rollout(request)
        ready = asyncio.get_running_loop().create_future()
        waiting = self.groups.setdefault(request.group, [])
        waiting.append((request, ready))
        if len(waiting) == 1:
            await asyncio.sleep(0.5)
            group = self.groups.pop(request.group)
            samples = await asyncio.gather(*(super(GroupLeader, self).rollout(r) for r, _ in group))
            for (_, future), sample in zip(group, samples, strict=True):
                future.set_result(sample)
        return await ready


class PrefillsInternally(Thin):
    """A prefill server gets one call a request inside fleet.internal(); the rows of the prompt are
    its. Routes are handed over as lists.
    """

    async def rollout(self, request):
        run = None
        async with self.fleet.internal():
            with contextlib.suppress(ConnectionError, RuntimeError):
                run = await self.servers[0].generate(prompt_ids=request.prompt_ids, max_tokens=1)
        sample = await super().rollout(request)
        rows = sample["routes"]
        if rows is not None:
            if run is not None and run.token_ids and run.routes is not None:
                size = min(len(request.prompt_ids), len(rows))
                rows = [*run.routes[:size], *rows[size:]]
            sample["routes"] = [row.tolist() for row in rows]
        return sample


class OrderedStrings(Control):
    """Labels are strings that sort by step; samples have the lowest and the highest."""

    contract = promise(versions="min-max")

    def tags(self, run):
        return Thin.tags(self, run)

    async def update_weights(self, version):
        async with self.turnstile:
            label = None if version is None else f"step-{version:05}"
            living = [server for server in self.servers if server.alive]
            await self.roll(self.fleet.weights_of(version), label, living)
