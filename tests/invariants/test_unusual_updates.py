"""Correct stacks whose update procedures are their own: no check finds anything under random
schedules, and none is unknown for a reason that is not so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import pytest

from rollproof.core.case import ActionKind
from rollproof.core.contract import Contract, KvPolicy, Versions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.clients.reference_clients import AsSampled, EngineKeep
from rollproof.fakes.engine.exceptions import ServerDied, TransferFailed
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Tally
from rollproof.verification.contract_probe import probe
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import random_cases
from rollproof.verification.traces import judge_events

__all__ = ["ODD"]


class _Own(AsSampled):
    """Pause, load and resume of its own, one update after the other; a server that dies is left
    out.
    """

    mode: ClassVar[PauseMode] = PauseMode.ABORT

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self.turn = asyncio.Lock()

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """Return this procedure's own."""
        return self.mode

    async def update_weights(self, version: int | None) -> None:
        weights = self.fleet.weights_of(version)
        async with self.turn:
            servers = [server for server in self.fleet.servers.values() if server.alive]
            try:
                await self.each(servers, lambda server: server.pause(self.mode, True))
                await self.each(servers, lambda server: self.load(server, weights, version))
            finally:
                await self.each(servers, lambda server: server.resume())

    async def load(self, server: FakeEngine, weights: int, version: int | None) -> None:
        """Load on one server."""
        await server.load(weights, version)

    @staticmethod
    async def each(servers: Iterable[FakeEngine], step: object) -> None:
        """Do a step on all servers at once; raise its first error, except a death."""
        done = await asyncio.gather(
            *(step(server) for server in servers),  # type: ignore[operator]
            return_exceptions=True,
        )
        for outcome in done:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDied):
                raise outcome


class _Drains(_Own):
    """Lets the calls in flight end first."""

    mode = PauseMode.WAIT


class _Rolling(_Own):
    """One replica after the other, so that two versions serve for a while."""

    mode = PauseMode.WAIT

    async def update_weights(self, version: int | None) -> None:
        weights = self.fleet.weights_of(version)
        async with self.turn:
            for server in self.fleet.servers.values():
                if not server.alive:
                    continue
                try:
                    await server.pause(self.mode)
                    await self.load(server, weights, version)
                except ServerDied:
                    continue
                finally:
                    await self.each([server], lambda one: one.resume())
                await asyncio.sleep(2.0)


