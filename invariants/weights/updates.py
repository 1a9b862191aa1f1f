"""Checks on the procedure that brings new weights to the servers: its pauses, loads and resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.conventions import Adapters
from rollproof.core.events.rollout import (
    Admit,
    Call,
    Fault,
    Pause,
    Reply,
    Resume,
    Submit,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import Version
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    EventCheck,
    case_actions,
    dead_server,
    remember,
)
from rollproof.invariants.weights import update_races
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "weights_every_pause_resumes",
    "weights_every_replica_updated",
    "weights_failed_update_resumes",
    "weights_no_load_while_running",
    "weights_updates_end",
]

# A dead replica cannot load, and a failed update is judged by failed-update-resumes.
_EXCUSES = {
    "death": "the death of a server",
    "revive": "the revival of a server",
    "update-failure": "a failed update",
}


class WeightsUpdatesEnd(EndAwareCheck):
    """An update that outlasts the deadline is recorded as the fault ``update-hung``."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._started = False

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_weights(self, event: Weights, out: Collector) -> None:
        if self._started:
            out.exercised("updates")

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if event.what == "update-hung":
            out.finding(
                "a weight update never ended",
                expected="every update ends, with new weights or with an error",
                observed=f"it did not end within the deadline ({event.detail or 'no detail'})",
                where={"server": event.server_id, "index": event.index},
                hint=(
                    "It waits for calls that wait for it: a lock is held across the pause, or"
                    " parked calls are drained (sglang #25319)."
                ),
            )


weights_updates_end: Check = trace_check(
    "weights.updates-end",
    promise="Every weight update ends.",
    needs="Weights events, and Fault update-hung if one did not end",
    exercised_by="updates",
)(WeightsUpdatesEnd)


