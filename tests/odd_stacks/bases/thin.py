"""Thin: a procedural single-turn client, min-max tags; `promise` makes its contract."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import rollproof

MODEL = {
    "layer_axis": "all",
    "num_layers": 4,
    "moe_layers": (1, 2, 3),
    "num_experts": 16,
    "top_k": 2,
}


def promise(**changes):
    base = dict(
        rows="T-1",
        provenance="as-sampled",
        resume="client",
        abort_surfaces=False,
        versions="min-max",
        logprobs="raw",
        kv_policy="recompute",
        filler="none",
        dtype="uint8",
        multimodal=True,
        sampling="forwarded",
        missing_logprobs="nan",
        **MODEL,
    )
    return rollproof.Contract(**{**base, **changes})


@dataclass
class Run:
    request: Any
    ids: list = field(default_factory=list)
    lps: list = field(default_factory=list)
    vers: list = field(default_factory=list)
    rows: Any = None
    attempt: int = 0
    calls: list = field(default_factory=list)  # the version of each call that returned tokens
    reason: str = ""


def labels_of(out):
    if not out.spans:
        return [out.version] * len(out.token_ids)
    found = []
    for s in out.spans:
        found += [s.version] * (s.end - s.start)
    return found


class Thin:
    flavours = ("vllm",)
    contract = promise()
    pause = 1.0

    def start(self, fleet):
        self.fleet = fleet
        self.servers = [fleet.servers[k] for k in sorted(fleet.servers)]
        self.prepare()

    def prepare(self):
        pass

    async def rollout(self, request):
        run = Run(request)
        while not run.reason:
            await self.step(run)
        return self.result(run)

    async def step(self, run):
        sent, left = self.prompt(run), self.left(run)
        out = await self.ask(run, sent, left)
        if out is None:
            return
        self.take(run, sent, out)
        run.reason = self.verdict(run, out)
        if not run.reason and not out.token_ids:
            await asyncio.sleep(self.pause)

    def prompt(self, run):
        return list(run.request.prompt_ids) + run.ids

    def left(self, run):
        return None if run.request.budget is None else run.request.budget - len(run.ids)

    def server(self, run):
        return self.servers[run.attempt % len(self.servers)]

    def key(self, run):
        return f"{run.request.request_id}:{run.attempt}"

    def params(self, run):
        return dict(run.request.sampling)

    async def ask(self, run, sent, left):
        """One call; None after a failure (and a wait)."""
        server = self.server(run)
        run.attempt += 1
        try:
            return await server.generate(
                prompt_ids=sent,
                max_tokens=left,
                request_id=self.key(run),
                sampling=self.params(run),
                media=run.request.media,
                **self.wants(run),
            )
        except (ConnectionError, RuntimeError):
            await self.after_failure(run)
            return None

    def wants(self, run):
        return {"want_routes": run.request.want_routes, "want_logprobs": run.request.want_logprobs}

    async def after_failure(self, run):
        await asyncio.sleep(self.pause)

    def take(self, run, sent, out):
        n = len(out.token_ids)
        if not n:
            return
        run.ids += out.token_ids
        run.lps += [float("nan")] * n if out.logprobs is None else [float(x) for x in out.logprobs]
        labels = labels_of(out)
        run.vers += labels
        run.calls.append(labels[-1])
        if out.routes is not None:
            self.take_rows(run, out)

    def take_rows(self, run, out):
        have = 0 if run.rows is None else len(run.rows)
        fresh = out.routes[have - out.routes_start :].copy()
        run.rows = fresh if run.rows is None else np.concatenate([run.rows, fresh])

    def ended(self, out):
        p = self.fleet.policy
        return bool(out.token_ids) and p.eos_every is not None and out.token_ids[-1] == p.eos_id

    def verdict(self, run, out):
        reason = str(out.finish_reason)
        if reason != "abort":
            return reason
        if self.ended(out):
            return "stop"
        return (
            "length"
            if run.request.budget is not None and len(run.ids) >= run.request.budget
            else ""
        )

    def result(self, run):
        r = run.request
        return dict(
            request_id=r.request_id,
            prompt_ids=tuple(r.prompt_ids),
            response_ids=tuple(run.ids),
            logprobs=np.array(run.lps, dtype=np.float64) if r.want_logprobs else None,
            routes=run.rows if r.want_routes else None,
            finish_reason=rollproof.FinishReason(run.reason),
            **self.tags(run),
        )

    def tags(self, run):
        v = run.vers
        if not v or None in v:
            return {"min_version": None, "max_version": None}
        return {"min_version": min(v), "max_version": max(v)}

    async def update_weights(self, version):
        await self.fleet.sync(version)

    def to_record(self, native):
        return rollproof.Rollout(**native)

    def stop(self):
        pass
