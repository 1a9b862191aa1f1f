"""The check that servers change their weights and the label of these weights together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollproof.core.contract import Versions
from rollproof.core.events.rollout import (
    Admit,
    Fault,
    Pause,
    Reply,
    Resume,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import Version
from rollproof.invariants._shared.event_check import EventCheck, dead_server, remember
from rollproof.invariants._shared.phrases import count, version_name
from rollproof.judging.checks import Check, Collector, trace_check
from rollproof.judging.weight_history import Key, key

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["versions_label_with_weights"]


@dataclass(slots=True)
class _Apart:
    """A server whose label is not that of its weights.

    event: The publication or the load that made them differ.
    lags: Whether the label is the older one; then tokens count from the resume on.
    sampled: The tokens that each call in flight had sampled when counting began.
    tokens: The tokens that ended calls have sampled since.
    own: Whether the label is of the stack's own, so that only its load shows for which weights.
    """

    event: Weights
    lags: bool
    sampled: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    own: bool = False

    def ended(self, call_id: int, tokens: int) -> None:
        """Count the tokens of a call that has ended."""
        before = self.sampled.pop(call_id, None)
        if before is not None:
            self.tokens += max(0, tokens - before)

    def until(self, progress: Mapping[int, int] | None) -> int:
        """Return how many tokens were sampled up to an event, given those of the calls in
        flight.
        """
        return self.tokens + sum(
            max(0, tokens - self.sampled[call])
            for call, tokens in (progress or {}).items()
            if call in self.sampled
        )


@dataclass(slots=True)
class _Server:
    """The weights of a server, its label, and whether it is paused.

    carried: Whether the last load left the label in place: that of its weights may follow.
    """

    version: Version
    label: Version
    paused: bool = False
    carried: bool = False
    apart: _Apart | None = None


class VersionsLabelWithWeights(EventCheck):
    """Counts the tokens from the publication of a label to the load of its weights, and from the
    resume after a load to the label.

    For which weights a label of the stack's own was published is learnt from the loads of the whole
    trace. An engine that is loaded while it serves may have no way to change both at once, so that
    a label that follows such a load is not judged.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        engine = context.header.engine
        self._silent = engine is not None and engine.versions is Versions.NONE
        self._shown = False
        self._servers: dict[str, _Server] = {}
        self._labels: dict[Version, Version] = {}
        self._asked_at: dict[Version, int] = {}
        self._open: dict[Key, list[Version]] = {}
        self._first_shown: dict[Key, int] = {}
        self._loaded_as: dict[Key, set[Version]] = {}
        # by the event that published the label
        self._pending: dict[int, tuple[_Apart, int, Weights | None]] = {}

    def on_update(self, event: Update, out: Collector) -> None:
        if event.phase is UpdatePhase.ASKED and event.version not in self._asked_at:
            remember(self._asked_at, event.version, event.index)
        running = self._open.setdefault(key(event.label), [])
        if event.phase is UpdatePhase.ASKED:
            running.append(event.version)
        elif running:
            del running[0]
        if not running:
            del self._open[key(event.label)]
        if event.label is not None:
            remember(self._labels, event.version, event.label)

    def on_pause(self, event: Pause, out: Collector) -> None:
        if event.server_id in self._servers:
            self._servers[event.server_id].paused = True

    def on_resume(self, event: Resume, out: Collector) -> None:
        server = self._servers.get(event.server_id)
        if server is None:
            return
        if server.paused and server.apart is not None and server.apart.lags:
            server.apart.sampled = dict(event.progress or {})
        server.paused = False

    def on_weights(self, event: Weights, out: Collector) -> None:
        server = self._servers.get(event.server_id)
        if self._silent:
            return
        shown = key(event.label)
        if shown not in self._first_shown:
            remember(self._first_shown, shown, event.index)
        if event.loaded and not event.by_harness:
            loads = self._loaded_as.get(shown, set())
            remember(self._loaded_as, shown, {*loads, event.version})
        if server is None:
            self._servers[event.server_id] = _Server(event.version, event.label)
            return
        own = event.label is not None and key(event.label) == key(self._labels.get(event.version))
        self._shown = self._shown or own
        out.exercised("labels of updates", int(own))
        apart, server.apart = server.apart, None
        if apart is not None and (
            not apart.lags
            # A stack may leave the labels alone: one that lags is late only if it comes.
            or (own and not event.loaded and event.version == server.version)
        ):
            self._report(apart, apart.until(event.progress), event, out)
        carried = (
            event.loaded
            and event.label is not None
            and not own
            and event.version != server.version
            and event.label == server.label
        )
        if carried and server.paused and not event.by_harness:
            server.apart = _Apart(event, lags=True)
        elif not carried and self.context.history.is_misplaced(event):
            server.apart = _Apart(event, lags=False, sampled=dict(event.progress or {}))
        elif not event.loaded and not own and self._may_be_early(event, server):
            server.apart = _Apart(event, lags=False, sampled=dict(event.progress or {}), own=True)
        # A label that was ahead of its weights is theirs now, and no longer carried over.
        ahead = apart is not None and apart.own
        if event.loaded or not event.by_harness:
            # equal weights, too, may get a label of their own later
            server.carried = event.loaded and event.label == server.label and not ahead
        server.version, server.label = event.version, event.label

    def _may_be_early(self, event: Weights, server: _Server) -> bool:
        """Return whether an update of other weights published a new label while the server had
        weights with a label of their own.
        """
        running = [version for versions in self._open.values() for version in versions]
        return (
            bool(running)
            and event.version not in running
            and not event.by_harness
            and not server.carried
            and server.label is not None
            and event.label is not None
            and key(event.label) != key(server.label)
        )

    def _loaded_for(self, apart: _Apart) -> bool:
        """Return whether the label was new with an update, and loaded with its weights alone."""
        label = key(apart.event.label)
        versions = self._loaded_as.get(label, set())
        if len(versions) != 1 or apart.event.version in versions:
            return False
        # A label that was there before the update names no weights, such as "latest".
        asked = self._asked_at.get(next(iter(versions)))
        return asked is not None and asked < self._first_shown.get(label, -1)

    def _report(self, apart: _Apart, tokens: int, until: Weights | None, out: Collector) -> None:
        """Report at once what is known, and put off what the rest of the trace shows."""
        if not apart.own:
            _report(apart, tokens, until, out)
        elif tokens:
            remember(self._pending, apart.event.index, (apart, tokens, until))

    def on_admit(self, event: Admit, out: Collector) -> None:
        server = self._servers.get(event.server_id)
        if server is not None and server.apart is not None and not server.paused:
            server.apart.sampled.setdefault(event.call_id, 0)

    def on_reply(self, event: Reply, out: Collector) -> None:
        for server in self._servers.values():
            if server.apart is not None:
                server.apart.ended(event.call_id, len(event.output.token_ids))

    def on_fault(self, event: Fault, out: Collector) -> None:
        server = self._servers.get(dead_server(event))
        if server is None:
            return
        if server.apart is not None and not server.apart.lags:
            self._report(server.apart, server.apart.tokens, None, out)
        server.apart, server.paused = None, False

    def finish(self, out: Collector) -> None:
        if self._silent:
            out.inapplicable(
                "the engines show no version (their contract declares versions='none')"
            )
            return
        for server in self._servers.values():
            if server.apart is not None and not server.apart.lags:
                self._report(server.apart, server.apart.tokens, None, out)
        early = [pending for pending in self._pending.values() if self._loaded_for(pending[0])]
        for apart, tokens, until in early:
            _report(apart, tokens, until, out)
        out.exercised("labels of updates", len({key(apart.event.label) for apart, *_ in early}))
        if not self._shown and not early:
            out.inapplicable(
                "no server showed the label of an update: the stack publishes none, or its own"
            )


