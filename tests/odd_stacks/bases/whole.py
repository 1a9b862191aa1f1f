"""Whole: a synchronous trainer's stack. Partial rollout is off: an aborted sample is dropped (or surfaced). Sample tags; T rows with a final filler row."""

from __future__ import annotations

import asyncio

import numpy as np

import rollproof
from tests.odd_stacks.bases.thin import MODEL, labels_of


def pledge(**changes):
    base = dict(
        rows="T",
        final_row="minus-one",
        filler="minus-one",
        dtype="int32",
        provenance="as-sampled",
        resume="none",
        partial_off="dropped",
        abort_surfaces=False,
        versions="sample",
        sampling="own",
        logprobs="raw",
        kv_policy="recompute",
        **MODEL,
    )
    return rollproof.Contract(**{**base, **changes})


class Whole:
    flavours = ("vllm",)
    contract = pledge()

    def start(self, fleet):
        self.fleet, self.next = fleet, 0

    async def rollout(self, request):
        tries = 0
        while True:
            tries += 1
            self.next += 1
            servers = [s for s in self.fleet.servers.values() if s.alive] or list(
                self.fleet.servers.values()
            )
            try:
                out = await servers[self.next % len(servers)].generate(
                    prompt_ids=request.prompt_ids,
                    max_tokens=request.budget,
                    request_id=f"{request.request_id}.{tries}",
                    want_routes=request.want_routes,
                    want_logprobs=request.want_logprobs,
                )
            except (ConnectionError, RuntimeError):
                await asyncio.sleep(min(tries, 4))
                continue
            if str(out.finish_reason) == "abort":
                if not out.token_ids:
                    await asyncio.sleep(1)
                    continue
                if not self.complete(request, out):
                    return self.aborted(request, out)
            return self.sample(request, out, self.reason(request, out))

    def complete(self, request, out):
        return self.reason(request, out) is not None

    def reason(self, request, out):
        if str(out.finish_reason) != "abort":
            return str(out.finish_reason)
        p = self.fleet.policy
        if out.token_ids and p.eos_every is not None and out.token_ids[-1] == p.eos_id:
            return "stop"
        return (
            "length"
            if request.budget is not None and len(out.token_ids) == request.budget
            else None
        )

    def aborted(self, request, out):
        return None

    def sample(self, request, out, reason):
        return {"request": request, "out": out, "reason": reason}

    def rows(self, request, out):
        if out.routes is None or not request.want_routes:
            return None
        rows = np.array(out.routes, dtype=np.int32)
        return np.concatenate([rows, self.last(rows)])

    def last(self, rows):
        return np.full((1, *rows.shape[1:]), -1, dtype=np.int32)

    def tag(self, out):
        labels = labels_of(out)
        return labels[-1] if labels else out.version

    def to_record(self, d):
        q, out = d["request"], d["out"]
        return rollproof.Rollout(
            request_id=q.request_id,
            prompt_ids=q.prompt_ids,
            response_ids=out.token_ids,
            finish_reason=rollproof.FinishReason(d["reason"]),
            logprobs=np.array(out.logprobs)
            if q.want_logprobs and out.logprobs is not None
            else None,
            routes=self.rows(q, out),
            version=self.tag(out),
        )

    async def update_weights(self, version):
        await self.fleet.sync(version, mode=rollproof.PauseMode.ABORT, clear_cache=True)

    def stop(self):
        pass
