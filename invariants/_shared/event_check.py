"""Base classes of the checks that read every event of a trace.

A subclass names the events that it reads by its methods: ``on_call(event, out)`` gets every
``Call``, ``on_reply`` every ``Reply``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Fault, Gauge, Result
from rollproof.core.trace import EVENT_KINDS, Header
from rollproof.errors import UsageError

if TYPE_CHECKING:
    from rollproof.judging.checks import Collector
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "EndAwareCheck",
    "EventCheck",
    "RecentItems",
    "case_actions",
    "case_option",
    "dead_server",
    "remember",
]

_K = TypeVar("_K")
_V = TypeVar("_V")
_MAX_ENTRIES = 1 << 14


class EventCheck:
    """A ``TraceCheck`` with methods ``on_<kind>(event, out)``, one for each kind of events that it
    reads.

    Raises:
        UsageError: The class has a method for a kind that does not exist.
    """

    handlers: ClassVar[Mapping[type[Event], Callable[..., None]]] = {}
    """What the judge calls in place of ``event``: the detour over it costs time."""

    @property
    def kinds(self) -> Iterable[type[Event]]:
        """The event classes that the check has a method for."""
        return self.handlers

    # About twenty checks see each event: one dictionary look-up must be all that an event costs a
    # check that ignores it.
    def __init_subclass__(cls) -> None:
        names = [name for name in dir(cls) if name.startswith("on_")]
        unknown = [name for name in names if name[3:] not in EVENT_KINDS]
        # A misspelt on_<kind> would never be called, and its check would silently pass.
        if unknown:
            raise UsageError(
                f"{cls.__name__} handles {unknown}, but a trace has only events of the kinds"
                f" {sorted(EVENT_KINDS)}."
            )
        cls.handlers = {EVENT_KINDS[name[3:]]: getattr(cls, name) for name in names}

    def __init__(self, context: JudgeContext) -> None:
        self.context = context

    def event(self, event: Event, out: Collector) -> None:
        """Call the method for the kind of the event, if there is one."""
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(self, event, out)

    def finish(self, out: Collector) -> None:
        """Conclude; the trace has ended. By default there is nothing to conclude."""


class EndAwareCheck(EventCheck):
    """A check that knows whether its trace ran to its end, to distinguish "never happened" from
    "cut off".

    A trace that no case drove may have been cut anywhere (a killed writer), unless the final gauges
    were read.
    """

    driven: ClassVar[Sequence[type[Event]]] = ()
    """The kinds that it reads of a trace that a case drove."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.driven = [
            kind
            for kind in cls.handlers
            if kind is not Gauge or cls.on_gauge is not EndAwareCheck.on_gauge
        ]

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self.hung: list[str] = []
        self._gauged = False
        self._update_hung = False

    @property
    def kinds(self) -> Iterable[type[Event]]:
        """The event classes that the check reads."""
        # A case already says that its trace ran to the end, and there are many gauges: skip them.
        return self.handlers if self.context.header.case is None else self.driven

    def on_gauge(self, event: Gauge, out: Collector) -> None:
        """Note the final gauges, which are read when everything that was started has ended."""
        self._gauged = self._gauged or event.phase == "end"

    def on_result(self, event: Result, out: Collector) -> None:
        """Remember the requests that hung. A subclass that overrides this calls it."""
        if event.hung:
            self.hung.append(event.request_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        """Remember that an update hangs. A subclass that overrides this calls it."""
        self._update_hung = self._update_hung or event.what == "update-hung"

    @property
    def complete(self) -> bool:
        """Whether every rollout and every update that was started has ended; valid in
        ``finish``.
        """
        return (
            not self.hung
            and not self._update_hung
            and (self._gauged or self.context.header.case is not None)
        )


def dead_server(event: Fault) -> str:
    """Return the server that died; empty if the fault is another one."""
    return event.server_id or "" if event.what == "death" else ""


def remember(entries: dict[_K, _V], key: _K, value: _V) -> None:
    """Store ``value`` under ``key`` and drop the oldest entry beyond 16,384."""
    # A call whose caller gave up may never get a reply: without a bound, memory grows with the
    # trace.
    entries[key] = value
    if len(entries) > _MAX_ENTRIES:
        del entries[next(iter(entries))]


class RecentItems:
    """The last ``size`` items that were added."""

    def __init__(self, size: int = 4096) -> None:
        self._order: deque[Hashable] = deque()
        self._items: set[Hashable] = set()
        self._size = size

    def add(self, item: Hashable) -> None:
        """Add ``item`` and drop the oldest one beyond ``size``."""
        if item in self._items:
            return
        self._items.add(item)
        self._order.append(item)
        if len(self._order) > self._size:
            self._items.discard(self._order.popleft())

    def discard(self, item: Hashable) -> None:
        """Remove ``item`` if it is there."""
        if item in self._items:
            self._items.discard(item)
            self._order.remove(item)

    def __contains__(self, item: Hashable) -> bool:
        return item in self._items


def case_option(header: Header | None, name: str) -> Any:
    """Return an option of the case that was run (``"partial"``, ``"clear_cache"``); ``None``
    without a case.
    """
    case = None if header is None else header.case
    return case.get(name) if isinstance(case, Mapping) else None


def case_actions(header: Header | None, *kinds: str) -> list[Mapping[str, Any]]:
    """Return the actions of the case with a ``do`` among ``kinds``; empty without a case."""
    actions = case_option(header, "actions")
    # A trace is untrusted input: what does not look like an action is left out.
    if not isinstance(actions, list | tuple):
        return []
    return [
        action for action in actions if isinstance(action, Mapping) and action.get("do") in kinds
    ]