class WeightsEveryReplicaUpdated(EndAwareCheck):
    """Replicas may differ during an update, and while a death, a failed update or a declared skew
    explains it. A stack may load lazily: a replica is behind if it admitted a call that was sent
    when the update had ended, or, if the trace does not say when, after its first load.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._versions: dict[str, frozenset[Version]] = {}
        self._dead: dict[str, frozenset[Version]] = {}
        self._paused: set[str] = set()
        self._started = False
        self._latest: Weights | None = None
        self._first: dict[Version, int] = {}
        self._ended: dict[Version, int | None] = {}
        self._sent: dict[int, int] = {}
        self._last_sent: dict[str, int] = {}
        self._loaded_by_harness: dict[str, Weights] = {}
        self._excuse: str | None = None
        self._skewed = {action.get("server") for action in case_actions(context.header, "skew")}

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._started = True

    def on_call(self, event: Call, out: Collector) -> None:
        if event.server_id not in self._dead:
            self._versions.setdefault(event.server_id, frozenset())
        # A stack may call a server that it sends no rollouts to, to see whether it is well.
        if event.request_id or event.candidates:
            remember(self._sent, event.call_id, event.index)

    def on_admit(self, event: Admit, out: Collector) -> None:
        sent = self._sent.pop(event.call_id, None)
        if sent is not None:
            self._last_sent[event.server_id] = max(sent, self._last_sent.get(event.server_id, 0))

    def on_update(self, event: Update, out: Collector) -> None:
        if self._ended.get(event.version) is None:
            end = None if event.phase is UpdatePhase.ASKED else event.index
            remember(self._ended, event.version, end)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._versions.setdefault(event.server_id, frozenset())
        self._paused.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.discard(event.server_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if event.what in _EXCUSES:
            self._excuse = (
                f"{_EXCUSES[event.what]} came after the last update that reached every replica"
            )
        if event.server_id is not None and event.what == "death":
            self._dead[event.server_id] = self._versions.pop(event.server_id, frozenset())
            self._paused.discard(event.server_id)
        elif event.server_id is not None and event.what == "revive":
            self._versions[event.server_id] = self._dead.pop(event.server_id, frozenset())

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded or event.version is None:
            return
        # What it admitted before, it admitted under other weights.
        self._last_sent.pop(event.server_id, None)
        before = self._versions.get(event.server_id, frozenset())
        self._versions[event.server_id] = (
            # After an identity update a server holds both versions, since they are equal.
            before | {event.version} if event.identity else frozenset((event.version,))
        )
        # The stack knows nothing of a skew or of a server that comes back with other weights.
        if event.by_harness:
            self._loaded_by_harness[event.server_id] = event
            return
        self._loaded_by_harness.pop(event.server_id, None)
        self._latest = event
        if event.version not in self._first:
            remember(self._first, event.version, event.index)
        # An update that reached every replica settles what came before it.
        if not self._behind():
            self._excuse = None
            if self._started and len(self._versions) > 1:
                out.exercised("updates of several replicas")

    def _behind(self) -> list[str]:
        latest = self._latest
        return (
            []
            if latest is None
            else [
                server
                for server, versions in self._versions.items()
                if latest.version not in versions
                and not _is_excused(self._loaded_by_harness.get(server), latest)
            ]
        )

    def finish(self, out: Collector) -> None:
        behind = self._behind()
        if not behind or self._latest is None:
            return
        since = self._ended.get(self._latest.version, self._first.get(self._latest.version, -1))
        if since is None:
            out.absent("the trace ends in the middle of an update")
            return
        ahead = [server for server in self._versions if server not in behind]
        sent = self._last_sent
        behind = [server for server in behind if server in sent and sent[server] > since]
        if not behind:
            return
        # The case itself updates some servers (skew, lag), which is no fault of the stack.
        if self._latest.by_harness or (
            len(ahead) == 1 and (ahead[0] in self._skewed or None in self._skewed)
        ):
            out.absent(update_races.SKEWED)
        elif self._excuse or self._paused or not self.complete:
            out.absent(self._excuse or "the trace ends in the middle of an update")
        else:
            for server in behind:
                versions = "/".join(sorted(map(str, self._versions[server]))) or (
                    "the weights that it started with"
                )
                out.finding(
                    "an update left a replica out",
                    expected=f"version {self._latest.version} on all of {sorted(self._versions)}",
                    observed=f"{server} still holds {versions}",
                    where={
                        "server": server,
                        "version": self._latest.version,
                        "index": self._latest.index,
                    },
                    hint=(
                        "Its samples come from older weights, whatever tag it shows: check"
                        " the list of replicas that the update covers."
                    ),
                )


def _is_excused(harness: Weights | None, latest: Weights) -> bool:
    """Return whether the harness loaded other weights after the stack's latest load, or newer ones
    while the update went on in the background.
    """
    if harness is None:
        return False
    loaded, expected = harness.version, latest.version
    newer = isinstance(loaded, int) and isinstance(expected, int) and loaded > expected
    return newer or harness.index > latest.index


weights_every_replica_updated: Check = trace_check(
    "weights.every-replica-updated",
    promise=(
        "When a weight update has ended, no live replica admits a new call under older weights to"
        " the end of the trace."
    ),
    needs=(
        "Weights, Call and Admit events of two or more servers, in a trace that runs to its end"
    ),
    exercised_by="updates of several replicas",
)(WeightsEveryReplicaUpdated)


class WeightsEveryPauseResumes(EndAwareCheck):
    """``weights.failed-update-resumes`` judges pauses that a failed update left behind."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: dict[str, Pause] = {}
        self._failed: set[str] = set()
        self._waiting: dict[str, set[str]] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        if event.server_id in self._paused:
            self._waiting.setdefault(event.server_id, set()).add(event.request_id)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.setdefault(event.server_id, event)

    def on_resume(self, event: Resume, out: Collector) -> None:
        if self._paused.pop(event.server_id, None) is not None:
            out.exercised("pauses")
        self._failed.discard(event.server_id)
        self._waiting.pop(event.server_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if _update_gave_up(event):
            self._failed.update(self._paused)
        elif event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)
            self._failed.discard(event.server_id)

    def finish(self, out: Collector) -> None:
        for server, pause in self._paused.items():
            hanging = sorted(self._waiting.get(server, set()).intersection(self.hung))
            # failed-update-resumes judges this pause.
            if server in self._failed:
                continue
            # A trace that was cut in a pause looks like a server that was never resumed.
            if not self.complete and not hanging:
                out.absent("the trace ends while a server is paused, and may have been cut there")
                continue
            out.finding(
                "a server was never resumed",
                expected=(
                    f"a resume of {server} after its pause (mode {pause.mode}) at event"
                    f" {pause.index}"
                ),
                observed="none until the end of the trace"
                + (f"; requests {hanging} hang on it" if hanging else ""),
                where={"server": server, "index": pause.index},
                hint=(
                    "Code that pauses must resume on every path, even if there was nothing to load."
                ),
            )


weights_every_pause_resumes: Check = trace_check(
    "weights.every-pause-resumes",
    promise="Every pause of a server ends with a resume.",
    needs="Pause and Resume events, in a trace that runs to its end or hangs",
    exercised_by="pauses",
)(WeightsEveryPauseResumes)


