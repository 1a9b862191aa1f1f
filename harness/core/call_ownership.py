"""Attribution: whose an engine call is that a recording sees.

A call belongs to the rollout in whose context it is made. Threads of an executor have no context,
and a worker that serves several rollouts has that of the one that started it: there the tokens
decide. Requests that share a prompt cannot always be told apart; then nothing is guessed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from rollproof.core.records import Request
from rollproof.errors import UsageError

__all__ = ["CURRENT", "Owners", "Running", "here"]


def here() -> tuple[int, int]:
    """The thread and the task (0: none) in which this is called."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), 0 if task is None else id(task)


@dataclass(frozen=True, slots=True)
class Running:
    """A recorded rollout that runs, and the thread and task in which its function was called."""

    request_id: str
    place: tuple[int, int]


CURRENT: ContextVar[Running | None] = ContextVar("rollproof_recorded_request", default=None)
"""The recorded rollout in whose context code runs."""


@dataclass(slots=True)
class _Open:
    """An open request: what of its sequence is known to have been delivered, and its calls that
    have no answer yet.
    """

    request: Request
    known: list[int] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    def fits(self, prompt_ids: Sequence[int]) -> bool:
        return tuple(prompt_ids[: len(self.request.prompt_ids)]) == self.request.prompt_ids

    def sends(self, prompt_ids: Sequence[int]) -> bool:
        """Whether these are the ids that a call of this request sends next, if it sends everything
        delivered.
        """
        return list(prompt_ids) == self.known


class Owners:
    """The open requests of a recording. Not thread-safe: the recording holds its lock."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._calls: dict[int, str] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    @property
    def ids(self) -> tuple[str, ...]:
        """The requests that are open, in the order in which they were submitted."""
        return tuple(self._open)

    def begin(self, request: Request) -> None:
        """A request was submitted."""
        self._open[request.request_id] = _Open(request, list(request.prompt_ids))

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._open.pop(request_id, None)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The environment appended tokens to a request's sequence."""
        if request_id in self._open:
            self._open[request_id].known += token_ids

    def asks(self, call_id: int, request_id: str) -> None:
        """A call was made for a request."""
        if request_id in self._open:
            self._calls[call_id] = request_id
            self._open[request_id].asked.add(call_id)

    def answered(self, call_id: int, token_ids: Sequence[int] = ()) -> None:
        """A call has ended, and brought tokens."""
        held = self._open.get(self._calls.pop(call_id, ""))
        if held is not None:
            held.asked.discard(call_id)
            held.known += token_ids

    def of(self, prompt_ids: Sequence[int]) -> tuple[str, ...]:
        """The request that a call with these ids is of; several where that cannot be told. Raises
        ``UsageError`` where none fits.
        """
        sending = [name for name, held in self._open.items() if held.sends(prompt_ids)]
        fitting = [name for name, held in self._open.items() if held.fits(prompt_ids)]
        running = CURRENT.get()
        current = (
            running.request_id if running is not None and running.request_id in self._open else None
        )
        if running is not None and current is not None and (running.place == here() or not fitting):
            return (current,)
        if current is not None and current in fitting:
            rivals = [name for name in sending if name != current]
            # a task of its own begins with its rollout's first call; later ones may be a twin's, in
            # a context that it inherited
            alone = not rivals or (current in sending and not self._open[current].asked)
            return (current,) if alone else (current, *rivals)
        if not fitting:
            raise UsageError(
                "An engine call cannot be attributed: no open request's prompt begins its"
                " prompt_ids. Record the request first (submit or rollout), or give `request_id` in"
                " the EngineCall."
            )
        if sending:
            return tuple(sending)
        longest = max(len(self._open[name].request.prompt_ids) for name in fitting)
        return tuple(
            name for name in fitting if len(self._open[name].request.prompt_ids) == longest
        )
