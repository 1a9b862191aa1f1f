"""Stacks whose engine calls are hard to attribute: correct ones pass under random schedules, with
no check unknown, and faulty ones are found.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import pytest

import rollproof
from rollproof.core.contract import Filler, Rows
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import AsSampled, ClientOptions, PartialSample
from rollproof.fakes.engine.fleet import Fleet
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judgement, Tally
from rollproof.verification.contract_probe import probe
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import random_cases
from rollproof.verification.traces import judge_events

REGISTRY = default_registry()
_CASES = 150


class _Unnamed(AsSampled):
    """Gives its calls handles of its own making, which name no request."""

    flavours: ClassVar[tuple[str, ...]] = ("vllm",)
    _handles = 0

    def handle(self, sample: PartialSample) -> str:
        self._handles += 1
        return f"call#{self._handles}#"


class _Workers(_Unnamed):
    """Workers that live as long as the stack take calls off one queue a server."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._workers: list[asyncio.Task[None]] = []

    async def _work(self, queue: asyncio.Queue[Any]) -> None:
        while True:
            call, reply = await queue.get()
            try:
                reply.set_result(await call())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                reply.set_exception(error)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        if server_id not in self._queues:
            self._queues[server_id] = asyncio.Queue()
            self._workers += [
                asyncio.ensure_future(self._work(self._queues[server_id])) for _ in range(16)
            ]
        reply = asyncio.get_running_loop().create_future()

        async def call() -> EngineOutput:
            return await super(_Workers, self).call(server_id, sample, sent, budget)

        self._queues[server_id].put_nowait((call, reply))
        return await reply

    async def stop(self) -> None:  # type: ignore[override]
        for worker in self._workers:
            worker.cancel()


class _Dispatcher(_Unnamed):
    """The rollout that finds a full window makes the first calls of all that wait, in its task."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._waiting: list[tuple[Callable[[], Awaitable[EngineOutput]], asyncio.Future[Any]]] = []

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        if sample.attempts:
            return await super().call(server_id, sample, sent, budget)
        reply = asyncio.get_running_loop().create_future()

        async def call() -> EngineOutput:
            return await super(_Dispatcher, self).call(server_id, sample, sent, budget)

        self._waiting.append((call, reply))
        await asyncio.sleep(0.5)
        batch, self._waiting = self._waiting, []
        outcomes = await asyncio.gather(*(call() for call, _ in batch), return_exceptions=True)
        for outcome, (_, future) in zip(outcomes, batch, strict=True):
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        return await reply


class _WarmsUp(_Unnamed):
    """Each rollout makes a health check first, in its own task."""

    async def run(self, sample: PartialSample) -> bool:
        await self.check()
        return await super().run(sample)

    async def check(self) -> None:
        for server in self.fleet.servers.values():
            if server.alive and not server.paused:
                await server.generate(prompt_ids=[1], max_tokens=1, request_id="health")
                return


class _Judges(_Unnamed):
    """A judge model behind the same servers reads each finished sample, declared as internal."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        self._finished = sample.ids
        return rollout

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        with self.fleet.internal():
            for server in self.fleet.servers.values():
                if rollout is not None and server.alive and not server.paused:
                    # what it reads begins with the prompt of the request
                    ids = (*rollout.prompt_ids, *rollout.response_ids, 5, 6)
                    await server.generate(prompt_ids=ids, max_tokens=2)
                    break
        return rollout


class _LeavesElsewhere(_WarmsUp):
    """Its health check is a block that it entered in another task."""

    async def check(self) -> None:
        block = self.fleet.internal()

        async def enter() -> None:
            block.__enter__()
            await super(_LeavesElsewhere, self).check()

        await asyncio.create_task(enter())
        block.__exit__(None, None, None)


class _Hedges(_Unnamed):
    """Calls twice; the loser is cancelled in the very instant in which the winner's reply comes."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        # samples of hedged calls are not judged, so some are not hedged
        if sample.request.request_id == "r0":
            return await super().call(server_id, sample, sent, budget)
        hedges = [
            asyncio.ensure_future(super(_Hedges, self).call(name, sample, sent, budget))
            for name in (server_id, *self.fleet.servers)[:2]
        ]
        try:
            done, _ = await asyncio.wait(hedges, return_when=asyncio.FIRST_COMPLETED)
            return await next(iter(sorted(done, key=hedges.index)))
        finally:
            for hedge in hedges:
                hedge.cancel()
            await asyncio.gather(*hedges, return_exceptions=True)


class _OtherServer(_Unnamed):
    """Retries on another server after a lost reply, in a task of its own."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        names = sorted(self.fleet.servers, key=lambda name: name != server_id)
        for name in names:
            attempt = super().call(name, sample, sent, budget)
            try:
                return await asyncio.create_task(attempt)
            except ConnectionError:
                if name == names[-1]:
                    raise
        raise AssertionError("no server")


