"""Checks that a weight update that has ended has brought new weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import (
    Admit,
    Call,
    Fault,
    Pause,
    Resume,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.events.weights import Adapter, AdapterChange
from rollproof.core.records import Scalar, Version
from rollproof.invariants._shared.event_check import EndAwareCheck, remember
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "weights_no_failure_without_fault",
    "weights_update_loads",
]


@dataclass(slots=True, eq=False)
class _RequestedUpdate:
    """An update that was requested, and what happened since.

    away: Servers that were dead, or out of the balancer, at some time while it ran.
    overlapped: Whether another update ran at the same time.
    loads: The last load of each server by the stack since the request.
    reached: Servers that have loaded its weights, or newer ones, since.
    labelled: Servers that have shown its label since, without a load.
    broken: Servers to which a transfer has broken since.
    ignored: Servers that have ignored an adapter since, whose name they had in use.
    served: Whether a server has shown that it serves its weights, or newer ones.
    ended: The index of its end.
    least: The oldest weights that an update which was asked for since wanted, if they are older
        than its own: then they may replace its own.
    """

    event: Update
    away: set[str]
    overlapped: bool
    loads: dict[str, Weights] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    labelled: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    served: bool = False
    ended: int = 0
    least: Version = None

    @property
    def version(self) -> Version:
        """The weights that were requested."""
        return self.event.version

    @property
    def required(self) -> Version:
        """The oldest weights that are new enough."""
        return self.version if self.least is None else self.least


@dataclass(frozen=True, slots=True)
class _Stale:
    """A call that ``server`` admitted under weights ``held``, older than those of an update that
    had ended; and what is known about the update by then.
    """

    update: _RequestedUpdate
    server: str
    held: Version
    admit: Admit
    title: str
    observed: str
    hint: str

    @property
    def place(self) -> dict[str, Scalar]:
        """Where it happened."""
        return {
            "version": self.update.version,
            "server": self.server,
            "call": self.admit.call_id,
            "index": self.admit.index,
        }


class WeightsUpdateLoads(EndAwareCheck):
    """Judges a server from the end of an update on, unless it was dead or out of the balancer at
    some time while the update ran. A stack may load lazily: what counts are the weights under which
    the server admits its next call, of those that were sent after the update had ended, or to a
    server that the update had paused.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._held: dict[str, Version] = {}
        self._out: set[str] = set()
        self._open: list[_RequestedUpdate] = []
        self._due: dict[str, _RequestedUpdate] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        self._paused: dict[str, int] = {}
        self._stale: list[_Stale] = []

    def on_update(self, event: Update, out: Collector) -> None:
        """Note the begin and the end of an update."""
        if event.phase is UpdatePhase.ASKED:
            for other in self._open:
                other.overlapped = True
            # The newest weights may be asked for without a label while a labelled update waits.
            for earlier in (*self._open, *self._due.values()):
                if _is_older(event.version, earlier.required):
                    earlier.least = event.version
            self._open.append(_RequestedUpdate(event, set(self._out), bool(self._open)))
            return
        # Updates without a label cannot be told apart. The oldest one requested the oldest weights,
        # so that taking it raises no false alarm.
        fitting = [update for update in self._open if update.event.label == event.label]
        if not fitting:
            return
        update = fitting[0]
        self._open.remove(update)
        update.ended = event.index
        if event.phase is UpdatePhase.FAILED:
            return
        # one that was away may have missed the transfer, which is no fault of the update
        for server in self._held.keys() - update.away:
            due = self._due.get(server)
            # updates may end in another order than that of their weights: the newest are due
            if due is None or not _is_older(update.version, due.version):
                self._due[server] = update
        if update.reached.intersection(name for name, due in self._due.items() if due is update):
            update.served = True
            out.exercised("updates that ended")

    def on_weights(self, event: Weights, out: Collector) -> None:
        server = event.server_id
        if not event.loaded:
            for update in self._open:
                if event.label is not None and event.label == update.event.label:
                    update.labelled.add(server)
            return
        self._held[server] = event.version
        if event.by_harness:
            return
        # A transfer in the background may end after its update has returned.
        for update in (*self._open, *self._due.values()):
            update.loads[server] = event
            if not _is_older(event.version, update.version):
                update.reached.add(server)
        for stale in [stale for stale in self._stale if stale.server == server]:
            if event.version == stale.update.version:
                self._stale.remove(stale)
                _report_early(stale, event, out)

    def on_adapter(self, event: Adapter, out: Collector) -> None:
        if event.change is AdapterChange.IGNORED:
            for update in self._open:
                update.ignored.add(event.server_id)

    def on_call(self, event: Call, out: Collector) -> None:
        # A stack may call a server that it sends no rollouts to, to see whether it is well.
        if event.request_id or event.candidates:
            paused = self._paused.get(event.server_id, -1)
            remember(self._sent, event.call_id, (event.index, paused))

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.setdefault(event.server_id, event.index)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)

    def on_admit(self, event: Admit, out: Collector) -> None:
        # A preempted call is admitted again, and may have begun before the update.
        sent, paused = self._sent.pop(event.call_id, (-1, -1))
        server = event.server_id
        update, held = self._due.get(server), self._held.get(server)
        # A call that was on its way when the update ended may have been sent before the request.
        if update is None or (sent < update.ended and paused < update.event.index):
            return
        if _is_older(held, update.required):
            # Only the first call is reported. A later load of the server may name the cause.
            self._due = {name: due for name, due in self._due.items() if due is not update}
            self._stale.append(
                _Stale(update, server, held, event, *_describe(update, server, held))
            )
        elif not update.served:
            update.served = True
            out.exercised("updates that ended")

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        server = event.server_id
        if server is None:
            return
        if event.what == "update-failure":
            for update in self._open:
                update.broken.add(server)
        elif event.what in ("death", "leave"):
            self._out.add(server)
            for update in self._open:
                update.away.add(server)
            # What a server serves after a restart is not the doing of an update before it.
            if event.what == "death":
                self._paused.pop(server, None)
                self._due.pop(server, None)
        elif event.what in ("revive", "join"):
            self._out.discard(server)

    def finish(self, out: Collector) -> None:
        for stale in self._stale:
            update = stale.update
            out.finding(
                stale.title,
                expected=(
                    f"version {update.version} on the servers that serve after"
                    f" update_weights({update.event.label}) has returned"
                ),
                observed=stale.observed,
                where=stale.place,
                hint=stale.hint,
            )


