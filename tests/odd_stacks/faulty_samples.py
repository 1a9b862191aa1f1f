"""Samples with one fault each."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

import rollproof
from tests.odd_stacks.bases.candidates import Candidates
from tests.odd_stacks.bases.pool import Pool
from tests.odd_stacks.bases.thin import Thin, promise


class EndsStripped(Thin):
    """The end token with which the model stopped is cut off the response (skip_special_tokens at
    hand-over), with its logprob and the row before it: a sampled and delivered token is lost.
    """

    def verdict(self, run, out):
        reason = super().verdict(run, out)
        if reason == "stop":
            for x in (run.ids, run.lps, run.vers):
                x.pop()
            if run.rows is not None:
                run.rows = run.rows[:-1]
        return reason


class BoundaryRowAgain(Thin):
    """On resume the row before the join is taken from the new call as well (off by one in the
    overlap): that row was computed again by the new weights, and the contract says as-
    sampled.
    """

    def take_rows(self, run, out):
        if run.rows is None:
            run.rows = out.routes.copy()
        else:
            keep = len(run.rows) - 1
            run.rows = np.concatenate([run.rows[:keep], out.routes[keep:]])


class AsksFromOneTooLate(Pool):
    """SGLang is asked for the rows from len(prompt)+len(tokens) on, but the row of the last token
    sent so far is the first that is missing: one row is lost a resume.
    """

    def call(self, job, number):
        start = len(job.request.prompt_ids) + len(job.done) if job.segments else 0
        return self.handle(job, number).generate.remote(
            prompt_ids=[*job.request.prompt_ids, *job.done],
            max_tokens=self.budget(job),
            request_id=f"{job.request.request_id}#{next(self.numbers)}",
            sampling={"temperature": 1.0},
            want_routes=job.request.want_routes,
            want_logprobs=job.request.want_logprobs,
            routes_start=start,
        )

    def pack(self, job, over):
        sample = super().pack(job, over)
        rows = [s.routes for s in job.segments if s.routes is not None]
        return (
            dataclasses.replace(sample, routes=np.concatenate(rows))
            if rows and job.request.want_routes
            else sample
        )


class PromptRowsByLength(Thin):
    """The rows of a prompt are cached under the prompt's length ("the padded shape"): a later
    request with another prompt of that length gets the first one's rows.
    """

    def prepare(self):
        self.prompt_rows = {}

    def result(self, run):
        sample = super().result(run)
        if sample["routes"] is not None:
            n = len(run.request.prompt_ids) - 1
            kept = self.prompt_rows.setdefault(n, sample["routes"][:n].copy())
            sample["routes"] = sample["routes"].copy()
            sample["routes"][:n] = kept
        return sample


class LatestPrefillPromised(Thin):
    """The contract promises the rows of the latest prefill, and the client keeps those of the first
    call (as-sampled).
    """

    contract = promise(provenance="latest-prefill")


class SpansFromTheCall(Thin):
    """The spans of an engine are over the tokens of its call; they are appended as they are, without
    the offset of the tokens before.
    """

    contract = promise(versions="span")

    def take(self, run, sent, out):
        super().take(run, sent, out)
        if out.token_ids:
            run.spans = [
                *getattr(run, "spans", []),
                *(rollproof.Span(start=s.start, end=s.end, version=s.version) for s in out.spans),
            ]

    def tags(self, run):
        return {"spans": tuple(getattr(run, "spans", ()))}


class AsCompleted(Thin):
    """The samples of a group are collected in the order in which they finish and handed out in the
    order of their requests: a request gets a sibling's response.
    """

    def prepare(self):
        self.finished, self.waiting = {}, {}

    async def rollout(self, request):
        if request.group is None:
            return await super().rollout(request)
        line = self.waiting.setdefault(request.group, [])
        turn = asyncio.get_running_loop().create_future()
        line.append((request, turn))
        sample = await super().rollout(request)
        asked, first = line.pop(0)
        first.set_result({**sample, "request_id": asked.request_id})
        return await turn


class MeanForMissing(Thin):
    """A logprob that the engine did not return is set to the mean of the others."""

    contract = promise(reply_gaps=True, missing_logprobs="nan")

    def result(self, run):
        sample = super().result(run)
        lp = sample["logprobs"]
        if lp is not None and np.isnan(lp).any():
            lp[np.isnan(lp)] = -1.0 if np.isnan(lp).all() else np.nanmean(lp)
        return sample


class NewestIsThatOfTheEnd(Thin):
    """The max tag is the version of the last call: a resume on a replica that lags behind is
    older than what came before it.
    """

    def result(self, run):
        sample = super().result(run)
        if sample["max_version"] is not None:
            sample["max_version"] = run.vers[-1]
        return sample


class LogprobsOfTheOther(Candidates):
    """The chosen candidate is handed over with the logprobs of the other one, if they are as
    many.
    """

    def choose(self, first, second):
        best = super().choose(first, second)
        other = second if best is first else first
        if best["logprobs"] is None or len(best["logprobs"]) != len(other["logprobs"]):
            return best
        return {**best, "logprobs": other["logprobs"]}
