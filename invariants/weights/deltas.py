"""Checks on deltas: updates that bring what changed since other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Deltas
from rollproof.core.events.rollout import Admit, Fault, Weights
from rollproof.core.records import Version
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.core.contract import Contract
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["weights_delta_base", "weights_partial_update_unserved"]


def _without_deltas(contract: Contract) -> str | None:
    return "the contract declares no deltas" if contract.deltas is None else None


class WeightsDeltaBase(EventCheck):
    """A delta that was applied to other weights makes weights of no version, until all tensors are
    loaded. Each server is reported once until then.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._held: dict[str, Version] = {}
        self._torn: set[str] = set()
        self._lost: set[str] = set()
        self._overwrites = context.contract.deltas is Deltas.OVERWRITE

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded or event.adapter is not None:
            return
        server, held = event.server_id, self._held.get(event.server_id)
        self._held[server] = event.version
        if event.delta_of is None:
            self._torn.discard(server)
            self._lost.discard(server)
            return
        if held is None or server in self._lost:
            return
        out.exercised("deltas")
        # new values may be written again: over those that a broken transfer left, too
        repeats = self._overwrites and held == event.version
        torn = server in self._torn and not self._overwrites
        self._torn.discard(server)
        if (held == event.delta_of and not torn) or repeats:
            return
        self._lost.add(server)
        out.finding(
            "a delta was applied to other weights than it was made from",
            expected=f"version {event.delta_of}, whole, on {server}",
            observed=(
                f"a part of another delta over version {held}"
                if torn
                else f"version {held}, so that version {event.version} is not what {server} has now"
            ),
            where={"server": server, "version": event.version, "index": event.index},
            hint=self._hint(event, held, torn=torn),
        )

    @staticmethod
    def _hint(event: Weights, held: Version, *, torn: bool) -> str:
        if torn:
            return (
                "Bring all tensors after a delta broke in the middle: differences that were added"
                " once cannot be added again."
            )
        if held == event.version:
            return "It was applied twice, by a retry of an update that had got through."
        return (
            "A delta got lost, or the server was restarted with other weights: compare what the"
            " server has with the base of the delta, and bring all tensors if they differ"
            " (SkyRL #1902, TRL #5932)."
        )

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.server_id is None:
            return
        if event.what == "partial-update":
            self._torn.add(event.server_id)
        elif event.what == "death":
            # what it has when it is back is told by a load of its own
            self._held.pop(event.server_id, None)
            self._torn.discard(event.server_id)
            self._lost.discard(event.server_id)


class WeightsPartialUpdateUnserved(EventCheck):
    """Judges the calls that a server admits between a transfer that broke in the middle and the
    next load that succeeds.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._torn: dict[str, Fault] = {}
        self._met = False

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.server_id is None:
            return
        if event.what == "partial-update":
            self._torn[event.server_id] = event
            self._met = True
            out.exercised("transfers that broke in the middle")
        elif event.what == "death":
            self._torn.pop(event.server_id, None)

    def on_weights(self, event: Weights, out: Collector) -> None:
        if event.loaded:
            self._torn.pop(event.server_id, None)

    def on_admit(self, event: Admit, out: Collector) -> None:
        fault = self._torn.pop(event.server_id, None)
        if fault is None:
            return
        out.finding(
            "a server serves weights of which a part was replaced",
            expected=(
                f"no call on {event.server_id} between event {fault.index}, where a transfer broke,"
                " and a load that succeeds"
            ),
            observed=f"call {event.call_id} was admitted at event {event.index}",
            where={"call": event.call_id, "server": event.server_id, "index": event.index},
            hint=(
                "Keep the server paused, or out of the balancer, and bring all tensors; a label of"
                " the old weights says nothing (TRL #5932: the version goes on after a failed"
                " apply)."
            ),
        )

    def finish(self, out: Collector) -> None:
        if not self._met:
            out.inapplicable("no transfer broke in the middle")


weights_delta_base: Check = trace_check(
    "weights.delta-base",
    promise="A delta is applied to the weights that it was made from, and once.",
    needs="Weights events that say from which weights a delta was made (delta_of)",
    exercised_by="deltas",
    applies=_without_deltas,
)(WeightsDeltaBase)
weights_partial_update_unserved: Check = trace_check(
    "weights.partial-update-unserved",
    promise=(
        "After a transfer broke in the middle, the server admits no call before a load succeeds."
    ),
    needs="Fault partial-update, and the Weights and Admit events of the servers",
    exercised_by="transfers that broke in the middle",
    applies=_without_deltas,
)(WeightsPartialUpdateUnserved)
