"""One request of a trace, as the judge sees it: its calls, its reference stitch, its story."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Result
from rollproof.core.trace import Trace
from rollproof.judging.checks import Check, Collector
from rollproof.judging.judge import Tally
from rollproof.judging.judge_context import JudgeContext
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import RequestView
from rollproof.judging.story import Moment
from rollproof.verification.traces import judge_events

__all__ = ["ToldRequest", "tell_request"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldRequest:
    """A request of a trace.

    view: What the judge knows of it.
    story: What happened to it.
    """

    view: RequestView
    story: tuple[Moment, ...]


def tell_request(trace: Trace, request_id: str) -> ToldRequest | None:
    """Return a request of ``trace`` with its story, which marks nothing; ``None`` if there is none.

    The trace goes through the judge, which decides which calls are those of the request.
    """
    seen: list[RequestView] = []

    class Observer:
        """Keeps the view of the request, and asks for its story when it ends."""

        kinds: Iterable[type[Event]] = (Call, Result)

        def __init__(self, context: JudgeContext) -> None:
            self._context = context
            self._told = False

        def event(self, event: Event, out: Collector) -> None:
            view = self._context.open.get(request_id)
            if view is not None and not seen:
                seen.append(view)
            if isinstance(event, Result) and event.request_id == request_id and not self._told:
                self._tell(out)

        def finish(self, out: Collector) -> None:
            if seen and not self._told:
                self._tell(out)

        def _tell(self, out: Collector) -> None:
            self._told = True
            out.finding("", expected="", observed="", where={"request": request_id})

    observer = Check(
        id="show.request",
        promise="",
        needs="",
        exercised_by=(),
        about=trace.header.about,
        trace=Observer,
    )
    tally = Tally(Registry([observer]))
    judge_events(trace.header, trace.events, tally)
    findings = tally.judgement()[observer.id].findings
    if not seen or not findings:
        return None
    unmarked = (replace(moment, broke=False) for moment in findings[0].story)
    return ToldRequest(view=seen[0], story=tuple(m for m in unmarked if m.text != "the trace ends"))
