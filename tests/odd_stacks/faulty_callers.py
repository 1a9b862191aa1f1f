"""Callers with one fault each."""

from __future__ import annotations

import asyncio
import contextlib

from tests.odd_stacks.bases.thin import Thin, promise
from tests.odd_stacks.bases.whole import Whole


class ResumeTakesCallersNumber(Thin):
    """After an abort the rest is counted from the caller's max_tokens alone, so a configured
    response length (Request.limit) or max_length that is tighter no longer holds for the
    resuming call.
    """

    def left(self, run):
        if not run.ids:
            return super().left(run)
        stated = run.request.max_tokens
        return None if stated is None else stated - len(run.ids)


class LastTokenOfAnAbortDropped(Thin):
    """After an abort the last token is thrown away ("may be half a character") and sampled again: a
    delivered token is neither sent nor in the sample.
    """

    def take(self, run, sent, out):
        super().take(run, sent, out)
        if str(out.finish_reason) == "abort" and len(run.ids) > 1 and not super().verdict(run, out):
            for x in (run.ids, run.lps, run.vers):
                x.pop()
            if run.rows is not None:
                run.rows = run.rows[:-1]


class ResumeWindow(Thin):
    """The resuming call sends the last six tokens only (a sliding window of the chat front end that
    a resumed generation passes through once more).
    """

    def prompt(self, run):
        whole = super().prompt(run)
        return whole[-6:] if run.ids else whole


class CheckpointsOfFour(Thin):
    """Progress is checkpointed every four tokens; after a failed call the rollout goes back to the
    last checkpoint, and tokens that were delivered before are lost.
    """

    async def after_failure(self, run):
        keep = len(run.ids) // 4 * 4
        del run.ids[keep:], run.lps[keep:], run.vers[keep:]
        if run.rows is not None:
            run.rows = run.rows[: max(0, len(run.request.prompt_ids) + keep - 1)] if keep else None
        await super().after_failure(run)


class TemperatureRises(Thin):
    """Each attempt raises the temperature a little ("escape loops"), although every attempt of a
    request must use the same parameters.
    """

    contract = promise(sampling="own")

    def params(self, run):
        return {**run.request.sampling, "temperature": 0.7 + 0.05 * run.attempt}


class TimeoutLeavesTheCall(Thin):
    """A call that takes longer than six seconds is called again elsewhere; the first is shielded and
    never aborted, so it runs on after the request has ended.
    """

    async def ask(self, run, sent, left):
        task = asyncio.ensure_future(super().ask(run, sent, left))
        try:
            return await asyncio.wait_for(asyncio.shield(task), 6)
        except TimeoutError:
            return await super().ask(run, sent, left)


class FirstSiblingEndsAll(Thin):
    """When the first sample of a group is finished, the calls of all others on the servers are
    aborted ("the group is over"), and so are those of strangers.
    """

    async def rollout(self, request):
        sample = await super().rollout(request)
        if request.group is not None:
            for s in self.servers:
                if s.alive:
                    await s.abort("*")
        return sample


class WarmsCacheAfterEnd(Thin):
    """After the hand-over a background task sends the finished sequence once more "to keep the
    prefix cache warm for the next turn", under the request's own handle.
    """

    async def rollout(self, request):
        sample = await super().rollout(request)
        self.task = asyncio.ensure_future(
            self.warm(request, [*request.prompt_ids, *sample["response_ids"]])
        )
        return sample

    async def warm(self, request, ids):
        await asyncio.sleep(1)
        with contextlib.suppress(ConnectionError):
            await self.servers[0].generate(
                prompt_ids=ids,
                max_tokens=1,
                request_id=f"{request.request_id}:warm",
                sampling=dict(request.sampling),
                media=request.media,
            )


class AtLeastOneMore(Thin):
    """An abort on the last token leaves a rest of 0, which is raised to 1: the call may sample more
    than what is left.
    """

    def left(self, run):
        rest = super().left(run)
        return None if rest is None else max(1, rest)

    def verdict(self, run, out):
        reason = str(out.finish_reason)
        return (
            ""
            if reason == "abort" and not self.ended(out)
            else "stop"
            if reason == "abort"
            else reason
        )


class LengthOfResponseOnly(Thin):
    """Prompt and response together are limited to 12 tokens by the contract; the loop compares the
    response alone with it.
    """

    contract = promise(limits={"length": 12})

    def left(self, run):
        stated = [b for b in (run.request.max_tokens, run.request.limit) if b is not None]
        return min([12, *stated]) - len(run.ids)

    def verdict(self, run, out):
        return super().verdict(run, out) or ("length" if self.left(run) <= 0 else "")


class EmptyAbortResets(Thin):
    """An abort before the first token is taken for "never started": the tokens of earlier calls are
    forgotten and the bare prompt is sent.
    """

    def take(self, run, sent, out):
        if not out.token_ids:
            run.ids, run.lps, run.vers, run.rows = [], [], [], None
        super().take(run, sent, out)


class DroppedByADeadServer(Whole):
    """With partial rollout off aborted samples are dropped as declared; a sample whose server died
    is dropped as well.
    """

    async def rollout(self, request):
        while True:
            server = next(
                (s for s in self.fleet.servers.values() if s.alive), self.fleet.servers["s0"]
            )
            try:
                out = await server.generate(
                    prompt_ids=request.prompt_ids,
                    max_tokens=request.budget,
                    request_id=f"{request.request_id}.0",
                    want_routes=request.want_routes,
                    want_logprobs=request.want_logprobs,
                )
            except ConnectionError:
                return None
            if str(out.finish_reason) == "abort" and not self.complete(request, out):
                return None
            return self.sample(request, out, self.reason(request, out))


class PromptWindow(Thin):
    """Prompts are cut to their last 32 tokens in the calls (a left truncation that is meant for
    another model), not in the sample.
    """

    def prompt(self, run):
        return [*run.request.prompt_ids[-32:], *run.ids]