def _report_early(stale: _Stale, load: Weights, out: Collector) -> None:
    """Report an update that returned before its weights came."""
    out.finding(
        "an update returned before its weights were loaded",
        expected=(
            f"version {load.version} on {stale.server} when"
            f" update_weights({stale.update.event.label}) returns"
        ),
        observed=(
            f"{stale.server} admitted call {stale.admit.call_id} under version {stale.held}, and"
            f" loaded version {load.version} only at event {load.index}"
        ),
        where=stale.place,
        hint=(
            "The transfer runs in a task that nobody awaits, or is not acknowledged by the server:"
            " await it before the update returns."
        ),
    )


def _describe(update: _RequestedUpdate, server: str, held: Version) -> tuple[str, str, str]:
    """Return title, observation and hint: why ``server`` serves older weights than ``update``."""
    load = update.loads.get(server)
    if load is not None and _is_older(load.version, update.version):
        return _other_weights(update, load)
    serves = f"{server} went on to serve version {held}"
    if server in update.broken:
        return (
            "an update ended as a success although a transfer had broken",
            f"{serves}; the transfer to it broke while the update ran",
            (
                "The error of the transfer was caught: repeat the transfer, let the update fail,"
                " or send the server no calls until it has the weights."
            ),
        )
    if server in update.ignored:
        return (
            "an update ended, and its adapter was ignored",
            f"{serves}; it has an adapter of that name, and kept it",
            (
                "The engine keeps the adapter that it has unless it is told to replace it: load it"
                " in place (`load_inplace`), unload the old one first, or give each version a name"
                " of its own (vLLM #31326, SkyRL #1606). Read what the load returns."
            ),
        )
    if update.reached:
        return (
            "an update ended before it had reached every server",
            (
                f"{serves}; {', '.join(sorted(update.reached))} had loaded version"
                f" {update.version} or newer"
            ),
            "Check the list of servers that the update covers, and that it waits for all of them.",
        )
    if server in update.labelled:
        return (
            "an update ended, and only its label was published",
            f"{serves}, now as {update.event.label!r}; nothing was loaded",
            (
                "The label is published whether or not weights were delivered (an adapter that"
                " never arrives: verl #7495)."
            ),
        )
    if update.overlapped:
        return (
            "an update that was asked for during another one was never carried out",
            f"{serves}; nothing newer was loaded",
            (
                "It returned although another update was still in progress: let it wait, or merge"
                " both into one load of the newest weights."
            ),
        )
    # verl #4248: free_cache_engine=False skipped every weight sync.
    return (
        "an update ended, and no server was given its weights",
        f"{serves}; nothing was loaded",
        (
            "The sampling policy lags behind the trained one, whatever its tag says: look for a"
            " condition under which the transfer is skipped (verl #4248: free_cache_engine=False"
            " skipped every weight sync)."
        ),
    )


def _other_weights(update: _RequestedUpdate, load: Weights) -> tuple[str, str, str]:
    """Return title, observation and hint for a server that loaded older weights since."""
    observed = (
        f"{load.server_id} loaded version {load.version} at event {load.index}, shown as"
        f" {load.label!r}"
    )
    if load.server_id in update.reached:
        return (
            "older weights replaced those of an update that had ended",
            f"{observed}, after it had version {update.version} or newer",
            "Updates must run one after the other, in the order in which they were started.",
        )
    if update.overlapped:
        return (
            "an update ended, and weights of an older one were loaded",
            observed,
            (
                "Another update ran at the same time: run them one after the other, or merge them"
                " into one load of the newest weights."
            ),
        )
    return (
        "an update ended, and other weights were loaded than it asked for",
        observed,
        (
            "The servers read a checkpoint or a buffer that the new weights have not replaced yet:"
            " a link to the latest one, a file that is still being written, a cache."
        ),
    )


def _is_older(version: Version, other: Version) -> bool:
    """Return whether weights are known to be older than others. Only numbers have an order."""
    return isinstance(version, int) and isinstance(other, int) and version < other


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
    promise=(
        "When a weight update has ended, every server that was alive through it serves its weights,"
        " or newer ones."
    ),
    needs="Update events, and the Weights and Admit events of the servers",
    exercised_by="updates that ended",
)(WeightsUpdateLoads)
