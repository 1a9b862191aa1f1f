"""Stacks that send a prompt more than once, or make calls beside their rollouts: correct ones are
clean under random schedules, and the nearest faulty ones are found.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import AsSampled, ClientOptions, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from tests.verification.test_unusual_callers import judged


class _Races(AsSampled):
    """Asks three servers at once, takes the first answer, and aborts the other calls."""

    seeds = False
    aborts = True

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        request = sample.request
        names = sorted(self.fleet.servers, key=lambda name: name != server_id)[:3]
        tasks: dict[asyncio.Task[EngineOutput], tuple[str, str]] = {}
        for number, name in enumerate(names):
            sample.attempts += 1
            handle = f"{request.request_id}-{sample.attempts}"
            sampling = self.sampling_for(sample)
            if self.seeds:
                sampling = {**sampling, "seed": number + 1}
            call = self.fleet.servers[name].generate(
                prompt_ids=list(sent),
                max_tokens=budget,
                request_id=handle,
                sampling=sampling,
                media=request.media,
                want_routes=request.want_routes,
                want_logprobs=request.want_logprobs,
                routes_start=self.routes_start(sample),
            )
            tasks[asyncio.ensure_future(call)] = (name, handle)
        return await self.best(tasks)

    async def best(self, tasks: dict[asyncio.Task[EngineOutput], tuple[str, str]]) -> EngineOutput:
        waiting: set[asyncio.Task[EngineOutput]] = set(tasks)
        answered: list[asyncio.Task[EngineOutput]] = []
        while waiting and not answered:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            answered = [task for task in tasks if task in done and not task.exception()]
        for task in waiting if self.aborts else ():
            name, handle = tasks[task]
            with contextlib.suppress(ConnectionError):
                await self.fleet.servers[name].abort(handle)
        if self.aborts:
            await asyncio.gather(*tasks, return_exceptions=True)
        return (answered or list(tasks))[0].result()


class _ForgetsLosers(_Races):
    """Leaves the losers running."""

    aborts = False


class _KeepsLonger(_Races):
    """Waits for all answers and keeps the longest one."""

    async def best(self, tasks: dict[asyncio.Task[EngineOutput], tuple[str, str]]) -> EngineOutput:
        await asyncio.gather(*tasks, return_exceptions=True)
        good = [task.result() for task in tasks if not task.exception()]
        return self.of(good) if good else next(iter(tasks)).result()

    def of(self, outputs: list[EngineOutput]) -> EngineOutput:
        return max(outputs, key=lambda output: len(output.token_ids))


class _MixesLogprobs(_KeepsLonger):
    """Takes the tokens of the longest answer, each raised by one: those of no answer."""

    def of(self, outputs: list[EngineOutput]) -> EngineOutput:
        best = super().of(outputs)
        return replace(best, token_ids=tuple(token ^ 1 for token in best.token_ids))


class _Seeds(_Races):
    """Each call of a race has a sampling seed of its own."""

    seeds = True


class _DropsFirstToken(_Seeds):
    """The winner's first token is lost."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        return replace(rollout, response_ids=rollout.response_ids[1:])


class _RetriesLive(AsSampled):
    """Calls again while the first call is still running, and takes whichever comes first."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        first = asyncio.ensure_future(super().call(server_id, sample, sent, budget))
        await asyncio.wait([first], timeout=3)
        if first.done():
            return first.result()
        sample.attempts += 1
        name = min(self.fleet.servers, key=lambda name: name == server_id)
        second = asyncio.ensure_future(super().call(name, sample, sent, budget))
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        chosen, other = (first, second) if first.done() else (second, first)
        if chosen.exception():
            chosen, other = other, chosen
        try:
            return await chosen
        finally:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)


class _RetriesForgetting(_RetriesLive):
    """Takes the first answer, and samples again what it has already got."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        return replace(rollout, response_ids=rollout.response_ids * 2)


class _InternalJudge(AsSampled):
    """A judge reads the entire conversation, declared as internal."""

    declared_internal = True

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        for server in self.fleet.servers.values():
            if rollout is not None and server.alive and not server.paused:
                ids = (*rollout.prompt_ids, *rollout.response_ids, 5)
                if self.declared_internal:
                    with self.fleet.internal():
                        await server.generate(prompt_ids=ids, max_tokens=1)
                else:
                    await server.generate(
                        prompt_ids=ids, max_tokens=1, request_id=f"{request.request_id}-judge"
                    )
                break
        return rollout


