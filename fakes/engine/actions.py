"""Faults and other events of a case: when each action fires, and what it does to the fleet.

An action fires at a moment of its request's life: in the queue, at an admission, at a token. At one
moment at most one action of a request fires; another that is due waits for the next moment. So two
aborts at the same token count are an abort, and another of the call that resumes, before its first
token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollproof.core.case import Action, ActionKind
from rollproof.core.events.rollout import Fault
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.scheduler import EngineHooks

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["RETRY_STEPS", "Schedule", "Shot", "perform"]

RETRY_STEPS = 20
"""Steps between a weight update that failed and the one that works."""


class Schedule(EngineHooks):
    """Watches the requests' tokens and fires what is due. ``attribute`` tells whose call it is from
    its prompt.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        attribute: Callable[[tuple[int, ...], str | None], str],
        fire: Callable[[Action, InflightCall], None],
    ) -> None:
        super().__init__()
        self._attribute = attribute
        self._fire = fire
        self._due: dict[str, list[Action]] = {}
        for action in actions:
            self._due.setdefault(action.when.request, []).append(action)
        self._count: dict[str, int] = {}
        self._rejects: dict[str, int] = {}
        self.latest: dict[str, InflightCall] = {}
        """The last call of each request that entered a queue."""

    @property
    def waiting(self) -> tuple[Action, ...]:
        """Actions that have not fired."""
        return tuple(action for actions in self._due.values() for action in actions)

    def reject_next(self, request_id: str) -> None:
        """Have the next call of a request turned away."""
        self._rejects[request_id] = self._rejects.get(request_id, 0) + 1

    def owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> str:
        """Which request a call belongs to."""
        return self._attribute(prompt_ids, rid)

    def rejects(self, request_id: str) -> bool:
        """Whether this call is to be turned away; asked once a call."""
        left = self._rejects.get(request_id, 0)
        if left:
            self._rejects[request_id] = left - 1
        return left > 0

    def watches(self, request_id: str) -> bool:
        """Whether anything is still due for this request."""
        return bool(self._due.get(request_id))

    def queued(self, call: InflightCall) -> bool:
        """Fire what is due while the call waits."""
        self.latest[call.request_id] = call
        return self._fire_one(call, lambda action: action.when.queued)

    def admitted(self, call: InflightCall) -> None:
        """Fire what is due before the call's next token."""
        self._fire_one(call, lambda action: not action.when.queued)

    def sampled(self, call: InflightCall) -> bool:
        """Count the token, and fire what races with the end of the call."""
        self._count[call.request_id] = self._count.get(call.request_id, 0) + 1
        return self._fire_one(call, lambda action: action.when.race and not action.when.queued)

    def looked(self, call: InflightCall) -> None:
        """Fire what is due after the token."""
        if not call.deferred:
            self._fire_one(call, lambda action: not action.when.race and not action.when.queued)
        call.watched = self.watches(call.request_id)

    def _fire_one(self, call: InflightCall, fits: Callable[[Action], bool]) -> bool:
        due = self._due.get(call.request_id, [])
        count = self._count.get(call.request_id, 0)
        for action in due:
            if fits(action) and action.when.tokens <= count:
                due.remove(action)
                self._fire(action, call)
                return True
        return False


@dataclass(frozen=True, slots=True)
class Shot:
    """An action that fires, and the call at which it does."""

    fleet: Fleet
    action: Action
    call: InflightCall

    @property
    def server(self) -> FakeEngine:
        """The server of the call."""
        return self.fleet.servers[self.call.server_id]

    async def pass_steps(self, steps: int) -> None:
        """Let engine steps pass."""
        await asyncio.sleep(steps * self.fleet.case.engine.step)

    def note(self, what: str) -> None:
        """Record a fault of the call."""
        self.fleet.recorder.record(
            Fault(what=what, server_id=self.call.server_id, call_id=self.call.call_id)
        )


def perform(shot: Shot) -> Coroutine[Any, Any, None] | None:
    """Do what the action says. What must happen before the call's reply does so at once; the rest
    is returned to be awaited.
    """
    return _DEEDS[shot.action.do](shot)


async def _abort(shot: Shot) -> None:
    await shot.server.abort_call(shot.call.call_id)


async def _sync(shot: Shot) -> None:
    await shot.fleet.update(shot.fleet.train())


async def _sync_unlabelled(shot: Shot) -> None:
    shot.fleet.train()
    await shot.fleet.update(None)


async def _sync_identity(shot: Shot) -> None:
    await shot.fleet.update(shot.fleet.train(identity=True))


async def _sync_fails(shot: Shot) -> None:
    fleet = shot.fleet
    alive = [server for server in fleet.servers.values() if server.alive]
    for server in alive[-1:]:
        server.fail_next_load = True
    await fleet.update(fleet.train())
    for server in alive[-1:]:
        server.fail_next_load = False
    await shot.pass_steps(RETRY_STEPS)
    await fleet.update(fleet.train())


async def _sync_twice(shot: Shot) -> None:
    await asyncio.gather(_sync(shot), _sync(shot))


async def _skew(shot: Shot) -> None:
    await shot.fleet.skew(shot.fleet.train(), shot.action.server or shot.call.server_id)


async def _relabel(shot: Shot) -> None:
    shot.fleet.relabel()


async def _kill(shot: Shot) -> None:
    server_id = shot.action.server or shot.call.server_id
    await asyncio.sleep(0)  # replies that were given before are taken before
    shot.fleet.servers[server_id].kill()
    await shot.pass_steps(shot.action.steps)
    await shot.fleet.revive(server_id)


async def _evict(shot: Shot) -> None:
    shot.server.evict(shot.call.call_id)


def _lose(shot: Shot) -> None:
    shot.call.lost_after = shot.action.steps
    shot.note("lost-reply")


def _duplicate(shot: Shot) -> None:
    shot.call.duplicated = True
    shot.note("duplicate-reply")


def _late(shot: Shot) -> None:
    shot.call.late_by += shot.action.steps
    shot.note("late-reply")


def _reject(shot: Shot) -> None:
    shot.fleet.schedule.reject_next(shot.call.request_id)


_DEEDS: Mapping[ActionKind, Callable[[Shot], Coroutine[Any, Any, None] | None]] = {
    ActionKind.ABORT: _abort,
    ActionKind.SYNC: _sync,
    ActionKind.SYNC_UNLABELLED: _sync_unlabelled,
    ActionKind.SYNC_IDENTITY: _sync_identity,
    ActionKind.SYNC_FAILS: _sync_fails,
    ActionKind.SYNC_TWICE: _sync_twice,
    ActionKind.SKEW: _skew,
    ActionKind.RELABEL: _relabel,
    ActionKind.KILL: _kill,
    ActionKind.EVICT: _evict,
    ActionKind.LOSE_REPLY: _lose,
    ActionKind.DUPLICATE_REPLY: _duplicate,
    ActionKind.LATE_REPLY: _late,
    ActionKind.REJECT: _reject,
}
