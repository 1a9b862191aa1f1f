"""Correct stacks that work in an unusual way: the families weights and lifecycle find nothing, and
some checks still have a verdict.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollproof.core.case import ActionKind, Case, EngineOptions
from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import EngineOutput, Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import (
    REFERENCES,
    AsSampled,
    EngineKeep,
    PartialSample,
)
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.judging.checks import Verdict
from rollproof.verification.contract_probe import probe
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import random_cases
from rollproof.verification.traces import judge
from tests.support.trace_script import REGISTRY

_PAIR = (request(), request("r1", (31, 32, 33)))
_SYNC = act(ActionKind.SYNC, 3)
_KILL = act(ActionKind.KILL, 4)
_DOWN = act(ActionKind.KILL, 4, steps=30)
_FAILS = act(ActionKind.SYNC_FAILS, 3)
_TWICE = act(ActionKind.SYNC_TWICE, 3)
_LATE = act(ActionKind.LATE_REPLY, 2, steps=12)


class _TriesAgain(AsSampled):
    """Repeats a broken transfer under the same pause, until it works; then resumes."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.pause(PauseMode.ABORT)
            for _ in range(3):
                try:
                    await server.load(self.fleet.weights_of(version), version)
                    break
                except TransferFailed:
                    await asyncio.sleep(5.0)
            await server.resume()


class _PausesAgain(AsSampled):
    """Begins the whole procedure again after a broken transfer, pause included, without a resume in
    between.
    """

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            for _ in range(3):
                await server.pause(PauseMode.ABORT)
                try:
                    await server.load(self.fleet.weights_of(version), version)
                    break
                except TransferFailed:
                    await asyncio.sleep(1.0)
            await server.resume()


class _Rolling(AsSampled):
    """One replica after another, so that two versions serve for a while; updates wait for each
    other.
    """

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._turn = asyncio.Lock()

    async def update_weights(self, version: int | None) -> None:
        async with self._turn:
            for server in self.fleet.servers.values():
                await server.pause(PauseMode.WAIT)
                try:
                    await server.load(self.fleet.weights_of(version), version)
                finally:
                    await server.resume()
                await asyncio.sleep(3.0)


class _OneByOne(AsSampled):
    """Gives each replica the fleet's procedure for itself, also where the weights have no label."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers:
            await self.fleet.sync(version, servers=(server,))


class _Races(AsSampled):
    """Calls every server at once, takes the first answer, and aborts the other call by its id."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        tasks = {}
        for server in self.fleet.servers.values():
            sample.attempts += 1
            handle = self.handle(sample)
            call = server.generate(
                prompt_ids=list(sent),
                max_tokens=budget,
                request_id=handle,
                sampling=self.sampling_for(sample),
            )
            tasks[asyncio.ensure_future(call)] = (server, handle)
        done, slow = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in slow:
            server, handle = tasks[task]
            await server.abort(handle)
        await asyncio.gather(*tasks, return_exceptions=True)
        return next(task for task in tasks if task in done).result()


class _OnTheFly(EngineKeep):
    """Loads into the running engine without a pause, and publishes the label later; KV of older
    weights is kept, as declared.
    """

    def declared(self, fleet: Fleet) -> Contract:
        return replace(
            super().declared(fleet), kv_policy="keep", versions="none", updates_pause=False
        )

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.load(self.fleet.weights_of(version), None)
        if version is not None:
            for server in self.fleet.servers.values():
                server.relabel(version)


class _Hedges(AsSampled):
    """Sends a slow call a second time, takes the first answer, and hangs up on the other."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        first = asyncio.ensure_future(super().call(server_id, sample, sent, budget))
        done, _ = await asyncio.wait([first], timeout=4.5)
        if done:
            return first.result()
        second = asyncio.ensure_future(super().call(server_id, sample, sent, budget))
        done, slow = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return min(done, key=lambda task: task is second).result()


class _StartsOver(AsSampled):
    """Promises no resume: a sample starts again when its server dies."""

    resume = ResumeBy.NONE

    def resumes(self, sample: PartialSample) -> bool:
        return False

    def aborts_surface(self, fleet: Fleet) -> bool:
        return False

    async def rollout(self, request: Request) -> Rollout | None:
        while True:
            sample = PartialSample(request=request)
            try:
                output = await self.call(
                    "s0", sample, self.resume_prompt(sample), self.next_budget(sample)
                )
            except ConnectionError:
                await self.wait()
                continue
            self.absorb(sample, len(request.prompt_ids), output)
            sample.finish = self.finish_reason(sample, output)
            return self.finished(sample)


class _GivesUp(AsSampled):
    """Reports to its caller that the server died, instead of continuing elsewhere."""

    async def attempt(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        return await self.call("s0", sample, sent, budget)


class _Polls(AsSampled):
    """Calls a gated server again every two steps, as long as the update takes."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.pause(PauseMode.ABORT)
        await asyncio.sleep(700.0)
        for server in self.fleet.servers.values():
            await server.load(self.fleet.weights_of(version), version)
            await server.resume()

    async def wait(self) -> None:
        await asyncio.sleep(2.0)


class _PollsTheDead(AsSampled):
    """Calls its only server again every ten milliseconds while it is down."""

    async def wait(self) -> None:
        await asyncio.sleep(0.01)


