"""A check on counters of the stack: they return to their start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.events.rollout import (
    Call,
    Fault,
    Gauge,
    Pause,
    Reply,
    Result,
    Resume,
    Update,
    UpdatePhase,
)
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    remember,
)
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["lifecycle_counters_return"]

_CUTS = frozenset({"death", "lost-reply", "broken-stream", "reject", "update-failure"})


class LifecycleCountersReturn(EndAwareCheck):
    """In-flight counts of load balancers, staleness managers and semaphores leak on untested
    paths.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._updates = 0
        self._returned = False
        self._paused: dict[str, tuple[Pause, bool]] = {}
        self._calls: dict[int, str] = {}
        self._cut_short = False

    def on_gauge(self, event: Gauge, out: Collector) -> None:
        super().on_gauge(event, out)
        if event.phase == "start":
            self._start[event.name] = event.value
        elif event.phase == "end":
            self._end[event.name] = event.value

    def on_update(self, event: Update, out: Collector) -> None:
        self._updates += 1 if event.phase is UpdatePhase.ASKED else -1
        self._returned = self._returned or event.phase is UpdatePhase.ENDED

    def on_pause(self, event: Pause, out: Collector) -> None:
        unawaited = self._returned and not self._updates
        self._paused.setdefault(event.server_id, (event, unawaited))

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._calls, event.call_id, event.server_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._calls.pop(event.call_id, None)
        if event.output.finish_reason is FinishReason.ABORT:
            self._cut_short = True

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        self._cut_short = self._cut_short or event.what in _CUTS
        if event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)
            self._calls = {
                call: server for call, server in self._calls.items() if server != event.server_id
            }

    def on_result(self, event: Result, out: Collector) -> None:
        super().on_result(event, out)
        self._cut_short = self._cut_short or event.error is not None

    def _hint(self, name: str) -> str:
        """Return what the trace says about why a counter did not return."""
        server, _, counted = name.rpartition("/")
        pause, unawaited = self._paused.get(server, (None, False))
        if pause is not None and counted in ("paused", "running", "waiting"):
            return (
                f"{server} was paused at event {pause.index}, when update_weights had returned, and"
                " not resumed: the update goes on in a task that nobody awaits."
                if unawaited
                else f"{server} was paused at event {pause.index} and never resumed."
            )
        open_calls = [call for call, where in self._calls.items() if where == server]
        if counted in ("running", "waiting") and open_calls:
            return (
                f"Call {open_calls[0]} to {server} had no reply yet when every request had ended:"
                " abort or await the calls that a request gives up."
            )
        if self._cut_short:
            return (
                "It is incremented on every path and decremented on some: decrement it in a"
                " `finally`, once per increment."
            )
        return (
            "No call was cut short and nothing failed in this run: it is incremented more often"
            " than decremented, or decremented only later."
        )

    def finish(self, out: Collector) -> None:
        if self.hung:
            out.absent("a request hangs, so the counters are not final")
            return
        for name, start in self._start.items():
            end = self._end.get(name)
            if end is None:
                out.absent(f"counter {name!r} has no value at the end")
                continue
            out.exercised("counters")
            # Gauges are floats: an exact comparison would report rounding.
            if abs(end - start) > 1e-9:
                out.finding(
                    f"counter {name!r} did not return to its start",
                    # The prefix of a gauge names an instance, which differs from run to run.
                    kind=f"counter {name.rpartition('/')[2]!r} did not return to its start",
                    expected=f"{start:g}, as at the start",
                    observed=f"{end:g} when every request had ended",
                    hint=self._hint(name),
                )


lifecycle_counters_return: Check = trace_check(
    "lifecycle.counters-return",
    promise="Every counter of the stack has the same value at the end as at the start.",
    needs="Gauge events at start and end",
    exercised_by="counters",
)(LifecycleCountersReturn)