class _JudgeAsCall(_InternalJudge):
    """The same judge, under the handle of the request."""

    declared_internal = False


class _Polls(AsSampled):
    """Polls the health of all servers in the task of each rollout, before every call."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        for server in self.fleet.servers.values():
            if server.alive and not server.paused:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    await server.generate(
                        prompt_ids=[1],
                        max_tokens=1,
                        request_id="health",
                        want_routes=False,
                        want_logprobs=False,
                    )
        return await super().call(server_id, sample, sent, budget)


class _PollsForever(_Polls):
    """The token of a rollout's last call is that of the health check."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        return replace(rollout, response_ids=(*rollout.response_ids[:-1], 9))


class _FansOut(AsSampled):
    """A router object has a task of its own for each request, and answers by futures."""

    swaps = False

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._routed: list[asyncio.Task[Any]] = []

    async def rollout(self, request: Request) -> Rollout | None:
        task = asyncio.ensure_future(super().rollout(request))
        self._routed.append(task)
        rollout: Rollout | None = await task
        if self.swaps and rollout is not None and request.group is not None:
            kept: dict[str, Rollout] = self.__dict__.setdefault("_kept", {})
            return replace(kept.setdefault(request.group, rollout), request_id=request.request_id)
        return rollout


class _FansOutOne(_FansOut):
    """Every request of a group gets the first answer."""

    swaps = True


class _Speculates(AsSampled):
    """Calls with a guess at what the environment says, and throws that call away."""

    options = ClientOptions(multi_turn=True)
    guess = (7, 7, 7)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        output = await super().call(server_id, sample, sent, budget)
        server = self.fleet.servers[server_id]
        ended = output.finish_reason is FinishReason.STOP and sample.request.turns
        if ended and server.alive and not server.paused:
            sample.attempts += 1
            handle = f"{sample.request.request_id}-{sample.attempts}"
            ids = (*sent, *output.token_ids, *self.guess)
            call = server.generate(
                prompt_ids=ids,
                max_tokens=2,
                request_id=handle,
                sampling=self.sampling_for(sample),
                media=sample.request.media,
                want_routes=sample.request.want_routes,
                want_logprobs=sample.request.want_logprobs,
            )
            task = asyncio.ensure_future(call)
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return output


class _KeepsSpeculation(_Speculates):
    """The end of what was guessed stays in the sample."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        if not sample.request.turns or not rollout.response_ids:
            return rollout
        return replace(rollout, response_ids=(*rollout.response_ids[:-1], 7))


STACKS: dict[str, tuple[SubjectFactory, SubjectFactory, str]] = {
    "three servers": (_Races, _ForgetsLosers, "lifecycle.no-orphan-calls"),
    "longer reply": (_KeepsLonger, _MixesLogprobs, "stitch.tokens"),
    "seeds": (_Seeds, _DropsFirstToken, "stitch.tokens"),
    "speculation": (_Speculates, _KeepsSpeculation, "stitch.tokens"),
    "live retry": (_RetriesLive, _RetriesForgetting, "stitch.tokens"),
    "internal judge": (_InternalJudge, _JudgeAsCall, "stitch.resume-prompt"),
    "health polls": (_Polls, _PollsForever, "stitch.tokens"),
    "router": (_FansOut, _FansOutOne, "stitch.tokens"),
}


@pytest.mark.parametrize("name", sorted(STACKS))
def test_a_correct_stack_is_clean(name: str) -> None:
    """Nothing is found."""
    judgement = judged(STACKS[name][0], 60, seed=5)
    assert () == judgement.failed, [
        result.findings[:2] for result in judgement.results if result.findings
    ]


@pytest.mark.parametrize("seed", [6, 7, 8])
@pytest.mark.parametrize("name", sorted(STACKS))
def test_a_correct_stack_is_clean_on_other_seeds(name: str, seed: int) -> None:
    """Nothing is found: empty replies that win a race, drops, and late replies of races come with
    some seeds only. SGLang's engines show a version with every reply, also with an empty one.
    """
    judgement = judged(STACKS[name][0], 40, seed=seed, flavour="sglang")
    assert () == judgement.failed, [
        result.findings[:2] for result in judgement.results if result.findings
    ]


@pytest.mark.parametrize("name", sorted(STACKS))
def test_the_nearest_faulty_stack_is_found(name: str) -> None:
    """By the check that its fault belongs to."""
    _, factory, expected = STACKS[name]
    assert expected in judged(factory, 60, seed=5).failed