class WeightsFailedUpdateResumes(EndAwareCheck):
    """Judges an update when the procedure has given up: one that retries by itself has not
    failed.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: dict[str, None] = {}
        self._failed: dict[str, Fault] = {}
        self._gave_up = False

    def on_pause(self, event: Pause, out: Collector) -> None:
        # That the next update resumes the server is too late: in between its callers waited for
        # nothing.
        failure = self._failed.pop(event.server_id, None)
        if failure is not None:
            self._report(
                event.server_id,
                failure,
                f"it was still paused when the next update began, at event {event.index}",
                out,
            )
        self._paused[event.server_id] = None

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)
        self._failed.pop(event.server_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        if _update_gave_up(event):
            self._gave_up = True
            out.exercised("failed updates")
            self._failed.update(dict.fromkeys(self._paused, event))
        elif event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)
            self._failed.pop(event.server_id, None)

    def finish(self, out: Collector) -> None:
        if not self._gave_up:
            out.inapplicable(
                "no weight update gave up: no transfer broke, or the broken ones were repeated"
            )
        for server, failure in self._failed.items():
            if self.complete or self.hung:
                tail = f"; requests {sorted(self.hung)} hang" if self.hung else ""
                self._report(
                    server, failure, f"it was still paused at the end of the trace{tail}", out
                )
            else:
                out.absent("the trace ends after a failed update, and may have been cut there")

    def _report(self, server: str, failure: Fault, observed: str, out: Collector) -> None:
        out.finding(
            "a failed update left a replica paused",
            expected=(
                f"{server} is resumed before the update gives up at event {failure.index}"
                f" ({failure.detail or 'no detail'})"
            ),
            observed=observed,
            where={"server": server, "index": failure.index},
            hint=(
                "Resume in a `finally` (verl CheckpointEngineManager.update_weights has"
                " none): until then clients wait or retry. If your trainer always retries a"
                " failed update at once, list this check as an expected failure with that"
                " reason."
            ),
        )


weights_failed_update_resumes: Check = trace_check(
    "weights.failed-update-resumes",
    promise="A weight update that fails leaves no replica paused.",
    needs="an update procedure that gives up (Fault update-failure without a server)",
    exercised_by="failed updates",
)(WeightsFailedUpdateResumes)


class WeightsNoLoadWhileRunning(EventCheck):
    """The calls in progress are those that the server lists at the load, not those without a reply:
    a reply may be on its way.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: set[str] = set()
        self._resumed: dict[str, Resume] = {}
        self._admitted: dict[int, str] = {}
        self._shows_admissions = False
        self._updating = 0
        self._busy: set[str] = set()
        self._restarted: set[str] = set()

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._shows_admissions = True
        remember(self._admitted, event.call_id, event.server_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._admitted.pop(event.call_id, None)

    def on_update(self, event: Update, out: Collector) -> None:
        if event.phase is UpdatePhase.ASKED:
            if not self._updating:
                self._busy, self._restarted = set(), set()
                self._resumed.clear()
            # Most pauses end the calls, and leave none for the load to find.
            self._busy.update(self._admitted.values())
        self._updating += 1 if event.phase is UpdatePhase.ASKED else -1

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        if event.server_id in self._paused:
            self._paused.discard(event.server_id)
            self._resumed[event.server_id] = event

    def on_fault(self, event: Fault, out: Collector) -> None:
        dead = dead_server(event)
        if not dead:
            return
        # One that comes back within the update takes calls, and the transfer to it may go on.
        self._restarted.add(dead)
        self._paused.discard(dead)
        self._admitted = {call: server for call, server in self._admitted.items() if server != dead}

    def on_weights(self, event: Weights, out: Collector) -> None:
        # Adapters are swapped while calls run on the base model (vLLM's load_lora_adapter).
        if not event.loaded or event.by_harness or event.adapter is not None:
            return
        server = event.server_id
        if server in self._restarted:
            return
        if event.progress is None:
            if server in self._admitted.values():
                out.absent("the trace does not say which calls run when a server loads weights")
            return
        running = [call for call in event.progress if self._admitted.get(call) == server]
        if running or server in self._busy:
            out.exercised("loads on servers that ran calls")
        if running and server not in self._paused:
            calls = ", ".join(f"call {call}" for call in running)
            resumed = self._resumed.get(server)
            out.finding(
                "weights were loaded into a server that ran calls and was not paused",
                expected=(
                    f"a pause of {server} before it loads version {event.version}: the contract"
                    " declares updates_pause=True"
                ),
                observed=(
                    f"it loaded them at event {event.index}, while {calls} ran"
                    + (
                        ", without a pause"
                        if resumed is None
                        else f": its pause had ended at event {resumed.index}"
                    )
                ),
                where={"call": running[0], "server": server, "index": event.index},
                hint=(
                    "Pause every server before the transfer, wait until the pauses are"
                    " acknowledged, and resume after the last load: a forward in between computes"
                    " with weights of which a part is new (SkyRL #1212)."
                ),
            )

    def finish(self, out: Collector) -> None:
        if not self._shows_admissions:
            out.absent("the trace does not say when a server admits a call")


weights_no_load_while_running: Check = trace_check(
    "weights.no-load-while-running",
    promise="A server that runs calls loads weights only while it is paused.",
    needs="Admit, Pause and Resume events, and the progress of calls at Weights",
    exercised_by="loads on servers that ran calls",
    applies=lambda contract: (
        "updates need not pause their servers (updates_pause=False)"
        if not contract.updates_pause
        else "every update brings an adapter, which is swapped while calls run"
        if contract.adapters is Adapters.FROZEN_BASE
        else None
    ),
)(WeightsNoLoadWhileRunning)


def _update_gave_up(event: Fault) -> bool:
    """Return whether an entire update gave up. With a server, only one transfer broke, and the
    procedure may still retry.
    """
    return event.what == "update-failure" and event.server_id is None