class _Lazy(AsSampled):
    """An update only says what to load; each server loads it before the next call to it."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._wanted: int | None = None
        self._have: dict[str, int | None] = {}
        self._locks = {name: asyncio.Lock() for name in fleet.servers}

    async def update_weights(self, version: int | None) -> None:
        self._wanted = version

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        server = self.fleet.servers[server_id]
        async with self._locks[server_id]:
            while self._have.get(server_id) != self._wanted:
                version = self._wanted
                await server.pause(PauseMode.ABORT)
                await server.load(self.fleet.weights_of(version), version)
                await server.resume()
                self._have[server_id] = version
        return await super().call(server_id, sample, sent, budget)


@pytest.mark.parametrize(
    ("factory", "schedule", "exercised"),
    [
        (
            _Lazy,
            case(
                _SYNC,
                requests=(*_PAIR, request("r2", (41, 42)), request("r3", (51, 52))),
                arrivals=(0.0, 0.0, 12.0, 12.0),
                servers=2,
            ),
            "weights.update-loads",
        ),
        (_TriesAgain, case(_FAILS), "weights.every-pause-resumes"),
        (_PausesAgain, case(_FAILS), "weights.every-pause-resumes"),
        (_Rolling, case(_SYNC, requests=_PAIR, servers=2), "weights.every-replica-updated"),
        (_Rolling, case(_TWICE, requests=_PAIR, servers=2), "weights.updates-do-not-interleave"),
        (_Rolling, case(_FAILS, requests=_PAIR, servers=2), "weights.failed-update-resumes"),
        (_Rolling, case(_SYNC, _KILL, requests=_PAIR, servers=2), "lifecycle.survives-death"),
        (
            _OneByOne,
            case(act(ActionKind.SYNC_UNLABELLED, 3), requests=_PAIR, servers=2),
            "weights.every-replica-updated",
        ),
        (_OneByOne, case(_TWICE, requests=_PAIR, servers=2), "weights.every-replica-updated"),
        (_Races, case(act(ActionKind.EVICT, 2), servers=2), "lifecycle.no-orphan-calls"),
        (_OnTheFly, case(_SYNC, requests=_PAIR, servers=2), "weights.label-only-keeps-calls"),
        (_OnTheFly, case(_TWICE), "weights.newest-update-stays"),
        (_Hedges, case(requests=_PAIR), "lifecycle.no-orphan-calls"),
        (_Hedges, case(_LATE), "lifecycle.one-reply-per-retry"),
        (_Hedges, case(_SYNC, requests=_PAIR), "lifecycle.aborts-do-not-surface"),
        (_StartsOver, case(_KILL), "lifecycle.survives-death"),
        (_GivesUp, case(_KILL), "lifecycle.no-error-without-fault"),
        (_GivesUp, case(act(ActionKind.LOSE_REPLY, 2)), "lifecycle.no-error-without-fault"),
        (_Polls, case(_SYNC, flavour="vllm-gated"), "lifecycle.bounded-attempts"),
        (_PollsTheDead, case(_DOWN), "lifecycle.bounded-attempts"),
        (
            EngineKeep,
            case(
                _SYNC,
                pause_mode=PauseMode.IN_PLACE,
                clear_cache=False,
                engine=EngineOptions(prefix_cache=True),
            ),
            "weights.no-token-while-paused",
        ),
        (
            EngineKeep,
            case(_SYNC, pause_mode=PauseMode.RETRACT, flavour="sglang"),
            "weights.no-stale-cache",
        ),
        (
            AsSampled,
            case(act(ActionKind.SKEW, 3), requests=_PAIR, servers=2),
            "weights.served-after-update",
        ),
        (
            AsSampled,
            case(act(ActionKind.SKEW, 2), act(ActionKind.SYNC, 4), requests=_PAIR, servers=2),
            "weights.every-replica-updated",
        ),
        (AsSampled, case(act(ActionKind.SYNC, 6)), "weights.updates-end"),
        (
            AsSampled,
            case(act(ActionKind.SYNC_IDENTITY, 3)),
            "weights.identity-update-changes-nothing",
        ),
    ],
)
def test_an_unusual_stack_passes(factory: SubjectFactory, schedule: Case, exercised: str) -> None:
    """No check of the two families finds anything, and the named one has really looked."""
    judgement = judge(run_case(factory, schedule), REGISTRY)
    assert () == judgement.failed, [
        result.findings for result in judgement.results if result.findings
    ]
    assert Verdict.PASS == judgement[exercised].verdict, judgement[exercised].reason
    assert not [result.reason for result in judgement.results if "crashed" in result.reason]


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_the_references_pass(name: str) -> None:
    """Every reference manager on every flavour that fits it, under a few drawn schedules each."""
    for flavour, contract, model in probe(REFERENCES[name], None):
        for drawn in random_cases(31, 4, flavour=flavour, contract=contract, model=model):
            if contract.kv_policy == "recompute":
                drawn = replace(drawn, clear_cache=True)
            judgement = judge(run_case(REFERENCES[name], drawn), REGISTRY)
            assert () == judgement.failed, (
                flavour,
                drawn,
                [result.findings for result in judgement.results if result.findings],
            )
