"""Fleet: the fake servers of a case, the weights that they serve, and what happens to them.

Weights are numbered by the fleet: the trainer's n-th weights are version n, and are published under
the label n unless nothing is published, or equal weights are published again. ``true`` versions
number weights, labels are what is shown.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

from rollproof.core.case import Action, Case
from rollproof.core.contract import Contract, KvPolicy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import told
from rollproof.core.events.rollout import (
    Fault,
    Observation,
    Result,
    Submit,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import FinishReason, Version
from rollproof.core.trace import Recorder
from rollproof.errors import CaseError, UsageError
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.actions import Schedule, Shot, perform
from rollproof.fakes.engine.balancer import Balancer
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.fake_engine import MAX_LENGTH, FakeEngine
from rollproof.fakes.engine.flavours import Flavour, engine_contract, flavour_named
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.ray_handles import RayHandle
from rollproof.simulation.exception_policy import pass_on

__all__ = ["CURRENT_REQUEST", "Fleet", "Updater"]

CURRENT_REQUEST: ContextVar[str | None] = ContextVar("rollproof_current_request", default=None)
"""The request that the running task works for; set by whoever calls ``rollout``."""

Updater: TypeAlias = "Callable[[int | None], Awaitable[None] | None]"


class Fleet:
    """The servers ``s0``, ``s1``, ... of ``case``, all with the weights of ``case.first_version``.

    ``pause_mode`` and ``clear_cache`` are what ``sync`` uses unless it is told otherwise; a subject
    whose own procedure differs sets them in ``start``. Must be made inside a running event loop.
    Raises ``CaseError`` for a case that cannot be run.
    """

    def __init__(self, case: Case, recorder: Recorder) -> None:
        self.case = case
        self.recorder = recorder
        _check(case)
        self.flavour: Flavour = flavour_named(case.flavour)
        self.policy: CodedPolicy = CodedPolicy.from_model(case.model, case.seed)
        self.pause_mode: PauseMode = case.pause_mode
        self.clear_cache: bool = case.clear_cache
        self.schedule: Schedule = Schedule(case.actions, self._owner, self._fire)
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
                label=case.first_version,
                hooks=self.schedule,
                max_length=max(MAX_LENGTH, longest + 1),
            )
            for name in (f"s{i}" for i in range(case.servers))
        }
        self.balancer: Balancer = Balancer(tuple(self.servers))
        self._labels = case.first_version
        self._trained = self._claimed = case.first_version
        self._updating = 0
        self._true: dict[int, int] = {}
        self._synced: tuple[int, Version] = (case.first_version, case.first_version)
        self._lock = asyncio.Lock()
        self._updater: Updater = self.sync
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._spawned = 0
        self._error: Exception | None = None
        self._giving_up = False
        for server in self.servers.values():
            recorder.record(
                Weights(
                    server_id=server.server_id,
                    version=server.version,
                    label=server.label,
                    flushed=True,
                )
            )

    @property
    def engine_contract(self) -> Contract:
        """What the servers promise, call by call."""
        return engine_contract(self.flavour, self.case.model, self.kv_policy)

    @property
    def kv_policy(self) -> KvPolicy:
        """Whether KV of older weights is used after ``sync``: in frozen calls, or through the
        prefix cache.
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
        """The servers behind handles that look like those of Ray actors, by id."""
        return {name: RayHandle(server) for name, server in self.servers.items()}

    def next_version(self) -> int:
        """A label that was not used before."""
        self._labels += 1
        return self._labels

    def train(self, *, identity: bool = False) -> int:
        """The trainer makes new weights; returns their label. With ``identity`` a new label for the
        weights it has.
        """
        label = self.next_version()
        if identity:
            self._true[label] = self._trained
        else:
            self._trained = label
        return label

    def weights_of(self, label: int | None) -> int:
        """The true version of the weights that are published under ``label``; ``None``: those that
        the trainer has now.
        """
        return self._trained if label is None else self._true.get(label, label)

    def set_updater(self, updater: Updater) -> None:
        """Have weight updates done by ``updater(label or None)``: the subject's own procedure.
        Default: ``sync``.
        """
        self._updater = updater

    async def update(self, label: int | None) -> bool:
        """One weight update by the updater; whether it worked. What it raises is recorded as a
        fault, not raised.
        """
        if label is None:
            self._train_if_claimed()
        version = self.weights_of(label)
        self.recorder.record(Update(version=version, label=label, phase=UpdatePhase.ASKED))
        self._updating += 1
        try:
            worked = await self._tried(lambda: self._updater(label))
        finally:
            self._updating -= 1
        if label is not None or not worked:
            phase = UpdatePhase.ENDED if worked else UpdatePhase.FAILED
        else:  # without a label it is up to the stack which weights those are
            version, phase = self._trained, UpdatePhase.ENDED
        self.recorder.record(Update(version=version, label=label, phase=phase))
        return worked

    async def skew(self, label: int, server_id: str) -> bool:
        """The default update of one server alone; the others follow at the next sync."""
        return await self._tried(lambda: self.sync(label, servers=(server_id,)))

    async def _tried(self, update: Callable[[], Awaitable[None] | None]) -> bool:
        try:
            done = update()
            if inspect.isawaitable(done):
                await done
        except (
            BaseException
        ) as error:  # whatever a stack's procedure raises, the run goes on and is judged
            pass_on(error)
            if self._giving_up and isinstance(error, asyncio.CancelledError):
                raise
            self.updates_failed += 1
            # without a server: the whole procedure gave up, where the engine's own record says that
            # one transfer broke
            self.recorder.record(Fault(what="update-failure", detail=told(error)))
            return False
        return True

    async def sync(
        self,
        version: int | None,
        *,
        mode: PauseMode | None = None,
        clear_cache: bool | None = None,
        servers: Iterable[str] | None = None,
    ) -> None:
        """The default weight update: pause, load, resume, on all living servers (or on
        ``servers``); one at a time.

        ``version`` is the label to publish (``None``: no label). Whatever fails, the servers are
        resumed. Raises what the transfer raised; a server that dies meanwhile is left out.
        """
        true = self._claim(version)
        async with self._lock:
            targets = [
                server for server in map(self._server, servers or self.servers) if server.alive
            ]
            mode = PauseMode(
                self.pause_mode if mode is None else mode
            )  # a subject may have set its plain name
            clear = self.clear_cache if clear_cache is None else clear_cache
            try:
                await _each(server.pause(mode, clear) for server in targets)
                await _each(
                    server.load(true, version, identity=true == server.version)
                    for server in targets
                )
                if servers is None:
                    self._synced = (true, version)
            finally:
                await _each(server.resume() for server in targets)

    async def revive(self, server_id: str) -> None:
        """Bring a dead server back, with the newest weights that the fleet serves; after the sync
        that runs, if one does.
        """
        async with self._lock:
            alive = [server for server in self.servers.values() if server.alive]
            known = [
                self._synced,
                *((server.version, server.label) for server in [*alive, self._server(server_id)]),
            ]
            version, label = max(known, key=lambda pair: pair[0])
            self._server(server_id).revive(version, label)

    def relabel(self) -> None:
        """Publish a new label on every living server; the weights stay."""
        label = self.train(identity=True)
        self._synced = (self._synced[0], label)
        for server in self.servers.values():
            if server.alive:
                server.relabel(label)

    async def settle(self) -> None:
        """Wait until every action that fired has done its work. Raises what an action raised beyond
        a failed update.

        An action that outlasts the case's deadline is cancelled and recorded as the fault
        ``update-hung``.
        """
        while self._tasks:
            tasks = list(self._tasks.values())
            done, late = await asyncio.wait(tasks, timeout=self.case.deadline)
            if not done:
                self._giving_up = True
                for task in tasks:
                    if task in late:
                        self.recorder.record(Fault(what="update-hung", detail=task.get_name()))
                        task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what an action that fired has raised so far, beyond a failed update."""
        if self._error is not None:
            raise self._error

    def gauges(self) -> dict[str, float]:
        """Counters of servers and balancer that return to where they started."""
        out = self.balancer.gauges()
        for server in self.servers.values():
            out.update(server.gauges())
        return out

    def _claim(self, label: int | None) -> int:
        """The weights that a sync will load: fixed when it is asked for, however long it then waits
        for its turn.
        """
        if (
            label is None and not self._updating
        ):  # while an update runs, replica after replica gets the weights that it is for
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
        deed = perform(Shot(self, action, call))
        if deed is not None:
            self._spawn(
                self._guarded(deed), f"{action.do} at {action.when.request}/{action.when.tokens}"
            )

    async def _guarded(self, deed: Coroutine[Any, Any, None]) -> None:
        try:
            await deed
        except ServerDied:
            return  # the server that an action aimed at died first
        except Exception as error:  # noqa: BLE001 - ours, or a fault of the fake: either must end the run, in ``settle``
            self._error = self._error or error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._spawned += 1
        number = self._spawned
        context = self.schedule.context.copy()
        task = asyncio.get_running_loop().create_task(
            work, name=f"action {number}: {name}", context=context
        )
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> str:
        """Whose call this is: the task's request, or the one whose prompt is the longest that the
        call starts with.
        """
        current = CURRENT_REQUEST.get()
        if any(rid == request.request_id for request in self.case.requests):
            return rid or ""
        fitting = [
            request
            for request in self.case.requests
            if prompt_ids[: len(request.prompt_ids)] == request.prompt_ids
        ]
        if current is not None and (
            not fitting or any(request.request_id == current for request in fitting)
        ):
            return self._beginning(current, prompt_ids) or current
        # a worker that serves several rollouts runs in the context of the one that started it:
        # there the prompt decides
        if not fitting:
            return ""
        longest = max(len(request.prompt_ids) for request in fitting)
        twins = [request.request_id for request in fitting if len(request.prompt_ids) == longest]
        return min(twins, key=lambda twin: self._unlikely(twin, prompt_ids))

    def _beginning(self, current: str, prompt_ids: tuple[int, ...]) -> str | None:
        """The twin of ``current`` whose first call this is, where it cannot be ``current``'s next."""
        if not self._ended_by_engine(current, prompt_ids):
            return None
        asked = {
            event.request.request_id: event.request.prompt_ids
            for event in self.recorder.events
            if isinstance(event, Submit)
        }
        ended = {event.request_id for event in self.recorder.events if isinstance(event, Result)}
        fresh = [
            twin
            for twin, prompt in asked.items()
            if prompt == asked.get(current) == prompt_ids and twin not in self.schedule.latest
        ]
        return next((twin for twin in fresh if twin not in ended), None)

    def _ended_by_engine(self, request_id: str, prompt_ids: tuple[int, ...]) -> bool:
        """Whether an engine ended the request's last call by itself, and a call with these ids
        would begin anew.

        Not so where something befell that call: who never heard its reply asks again with what he
        had.
        """
        last = self.schedule.latest.get(request_id)
        if (
            last is None
            or last.ended is None
            or last.ended[0] is FinishReason.ABORT
            or len(prompt_ids) >= len(last.ids)
        ):
            return False
        return not any(
            isinstance(event, Fault) and event.call_id == last.call_id
            for event in self.recorder.events
        )

    def _unlikely(
        self, request_id: str, prompt_ids: tuple[int, ...]
    ) -> tuple[bool, bool, bool, bool, bool, int]:
        """Of requests that share a prompt: what speaks against one, the strongest first.

        That it has ended; that it was not submitted yet; that it has a call out already; that an
        engine ended its last one and this one begins anew; that what the call adds to its last one
        is not what its environment said since; and how many tokens the call adds to its last one,
        or leaves out.
        """
        events = [
            event
            for event in self.recorder.events
            if getattr(event, "request_id", None) == request_id
        ]
        ended = any(isinstance(event, Result) for event in events)
        early = not any(
            isinstance(event, Submit) and event.request.request_id == request_id
            for event in self.recorder.events
        )
        last = self.schedule.latest.get(request_id)
        if last is None:
            return (ended, early, False, False, False, len(prompt_ids))
        shorter = min(len(last.ids), len(prompt_ids))
        same = next(
            (i for i, (a, b) in enumerate(zip(last.ids, prompt_ids, strict=False)) if a != b),
            shorter,
        )
        said = next(
            (event.token_ids for event in reversed(events) if isinstance(event, Observation)), ()
        )
        apart = len(prompt_ids) + len(last.ids) - 2 * same
        over = self._ended_by_engine(request_id, prompt_ids)
        return (
            ended,
            early,
            not last.future.done(),
            over,
            prompt_ids[same:] not in ((), said),
            apart,
        )


async def _each(deeds: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all at once and wait for all; raises the first error that is not the death of a server."""
    for outcome in await asyncio.gather(*deeds, return_exceptions=True):
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
