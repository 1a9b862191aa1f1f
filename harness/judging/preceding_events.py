"""Preceding events: what had happened to a request, or in the run, before a finding.

They come from the trace itself and say nothing about a cause: a finding names what preceded it, so
that a reader knows which situation to look at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Abort, Fault, Observation, Reply, Update
from rollproof.core.records import Scalar
from rollproof.core.trace import Header
from rollproof.judging.event_words import describe, is_aborted
from rollproof.judging.request_view import RequestView

__all__ = ["PrecedingEvents"]

# More events than these lie too far back to explain a finding; memory must not grow with the trace.
_REMEMBERED = 256
_LISTED = 6


class PrecedingEvents:
    """The last events of one trace, and what of them concerns a finding.

    flavour: The engine flavour of the trace; ``""`` if its header names none.
    view: The request that is being judged; ``None`` if an event is.
    """

    __slots__ = ("_ended", "_events", "_open", "flavour", "view")

    def __init__(
        self, header: Header, open: Mapping[str, RequestView], ended: Iterable[RequestView]
    ) -> None:
        self.flavour: str = str((header.case or {}).get("flavour", ""))
        self.view: RequestView | None = None
        self._open, self._ended = open, ended
        self._events: deque[Event] = deque(maxlen=_REMEMBERED)

    def add(self, event: Event) -> None:
        """Remember an event that may precede a finding; of replies only those that were aborted."""
        if not isinstance(event, Reply) or is_aborted(event):
            self._events.append(event)

    def before(self, where: Mapping[str, Scalar]) -> tuple[str, ...]:
        """Return the last events before a finding at ``where``, the oldest first, in words.

        A finding in a request has those of its calls and of the servers that they ran on, up to
        the reply that completed it; any other finding has those of its server, or of all servers.
        """
        view = self.view or self._view_of(where.get("request"))
        if view is not None and view.attempts:
            texts = list(self._of_request(view))
        else:
            server = where.get("server")
            texts = [
                text
                for event in self._events
                if server is None or getattr(event, "server_id", None) in (None, server)
                if (text := describe(event))
            ]
        # several servers, or an update and its end, often say the same
        texts = [text for i, text in enumerate(texts) if i == 0 or texts[i - 1] != text]
        earlier = len(texts) - _LISTED
        return (*((f"{earlier} earlier events",) if earlier > 0 else ()), *texts[-_LISTED:])

    def _view_of(self, request_id: Scalar) -> RequestView | None:
        """Return the open or lately ended request of that name."""
        views = (*self._open.values(), *self._ended)
        return next((view for view in views if view.request.request_id == request_id), None)

    def _of_request(self, view: RequestView) -> Iterator[str]:
        servers = {attempt.call.call_id: attempt.call.server_id for attempt in view.attempts}
        # nothing after the reply that completed a sample concerns it; a request without such a
        # reply may have met everything until the end
        replies = view.attempts[-1].replies
        complete = [reply for reply in replies if reply.delivered and not is_aborted(reply)]
        last = complete[-1].index if complete else float("inf")
        for event in self._events:
            if not view.submit.index <= event.index <= last:
                continue
            if isinstance(event, Reply):
                if event.call_id in servers:
                    tokens = len(event.output.token_ids)
                    yield (
                        f"abort of call {event.call_id} on {servers[event.call_id]} at {tokens}"
                        f" token{'' if tokens == 1 else 's'}"
                    )
            elif isinstance(event, Observation):
                if event.request_id == view.request.request_id:
                    yield describe(event)
            elif isinstance(event, Fault) and event.call_id is not None:
                if event.call_id in servers:
                    yield describe(event)
            # the reply says where the abort met the call
            elif not isinstance(event, Abort | Update) and (
                getattr(event, "server_id", None) in (None, *servers.values())
            ):
                yield describe(event)