versions_label_with_weights: Check = trace_check(
    "versions.label-with-weights",
    promise=(
        "A server shows the label of an update from the load of its weights on: no token is sampled"
        " under it before, nor under the label of older weights once the server was resumed."
    ),
    needs="Update, Weights, Pause and Resume events, and the progress of calls in flight",
    exercised_by="labels of updates",
)(VersionsLabelWithWeights)


def _report(apart: _Apart, tokens: int, until: Weights | None, out: Collector) -> None:
    """Report the tokens that were sampled while the label was not that of the weights."""
    if not tokens:
        return
    event = apart.event
    label = version_name(event.label)
    if apart.lags:
        title = "the label of an update was published after its weights had begun to serve"
        hint = (
            "Publish the label while the server is still paused, with the load or right after it."
        )
    elif event.loaded:
        title = "other weights were loaded under the label of an update"
        hint = (
            "The label says what was asked for, and not what was loaded: take both from the same"
            " place, such as the step that is stored in the checkpoint."
        )
    else:
        title = "the label of an update was published before its weights were loaded"
        hint = (
            "Publish it when the calls in flight have drained or were aborted: with the load, or"
            " between the load and the resume."
        )
    end = "the end of the trace" if until is None else f"event {until.index}"
    out.finding(
        title,
        expected=f"no token while {event.server_id} shows {label} and has version {event.version}",
        observed=(
            f"{count(tokens, 'token')} from event {event.index} to {end}, sampled by version"
            f" {event.version} and shown as {label}"
        ),
        where={"server": event.server_id, "version": event.version, "index": event.index},
        hint=hint,
    )
