"""Checks on two weight updates at once, and on one that runs twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import (
    Fault,
    Pause,
    Resume,
    Submit,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.invariants._shared.event_check import EventCheck, case_actions, dead_server
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "SKEWED",
    "weights_newest_update_stays",
    "weights_one_load_per_version",
    "weights_updates_do_not_interleave",
]

SKEWED = "the case updates some servers by itself (skew, lag), next to the stack's updates"


class _SimultaneousUpdates(EventCheck):
    """Base of the checks of two updates at once.

    They overlap if a paused server is paused again, or if the case says so.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self.overlapped: set[str] = set()
        self.skewed: bool = bool(case_actions(context.header, "skew", "lag"))
        self._synced_twice = bool(case_actions(context.header, "sync-twice"))
        self._paused: set[str] = set()
        self._loads: dict[str, int] = {}
        self._started = False
        # a recorder at the wire: a pause of a paused server may be one update's, made twice
        self._unnamed = False

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_pause(self, event: Pause, out: Collector) -> None:
        if event.server_id in self._paused:
            self.overlapped.add(event.server_id)
        self._paused.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.discard(event.server_id)

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._unnamed = self._unnamed or (event.loaded and event.version is None)
        if event.loaded and self._started:
            loads = self._loads[event.server_id] = self._loads.get(event.server_id, 0) + 1
            # Without pauses only the case shows that two updates overlapped.
            if self._synced_twice and loads > 1:
                self.overlapped.add(event.server_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        # a server that starts again is not paused, though nobody has resumed it
        self._paused.discard(dead_server(event))

    def finish(self, out: Collector) -> None:
        if self.skewed and self.overlapped:
            out.absent(SKEWED)
        elif self._unnamed and self.overlapped:
            out.absent("the trace does not say which weights were loaded")
        else:
            out.exercised("updates started at once", len(self.overlapped))


@dataclass(slots=True)
class _Session:
    """A server's pauses that no resume has matched yet.

    paused: Whether the server is still paused.
    pauses: The number of unmatched pauses.
    resumed_early: The last resume, while another pause is unmatched.
    loaded: A load after that resume.
    """

    paused: bool = True
    pauses: int = 1
    resumed_early: Resume | None = None
    loaded: Weights | None = None


class WeightsUpdatesDoNotInterleave(_SimultaneousUpdates):
    """Two pauses, a resume, a load into the serving server and another resume: the first resume
    interrupted the other update.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._sessions: dict[str, _Session] = {}

    def on_pause(self, event: Pause, out: Collector) -> None:
        super().on_pause(event, out)
        session = self._sessions.get(event.server_id)
        if session is not None and session.paused:
            session.pauses += 1
        else:
            # A pause of a running server begins a new session.
            self._sessions[event.server_id] = _Session()

    def on_weights(self, event: Weights, out: Collector) -> None:
        super().on_weights(event, out)
        session = self._sessions.get(event.server_id)
        if (
            event.loaded
            and event.version is not None
            and session is not None
            and session.resumed_early is not None
        ):
            session.loaded = event

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        self._sessions.pop(dead_server(event), None)

    def on_resume(self, event: Resume, out: Collector) -> None:
        super().on_resume(event, out)
        session = self._sessions.get(event.server_id)
        if session is None:
            return
        # Two pauses and two resumes alone may be nested correctly: only a load in between shows the
        # interleaving.
        if session.resumed_early is not None and session.loaded is not None and not self.skewed:
            out.finding(
                "two concurrent updates overlap",
                expected=(
                    f"{event.server_id} stays paused until both updates have loaded their weights"
                ),
                observed=(
                    f"paused twice, resumed at event {session.resumed_early.index}, loaded at event"
                    f" {session.loaded.index} while serving, resumed again at event {event.index}"
                ),
                where={"server": event.server_id, "index": session.resumed_early.index},
                hint=(
                    "Updates need a lock or a count of pauses: the first resume served from weights"
                    " that the other was loading."
                ),
            )
        session.paused = False
        session.pauses -= 1
        session.resumed_early, session.loaded = event, None
        if session.pauses <= 0:
            del self._sessions[event.server_id]


weights_updates_do_not_interleave: Check = trace_check(
    "weights.updates-do-not-interleave",
    promise=(
        "If two updates overlap, neither resumes a server that the other one has paused and not"
        " yet loaded."
    ),
    needs="Pause, Weights and Resume events of two updates that overlap",
    exercised_by="updates started at once",
)(WeightsUpdatesDoNotInterleave)


class WeightsNewestUpdateStays(_SimultaneousUpdates):
    """Compares versions that are numbers; a roll-back without overlapping updates is no fault."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        # by server: version and index
        self._newest: dict[str, tuple[int, int]] = {}
        self._loaded: dict[str, Weights] = {}

    def on_weights(self, event: Weights, out: Collector) -> None:
        super().on_weights(event, out)
        # String labels have no order of their own.
        if not event.loaded or not isinstance(event.version, int):
            return
        self._loaded[event.server_id] = event
        newest = self._newest.get(event.server_id)
        if newest is None or event.version >= newest[0]:
            self._newest[event.server_id] = (event.version, event.index)

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        self._newest.pop(dead_server(event), None)
        self._loaded.pop(dead_server(event), None)

    def finish(self, out: Collector) -> None:
        super().finish(out)
        for server, (version, index) in self._newest.items():
            loaded = self._loaded[server]
            if loaded.version == version or self.skewed or server not in self.overlapped:
                continue
            out.finding(
                "an older update overwrote a newer one",
                expected=f"version {version}, loaded at event {index}, stays on {server}",
                observed=(
                    f"version {loaded.version} was loaded after it, at event {loaded.index}, and is"
                    " served to the end"
                ),
                where={"server": server, "version": loaded.version, "index": loaded.index},
                hint=(
                    "Updates must run one after the other, in the order in which they were started."
                ),
            )


weights_newest_update_stays: Check = trace_check(
    "weights.newest-update-stays",
    promise="If two updates overlap, the newer weights are served in the end.",
    needs="Weights events of two updates that overlap, with numbered versions",
    exercised_by="updates started at once",
)(WeightsNewestUpdateStays)


class WeightsOneLoadPerVersion(EventCheck):
    """An update may load as often as it likes until it returns: the weights are the same. A load
    after a death or a failed update, under a new label, or while another update runs has a reason.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._loaded: dict[str, Weights] = {}
        self._running: int | None = None
        self._started = False

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_update(self, event: Update, out: Collector) -> None:
        change = 1 if event.phase is UpdatePhase.ASKED else -1
        self._running = max(0, (self._running or 0) + change)
        if event.phase is UpdatePhase.FAILED:
            # what a stack repairs afterwards, it repairs on all servers
            self._loaded.clear()

    def on_fault(self, event: Fault, out: Collector) -> None:
        # A reload after a failure is a repair, not a repetition.
        if event.what in ("death", "revive", "update-failure"):
            # on all servers: a stack may repeat an update everywhere to repair one of them
            self._loaded.clear()

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not self._started or not event.loaded:
            return
        # The stack repeats nothing if rollproof loaded these weights, or other ones in between.
        if event.by_harness:
            self._loaded.pop(event.server_id, None)
            return
        if event.version is None:
            # two loads under one label may be two parts of one update
            self._loaded.pop(event.server_id, None)
            out.absent("the trace does not say which weights were loaded")
            return
        previous = self._loaded.get(event.server_id)
        self._loaded[event.server_id] = event
        again = (
            previous is not None
            and event.label is not None
            and (previous.version, previous.label) == (event.version, event.label)
        )
        # Recordings hold no Update events, so an update may have been running.
        if again and self._running is None:
            out.absent("a server loaded the same version twice, and no event says when updates end")
            return
        out.exercised("loads")
        if previous is not None and again and not self._running:
            out.finding(
                "an update loads again after it has ended",
                expected=(
                    f"no further load of version {event.version}, published as {event.label!r}, by"
                    f" {event.server_id}"
                ),
                observed=f"loads at events {previous.index} and {event.index}",
                where={"server": event.server_id, "version": event.version, "index": event.index},
                hint=(
                    "A cancelled or retried update runs on although the trainer was told that it"
                    " is done (prime-rl #2004): it interrupts calls that nobody expects it to"
                    " interrupt, and may overwrite newer weights. Cancel it, or wait for it."
                ),
            )


weights_one_load_per_version: Check = trace_check(
    "weights.one-load-per-version",
    promise="When a weight update has ended, no server loads its weights a second time.",
    needs="Weights and Update events",
    exercised_by="loads",
)(WeightsOneLoadPerVersion)
