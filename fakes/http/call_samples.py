"""Samples: what a server can tell of the requests behind its calls, and what a client tells it.

A server sees calls. Whose a call is, a client may say (the header ``x-rollproof-request``), or tell
by its handle, or the tokens tell it: a call that begins with the prompt of an open request, or goes
on exactly where an earlier call was cut off.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from rollproof.core.call_ownership import Owners
from rollproof.core.case import Action
from rollproof.core.events.rollout import Result, Submit
from rollproof.core.record_validation import sound_request, sound_rollout
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.trace import Recorder
from rollproof.errors import UsageError
from rollproof.fakes.engine.actions import Schedule, Shot, perform
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.fleet import CURRENT_REQUEST
from rollproof.fakes.engine.inflight import InflightCall

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine
    from rollproof.fakes.http.engine_backend import ServeOptions

__all__ = ["Attributing", "Samples"]

_REMEMBERED = 4096
"""Sequences that were cut off and may be resumed."""


class Samples:
    """Requests that clients said they have, and the sequences that were cut off."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._owners = Owners()
        self._ended: set[str] = set()
        self._cut: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._asked: dict[str, tuple[int, str]] = {}
        self._count = 0

    def submit(self, request: Request) -> None:
        """A client was handed ``request``. Raises ``UsageError`` where it was handed it before,
        ``SubjectError`` where it is none.
        """
        request = sound_request(request, "The caller of /rollproof/submit")
        if request.request_id in self._owners or request.request_id in self._ended:
            raise UsageError(
                f"Request {request.request_id!r} was submitted before: give each rollout an id of"
                " its own."
            )
        self._owners.begin(request)
        self._recorder.record(Submit(request=request))

    def result(self, request_id: str, rollout: Rollout | None, error: str | None) -> None:
        """A request has ended: with a sample, an error, or dropped. Raises ``UsageError`` where it
        was never submitted.
        """
        if request_id not in self._owners:
            raise UsageError(
                f"Request {request_id!r} ends and is not open: submit it first, and end it once."
            )
        if rollout is not None:
            rollout = sound_rollout(rollout, "The caller of /rollproof/result")
        self._owners.end(request_id)
        self._ended.add(request_id)
        self._recorder.record(Result(request_id=request_id, rollout=rollout, error=error))

    def owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> str:
        """Whose call this is; the call's own handle where nobody knows better."""
        found = self._found(prompt_ids, rid or "")
        self._count += 1
        self._owners.asks(self._count, found)
        self._asked[rid or ""] = (self._count, found)
        return found

    def answered(self, rid: str, prompt_ids: tuple[int, ...], output: EngineOutput | None) -> None:
        """The call ``rid`` has ended; where it was cut off, the next one may go on from there."""
        number, request_id = self._asked.pop(rid, (0, rid))
        self._owners.answered(number, () if output is None else output.token_ids)
        if output is not None and output.finish_reason is FinishReason.ABORT and output.token_ids:
            self._cut[_mark((*prompt_ids, *output.token_ids))] = request_id
            if len(self._cut) > _REMEMBERED:
                self._cut.popitem(last=False)

    def _found(self, prompt_ids: tuple[int, ...], rid: str) -> str:
        named = CURRENT_REQUEST.get()
        if named is not None:
            return named
        if rid in self._owners:
            return rid
        if self._owners.ids:
            try:
                found = self._owners.of(prompt_ids)
            except UsageError:
                found = ()
            if len(found) == 1:
                return found[0]
        return self._cut.pop(_mark(prompt_ids), rid) if self._cut else rid


def _mark(ids: tuple[int, ...]) -> tuple[int, int]:
    """What a sequence is known by again: thousands that may have thousands of tokens are too much
    to keep.
    """
    return len(ids), hash(ids)


class Attributing(Schedule):
    """Tells the engines whose their calls are, and carries out the actions of a plan on
    ``servers``.
    """

    def __init__(
        self, samples: Samples, actions: Iterable[Action], recorder: Recorder, options: ServeOptions
    ) -> None:
        super().__init__(actions, samples.owner, self._perform)
        self.servers: dict[str, FakeEngine] = {}
        self._together = _Together(self, recorder, options)
        self._doing: set[asyncio.Task[None]] = set()

    def queued(self, call: InflightCall) -> bool:
        """As a schedule, without keeping each request's last call: a server has no end of requests."""
        queued = super().queued(call)
        del self.latest[call.request_id]
        return queued

    def _perform(self, action: Action, call: InflightCall) -> None:
        deed = perform(Shot(cast("Any", self._together), action, call))
        if deed is not None:
            task = asyncio.get_running_loop().create_task(
                _unless_dead(deed), context=self.context.copy()
            )
            self._doing.add(task)
            task.add_done_callback(self._doing.discard)


class _Together:
    """The part of a fleet that the actions of a plan need."""

    def __init__(self, schedule: Attributing, recorder: Recorder, options: ServeOptions) -> None:
        self.recorder, self.schedule, self.case = recorder, schedule, options
        self.servers = schedule.servers

    async def revive(self, server_id: str) -> None:
        self.servers[server_id].revive()


async def _unless_dead(deed: Coroutine[Any, Any, None]) -> None:
    with suppress(ServerDied):
        await deed
