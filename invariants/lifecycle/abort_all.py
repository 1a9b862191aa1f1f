"""The check on aborts of all calls of a server that the end of one request sets off.

Such an abort is right before a weight update, at the end of a batch or at the end of a run. After
every single rollout it only ends what other requests are doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Abort, Call, Reply, Result, Submit, Update, UpdatePhase
from rollproof.invariants._shared.event_check import EventCheck, remember
from rollproof.invariants._shared.phrases import count
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "lifecycle_end_spares_others",
]

_MIN_REPEATS = 2
"""Once may be the end of a batch."""


class LifecycleEndSparesOthers(EventCheck):
    """Compares, moment by moment of the virtual clock, which requests ended and which calls an
    abort of all calls hit.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._groups: dict[str, str | None] = {}
        self._in_flight: dict[int, str] = {}
        self._updates = 0
        self._time = 0.0
        self._ended: dict[str, set[str]] = {}
        self._aborted: dict[str, Abort] = {}
        self._updating = False
        self._spared = False
        self._ends_with_abort = 0
        self._example: tuple[str, str, Abort] | None = None

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._advance(event, out)
        remember(self._groups, event.request.request_id, event.request.group)

    def on_call(self, event: Call, out: Collector) -> None:
        self._advance(event, out)
        remember(self._in_flight, event.call_id, event.request_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._advance(event, out)
        self._in_flight.pop(event.call_id, None)

    def on_update(self, event: Update, out: Collector) -> None:
        self._advance(event, out)
        self._updating = True
        # Before a weight update an abort of all calls is the usual procedure.
        self._updates += 1 if event.phase is UpdatePhase.ASKED else -1

    def on_abort(self, event: Abort, out: Collector) -> None:
        self._advance(event, out)
        if event.wanted == "*":
            self._aborted.update(
                (self._in_flight[call], event) for call in event.call_ids if call in self._in_flight
            )

    def on_result(self, event: Result, out: Collector) -> None:
        self._advance(event, out)
        if event.rollout is not None:
            self._ended[event.request_id] = self._unrelated(
                event.request_id, self._in_flight.values()
            )

    def finish(self, out: Collector) -> None:
        if self.context.header.case is None:
            out.absent(
                "the clock of a recording does not show which abort belongs to the end of"
                " which request"
            )
            return
        self._judge_moment(out)
        # A stack that spares others even once does not do it by design: then the aborts had another
        # reason.
        if self._spared or self._example is None or self._ends_with_abort < _MIN_REPEATS:
            return
        ended, aborted, abort = self._example
        out.finding(
            "the end of a request aborts the calls of others",
            expected="only the calls of the request end with it",
            observed=(
                f"each of {count(self._ends_with_abort, 'request')} that ended while others"
                f" ran is accompanied by an abort of all calls: at the end of {ended}, server"
                f" {abort.server_id} ended the call of {aborted} too"
            ),
            where={"request": aborted, "server": abort.server_id, "index": abort.index},
            hint=(
                "Each such abort costs the others a prefill and, if partial rollout is off,"
                " the sample: abort the request's own calls by their id, and all calls only"
                " before a weight update or at the end of a batch (cf. verl #6866)."
            ),
        )

    def _advance(self, event: Event, out: Collector) -> None:
        """Judge the previous moment when a new one begins."""
        # within a moment the end of a request and the abort that it sets off come in either order
        if event.time != self._time:
            self._judge_moment(out)
            self._time = event.time

    def _judge_moment(self, out: Collector) -> None:
        if self.context.header.case is not None and not self._updating:
            for ended, others in self._ended.items():
                # A request whose own call was hit did not set the abort off, and members of a group
                # may end each other. What happens during a weight update belongs to the update.
                aborted = self._unrelated(ended, self._aborted) - self._ended.keys()
                if ended in self._aborted or not (others or aborted):
                    continue
                out.exercised("requests that ended while others ran")
                if aborted:
                    self._ends_with_abort += 1
                    self._example = self._example or (
                        ended,
                        min(aborted),
                        self._aborted[min(aborted)],
                    )
                else:
                    self._spared = True
        self._ended.clear()
        self._aborted.clear()
        self._updating = self._updates > 0

    def _unrelated(self, request_id: str, others: Iterable[str]) -> set[str]:
        """Return the requests of ``others`` that are neither this one nor of its group."""
        group = self._groups.get(request_id)
        return {
            other
            for other in others
            if other != request_id and (group is None or self._groups.get(other) != group)
        }


lifecycle_end_spares_others: Check = trace_check(
    "lifecycle.end-spares-others",
    promise="The end of a request does not abort the calls of other requests.",
    needs=(
        "a driven run with requests that end while others run, and Abort, Result and Update events"
    ),
    exercised_by="requests that ended while others ran",
)(LifecycleEndSparesOthers)