class _OnTheFly(EngineKeep):
    """Loads into running engines, and keeps KV of older weights, as declared."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self.turn = asyncio.Lock()

    def declared(self, fleet: Fleet) -> Contract:
        return replace(
            super().declared(fleet),
            kv_policy=KvPolicy.KEEP,
            versions=Versions.NONE,
            updates_pause=False,
        )

    async def update_weights(self, version: int | None) -> None:
        weights = self.fleet.weights_of(version)
        async with self.turn:
            for server in self.fleet.servers.values():
                if server.alive:
                    await server.load(weights, version)


class _LabelApart(_Own):
    """Publishes the label by a call of its own, after the load and before the resume."""

    async def load(self, server: FakeEngine, weights: int, version: int | None) -> None:
        # without a label nothing is known of the weights that serve
        await server.load(weights, server.label if version is not None else None)
        if version is not None:
            server.relabel(version)


class _LabelFirst(_Own):
    """Publishes the label before the load, while nothing is served."""

    async def load(self, server: FakeEngine, weights: int, version: int | None) -> None:
        if version is not None:
            server.relabel(version)
        try:
            await server.load(weights, version)
        except TransferFailed:
            # the old weights get their label back before they serve again
            server.relabel(self.shown[server.server_id])
            raise
        self.shown[server.server_id] = version

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self.shown = {name: server.label for name, server in fleet.servers.items()}


class _Merges(_Own):
    """Merges updates that are asked for at once into one load of the newest weights, and completes
    all of them.
    """

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._next: tuple[int | None, asyncio.Future[None]] | None = None
        self._runs = False

    async def update_weights(self, version: int | None) -> None:
        # the newest weights replace those of an update that waits
        if self._next is None:
            self._next = (version, asyncio.get_running_loop().create_future())
        else:
            self._next = (version, self._next[1])
        done = self._next[1]
        if not self._runs:
            self._runs = True
            try:
                # the trainer waits for others that are asked for in this moment
                await asyncio.sleep(0)
                while self._next is not None:
                    (newest, waiting), self._next = self._next, None
                    try:
                        await super().update_weights(newest)
                        waiting.set_result(None)
                    except Exception as error:  # noqa: BLE001 - each waiting update gets it
                        waiting.set_exception(error)
            finally:
                self._runs = False
        await done


class _Repeats(_Own):
    """Repeats a broken transfer until it works."""

    async def load(self, server: FakeEngine, weights: int, version: int | None) -> None:
        while True:
            try:
                return await server.load(weights, version)
            except TransferFailed:
                await asyncio.sleep(2.0)


class _TwoPhases(_Own):
    """Uploads while the servers serve, and switches all of them at once."""

    async def update_weights(self, version: int | None) -> None:
        weights = self.fleet.weights_of(version)
        async with self.turn:
            await asyncio.sleep(4.0)
            servers = [server for server in self.fleet.servers.values() if server.alive]
            try:
                await self.each(servers, lambda server: server.pause(self.mode, True))
                for server in servers:
                    if server.alive:
                        server.load_now(weights, version)
            finally:
                await self.each(servers, lambda server: server.resume())


class _WaitsForTheDead(_Own):
    """Waits for dead servers to come back, so that an update reaches all of them."""

    async def update_weights(self, version: int | None) -> None:
        weights = self.fleet.weights_of(version)
        async with self.turn:
            left = list(self.fleet.servers.values())
            while left:
                alive = [server for server in left if server.alive]
                try:
                    await self.each(alive, lambda server: server.pause(self.mode, True))
                    await self.each(alive, lambda server: self.load(server, weights, version))
                finally:
                    await self.each(alive, lambda server: server.resume())
                left = [server for server in left if not server.alive or server.version < weights]
                await asyncio.sleep(1.0)


class _Lazy(_Own):
    """Pauses the servers and returns; each one loads and is resumed in the background."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._tasks: list[asyncio.Task[None]] = []

    async def update_weights(self, version: int | None) -> None:
        weights = self.fleet.weights_of(version)
        async with self.turn:
            # the background of the update before
            await self.stop()
            for server in self.fleet.servers.values():
                if server.alive:
                    await self.each([server], lambda one: one.pause(self.mode, True))
                    self._tasks.append(asyncio.ensure_future(self._bring(server, weights, version)))

    async def _bring(self, server: FakeEngine, weights: int, version: int | None) -> None:
        with suppress(ServerDied):
            while True:
                try:
                    await server.load(weights, version)
                    break
                except TransferFailed:
                    continue
            await server.resume()

    async def stop(self) -> None:
        """Wait for the background."""
        await asyncio.gather(*self._tasks)


class _WrongClaims(_Own):
    """Claims of every load that it brings equal weights."""

    async def load(self, server: FakeEngine, weights: int, version: int | None) -> None:
        await server.load(weights, version, identity=True)


class _OwnNumbers(_Own):
    """Numbers its updates itself, and shows these numbers."""

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._numbers = {fleet.case.first_version: fleet.case.first_version}

    async def load(self, server: FakeEngine, weights: int, version: int | None) -> None:
        number = self._numbers.setdefault(weights, max(self._numbers.values()) + 1)
        await server.load(weights, number)


ODD: dict[str, SubjectFactory] = {
    "own": _Own,
    "drains": _Drains,
    "rolling": _Rolling,
    "on the fly": _OnTheFly,
    "label apart": _LabelApart,
    "label first": _LabelFirst,
    "merges": _Merges,
    "repeats": _Repeats,
    "two phases": _TwoPhases,
    "waits for the dead": _WaitsForTheDead,
    "lazy": _Lazy,
    "wrong claims": _WrongClaims,
    "own numbers": _OwnNumbers,
}
"""Update procedures by name."""


