"""A check on the death of servers: what calls had brought before is not lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.contract import Provenance, ResumeBy
from rollproof.core.events.rollout import (
    Call,
    Fault,
    Reply,
    Result,
)
from rollproof.invariants._shared.event_check import (
    EventCheck,
    remember,
)
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import Check, Collector, trace_check
from rollproof.judging.request_view import UNATTRIBUTED_CALLS, RequestView
from rollproof.judging.stitching import stitch

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["lifecycle_survives_death"]


class LifecycleSurvivesDeath(EventCheck):
    """The tokens of the dead call are lost; the client has what earlier calls delivered, and must
    send it.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._in_flight: dict[int, str] = {}
        self._deaths: dict[int, Fault] = {}
        self._open: dict[str, RequestView] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._in_flight, event.call_id, event.server_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._in_flight.pop(event.call_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what != "death":
            return
        self._open.update(self.context.open)
        dead = event.server_id
        for call_id in [call for call, where in self._in_flight.items() if where == dead]:
            del self._in_flight[call_id]
            remember(self._deaths, call_id, event)

    def on_result(self, event: Result, out: Collector) -> None:
        view = self._open.pop(event.request_id, None)
        if view is not None:
            self._judge(view, event, out)

    def finish(self, out: Collector) -> None:
        for view in self._open.values():
            self._judge(view, None, out)

    def _judge(self, view: RequestView, event: Result | None, out: Collector) -> None:
        """Judge a request that was open at a death.

        Only its end shows which calls were its own, and which made its sample.
        """
        if view.unattributed_calls:
            out.absent(UNATTRIBUTED_CALLS)
            return
        deaths = [
            (attempt, death)
            for attempt in view.attempts
            if (death := self._deaths.pop(attempt.call.call_id, None)) is not None
        ]
        out.exercised("requests in flight at a server's death", len(deaths))
        unanswered, begin = None, 0
        contract = self.context.contract
        # a call of another branch need not go on from what was known
        resumes = contract.resume is ResumeBy.CLIENT and not contract.delivers_several
        for attempt, death in deaths:
            later = next((a.call for a in view.attempts if a.call.index > death.index), None)
            # An answer, late or to another call, explains what the stack does then.
            if later is None or not _answered(view, death.index, later.index):
                # the reply to a call that raced with this one may have come before the death
                unanswered, begin = death, attempt.call.index
                # what an undecided race brought may be known or not
                if later is not None and resumes and not view.undecided_race:
                    self._compare(view, attempt, death, later, out)
        if unanswered is None or event is None or _answered(view, begin, event.index):
            return
        if event.error is not None or event.rollout is not None:
            return
        server = str(unanswered.server_id)
        out.finding(
            "a request vanished when a server died",
            expected=f"a rollout or an explicit error after the death of {server}",
            observed="nothing was delivered",
            where={"request": event.request_id, "server": server, "index": event.index},
        )

    def _compare(
        self, view: RequestView, dead: Attempt, death: Fault, event: Call, out: Collector
    ) -> None:
        """Compare the first call after a death with what the client knew: only this one shows what
        it kept.
        """
        known_ids = _known_before(view, death.index)
        if known_ids is None or event.prompt_ids[: len(known_ids)] == known_ids:
            return
        common = next(
            (
                i
                for i, (sent, expected) in enumerate(zip(event.prompt_ids, known_ids, strict=False))
                if sent != expected
            ),
            min(len(event.prompt_ids), len(known_ids)),
        )
        out.finding(
            "tokens were lost when a server died",
            expected=(
                f"the next call sends the {len(known_ids)} tokens known before"
                f" {dead.call.server_id} died"
            ),
            observed=(
                f"call {event.call_id} sends {len(event.prompt_ids)} tokens, the first"
                f" {common} of them unchanged"
            ),
            where={
                "request": view.request.request_id,
                "call": event.call_id,
                "server": dead.call.server_id,
                "index": event.index,
            },
            hint=(
                "Only the dead call's own tokens are lost: store what earlier calls"
                " delivered outside of the try block that is retried."
            ),
        )


def _answered(view: RequestView, begin: int, end: int) -> bool:
    """Return whether a reply reached the stack between two events."""
    return any(
        reply.delivered and begin < reply.index < end
        for attempt in (*view.attempts, *view.set_aside)
        for reply in attempt.replies
    )


def _known_before(view: RequestView, index: int) -> tuple[int, ...] | None:
    """Return the prompt and what had been delivered before an event; ``None`` if the calls until
    then do not continue each other.
    """
    known = stitch(
        view.request.prompt_ids,
        [
            replace(
                attempt,
                replies=[reply for reply in attempt.replies if reply.index < index],
                partial=attempt.partial
                if attempt.partial is not None and attempt.partial.index < index
                else None,
            )
            for attempt in view.attempts
            if attempt.call.index < index
        ],
        [words for words in view.observations if words.index < index],
        Provenance.AS_SAMPLED,
    )
    return None if known.broken is not None else (*view.request.prompt_ids, *known.response_ids)


lifecycle_survives_death: Check = trace_check(
    "lifecycle.survives-death",
    promise=(
        "When a server dies, its requests end with a rollout or an explicit error, and tokens that"
        " were delivered before are kept."
    ),
    needs="Fault death events with calls in flight on the server",
    exercised_by="requests in flight at a server's death",
)(LifecycleSurvivesDeath)
