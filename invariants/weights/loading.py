"""Checks that a weight update that has ended has brought new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.events.rollout import Admit, Fault, Update, UpdatePhase, Weights
from rollproof.core.records import Version
from rollproof.invariants._shared.event_check import EndAwareCheck
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge import JudgeContext

__all__ = [
    "weights_no_failure_without_fault",
    "weights_update_loads",
]


class WeightsUpdateLoads(EndAwareCheck):
    """Judges the latest update that ended. A stack may load lazily: only a server that served
    without loading is blamed.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._loaded: dict[str, Version] = {}
        self._loaded_since: set[str] = set()
        self._ended: Update | None = None
        self._open = 0
        self._served: dict[str, Admit] = {}
        self._excuse: str | None = None

    def on_update(self, event: Update, out: Collector) -> None:
        """Note the begin and the end of an update."""
        if event.phase is UpdatePhase.ASKED:
            self._judge_ended(out)
            # With two updates at once a load cannot be attributed to one: the loads of both count
            # for the last.
            if not self._open:
                self._loaded_since.clear()
            self._open += 1
            return
        self._open -= 1
        if event.phase is UpdatePhase.ENDED:
            self._ended = event
            self._served.clear()

    def on_weights(self, event: Weights, out: Collector) -> None:
        if event.loaded:
            self._loaded[event.server_id] = event.version
            # A stack may load lazily, after the update has returned.
            self._loaded_since.add(event.server_id)

    def on_admit(self, event: Admit, out: Collector) -> None:
        if self._ended is not None:
            self._served.setdefault(event.server_id, event)

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if event.what in ("death", "revive", "update-failure"):
            self._excuse = f"a fault ({event.what}) may explain weights that were not loaded"

    def finish(self, out: Collector) -> None:
        self._judge_ended(out)

    def _judge_ended(self, out: Collector) -> None:
        """Judge the servers that served after the latest update had ended."""
        update, self._ended = self._ended, None
        if update is None:
            return
        unloaded = [
            server
            for server in sorted(self._served)
            if server not in self._loaded_since and self._loaded.get(server) != update.version
        ]
        if not unloaded:
            out.exercised("updates that ended", int(bool(self._served) or bool(self._loaded_since)))
        elif self._excuse:
            out.absent(self._excuse)
        # verl #4248: free_cache_engine=False skipped every weight sync. Some servers without a load
        # are every-replica-updated's to judge.
        elif len(unloaded) == len(self._served):
            admitted = self._served[unloaded[0]]
            out.finding(
                "an update ended, and no server was given its weights",
                expected=(
                    f"version {update.version} on the servers that serve after"
                    f" update_weights({update.label}) has returned"
                ),
                observed=(
                    f"{', '.join(unloaded)} went on to serve version"
                    f" {self._loaded.get(unloaded[0])}; nothing was loaded"
                ),
                where={
                    "version": update.version,
                    "server": unloaded[0],
                    "call": admitted.call_id,
                    "index": admitted.index,
                },
                hint=(
                    "The sampling policy lags behind the trained one, whatever its tag says:"
                    " look for a condition under which the transfer is skipped (verl #4248:"
                    " free_cache_engine=False skipped every weight sync)."
                ),
            )


class WeightsNoFailureWithoutFault(EndAwareCheck):
    """Judges labelled updates, one at a time, in a fleet in which nothing ever broke."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._open = 0
        self._alone = True
        self._broken = False
        self._detail = ""

    def on_update(self, event: Update, out: Collector) -> None:
        if event.phase is UpdatePhase.ASKED:
            self._open += 1
            # Two updates at once may rightly make one of them fail.
            self._alone = self._open == 1
            return
        self._open -= 1
        # A stack may choose to refuse an update without a label.
        if event.label is None or self._broken or not self._alone:
            return
        out.exercised("updates while nothing was broken")
        if event.phase is UpdatePhase.FAILED:
            out.finding(
                f"update_weights({event.label}) raised, though nothing was broken",
                kind="an update raised, though nothing was broken",
                expected=(
                    "an update without an error: every server was alive, and no transfer failed"
                ),
                observed=self._detail or "it failed",
                where={"version": event.version, "index": event.index},
                hint=(
                    "The stack itself raised the error. The sampling policy lags behind the"
                    " trained one."
                ),
            )

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if event.what == "update-failure" and event.server_id is None:
            self._detail = event.detail
        elif event.what in ("death", "revive", "update-failure", "update-hung"):
            self._broken = True


weights_no_failure_without_fault: Check = trace_check(
    "weights.no-failure-without-fault",
    promise="A labelled weight update fails only if a server or a transfer did.",
    needs="Update and Fault events",
    exercised_by="updates while nothing was broken",
)(WeightsNoFailureWithoutFault)
weights_update_loads: Check = trace_check(
    "weights.update-loads",
    promise="When a weight update has ended, its weights are on the servers.",
    needs="Update events, and the Weights and Admit events of the servers",
    exercised_by="updates that ended",
)(WeightsUpdateLoads)