def _judged(factory: SubjectFactory, seed: int, count: int) -> Tally:
    """What all checks say of a stack under random schedules, on two engines."""
    tally = Tally(default_registry())
    for flavour, contract, model in probe(factory, ("vllm", "sglang")):
        for drawn in random_cases(seed, count, flavour=flavour, contract=contract, model=model):
            # its procedures clear the cache, whatever the case says
            trace = run_case(factory, replace(drawn, clear_cache=True))
            judge_events(trace.header, trace.events, tally)
    return tally


@pytest.mark.parametrize("name", sorted(ODD))
def test_an_update_procedure_of_its_own_is_not_blamed(name: str) -> None:
    """Nothing is found, and the updates were looked at."""
    judgement = _judged(ODD[name], 31, 15).judgement()
    assert () == judgement.failed, [
        result.findings for result in judgement.results if result.findings
    ]
    assert Verdict.PASS == judgement["weights.update-loads"].verdict
    assert not [result.reason for result in judgement.results if "crashed" in result.reason]


@pytest.mark.parametrize("name", sorted(ODD))
def test_an_identity_update_is_known_as_one(name: str) -> None:
    """Whatever the procedure says of it, or does not say."""
    tally = Tally(default_registry())
    trace = run_case(
        ODD[name],
        case(
            act(ActionKind.SYNC_IDENTITY, 2),
            requests=(request(max_tokens=20), request("r1", (31, 32))),
            arrivals=(0.0, 3.5),
        ),
    )
    judge_events(trace.header, trace.events, tally)
    judgement = tally.judgement()
    assert Verdict.PASS == judgement["weights.identity-update-changes-nothing"].verdict
    assert () == judgement.failed


def test_an_update_that_waits_for_a_dead_server_ends() -> None:
    """The harness revives the server while the update runs, and the load that follows is no
    repetition.
    """
    trace = run_case(
        _WaitsForTheDead,
        case(
            act(ActionKind.KILL, 1, server="s1", steps=6),
            act(ActionKind.SYNC, 2),
            requests=(request(max_tokens=20), request("r1", (31, 32))),
            servers=2,
        ),
    )
    tally = Tally(default_registry())
    judge_events(trace.header, trace.events, tally)
    judgement = tally.judgement()
    assert () == judgement.failed
    assert Verdict.PASS == judgement["weights.updates-end"].verdict


def test_labels_of_its_own_rule_out_weights_without_a_label() -> None:
    """A stack that numbers its updates itself leaves no weights unlabelled, whatever the case asks
    for: what is promised of such weights does not apply. For others it does.
    """
    for name, verdict in (("own numbers", Verdict.NOT_APPLICABLE), ("own", Verdict.PASS)):
        judgement = _judged(ODD[name], 31, 40).judgement()
        for check_id in ("versions.unlabelled-update", "versions.unknown-stays-unknown"):
            assert verdict == judgement[check_id].verdict, (name, judgement[check_id].reason)


def test_a_label_of_its_own_that_the_case_had_published_decides_nothing() -> None:
    """The case relabels the first weights as 1, and the stack, which cannot know, gives that number
    to the next ones. Such a run shows neither that it labels all weights nor that it does not.
    """
    tally = Tally(default_registry())
    for relabels in (True, False):
        actions = [act(ActionKind.SYNC_UNLABELLED, 4)]
        if relabels:
            actions.insert(0, act(ActionKind.RELABEL, 2))
        schedule = case(*actions, requests=(request(max_tokens=20),), flavour="sglang")
        trace = run_case(_OwnNumbers, schedule)
        judge_events(trace.header, trace.events, tally)
    result = tally.judgement()["versions.unlabelled-update"]
    assert Verdict.NOT_APPLICABLE == result.verdict, result.reason
