"""Actions of a case: when each one fires, and what it does to the fleet.

An action fires at a moment of its request's life: in the queue, at an admission, at a token. At
each moment at most one action of a request fires; another one that is due waits for the next. So
two aborts at the same token count abort the call, and then the call that resumes it, before its
first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollproof.core.call_ownership import CallOwner
from rollproof.core.case import Action, ActionKind, EngineOptions
from rollproof.core.events.rollout import Call, Fault
from rollproof.core.records import Scalar
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.inflight import FirstDraw, InflightCall
from rollproof.fakes.engine.scheduler import EngineHooks

if TYPE_CHECKING:
    from rollproof.fakes.engine.balancer import Balancer
    from rollproof.fakes.engine.fake_engine import FakeEngine

__all__ = ["RETRY_STEPS", "ActionFleet", "FiredAction", "Schedule", "perform"]

RETRY_STEPS = 20
"""Steps between a failed weight update and the one that succeeds."""


class Schedule(EngineHooks):
    """Counts the tokens of each request and fires the actions that are due.

    ``attribute`` returns the request of a call, from its prompt and its handle; ``draw`` how
    its first token is drawn, from its prompt and its sampling parameters.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        attribute: Callable[[tuple[int, ...], str | None], CallOwner],
        fire: Callable[[Action, InflightCall], None],
        draw: Callable[[tuple[int, ...], Mapping[str, Scalar]], FirstDraw] | None = None,
    ) -> None:
        super().__init__()
        self._attribute = attribute
        self._draw = draw
        self._acting, self._doubtful = "", False
        self._fire = fire
        self._due: dict[str, list[Action]] = {}
        for action in actions:
            self._due.setdefault(action.when.request, []).append(action)
        self._count: dict[str, int] = {}
        self._rejects: dict[str, int] = {}
        self.latest: dict[str, InflightCall] = {}
        """The last call of each request that entered a queue, but those that may be of none."""

    @property
    def waiting(self) -> tuple[Action, ...]:
        """Return the actions that have not fired."""
        return tuple(action for actions in self._due.values() for action in actions)

    def reject_next(self, request_id: str) -> None:
        """Turn away the next call of a request."""
        self._rejects[request_id] = self._rejects.get(request_id, 0) + 1

    def owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> CallOwner:
        """Return the request that a call belongs to."""
        owner = self._attribute(prompt_ids, rid)
        self._acting, self._doubtful = owner.acting, owner.request_id in owner.candidates
        return owner

    def acting(self, call: Call) -> str:
        """Return the request whose actions a call triggers."""
        return call.request_id or self._acting

    def draw(self, prompt_ids: tuple[int, ...], sampling: Mapping[str, Scalar]) -> FirstDraw:
        """Return how the first token of a call is drawn."""
        return self._draw(prompt_ids, sampling) if self._draw else FirstDraw()

    def rejects(self, request_id: str) -> bool:
        """Whether this call is turned away; called once for each call."""
        left = self._rejects.get(request_id, 0)
        if left:
            self._rejects[request_id] = left - 1
        return left > 0

    def watches(self, request_id: str) -> bool:
        """Whether any action of this request has not fired."""
        return bool(self._due.get(request_id))

    def queued(self, call: InflightCall) -> bool:
        """Fire an action that is due while the call waits."""
        # a call that may belong to no request is no step of one
        if not self._doubtful:
            self.latest[call.request_id] = call
        return self._fire_due(call, lambda action: action.when.queued)

    def admitted(self, call: InflightCall) -> None:
        """Fire an action that is due before the call's next token."""
        self._fire_due(call, lambda action: not action.when.queued)

    def sampled(self, call: InflightCall) -> bool:
        """Count the token, and fire an action that races with the end of the call."""
        self._count[call.request_id] = self._count.get(call.request_id, 0) + 1
        return self._fire_due(call, lambda action: action.when.race and not action.when.queued)

    def checked(self, call: InflightCall) -> None:
        """Fire an action that is due after the token."""
        if not call.deferred:
            self._fire_due(call, lambda action: not action.when.race and not action.when.queued)
        call.watched = self.watches(call.request_id)

    def _fire_due(self, call: InflightCall, fits: Callable[[Action], bool]) -> bool:
        due = self._due.get(call.request_id, [])
        count = self._count.get(call.request_id, 0)
        for action in due:
            # at most one action fires at a moment, so that two aborts hit two calls
            if fits(action) and action.when.tokens <= count:
                due.remove(action)
                self._fire(action, call)
                return True
        return False


class ActionFleet(Protocol):
    """A fleet of engines, as far as actions use it."""

    @property
    def case(self) -> _HasEngineOptions: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def servers(self) -> Mapping[str, FakeEngine]: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def balancer(self) -> Balancer: ...
    def train(self, *, identity: bool = False, merge: bool = False) -> int: ...
    async def update(
        self, published: Callable[[], int | None], *, prepare: Callable[[], None] = ...
    ) -> bool: ...
    async def skew(self, label: int, server_id: str) -> bool: ...
    def between_updates(self) -> AbstractAsyncContextManager[None]: ...
    def relabel(self) -> None: ...
    async def revive(self, server_id: str) -> None: ...


class _HasEngineOptions(Protocol):
    @property
    def engine(self) -> EngineOptions: ...


