"""Pool: producers put jobs in a queue, workers call SGLang servers through Ray-style handles; one version tag per engine call."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

import rollproof
from tests.odd_stacks.bases.thin import MODEL


def deal(**changes):
    base = dict(
        rows="T-1",
        provenance="as-sampled",
        resume="client",
        abort_surfaces=False,
        versions="call",
        logprobs="temperature-scaled",
        kv_policy="recompute",
        filler="none",
        dtype="int32",
        sampling="own",
        **MODEL,
    )
    return rollproof.Contract(**{**base, **changes})


class Job:
    def __init__(self, request):
        self.request, self.segments, self.failures = request, [], 0
        self.future = asyncio.get_running_loop().create_future()

    @property
    def done(self):
        return [t for s in self.segments for t in s.token_ids]

    @property
    def rows(self):
        kept = None
        for s in self.segments:
            if s.routes is not None:
                kept = (
                    s.routes
                    if kept is None
                    else np.concatenate([kept, s.routes[len(kept) - s.routes_start :]])
                )
        return kept


class Pool:
    flavours = ("sglang",)
    contract = deal()
    width = 8

    async def start(self, fleet):
        self.fleet, self.handles, self.numbers = fleet, fleet.ray_handles(), itertools.count()
        self.queue = asyncio.Queue()
        self.ready()
        self.workers = [asyncio.create_task(self.work(i)) for i in range(self.width)]

    def ready(self):
        pass

    async def rollout(self, request):
        job = Job(request)
        self.queue.put_nowait(job)
        return await job.future

    async def work(self, number):
        while True:
            job = await self.queue.get()
            try:
                over = await self.attempt(job, number)
                if over:
                    self.settle(job, self.pack(job, over))
                else:
                    self.queue.put_nowait(job)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not job.future.done():
                    job.future.set_exception(error)

    def settle(self, job, sample):
        if not job.future.done():
            job.future.set_result(sample)

    def budget(self, job):
        b = job.request.budget
        return None if b is None else b - len(job.done)

    def handle(self, job, number):
        names = sorted(self.handles)
        return self.handles[names[(number + job.failures) % len(names)]]

    def call(self, job, number):
        return self.handle(job, number).generate.remote(
            prompt_ids=[*job.request.prompt_ids, *job.done],
            max_tokens=self.budget(job),
            request_id=f"{job.request.request_id}#{next(self.numbers)}",
            sampling={"temperature": 1.0, "no_stop_trim": True},
            want_routes=job.request.want_routes,
            want_logprobs=job.request.want_logprobs,
        )

    async def attempt(self, job, number):
        try:
            out = await self.call(job, number)
        except (ConnectionError, RuntimeError):
            job.failures += 1
            await asyncio.sleep(2)
            return None
        return await self.absorb(job, out)

    async def absorb(self, job, out):
        if out.token_ids:
            job.segments.append(out)
        elif str(out.finish_reason) == "abort":
            job.failures += 1
            await asyncio.sleep(1)
        if str(out.finish_reason) != "abort":
            return str(out.finish_reason)
        policy = self.fleet.policy
        if out.token_ids and policy.eos_every is not None and out.token_ids[-1] == policy.eos_id:
            return "stop"
        return "length" if self.budget(job) == 0 else None

    def pack(self, job, over):
        r, lps = job.request, [s.logprobs for s in job.segments if s.logprobs is not None]
        return rollproof.Rollout(
            request_id=r.request_id,
            prompt_ids=r.prompt_ids,
            response_ids=tuple(job.done),
            finish_reason=rollproof.FinishReason(over),
            logprobs=np.concatenate(lps) if r.want_logprobs and lps else None,
            routes=job.rows if r.want_routes else None,
            **self.tags(job),
        )

    def tags(self, job):
        return {"call_versions": tuple(s.version for s in job.segments)}

    async def update_weights(self, version):
        await self.fleet.sync(version)

    def to_record(self, sample):
        return sample

    async def stop(self):
        for w in self.workers:
            w.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)
