"""The fake servers of a case, the weights that they serve, and the actions that change them.

The fleet numbers weights: the trainer's n-th weights are version n. They are published under the
label n, unless nothing is published or equal weights are published again. A ``true`` version
numbers weights; a label is what servers show.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from rollproof.core.case import Action, ActionKind, Case
from rollproof.core.contract import Contract, KvPolicy, MissingLogprobs
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import describe_error
from rollproof.core.events.rollout import (
    Fault,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.events.weights import Checksums
from rollproof.core.records import Version
from rollproof.core.trace import Recorder
from rollproof.errors import CaseError, UsageError
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.actions import FiredAction, Schedule, perform
from rollproof.fakes.engine.balancer import Balancer
from rollproof.fakes.engine.call_owners import CURRENT_REQUEST, CallOwners, InternalCalls
from rollproof.fakes.engine.checksums import tensor_checksums
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.fake_engine import MAX_LENGTH, FakeEngine
from rollproof.fakes.engine.flavours import Flavour, engine_contract, flavour_named
from rollproof.fakes.engine.harness_acts import harness_acts
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.label_form import in_form
from rollproof.fakes.engine.ray_handles import RayHandle
from rollproof.simulation.exception_policy import reraise_foreign

__all__ = ["CURRENT_REQUEST", "Fleet", "Load", "Updater"]

Updater: TypeAlias = "Callable[[int | None], Awaitable[None] | None]"
Load: TypeAlias = "Callable[[FakeEngine, int, Version], Coroutine[Any, Any, None]]"
"""Brings weights to a server, under a label."""


class Fleet:
    """The servers ``s0``, ``s1``, ... of ``case``, all with the weights of ``case.first_version``.

    Their label is that number, or in the form of the strings that the stack itself publishes.
    ``pause_mode`` and ``clear_cache`` are the defaults of ``sync``, and at first those of the case.
    """

    def __init__(self, case: Case, recorder: Recorder, *, first_label: str | None = None) -> None:
        self.case = case
        self.recorder = recorder
        _check(case)
        label: Version = case.first_version if first_label is None else first_label
        self.flavour: Flavour = flavour_named(case.flavour)
        self.policy: CodedPolicy = CodedPolicy.from_model(case.model, case.seed)
        self.pause_mode: PauseMode = case.pause_mode
        self.clear_cache: bool = case.clear_cache
        self._owners = owners = CallOwners(case.requests, recorder)
        self.schedule: Schedule = Schedule(case.actions, owners.of, self._fire, owners.draw)
        owners.latest = self.schedule.latest
        self.updates_failed: int = 0
        longest = max(
            len(request.prompt_ids) + (request.budget or 0) + sum(map(len, request.turns))
            for request in case.requests
        )
        self.servers: Mapping[str, FakeEngine] = {
            name: FakeEngine(
                name,
                self.policy,
                self.flavour,
                case.engine,
                recorder,
                version=case.first_version,
                label=label,
                hooks=self.schedule,
                max_length=case.engine.max_length or max(MAX_LENGTH, longest + 1),
            )
            for name in (f"s{i}" for i in range(case.servers))
        }
        self.balancer: Balancer = Balancer(tuple(self.servers))
        self._first_label = label
        self._labels = case.first_version
        self._trained = self._claimed = case.first_version
        self._updating = 0
        # set while no update runs
        self._quiet = asyncio.Event()
        self._quiet.set()
        # held while the harness itself changes weights or labels
        self._acting = asyncio.Lock()
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._true: dict[int, int] = {}
        self._merged: list[int] = []
        self._synced: tuple[int, Version] = (case.first_version, label)
        # one update at a time; the known bug updates-interleave does without this lock
        self._lock = asyncio.Lock()
        self._updater: Updater = self.sync
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._spawned = 0
        self._error: Exception | None = None
        self._giving_up = False
        for server in self.servers.values():
            server.trained_on(self.base_of)
            recorder.record(
                Weights(
                    server_id=server.server_id,
                    version=server.version,
                    label=server.label,
                    flushed=True,
                )
            )

    @property
    def first_label(self) -> str | None:
        """The first label in the form of those that the stack published, if these are strings.

        Only a run shows the form of a stack's labels: a stack that orders its strings cannot order
        them and a number.
        """
        label = self._shown(self.case.first_version)
        return label if isinstance(label, str) else None

    @property
    def engine_contract(self) -> Contract:
        """Return the contract of one engine call."""
        declared = engine_contract(self.flavour, self.case.model, self.kv_policy)
        # engines whose replies may lack logprobs have to say so
        if any(action.do is ActionKind.DROP_LOGPROBS for action in self.case.actions):
            return replace(declared, missing_logprobs=MissingLogprobs.NAN)
        return declared

    @property
    def kv_policy(self) -> KvPolicy:
        """Return whether KV of older weights is used after ``sync``.

        It may be used by frozen calls, or through the prefix cache.
        """
        mode = PauseMode(self.pause_mode)
        frozen = mode in (PauseMode.KEEP, PauseMode.IN_PLACE)
        cleared = self.clear_cache and mode is not PauseMode.IN_PLACE
        return (
            KvPolicy.KEEP
            if not cleared and (frozen or self.case.engine.prefix_cache)
            else KvPolicy.RECOMPUTE
        )

    def ray_handles(self) -> dict[str, RayHandle]:
        """Return Ray-style handles of the servers, by id."""
        return {name: RayHandle(server) for name, server in self.servers.items()}

    def internal(self) -> InternalCalls:
        """Return a context manager (``with`` or ``async with``): the engine calls inside belong to
        no request, and neither do those of tasks begun inside.

        For health checks, warm-up calls and judges that run inside a rollout::

            with fleet.internal():
                await server.generate(prompt_ids=[1], max_tokens=1)
        """
        return InternalCalls(self._owners)

    def next_version(self) -> int:
        """Return a new label."""
        self._labels += 1
        return self._labels

    def train(self, *, identity: bool = False, merge: bool = False) -> int:
        """Make new weights and return their label; with ``identity``, label the old ones again.

        With ``merge`` the trainer merges its adapter into its base model, and goes on with a new
        one.
        """
        label = self.next_version()
        if identity:
            self._true[label] = self._trained
        else:
            self._trained = label
        if merge:
            self._merged.append(label)
        return label

    def weights_of(self, label: int | None) -> int:
        """Return the true version of the weights under ``label``; ``None`` for the newest ones."""
        return self._trained if label is None else self._true.get(label, label)

    def base_of(self, version: int) -> int:
        """Return the weights of the base model on which the adapter of ``version`` was trained:
        ``version`` itself if the trainer merged that adapter into its base model.
        """
        return max(
            (merged for merged in self._merged if merged <= version),
            default=self.case.first_version,
        )

    def checksums(self, label: int | None) -> Mapping[str, str]:
        """Return the trainer's checksum of each tensor of the weights under ``label``, and record
        that they were told; ``None`` for the newest ones.
        """
        version = self.weights_of(label)
        digests = tensor_checksums(self.policy, version)
        self.recorder.record(Checksums(version=version, digests=digests))
        return digests

    def set_updater(self, updater: Updater) -> None:
        """Run weight updates by ``updater(label or None)``, the subject's procedure.

        The default is ``sync``.
        """
        self._updater = updater

    async def update(
        self,
        published: int | Callable[[], int | None] | None,
        *,
        prepare: Callable[[], None] = lambda: None,
    ) -> bool:
        """Run one weight update and return whether it succeeded.

        It begins when no skew is under way; ``prepare`` is called then. ``published`` is the label,
        or trains and returns it when the update begins: a trainer asks for its weights in the order
        in which it trained them. An error of the updater is recorded as a fault.
        """
        async with self._turn():
            label = published() if callable(published) else published
            if label is None:
                self._train_if_claimed()
            version = self.weights_of(label)
            self.recorder.record(Update(version=version, label=label, phase=UpdatePhase.ASKED))
            self._updating += 1
            self._quiet.clear()
            prepare()
        try:
            succeeded = await self._succeeds(lambda: self._updater(label))
        finally:
            self._updating -= 1
            if not self._updating:
                self._quiet.set()
        if label is not None or not succeeded:
            phase = UpdatePhase.ENDED if succeeded else UpdatePhase.FAILED
        else:  # without a label the stack chooses the weights
            version, phase = self._trained, UpdatePhase.ENDED
        self.recorder.record(Update(version=version, label=label, phase=phase))
        return succeeded

    async def skew(self, label: int, server_id: str) -> bool:
        """Run the default update on one server only; the others follow at the next sync."""
        with harness_acts():
            return await self._succeeds(
                lambda: self._sync(label, self._shown(label), servers=(server_id,))
            )

    @asynccontextmanager
    async def between_updates(self) -> AsyncIterator[None]:
        """Wait until no weight update runs, and let none begin within the block."""
        # A load, a label or a resume of the harness in the middle of a stack's own procedure would
        # look like the stack's, whose code cannot know of it.
        while True:
            self._waiting.add(asyncio.current_task())
            try:
                await self._quiet.wait()
            finally:
                self._waiting.discard(asyncio.current_task())
            async with self._turn():
                if self._updating:
                    continue
                yield
                return

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        self._waiting.add(asyncio.current_task())
        try:
            await self._acting.acquire()
        finally:
            self._waiting.discard(asyncio.current_task())
        try:
            yield
        finally:
            self._acting.release()

    async def _succeeds(self, update: Callable[[], Awaitable[None] | None]) -> bool:
        try:
            done = update()
            if inspect.isawaitable(done):
                await done
        except BaseException as error:
            # the run continues after any error of a stack's procedure, and is judged
            reraise_foreign(error)
            if self._giving_up and isinstance(error, asyncio.CancelledError):
                raise
            # the run continues: whether the stack recovers is what the checks judge
            self.updates_failed += 1
            # without server_id: the procedure failed. A broken transfer is recorded by its server.
            self.recorder.record(Fault(what="update-failure", detail=describe_error(error)))
            return False
        return True

    async def sync(
        self,
        version: int | None,
        *,
        mode: PauseMode | None = None,
        clear_cache: bool | None = None,
        servers: Iterable[str] | None = None,
        load: Load | None = None,
    ) -> None:
        """Run the default weight update on all living servers, or on ``servers``: pause, load,
        resume.

        Updates run one after the other. ``version`` is the label to publish; ``None`` for none. The
        servers are resumed after a failure, too. ``load(server, weights, label)`` brings the
        weights to a server; the default is ``server.load``. Raises the error of the transfer; a
        server that dies meanwhile is left out.
        """
        await self._sync(
            version, version, mode=mode, clear_cache=clear_cache, servers=servers, load=load
        )

    async def _sync(
        self,
        version: int | None,
        shown: Version,
        *,
        mode: PauseMode | None = None,
        clear_cache: bool | None = None,
        servers: Iterable[str] | None = None,
        load: Load | None = None,
    ) -> None:
        """Run ``sync``, and show ``shown`` for the label."""
        # claimed before the lock: an update loads the weights of the moment when it was called
        true = self._claim(version)
        async with self._lock:
            targets = [
                server for server in map(self._server, servers or self.servers) if server.alive
            ]
            # a subject may have set the plain name of the mode
            mode = PauseMode(self.pause_mode if mode is None else mode)
            clear = self.clear_cache if clear_cache is None else clear_cache
            try:
                await _each(server.pause(mode, clear) for server in targets)
                if load is None:
                    await _each(server.load(true, shown) for server in targets)
                else:
                    await _each(load(server, true, shown) for server in targets)
                # what a procedure of its own brings may be an adapter, and no base model
                if servers is None and load is None:
                    self._synced = (true, shown)
            finally:
                await _each(server.resume() for server in targets)

    async def revive(self, server_id: str) -> None:
        """Restart a dead server with the newest weights of the fleet, after a sync that runs.

        A procedure of the subject's own is not waited for: it may wait for the server.
        """
        async with self._lock:
            alive = [server for server in self.servers.values() if server.alive]
            candidates = [
                self._synced,
                *((server.version, server.label) for server in [*alive, self._server(server_id)]),
            ]
            version, label = max(candidates, key=lambda pair: pair[0])
            # the label that the fleet began with is the harness's own
            if isinstance(label, int):
                label = self._shown(label)
            with harness_acts():
                self._server(server_id).revive(version, label)
                # whoever restarts a server gives it the adapters that the others have
                if any(server.adapters for server in self.servers.values()):
                    others = [server for server in alive if server.version == version]
                    self._server(server_id).restore_adapters(others)

    def relabel(self) -> None:
        """Publish a new label on every living server; the weights stay."""
        label = self._shown(self.train(identity=True))
        self._synced = (self._synced[0], label)
        with harness_acts():
            for server in self.servers.values():
                if server.alive:
                    server.relabel(label)

    def _shown(self, label: int) -> int | str:
        """Return a label of the harness in the form of those that the stack publishes."""
        published = [server.published for server in self.servers.values() if server.published]
        published.append((self.case.first_version, self._first_label))
        return in_form(
            label,
            [
                ({version, *(n for n, true in self._true.items() if true == version)}, text)
                for version, text in published
            ],
        )

    async def settle(self) -> None:
        """Wait until the effects of all fired actions are complete.

        Raises the error of an action, unless it is a failed update. An action that outlasts the
        case's deadline is cancelled and recorded as the fault ``update-hung``.
        """
        while self._tasks:
            tasks = list(self._tasks.values())
            done, late = await asyncio.wait(tasks, timeout=self.case.deadline)
            if not done:
                self._giving_up = True
                for task in tasks:
                    if task in late and task not in self._waiting:
                        self.recorder.record(Fault(what="update-hung", detail=task.get_name()))
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error of a fired action, unless it is a failed update."""
        if self._error is not None:
            raise self._error

    def gauges(self) -> dict[str, float]:
        """Return gauges of servers and balancer that are zero when idle."""
        out = self.balancer.gauges()
        for server in self.servers.values():
            out.update(server.gauges())
        return out

    def _claim(self, label: int | None) -> int:
        """Return the weights that a sync loads, fixed when it is called, before it waits."""
        # during an update, each replica in turn gets the weights of that update
        if label is None and not self._updating:
            self._train_if_claimed()
        true = self.weights_of(label)
        self._labels = max(self._labels, label or 0)
        self._trained = max(self._trained, true)
        self._claimed = max(self._claimed, true)
        return true

    def _train_if_claimed(self) -> None:
        if self._trained <= self._claimed:
            self.train()

    def _server(self, server_id: str) -> FakeEngine:
        try:
            return self.servers[server_id]
        except KeyError:
            raise UsageError(
                f"The fleet has no server {server_id!r}; it has {list(self.servers)}."
            ) from None

    def _fire(self, action: Action, call: InflightCall) -> None:
        effect = perform(FiredAction(self, action, call))
        if effect is not None:
            self._spawn(
                self._guarded(effect), f"{action.do} at {action.when.request}/{action.when.tokens}"
            )

    async def _guarded(self, effect: Coroutine[Any, Any, None]) -> None:
        try:
            await effect
        except ServerDied:
            return  # the server that an action aimed at died first
        except Exception as error:  # noqa: BLE001 - a bug of ours or of the fake must end the run, in settle
            self._error = self._error or error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._spawned += 1
        number = self._spawned
        # actions belong to no request, so they must not run in the context of one
        context = self.schedule.context.copy()
        task = asyncio.get_running_loop().create_task(
            work, name=f"action {number}: {name}", context=context
        )
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))


async def _each(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all and wait for all; raise the first error other than the death of a server."""
    for outcome in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, ServerDied):
            raise outcome


def _check(case: Case) -> None:
    names = [f"s{i}" for i in range(case.servers)]
    problems = []
    if not case.engine.step > 0:
        problems.append(f"engine.step={case.engine.step!r} must be above 0 virtual seconds.")
    problems += [
        f"The action {action.do} names server {action.server!r}; the case has {names}."
        for action in case.actions
        if action.server is not None and action.server not in names
    ]
    try:
        flavour_named(case.flavour)
    except UsageError as error:
        problems.append(str(error))
    if problems:
        raise CaseError("This case cannot be run:\n  - " + "\n  - ".join(problems))
