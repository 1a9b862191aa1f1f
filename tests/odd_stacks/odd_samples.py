"""Samples that are unusual and keep their contracts."""

from __future__ import annotations

import asyncio
import functools

import numpy as np

import rollproof
from tests.odd_stacks.bases.thin import Thin, promise
from tests.odd_stacks.bases.whole import Whole, pledge


def text_of(ids):
    return " ".join(f"w{i}" for i in ids)


class DetokenisesInThreads(Thin):
    """After every call the text is made in a thread of the default executor (asyncio.to_thread), as
    tokenizers that hold no GIL are used; the tokens stay as they are.
    """

    async def step(self, run):
        await super().step(run)
        run.text = await asyncio.to_thread(text_of, list(run.ids))

    def result(self, run):
        assert run.text.count("w") == len(run.ids)
        return super().result(run)


@functools.lru_cache(maxsize=64)
def encode(text):
    return tuple(int(w[1:]) for w in text.split())


class TokenisesOnce(Thin):
    """Prompts are turned to text when they arrive and tokenised once, by a codec with a cache; calls
    are made from numpy arrays.
    """

    async def rollout(self, request):
        text = " ".join(f"w{i}" for i in request.prompt_ids)
        assert encode(text) == tuple(request.prompt_ids)
        return await super().rollout(request)

    def prompt(self, run):
        return np.concatenate(
            [
                np.array(encode(" ".join(f"w{i}" for i in run.request.prompt_ids)), dtype=np.int64),
                np.array(run.ids, dtype=np.int64),
            ]
        ).tolist()


class AsksForMissingRows(Thin):
    """SGLang is asked for the rows from the first missing one on (routed_experts_start_len), and
    rows are appended as they come.
    """

    flavours = ("sglang", "sglang-0.5.17")
    contract = promise(logprobs="temperature-scaled", dtype="int32", versions="none")

    async def ask(self, run, sent, left):
        run.asked = 0 if run.rows is None else len(run.rows)
        return await super().ask(run, sent, left)

    def wants(self, run):
        return {**super().wants(run), "routes_start": run.asked}

    def take_rows(self, run, out):
        fresh = np.array(out.routes[run.asked - out.routes_start :])
        run.rows = fresh if run.rows is None else np.concatenate([run.rows, fresh])

    def tags(self, run):
        return {}


class CapturedPrefix(Thin):
    """Only the rows of the first call that sampled something are kept (a captured prefix);
    everything after it is left to the trainer's own routers.
    """

    contract = promise(rows="captured-prefix")

    def take_rows(self, run, out):
        if run.rows is None and len(run.calls) == 1:
            run.rows = out.routes.copy()


class PolicySpan(Thin):
    """Bounds as prime-rl has them, wider than needed: the oldest label that any server showed when
    the rollout began, and the newest when it ended.
    """

    contract = promise(versions="bounds")

    def shown(self):
        return [s.label for s in self.servers if s.label is not None]

    async def rollout(self, request):
        self.began = {**getattr(self, "began", {}), request.request_id: self.shown()}
        return await super().rollout(request)

    def tags(self, run):
        own = run.vers
        if not own or None in own:
            return {"min_version": None, "max_version": None}
        return {
            "min_version": min(self.began[run.request.request_id] + own),
            "max_version": max(self.shown() + own),
        }


class Surfaced(Whole):
    """Partial rollout off; an aborted sample is handed over as aborted, as the contract says."""

    contract = pledge(partial_off="surfaced", abort_surfaces=True)

    def aborted(self, request, out):
        return self.sample(request, out, "abort")


class EngineResumes(Thin):
    """The engine freezes calls in an update (keep) and goes on with them; the client calls once and
    hands over what it gets, an abort by somebody else included.
    """

    contract = promise(resume="engine", kv_policy="keep", abort_surfaces=True, versions="span")

    def prepare(self):
        self.fleet.pause_mode, self.fleet.clear_cache = rollproof.PauseMode.KEEP, False

    def verdict(self, run, out):
        return super().verdict(run, out) or ("abort" if out.token_ids else "")

    def take(self, run, sent, out):
        super().take(run, sent, out)
        run.spans = [
            rollproof.Span(start=s.start, end=s.end, version=s.version)
            for s in out.spans
            if s.end > s.start
        ]

    def tags(self, run):
        return {"spans": tuple(run.spans)}


class LatestPrefill(Thin):
    """Each call's rows replace those of the calls before, as the contract declares."""

    contract = promise(provenance="latest-prefill")

    def take_rows(self, run, out):
        run.rows = out.routes.copy()


class DenseAndBare:
    """A dense model's stack: no routes, no logprobs, no tags; a plain function with closures."""

    flavours = ("vllm", "sglang", "vllm-gated")
    contract = rollproof.Contract(
        rows="none",
        resume="client",
        versions="none",
        logprobs="none",
        abort_surfaces=False,
        kv_policy="recompute",
        sampling="forwarded",
        multimodal=True,
    )

    def start(self, fleet):
        ring = list(fleet.servers.values())

        async def generate(request):
            text = []
            for n in range(10_000):
                rest = None if request.budget is None else request.budget - len(text)
                if rest == 0:
                    return request, text, "length"
                try:
                    out = await ring[n % len(ring)].generate(
                        prompt_ids=(*request.prompt_ids, *text),
                        max_tokens=rest,
                        request_id=f"{request.request_id}_{n}",
                        sampling=request.sampling,
                        media=request.media,
                        want_routes=False,
                        want_logprobs=False,
                    )
                except (ConnectionError, RuntimeError):
                    await asyncio.sleep(1.5)
                    continue
                text.extend(out.token_ids)
                if out.finish_reason is not rollproof.FinishReason.ABORT:
                    return request, text, str(out.finish_reason)
                if (
                    text
                    and fleet.policy.eos_every is not None
                    and text[-1] == fleet.policy.eos_id
                    and out.token_ids
                ):
                    return request, text, "stop"
                if not out.token_ids:
                    await asyncio.sleep(1)
            return None

        self.rollout, self.update_weights = generate, fleet.sync

    async def rollout(self, request): ...

    async def update_weights(self, version): ...

    def to_record(self, native):
        request, text, reason = native
        return rollproof.Rollout(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            response_ids=tuple(text),
            finish_reason=rollproof.FinishReason(reason),
        )

    def stop(self): ...


class GapsAreNan(Thin):
    """Replies may come without logprobs; their tokens hold NaN, as declared."""

    contract = promise(reply_gaps=True, missing_logprobs="nan", versions="none")

    def tags(self, run):
        return {}


class SortedWideIds(Thin):
    """Expert ids are widened to int32 and sorted within each row of the stack's own copy (the order
    within a layer does not matter).
    """

    contract = promise(dtype="int32")

    def result(self, run):
        sample = super().result(run)
        if sample["routes"] is not None:
            sample["routes"] = np.sort(sample["routes"].astype(np.int32), axis=2)
        return sample