class _GroupWorkers(_Unnamed):
    """One task a group, begun by its first rollout, runs the rollouts of all its requests."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def rollout(self, request: Request) -> Rollout | None:
        loop, group = asyncio.get_running_loop(), request.group or "all"
        if group not in self._queues:
            self._queues[group] = asyncio.Queue()
            self._tasks.append(loop.create_task(self._work(self._queues[group])))
        answer: asyncio.Future[Rollout | None] = loop.create_future()
        self._queues[group].put_nowait((answer, request))
        return await answer

    async def _work(self, queue: asyncio.Queue[Any]) -> None:
        while True:
            self._tasks.append(asyncio.create_task(self._serve(*await queue.get())))

    async def _serve(self, answer: asyncio.Future[Rollout | None], request: Request) -> None:
        try:
            rollout = await _Unnamed.rollout(self, request)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(rollout)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


class _ChecksFirst(_GroupWorkers):
    """Each rollout first makes a health check, declared as internal, with the request's prompt."""

    async def rollout(self, request: Request) -> Rollout | None:
        servers = [each for each in self.fleet.servers.values() if each.alive and not each.paused]
        async with self.fleet.internal():
            for server in servers[:1]:
                with contextlib.suppress(Exception):
                    await server.generate(prompt_ids=list(request.prompt_ids), max_tokens=1)
        return await super().rollout(request)


class _SmallPool(_Unnamed):
    """Three workers that outlive the rollouts which began them; calls have no handles at all."""

    workers = 3

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        if len(self._tasks) < self.workers:
            self._tasks.append(asyncio.ensure_future(self._work()))
        request = sample.request
        sample.attempts += 1
        reply = asyncio.get_running_loop().create_future()

        async def call() -> None:
            try:
                output = await self.fleet.servers[server_id].generate(
                    prompt_ids=list(sent),
                    max_tokens=budget,
                    sampling=self.sampling_for(sample),
                    media=request.media,
                    want_routes=request.want_routes,
                    want_logprobs=request.want_logprobs,
                    routes_start=self.routes_start(sample),
                )
            except Exception as error:  # noqa: BLE001 - the caller gets it
                reply.set_exception(error)
            else:
                reply.set_result(output)

        self._queue.put_nowait(call)
        return await reply

    async def _work(self) -> None:
        while True:
            await (await self._queue.get())()

    async def stop(self) -> None:  # type: ignore[override]
        for task in self._tasks:
            task.cancel()


class _DispatcherTask(_SmallPool):
    """One task, begun by the first rollout, begins a task for every call of all rollouts."""

    workers = 1

    async def _work(self) -> None:
        while True:
            call = await self._queue.get()
            self._tasks.append(asyncio.create_task(call()))


CORRECT: dict[str, SubjectFactory] = {
    "workers": _Workers,
    "dispatcher": _Dispatcher,
    "health checks": _WarmsUp,
    "judge": _Judges,
    "leaves a block elsewhere": _LeavesElsewhere,
    "hedges": _Hedges,
    "another server": _OtherServer,
    "unnamed": _Unnamed,
    "group workers": _GroupWorkers,
    "small pool": _SmallPool,
    "dispatcher task": _DispatcherTask,
}


def judged(
    factory: SubjectFactory, count: int = _CASES, seed: int = 7, flavour: str = "vllm"
) -> Judgement:
    """Return the judgement of a stack over random cases, the same for every stack."""
    tally = Tally(REGISTRY)
    ((flavour, contract, model),) = probe(factory, (flavour,))
    for drawn in random_cases(seed, count, flavour=flavour, contract=contract, model=model):
        trace = run_case(factory, drawn)
        judge_events(trace.header, trace.events, tally)
    return tally.judgement()


@lru_cache(maxsize=1)
def _undecided() -> set[str]:
    """Return the checks that these cases leave undecided for the reference client."""
    results = judged(AsSampled).results
    return {result.id for result in results if result.verdict is Verdict.UNKNOWN}


@pytest.mark.parametrize("name", sorted(CORRECT))
def test_a_correct_stack_is_clean(name: str) -> None:
    """Nothing is found, and no check is unknown that is not so for the reference client."""
    judgement = judged(CORRECT[name])
    assert () == judgement.failed, [
        result.findings[:2] for result in judgement.results if result.findings
    ]
    undecided = {
        result.id: result.reason
        for result in judgement.results
        if result.verdict is Verdict.UNKNOWN and result.id not in _undecided()
    }
    assert {} == undecided


