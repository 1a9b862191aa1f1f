"""Requests and samples that clients report to a fake server, and which request a call belongs to.

A server sees calls. A client may name the request of a call (header ``x-rollproof-request``), or
use the request's id as the call's handle or as the beginning of it (``r0-1``). Otherwise the tokens
decide: a call belongs to an open request if it begins with its prompt, or if it continues exactly
where an earlier call was aborted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from rollproof.core.call_ownership import CallOwner, Owners, named_request
from rollproof.core.case import Action
from rollproof.core.events.rollout import Result, Submit
from rollproof.core.record_validation import validate_request, validate_rollout
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.trace import Recorder
from rollproof.errors import UsageError
from rollproof.fakes.engine.actions import FiredAction, Schedule, perform
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.fleet import CURRENT_REQUEST
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.serve_options import ServeOptions

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine

__all__ = ["CallAttribution", "Samples"]

_MAX_ABORTED = 4096
"""Aborted sequences that are remembered because they may be resumed."""


class Samples:
    """Requests that clients have submitted, and sequences that were aborted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._owners = Owners()
        self._ended: set[str] = set()
        self._aborted: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._calls: dict[str, tuple[int, str]] = {}
        self._count = 0

    def submit(self, request: Request) -> None:
        """Record that a client was handed ``request``.

        Raises:
            UsageError: it was submitted before.
            SubjectError: its fields do not make a request.
        """
        request = validate_request(request, "The caller of /rollproof/submit")
        if request.request_id in self._owners or request.request_id in self._ended:
            raise UsageError(
                f"Request {request.request_id!r} was submitted before: give each rollout an id of"
                " its own."
            )
        self._owners.begin(request)
        self._recorder.record(Submit(request=request))

    def result(self, request_id: str, rollout: Rollout | None, error: str | None) -> None:
        """Record that a request ended: with a sample, an error, or neither.

        Raises:
            UsageError: the request is not open.
            SubjectError: the fields of ``rollout`` do not make a sample.
        """
        if request_id not in self._owners:
            raise UsageError(
                f"Request {request_id!r} is not open: submit it first, and end it once."
            )
        if rollout is not None:
            rollout = validate_rollout(rollout, "The caller of /rollproof/result")
        self._owners.end(request_id)
        self._ended.add(request_id)
        self._recorder.record(Result(request_id=request_id, rollout=rollout, error=error))

    def owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> CallOwner:
        """Return the request of a new call, or the call's own handle if it is not known."""
        request_id = self._request_of(prompt_ids, rid or "")
        self._count += 1
        self._owners.asks(self._count, request_id)
        self._calls[rid or ""] = (self._count, request_id)
        return CallOwner(request_id=request_id)

    def answered(self, rid: str, prompt_ids: tuple[int, ...], output: EngineOutput | None) -> None:
        """Note that the call ``rid`` has ended; if it was aborted, the next call may resume it."""
        number, request_id = self._calls.pop(rid, (0, rid))
        self._owners.answered(number, () if output is None else output.token_ids)
        if output is not None and output.finish_reason is FinishReason.ABORT and output.token_ids:
            self._aborted[_fingerprint((*prompt_ids, *output.token_ids))] = request_id
            if len(self._aborted) > _MAX_ABORTED:
                self._aborted.popitem(last=False)

    def _request_of(self, prompt_ids: tuple[int, ...], rid: str) -> str:
        # in order of certainty: the client says it, the handle says it, the tokens suggest it
        by_header = CURRENT_REQUEST.get()
        if by_header is not None:
            return by_header
        named = named_request(rid, self._owners)
        if named is not None:
            return named
        if self._owners.ids:
            try:
                candidates = self._owners.of(prompt_ids)
            except UsageError:
                candidates = ()
            if len(candidates) == 1:
                return candidates[0]
        return self._aborted.pop(_fingerprint(prompt_ids), rid) if self._aborted else rid


def _fingerprint(ids: tuple[int, ...]) -> tuple[int, int]:
    # thousands of aborted sequences of thousands of tokens each would take gigabytes
    return len(ids), hash(ids)


class CallAttribution(Schedule):
    """Tells the engines which request a call belongs to, and carries out the actions of a plan.

    Attributes:
        servers: the engines, by their ids in the trace.
    """

    def __init__(
        self, samples: Samples, actions: Iterable[Action], recorder: Recorder, options: ServeOptions
    ) -> None:
        super().__init__(actions, samples.owner, self._perform)
        self.servers: dict[str, FakeEngine] = {}
        self._fleet = _ServedFleet(self, recorder, options)
        self._running: set[asyncio.Task[None]] = set()

    def queued(self, call: InflightCall) -> bool:
        """Fire what is due while the call waits."""
        fired = super().queued(call)
        # a schedule keeps the last call of each request; a server has no end of requests
        self.latest.pop(call.request_id, None)
        return fired

    def _perform(self, action: Action, call: InflightCall) -> None:
        effect = perform(FiredAction(cast("Any", self._fleet), action, call))
        if effect is not None:
            # in the schedule's context: an action is no call of the request that triggered it
            task = asyncio.get_running_loop().create_task(
                _unless_dead(effect), context=self.context.copy()
            )
            # the loop refers to tasks weakly: one that nothing else refers to may vanish
            self._running.add(task)
            task.add_done_callback(self._running.discard)


class _ServedFleet:
    """The part of a fleet that the actions of a plan need."""

    def __init__(
        self, schedule: CallAttribution, recorder: Recorder, options: ServeOptions
    ) -> None:
        self.recorder, self.schedule, self.case = recorder, schedule, options
        self.servers = schedule.servers

    async def revive(self, server_id: str) -> None:
        self.servers[server_id].revive()


async def _unless_dead(effect: Coroutine[Any, Any, None]) -> None:
    with suppress(ServerDied):
        await effect
