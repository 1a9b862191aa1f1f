"""Attribute the engine calls that a recording sees to its open requests.

A call belongs to the rollout in which context it is made. Threads of an executor have no context,
and a worker that serves several rollouts has the context of the rollout that started it: then the
tokens decide. Requests that share a prompt cannot always be distinguished; then nothing is guessed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Container, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeAlias

from rollproof.core.records import Request
from rollproof.errors import UsageError

__all__ = ["CURRENT", "CallOwner", "Caller", "Owners", "Running", "here", "named_request"]

_SEPARATORS = "-_:/.#"
"""What may follow the id of a request in the handle of one of its calls: ``r0-1``, ``r0/retry``."""


def here() -> tuple[int, int]:
    """Return the thread and the task (0: none) of the caller."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), 0 if task is None else id(task)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOwner:
    """The request to which an engine call belongs; fields as in ``Call``.

    acting: The request whose planned actions the call triggers, if ``request_id`` leaves it open.
    """

    request_id: str = ""
    candidates: tuple[str, ...] = ()
    internal: bool = False
    acting: str = ""


def named_request(handle: str | None, request_ids: Container[str]) -> str | None:
    """Return the request that a call's handle names: the handle is its id, or begins with its id
    and a separator (``-``, ``_``, ``:``, ``/``, ``.`` or ``#``).
    """
    if not handle:
        return None
    if handle in request_ids:
        return handle
    # "r0-1" may be an id itself: the longest is meant
    for end in range(len(handle) - 1, 0, -1):
        if handle[end] in _SEPARATORS and handle[:end] in request_ids:
            return handle[:end]
    return None


@dataclass(frozen=True, slots=True)
class Running:
    """A recorded rollout that runs, and the thread and task in which its function was called."""

    request_id: str
    place: tuple[int, int]


Caller: TypeAlias = "tuple[Running | None, tuple[int, int]]"
"""The rollout in whose context a call was made, and the thread and task that made it."""
CURRENT: ContextVar[Running | None] = ContextVar("rollproof_recorded_request", default=None)
"""The recorded rollout in whose context code runs."""


@dataclass(slots=True)
class _Open:
    """An open request."""

    request: Request
    number: int
    """How many requests were submitted before it."""
    delivered: tuple[int, ...]
    """Tokens of its sequence that have certainly reached the stack, the prompt first."""
    pending_calls: set[int] = field(default_factory=set)
    """Its calls that have no reply yet."""


class _Index:
    """The names of requests by a sequence of tokens."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], dict[str, int]] = {}
        self.lengths: Counter[int] = Counter()

    def add(self, ids: tuple[int, ...], name: str, number: int) -> None:
        """Add a request; ``number`` is its place among those that were submitted."""
        self._names.setdefault(ids, {})[name] = number
        self.lengths[len(ids)] += 1

    def remove(self, ids: tuple[int, ...], name: str) -> None:
        """Remove a request."""
        names = self._names[ids]
        del names[name]
        if not names:
            del self._names[ids]
        self.lengths[len(ids)] -= 1
        if not self.lengths[len(ids)]:
            del self.lengths[len(ids)]

    def at(self, ids: tuple[int, ...]) -> list[tuple[int, str]]:
        """Return the requests with just these tokens, each with its number."""
        return [(number, name) for name, number in self._names.get(ids, {}).items()]


class Owners:
    """The open requests of a recording. Not thread-safe: the recording holds its lock.

    A batch may have thousands of open requests, so that they are found by their tokens.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._calls: dict[int, str] = {}
        self._submitted = 0
        self._prompts = _Index()
        self._delivered = _Index()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the open requests, in the order in which they were submitted."""
        return tuple(self._open)

    def begin(self, request: Request) -> None:
        """Add a request that was submitted."""
        name = request.request_id
        self.end(name)
        self._submitted += 1
        self._open[name] = _Open(request, self._submitted, request.prompt_ids)
        self._prompts.add(request.prompt_ids, name, self._submitted)
        self._delivered.add(request.prompt_ids, name, self._submitted)

    def end(self, request_id: str) -> None:
        """Remove a request that has ended."""
        ended = self._open.pop(request_id, None)
        if ended is not None:
            self._prompts.remove(ended.request.prompt_ids, request_id)
            self._delivered.remove(ended.delivered, request_id)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment to a request's sequence."""
        request = self._open.get(request_id)
        if request is not None and token_ids:
            self._delivered.remove(request.delivered, request_id)
            request.delivered = (*request.delivered, *token_ids)
            self._delivered.add(request.delivered, request_id, request.number)

    def asks(self, call_id: int, request_id: str) -> None:
        """Note that a call was made for a request."""
        if request_id in self._open:
            self._calls[call_id] = request_id
            self._open[request_id].pending_calls.add(call_id)

    def answered(self, call_id: int, token_ids: Sequence[int] = ()) -> None:
        """Note that a call has ended, and which tokens it brought."""
        request_id = self._calls.pop(call_id, "")
        request = self._open.get(request_id)
        if request is not None:
            request.pending_calls.discard(call_id)
            self.extend(request_id, token_ids)

    def beginning(self, prompt_ids: Sequence[int]) -> list[str]:
        """Return the open requests with whose prompt these ids begin."""
        ids = tuple(prompt_ids)
        found = [
            each
            for length in self._prompts.lengths
            if length <= len(ids)
            for each in self._prompts.at(ids[:length])
        ]
        return [name for _, name in sorted(found)]

    def of(self, prompt_ids: Sequence[int], caller: Caller | None = None) -> tuple[str, ...]:
        """Return the request to which a call with these ids belongs, or several if that cannot be
        decided.

        Args:
            prompt_ids: What the call sends.
            caller: Where the call was made; ``None``: here and now.

        Raises:
            UsageError: No open request fits.
        """
        running, place = (CURRENT.get(), here()) if caller is None else caller
        # a call sends everything that was delivered to its request
        sending = [name for _, name in sorted(self._delivered.at(tuple(prompt_ids)))]
        current = (
            running.request_id if running is not None and running.request_id in self._open else None
        )
        if current is not None:
            # in the task of the rollout itself: only other tasks can have inherited its context
            if running is not None and running.place == place:
                return (current,)
            prompt = self._open[current].request.prompt_ids
            if tuple(prompt_ids[: len(prompt)]) == prompt:
                rivals = [name for name in sending if name != current]
                # a task that a rollout starts makes that rollout's call first; later calls may be
                # those of a request with the same prompt, which inherited the context
                alone = not rivals or (current in sending and not self._open[current].pending_calls)
                return (current,) if alone else (current, *rivals)
        if sending:
            return tuple(sending)
        fitting = self.beginning(prompt_ids)
        if not fitting:
            if current is not None:
                return (current,)
            raise UsageError(
                "An engine call cannot be attributed: no open request's prompt begins its"
                " prompt_ids. Record the request first (submit or rollout), or set `request_id` on"
                " the EngineCall."
            )
        # one prompt may be the beginning of another: the longer one is the more certain owner
        longest = max(len(self._open[name].request.prompt_ids) for name in fitting)
        return tuple(
            name for name in fitting if len(self._open[name].request.prompt_ids) == longest
        )
