"""Requests and samples that clients report to a fake server, and which request a call belongs to.

A server sees calls. A client may name the request of a call (header ``x-rollproof-request``), or
use the request's id as the call's handle or as the beginning of it (``r0-1``). Otherwise the tokens
decide: a call belongs to an open request if it begins with its prompt, or if it continues exactly
where an earlier call was aborted.

``rollproof.http_clients`` names the rollout in which a call is made (``x-rollproof-rollout``). That
is where the call comes from, and most often, but not always, what it is for: a rollout may ask a
judge. So the tokens have to agree; a call whose tokens do not is a guess, which leaves its request
unknown.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rollproof.core.call_ownership import CallOwner, Owners, named_request
from rollproof.core.case import Action
from rollproof.core.events.rollout import Result, Submit
from rollproof.core.record_validation import validate_request, validate_rollout
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.report_headers import INTERNAL
from rollproof.core.trace import Recorder
from rollproof.errors import UsageError
from rollproof.fakes.engine.actions import FiredAction, Schedule, perform
from rollproof.fakes.engine.exceptions import ServerDied
from rollproof.fakes.engine.fleet import CURRENT_REQUEST
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.serve_options import ServeOptions

if TYPE_CHECKING:
    from rollproof.fakes.engine.fake_engine import FakeEngine

__all__ = ["CURRENT_ROLLOUT", "CallAttribution", "Samples"]

CURRENT_ROLLOUT: ContextVar[str | None] = ContextVar("rollproof_current_rollout", default=None)
"""The rollout that a client names in the headers of the call that is being answered."""
_MAX_ABORTED = 4096
"""Aborted sequences that are remembered because they may be resumed."""
_NO_CALL = (
    "No call of this rollout has reached the server, so nothing says what an engine sampled for it."
    " Its calls must go to the address of the server (the variable ROLLPROOF_URL), through a"
    " hook of rollproof.http_clients, and in the task of the rollout or one that it starts. If"
    " a worker of another rollout makes them, name the request: rollout(to_request=...)."
)
_NO_REQUEST = (
    "The environment answers in rollouts of this contract (multi_turn), and only the request says"
    " how: name it with rollout(to_request=...), and its answers with Request(turns=...)."
)
_OTHER_FIRST = (
    "The first call of this rollout has another prompt than its sample; a later one has that of the"
    " sample. Make calls for another purpose within `with internal():`, or name the request with"
    " rollout(to_request=...)."
)


class Samples:
    """Requests that clients have submitted, and sequences that were aborted.

    Args:
        recorder: takes the events.
        opens_rollouts: whether the first call of a rollout may open its request. Not if the
            environment answers (``multi_turn``): the tokens that a later call adds could be its
            answer or a mistake, and only the request says which.
    """

    def __init__(self, recorder: Recorder, *, opens_rollouts: bool = False) -> None:
        self._recorder = recorder
        self._opens_rollouts = opens_rollouts
        self._rollouts: dict[str, str] = {}
        self._unlike: dict[str, list[tuple[int, ...]]] = {}
        self._owners = Owners()
        self._ended: set[str] = set()
        self._aborted: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._calls: dict[str, tuple[int, str]] = {}
        self._count = 0

    def request_of_rollout(self, rollout: str) -> str | None:
        """Return the id of the request of a rollout that a client names, ``r1`` for the first one;
        ``None`` if it names none.
        """
        if rollout == INTERNAL:
            return None
        if rollout not in self._rollouts:
            number = len(self._rollouts) + 1
            while f"r{number}" in self._owners or f"r{number}" in self._ended:
                number += 1
            self._rollouts[rollout] = f"r{number}"
        return self._rollouts[rollout]

    def submit(self, request: Request, *, rollout: str | None = None) -> None:
        """Record that a client was handed ``request``, in the rollout that it names.

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
        if rollout is not None:
            self._rollouts[rollout] = request.request_id
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

    def end_rollout(self, rollout: str, sample: Rollout | None, error: str | None) -> None:
        """Record that a rollout ended; the ``request_id`` of its sample is of no account.

        Raises:
            UsageError: it has no open request, or the wrong one.
            SubjectError: the fields of ``sample`` do not make a sample.
        """
        request_id = self._rollouts.get(rollout, "")
        if request_id not in self._owners:
            raise UsageError(_NO_CALL if self._opens_rollouts else _NO_REQUEST)
        if sample is not None:
            sample = replace(sample, request_id=request_id)
            prompt = tuple(sample.prompt_ids or ())
            unlike = self._unlike.get(request_id, ()) if prompt else ()
            if any(ids[: len(prompt)] == prompt for ids in unlike):
                raise UsageError(_OTHER_FIRST)
        self._unlike.pop(request_id, None)
        self.result(request_id, sample, error)

    def owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> CallOwner:
        """Return the request of a new call, or the call's own handle if it is not known."""
        owner = self._owner_in_rollout(prompt_ids) or CallOwner(
            request_id=self._request_of(prompt_ids, rid or "")
        )
        self._count += 1
        self._owners.asks(self._count, owner.request_id)
        self._calls[rid or ""] = (self._count, owner.request_id)
        return owner

    def answered(self, rid: str, prompt_ids: tuple[int, ...], output: EngineOutput | None) -> None:
        """Note that the call ``rid`` has ended; if it was aborted, the next call may resume it."""
        number, request_id = self._calls.pop(rid, (0, rid))
        self._owners.answered(number, () if output is None else output.token_ids)
        if output is not None and output.finish_reason is FinishReason.ABORT and output.token_ids:
            self._aborted[_fingerprint((*prompt_ids, *output.token_ids))] = request_id
            if len(self._aborted) > _MAX_ABORTED:
                self._aborted.popitem(last=False)

    def _owner_in_rollout(self, prompt_ids: tuple[int, ...]) -> CallOwner | None:
        """Return the request of a call whose client names its rollout, if the rollout has one."""
        rollout = CURRENT_ROLLOUT.get()
        if rollout is None or CURRENT_REQUEST.get() is not None:
            return None
        request_id = self.request_of_rollout(rollout)
        if request_id is None:
            return CallOwner(internal=True)
        if request_id in self._ended:
            return CallOwner(request_id=request_id)
        if request_id not in self._owners:
            if not self._opens_rollouts:
                return None
            # no budget: the first call may ask for a part of it
            self.submit(Request(request_id=request_id, prompt_ids=prompt_ids), rollout=rollout)
        fitting = self._owners.beginning(prompt_ids)
        if request_id in fitting:
            return CallOwner(request_id=request_id)
        self._unlike.setdefault(request_id, []).append(prompt_ids)
        guess = fitting[0] if len(fitting) == 1 else request_id
        return CallOwner(request_id=guess, candidates=(guess,))

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
        update: brings the next weights to all of them.
    """

    def __init__(
        self, samples: Samples, actions: Iterable[Action], recorder: Recorder, options: ServeOptions
    ) -> None:
        super().__init__(actions, samples.owner, self._perform)
        self.servers: dict[str, FakeEngine] = {}
        self.update: Callable[[], Coroutine[Any, Any, None]] | None = None
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

    def train(self) -> None:
        """Make new weights: here they are made when they are loaded."""

    async def update(self, published: Callable[[], None]) -> None:
        published()
        if self.schedule.update is not None:
            await self.schedule.update()

    async def revive(self, server_id: str) -> None:
        self.servers[server_id].revive()


async def _unless_dead(effect: Coroutine[Any, Any, None]) -> None:
    with suppress(ServerDied):
        await effect
