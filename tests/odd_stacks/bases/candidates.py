"""Candidates: Thin's rollouts, two for each request at once, of which one is the sample."""

from __future__ import annotations

import asyncio

from tests.odd_stacks.bases.thin import Run, Thin


class Candidates(Thin):
    """Each candidate is resumed by itself; the likelier one is the sample."""

    async def rollout(self, request):
        return self.choose(*await asyncio.gather(*(self.candidate(request, n) for n in range(2))))

    async def candidate(self, request, number):
        run = Run(request)
        run.number = number
        while not run.reason:
            await self.step(run)
        return self.result(run)

    def key(self, run):
        return f"{run.request.request_id}:{run.number}.{run.attempt}"

    def wants(self, run):
        return {**super().wants(run), "draw": run.number}

    def choose(self, first, second):
        if first["logprobs"] is None:
            return first
        return max(first, second, key=lambda sample: sample["logprobs"].sum())