@pytest.mark.parametrize("seed", [11])
@pytest.mark.parametrize("name", sorted(CORRECT))
def test_a_correct_stack_is_clean_on_other_seeds(name: str, seed: int) -> None:
    """Nothing is found: rare cases, such as a dropped request whose task made the calls of others,
    come with some seeds only.
    """
    judgement = judged(CORRECT[name], seed=seed)
    assert () == judgement.failed, [
        result.findings[:2] for result in judgement.results if result.findings
    ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("factory", [_GroupWorkers, _ChecksFirst])
def test_workers_of_groups_are_clean_in_every_corner(factory: SubjectFactory, seed: int) -> None:
    """The calls of requests with one prompt, or one that begins another, come from one task."""
    report = rollproof.run_conformance(factory, flavours=("vllm",), seed=seed)
    failed = [check["id"] for check in report.to_dict()["checks"] if check["verdict"] == "fail"]
    assert [] == failed


class _MadeUp(_Unnamed):
    """Every third sample of its prompt is one that no engine sampled."""

    _count = 0

    async def rollout(self, request: Request) -> Rollout | None:
        self._count += 1
        rollout = await super().rollout(request)
        if self._count % 3 or rollout is None or not rollout.response_ids:
            return rollout
        sample = PartialSample(request=request, attempts=1)
        sample.response = [token % 7 + 500 for token in rollout.response_ids]
        return replace(rollout, response_ids=tuple(sample.response))


class _OneForAll(_Workers):
    """Workers call once for a prompt and answer all requests of it with that reply."""

    async def rollout(self, request: Request) -> Rollout | None:
        made = self.__dict__.setdefault("_made", {})
        if request.group is None:
            return await super().rollout(request)
        if request.group not in made:
            made[request.group] = asyncio.ensure_future(super().rollout(request))
        rollout = await asyncio.shield(made[request.group])
        return rollout and replace(rollout, request_id=request.request_id)


class _Cached(_Unnamed):
    """A cache in front of the engine answers a prompt that it knows."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        cache = self.__dict__.setdefault("_cache", {})
        if sent not in cache:
            cache[sent] = await super().call(server_id, sample, sent, budget)
        reply: EngineOutput = cache[sent]
        return reply


class _Doubled(_Unnamed):
    """The first sample of a prompt is delivered for all requests of it, which all called."""

    async def rollout(self, request: Request) -> Rollout | None:
        first = self.__dict__.setdefault("_first", {})
        rollout = await super().rollout(request)
        if request.group is None or rollout is None:
            return rollout
        kept: Rollout = first.setdefault(request.group, rollout)
        return replace(kept, request_id=request.request_id)


class _KeepsCheck(_WarmsUp):
    """The token of the health check stays in the buffer of the sample."""

    async def check(self) -> None:
        self._token = 1
        await super().check()

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        return replace(rollout, response_ids=(*rollout.response_ids, 9)[1:])


class _Hidden(_Unnamed):
    """Declares calls as internal whose replies it delivers."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        with self.fleet.internal():
            return await super().call(server_id, sample, sent, budget)


class _NeverLeaves(_Unnamed):
    """Enters a block of internal calls before its own calls and never leaves it."""

    async def rollout(self, request: Request) -> Rollout | None:
        self.fleet.internal().__enter__()
        return await super().rollout(request)


class _JudgesUndeclared(_Judges):
    """The same judge, in calls that continue the request."""

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await AsSampled.rollout(self, request)
        for server in self.fleet.servers.values():
            if rollout is not None and server.alive and not server.paused:
                ids = (*rollout.prompt_ids, *rollout.response_ids, 5, 6)
                await server.generate(prompt_ids=ids, max_tokens=2)
                break
        return rollout


class _LosesToken(_Dispatcher):
    """The dispatcher drops the last token of each reply."""

    def finished(self, sample: PartialSample) -> Rollout:
        rollout = super().finished(sample)
        assert rollout.logprobs is not None or not sample.request.want_logprobs
        return replace(rollout, response_ids=rollout.response_ids[1:])


FAULTY: dict[str, tuple[SubjectFactory, str]] = {
    "made up": (_MadeUp, "stitch.tokens"),
    "one for all": (_OneForAll, "stitch.sampled-by-engine"),
    "cached": (_Cached, "stitch.sampled-by-engine"),
    "doubled": (_Doubled, "stitch.tokens"),
    "keeps a health check": (_KeepsCheck, "stitch.tokens"),
    "hidden": (_Hidden, "stitch.sampled-by-engine"),
    "never leaves a block": (_NeverLeaves, "stitch.sampled-by-engine"),
    "judge undeclared": (_JudgesUndeclared, "stitch.resume-prompt"),
    "loses a token": (_LosesToken, "stitch.tokens"),
}


@pytest.mark.parametrize("name", sorted(FAULTY))
def test_a_faulty_stack_is_found(name: str) -> None:
    """The check that its fault belongs to fails."""
    factory, expected = FAULTY[name]
    judgement = judged(factory)
    assert expected in judgement.failed


class _OwnEnd(AsSampled):
    """Ends a cut response with an end token of its own, masked out, with filler rows."""

    options = ClientOptions(multi_turn=True)

    def finished(self, sample: PartialSample) -> Rollout:
        if sample.finish is FinishReason.LENGTH and sample.response:
            sample.response.append(0)
            sample.mask.append(0)
            sample.logprobs.append(float("nan"))
            sample.labels.append(None)
        return super().finished(sample)


@pytest.mark.parametrize("final_row", [None, *(kind for kind in Filler if kind is not Filler.NONE)])
def test_an_end_token_of_the_stack_is_no_fault(final_row: Filler | None) -> None:
    """Masked out, as the hint of stitch.tokens advises, it needs no row, or one of the declared
    filler.
    """

    class Client(_OwnEnd):
        options = ClientOptions(
            multi_turn=True,
            rows=Rows.FORWARDED if final_row is None else Rows.ALL,
            final_row=final_row or Filler.MINUS_ONE,
        )

    assert () == judged(Client, 40).failed
