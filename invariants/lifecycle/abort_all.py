"""Sweeps: aborts of everything that a server runs, where the end of one request sets them off
(family ``lifecycle``).

An abort of everything is in place before a weight update, at the end of a batch, at the end of a
run. After every single rollout it only ends what other requests are doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Abort, Call, Reply, Result, Submit, Update, UpdatePhase
from rollproof.invariants._shared.event_check import EventCheck, remember
from rollproof.invariants._shared.phrases import count
from rollproof.judging.checks import Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge import JudgeContext

__all__ = [
    "lifecycle_end_spares_others",
]

_TWICE = 2
"""Once may be the end of a batch."""


class LifecycleEndSparesOthers(EventCheck):
    """Looks at one moment of the virtual clock at a time: who ended in it, and whose calls an abort
    of everything hit in it.

    A request whose own call was hit did not set the abort off. Members of a group may end each
    other. What happens while weights are updated is the update's.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._groups: dict[str, str | None] = {}
        self._flying: dict[int, str] = {}
        self._updates = 0
        self._time = 0.0
        self._ended: dict[str, set[str]] = {}
        self._swept: dict[str, Abort] = {}
        self._busy = False
        self._spared = False
        self._struck = 0
        self._first: tuple[str, str, Abort] | None = None

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._turn(event, out)
        remember(self._groups, event.request.request_id, event.request.group)

    def on_call(self, event: Call, out: Collector) -> None:
        self._turn(event, out)
        remember(self._flying, event.call_id, event.request_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._turn(event, out)
        self._flying.pop(event.call_id, None)

    def on_update(self, event: Update, out: Collector) -> None:
        self._turn(event, out)
        self._busy = True
        self._updates += 1 if event.phase is UpdatePhase.ASKED else -1

    def on_abort(self, event: Abort, out: Collector) -> None:
        self._turn(event, out)
        if event.wanted == "*":
            self._swept.update(
                (self._flying[call], event) for call in event.call_ids if call in self._flying
            )

    def on_result(self, event: Result, out: Collector) -> None:
        self._turn(event, out)
        if event.rollout is not None:
            self._ended[event.request_id] = self._strangers(event.request_id, self._flying.values())

    def finish(self, out: Collector) -> None:
        if self.context.header.case is None:
            out.absent(
                "the clock of a recording does not tell which abort belongs to the end of which"
                " request"
            )
            return
        self._conclude(out)
        if self._spared or self._first is None or self._struck < _TWICE:
            return
        ended, hit, abort = self._first
        out.finding(
            "the end of a request aborts the calls of others",
            expected="only what belongs to the request ends with it",
            observed=(
                f"each of {count(self._struck, 'request')} that ended while others ran is"
                f" accompanied by an abort of everything: at the end of {ended}, server"
                f" {abort.server_id} ended the call of {hit} too"
            ),
            where={"request": hit, "server": abort.server_id, "index": abort.index},
            hint=(
                "Each such abort costs the others a prefill, and where partial rollout is off the"
                " sample: abort the request's own calls by their id, and everything only before a"
                " weight update or at the end of a batch (cf. verl #6866)."
            ),
        )

    def _turn(self, event: Event, out: Collector) -> None:
        """A new moment: conclude the one before."""
        if event.time != self._time:
            self._conclude(out)
            self._time = event.time

    def _conclude(self, out: Collector) -> None:
        if self.context.header.case is not None and not self._busy:
            for ended, running in self._ended.items():
                hit = self._strangers(ended, self._swept) - self._ended.keys()
                if ended in self._swept or not (running or hit):
                    continue
                out.exercised("requests that ended beside others")
                if hit:
                    self._struck += 1
                    self._first = self._first or (ended, min(hit), self._swept[min(hit)])
                else:
                    self._spared = True
        self._ended.clear()
        self._swept.clear()
        self._busy = self._updates > 0

    def _strangers(self, request_id: str, others: Iterable[str]) -> set[str]:
        """Of ``others`` the requests that are neither this one nor of its group."""
        group = self._groups.get(request_id)
        return {
            other
            for other in others
            if other != request_id and (group is None or self._groups.get(other) != group)
        }


lifecycle_end_spares_others = trace_check(
    "lifecycle.end-spares-others",
    promise="The end of a request leaves the calls of other requests alone.",
    needs=(
        "a driven run with requests that end while others run, and Abort, Result and Update events"
    ),
    exercised_by="requests that ended beside others",
)(LifecycleEndSparesOthers)