@dataclass(frozen=True, slots=True)
class FiredAction:
    """An action that fires, and the call at which it fires."""

    fleet: ActionFleet
    action: Action
    call: InflightCall

    @property
    def server(self) -> FakeEngine:
        """Return the server of the call."""
        return self.fleet.servers[self.call.server_id]

    async def pass_steps(self, steps: int) -> None:
        """Let engine steps pass."""
        await asyncio.sleep(steps * self.fleet.case.engine.step)

    def record_fault(self, kind: str) -> None:
        """Record a fault of the call."""
        self.fleet.recorder.record(
            Fault(what=kind, server_id=self.call.server_id, call_id=self.call.call_id)
        )


def perform(fired: FiredAction) -> Coroutine[Any, Any, None] | None:
    """Apply the action; return a coroutine for the part that need not precede the call's reply."""
    return _EFFECTS[fired.action.do](fired)


async def _abort(fired: FiredAction) -> None:
    await fired.server.abort_call(fired.call.call_id)


async def _abort_handle(fired: FiredAction) -> None:
    await fired.server.abort_handle(fired.call.call_id)


async def _sync(fired: FiredAction) -> None:
    await fired.fleet.update(fired.fleet.train)


async def _sync_unlabelled(fired: FiredAction) -> None:
    def train() -> None:
        fired.fleet.train()

    await fired.fleet.update(train)


async def _sync_identity(fired: FiredAction) -> None:
    await fired.fleet.update(lambda: fired.fleet.train(identity=True))


async def _sync_fails(fired: FiredAction) -> None:
    fleet = fired.fleet
    broken: list[FakeEngine] = []

    def break_last() -> None:
        # the last server fails: the others have the new weights already
        broken.extend([server for server in fleet.servers.values() if server.alive][-1:])
        for server in broken:
            server.fail_next_load = True

    await fleet.update(fleet.train, prepare=break_last)
    for server in broken:
        server.fail_next_load = False
    # a stack needs time to notice the failure before the update that succeeds
    await fired.pass_steps(RETRY_STEPS)
    await fleet.update(fleet.train)


async def _sync_twice(fired: FiredAction) -> None:
    await asyncio.gather(_sync(fired), _sync(fired))


async def _sync_merged(fired: FiredAction) -> None:
    await fired.fleet.update(lambda: fired.fleet.train(merge=True))


async def _evict_adapters(fired: FiredAction) -> None:
    fired.fleet.servers[fired.action.server or fired.call.server_id].evict_adapters()


async def _skew(fired: FiredAction) -> None:
    fleet = fired.fleet
    async with fleet.between_updates():
        # trained only now: an update that came first has older weights
        await fleet.skew(fleet.train(), fired.action.server or fired.call.server_id)


async def _lag(fired: FiredAction) -> None:
    fleet, lagging = fired.fleet, fired.action.server or fired.call.server_id
    async with fleet.between_updates():
        others = [
            server.server_id
            for server in fleet.servers.values()
            if server.alive and server.server_id != lagging
        ]
        # a server alone has nobody to lag behind
        if others:
            label = fleet.train()
            await asyncio.gather(*(fleet.skew(label, server_id) for server_id in others))


async def _leave(fired: FiredAction) -> None:
    fleet, server_id = fired.fleet, fired.action.server or fired.call.server_id
    fleet.balancer.leave(server_id)
    fleet.recorder.record(Fault(what="leave", server_id=server_id))
    await fired.pass_steps(fired.action.steps)
    fleet.balancer.join(server_id)
    fleet.recorder.record(Fault(what="join", server_id=server_id))


async def _relabel(fired: FiredAction) -> None:
    async with fired.fleet.between_updates():
        fired.fleet.relabel()


async def _kill(fired: FiredAction) -> None:
    server_id = fired.action.server or fired.call.server_id
    # callers take the replies that were sent before the death
    await asyncio.sleep(0)
    fired.fleet.servers[server_id].kill()
    # one that stays dead leaves nothing to wait for: the run may end before the case's deadline
    if fired.action.steps:
        await fired.pass_steps(fired.action.steps)
        await fired.fleet.revive(server_id)


async def _evict(fired: FiredAction) -> None:
    fired.server.evict(fired.call.call_id)


def _lose(fired: FiredAction) -> None:
    # Recorded once the reply is lost: the caller may have left by then.
    fired.call.lost_after = fired.action.steps


def _duplicate(fired: FiredAction) -> None:
    fired.call.duplicated = True
    fired.record_fault("duplicate-reply")


def _late(fired: FiredAction) -> None:
    fired.call.late_by += fired.action.steps
    fired.record_fault("late-reply")


def _reject(fired: FiredAction) -> None:
    fired.fleet.schedule.reject_next(fired.call.request_id)


def _drop_routes(fired: FiredAction) -> None:
    fired.call.want_routes = False


def _drop_logprobs(fired: FiredAction) -> None:
    fired.call.want_logprobs = False


_EFFECTS: Mapping[ActionKind, Callable[[FiredAction], Coroutine[Any, Any, None] | None]] = {
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
    ActionKind.LAG: _lag,
    ActionKind.LEAVE: _leave,
    ActionKind.DROP_ROUTES: _drop_routes,
    ActionKind.DROP_LOGPROBS: _drop_logprobs,
    ActionKind.ABORT_HANDLE: _abort_handle,
    ActionKind.SYNC_MERGED: _sync_merged,
    ActionKind.EVICT_ADAPTERS: _evict_adapters,
}
