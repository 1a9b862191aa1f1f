"""Fold: base of the checks that are fed every event of a trace.

A subclass names what it reads by its methods: ``on_call(event, out)`` gets every ``Call``,
``on_reply`` every ``Reply``. About twenty folds see each event, so one dictionary look-up must be
all that an event costs a fold that ignores it.
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
    from rollproof.judging.judge import JudgeContext

__all__ = ["Ending", "Fold", "Recent", "case_actions", "case_option", "keep"]

_K = TypeVar("_K")
_V = TypeVar("_V")
_MOST = 1 << 14


class Fold:
    """A ``TraceCheck`` whose methods ``on_<kind>(event, out)`` are called for the events of that
    kind.

    Raises ``UsageError`` when the class is made and a method names a kind that does not exist.
    """

    handlers: ClassVar[Mapping[type[Event], Callable[..., None]]] = {}
    direct: ClassVar[Mapping[type[Event], Callable[..., None]]] = {}
    """What the judge may call in place of ``event``: the handlers, unless a subclass has an
    ``event`` of its own.
    """

    @property
    def kinds(self) -> Iterable[type[Event]]:
        """The event classes that the fold has a method for."""
        return self.handlers

    def __init_subclass__(cls) -> None:
        names = [name for name in dir(cls) if name.startswith("on_")]
        stray = [name for name in names if name[3:] not in EVENT_KINDS]
        if stray:
            raise UsageError(
                f"{cls.__name__} handles {stray}, but a trace has only events of the kinds"
                f" {sorted(EVENT_KINDS)}."
            )
        cls.handlers = {EVENT_KINDS[name[3:]]: getattr(cls, name) for name in names}
        cls.direct = cls.handlers if cls.event is Fold.event else {}

    def __init__(self, context: JudgeContext) -> None:
        self.context = context

    def event(self, event: Event, out: Collector) -> None:
        """Hand the event to the method of its kind, if there is one."""
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(self, event, out)

    def finish(self, out: Collector) -> None:
        """The trace has ended. Nothing to conclude unless a subclass says so."""


class Ending(Fold):
    """A fold that knows whether its trace ran to its end, so that "never happened" can be told from
    "was cut off".

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
            if kind is not Gauge or cls.on_gauge is not Ending.on_gauge
        ]

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self.hung: list[str] = []
        self._gauged = False
        self._stuck = False

    @property
    def kinds(self) -> Iterable[type[Event]]:
        """Without the gauges where a case already says that the trace ran to its end: there are
        many of them.
        """
        return self.handlers if self.context.header.case is None else self.driven

    def on_gauge(self, event: Gauge, out: Collector) -> None:
        """The final gauges are read when everything that was started has ended."""
        self._gauged = self._gauged or event.phase == "end"

    def on_result(self, event: Result, out: Collector) -> None:
        """Remember the requests that hung. A subclass that overrides this calls it."""
        if event.hung:
            self.hung.append(event.request_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        """Remember that an update hangs. A subclass that overrides this calls it."""
        self._stuck = self._stuck or event.what == "update-hung"

    @property
    def complete(self) -> bool:
        """Whether every rollout and every update that was started has ended. Ask in ``finish``."""
        return (
            not self.hung
            and not self._stuck
            and (self._gauged or self.context.header.case is not None)
        )


def keep(known: dict[_K, _V], key: _K, value: _V) -> None:
    """Remember ``value`` under ``key``; beyond 16,384 entries the oldest is forgotten.

    A call whose caller gave up may have no reply for ever: without a bound, memory would grow with
    the trace.
    """
    known[key] = value
    if len(known) > _MOST:
        del known[next(iter(known))]


class Recent:
    """The last ``size`` things that were added: what a fold may remember of ended requests without
    growing.
    """

    def __init__(self, size: int = 4096) -> None:
        self._order: deque[Hashable] = deque()
        self._known: set[Hashable] = set()
        self._size = size

    def add(self, item: Hashable) -> None:
        """Remember ``item``, and forget the oldest beyond ``size``."""
        if item in self._known:
            return
        self._known.add(item)
        self._order.append(item)
        if len(self._order) > self._size:
            self._known.discard(self._order.popleft())

    def discard(self, item: Hashable) -> None:
        """Forget ``item``, if it is remembered."""
        if item in self._known:
            self._known.discard(item)
            self._order.remove(item)

    def __contains__(self, item: Hashable) -> bool:
        return item in self._known


def case_option(header: Header | None, name: str) -> Any:
    """An option of the case that was run (``"partial"``, ``"clear_cache"``); ``None`` where no case
    drove the trace.
    """
    case = None if header is None else header.case
    return case.get(name) if isinstance(case, Mapping) else None


def case_actions(header: Header | None, *kinds: str) -> list[Mapping[str, Any]]:
    """The actions of the case whose ``do`` is one of ``kinds``; empty where no case drove the
    trace.

    A trace is untrusted: what does not look like an action is left out.
    """
    actions = case_option(header, "actions")
    if not isinstance(actions, list | tuple):
        return []
    return [
        action for action in actions if isinstance(action, Mapping) and action.get("do") in kinds
    ]
