"""Preceding events: what had happened to a request, or in the run, before a finding.

They come from the trace itself and say nothing about a cause: a finding names what preceded it, so
that a reader knows which situation to look at. ``before`` names the last of them, and ``story``
tells all, with the event that broke the promise marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Abort, Fault, Observation, Reply, Update
from rollproof.core.records import Scalar
from rollproof.core.trace import Header
from rollproof.judging.attempt import Attempt
from rollproof.judging.event_words import describe, is_aborted, tokens
from rollproof.judging.request_view import RequestView
from rollproof.judging.story import Mark, Moment, moment_of, request_story, server_story

__all__ = ["PrecedingEvents"]

# More events than these lie too far back to explain a finding; memory must not grow with the trace.
_REMEMBERED = 256
_LISTED = 6
_RECENT = 16
"""Events of a story that is not about a request."""


class PrecedingEvents:
    """The last events of one trace, and what of them concerns a finding.

    flavour: The engine flavour of the trace; ``""`` if its header names none.
    view: The request that is being judged; ``None`` if an event is.
    now: The event that the judge is looking at; ``None`` once the trace has ended.
    """

    __slots__ = ("_calls", "_ended", "_events", "_of_engine", "_open", "flavour", "now", "view")

    def __init__(
        self,
        header: Header,
        open: Mapping[str, RequestView],
        ended: Iterable[RequestView],
        calls: Mapping[int, tuple[RequestView | None, Attempt]],
    ) -> None:
        self.flavour: str = str((header.case or {}).get("flavour", ""))
        self.view: RequestView | None = None
        self.now: Event | None = None
        self._open, self._ended, self._calls = open, ended, calls
        self._of_engine = header.about == "engines"
        self._events: deque[Event | Moment] = deque(maxlen=_REMEMBERED)

    def add(self, event: Event) -> None:
        """Remember an event that may precede a finding; of replies only those that were aborted."""
        if not isinstance(event, Reply) or is_aborted(event):
            self._events.append(event)

    def add_in_words(self, event: Event) -> None:
        """Remember an event for stories alone, without its arrays: these may be large."""
        self._events.append(moment_of(event))

    def story(self, where: Mapping[str, Scalar]) -> tuple[Moment, ...]:
        """Return the story of a finding at ``where``.

        If the place names a request or one of its calls, that is the story of the request.
        Otherwise it is that of the server that the place names, or of all servers.
        """
        mark = self._mark(where)
        if mark.step:
            return server_story(self._events, mark)
        view = self.view or self._view_of(where.get("request"))
        if view is not None:
            return request_story(view, self._met_by(view), mark)
        view = self._view_of_call(where.get("call"))
        if view is not None:
            # what happened to the server before may matter as much
            return request_story(view, self._met_by(view, since=-1), mark)
        server = where.get("server")
        remembered = [
            item
            for item in self._events
            if isinstance(item, Moment) or describe(item)
            if server is None or _server_of(item) in ("", server)
        ]
        return server_story(remembered[-_RECENT:], mark)

    def _mark(self, where: Mapping[str, Scalar]) -> Mark:
        call, index, step = where.get("call"), where.get("index"), where.get("step")
        # a check of a request, or of an engine, counts tokens by "index"
        of_event = self.view is None and not self._of_engine
        names_call = self.view is not None or self._of_engine
        return Mark(
            now=self.now,
            index=index if type(index) is int and of_event else None,
            call=call if type(call) is int and names_call else None,
            step=step if isinstance(step, str) else "",
        )

    def _view_of_call(self, call_id: Scalar) -> RequestView | None:
        """Return the open or lately ended request of a call."""
        if type(call_id) is not int:
            return None
        if call_id in self._calls:
            return self._calls[call_id][0]
        return next(
            (
                view
                for view in self._ended
                if any(attempt.call.call_id == call_id for attempt in view.every_call)
            ),
            None,
        )

    def _met_by(self, view: RequestView, since: int | None = None) -> Iterator[Event]:
        """Yield what happened to the servers of a request while they worked for it, or from index
        ``since`` on.
        """
        first = view.submit.index if since is None else since
        calls = {attempt.call.call_id: attempt.call.server_id for attempt in view.every_call}
        servers = set(calls.values())
        last = _completed_at(view)
        for event in self._events:
            if isinstance(event, Moment | Reply | Observation):
                continue
            if not first <= event.index <= last:
                continue
            # an update of all servers is told by what happened to each, if the request saw it
            if isinstance(event, Update):
                if since is not None:
                    yield event
                continue
            if _server_of(event) not in servers:
                continue
            if isinstance(event, Fault) and event.call_id is not None:
                continue
            if (
                isinstance(event, Abort)
                and event.call_ids
                and calls.keys().isdisjoint(event.call_ids)
            ):
                continue
            yield event

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
                if not isinstance(event, Moment)
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
        last = _completed_at(view)
        for event in self._events:
            if isinstance(event, Moment) or not view.submit.index <= event.index <= last:
                continue
            if isinstance(event, Reply):
                if event.call_id in servers:
                    at = tokens(len(event.output.token_ids))
                    yield f"abort of call {event.call_id} on {servers[event.call_id]} at {at}"
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


def _completed_at(view: RequestView) -> float:
    """Return the index of the reply that completed the sample of a request.

    Nothing after it concerns the sample; a request without such a reply may have met everything
    until the end.
    """
    replies = view.attempts[-1].replies if view.attempts else []
    complete = [reply for reply in replies if reply.delivered and not is_aborted(reply)]
    return complete[-1].index if complete else float("inf")


def _server_of(item: Event | Moment) -> str:
    """Return the server of an event; ``""`` if it is about none."""
    if isinstance(item, Moment):
        return item.server
    return getattr(item, "server_id", None) or ""
