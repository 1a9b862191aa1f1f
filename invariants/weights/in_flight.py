"""Checks on what weight updates and pauses may do to calls and samples in flight.

Versions are those that the trace knows to be true (``Weights.version``, ``Reply.true_tokens``):
labels belong to the family ``versions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rollproof.core.contract import Provenance, ResumeBy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Fault,
    Pause,
    Reply,
    Result,
    Resume,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import FinishReason, Rollout, Version
from rollproof.invariants._shared.event_check import EventCheck, dead_server, remember
from rollproof.invariants.lifecycle.aborted_samples import no_partial_flag, partial_is_off
from rollproof.invariants.weights.serving import MIXED, NO_TRUTH
from rollproof.judging.checks import Check, Collector, trace_check
from rollproof.judging.sample_views import sample_views

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.judge_context import JudgeContext
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Stretch

__all__ = [
    "weights_label_only_keeps_calls",
    "weights_no_admission_while_paused",
    "weights_no_token_while_paused",
    "weights_one_version_per_sample",
    "weights_staleness_bound",
]

_FREEZING = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)


class WeightsNoAdmissionWhilePaused(EventCheck):
    """A call may be sent to a paused server and be parked or refused; it must not run."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._paused: dict[str, Pause] = {}
        self._queued: dict[int, str] = {}
        # a recording of calls alone says nothing of admissions
        self._shows_admissions = context.header.case is not None
        self._met: dict[str, int] = {}
        self._updating = 0
        self._pauses_to_update = False

    def on_update(self, event: Update, out: Collector) -> None:
        self._updating += 1 if event.phase is UpdatePhase.ASKED else -1

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._queued, event.call_id, event.server_id)
        # A parked call is fine; AReaL #1618 ran it, since proxy workers were not paused.
        if event.server_id in self._paused:
            self._meet("calls sent to a paused server", 1)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._queued.pop(event.call_id, None)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._pauses_to_update = self._pauses_to_update or self._updating > 0
        self._paused.setdefault(event.server_id, event)
        self._meet(
            "calls queued at a pause",
            sum(server == event.server_id for server in self._queued.values()),
        )

    def _meet(self, situation: str, times: int) -> None:
        self._met[situation] = self._met.get(situation, 0) + times

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        dead = dead_server(event)
        self._paused.pop(dead, None)
        self._queued = {call: server for call, server in self._queued.items() if server != dead}

    def finish(self, out: Collector) -> None:
        if not self._shows_admissions:
            out.absent("the trace does not say when a server admits a call")
            return
        # Other pauses are those of servers that the run itself updates, for stacks of every kind.
        if self.context.header.case is not None and not (
            self._pauses_to_update or any(self._met.values())
        ):
            out.inapplicable("the stack pauses no server to update it")
        for situation, times in self._met.items():
            out.exercised(situation, times)

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._shows_admissions = True
        self._queued.pop(event.call_id, None)
        pause = self._paused.get(event.server_id)
        if pause is not None:
            out.finding(
                "a call was admitted by a paused server",
                expected=(
                    f"no admission between the pause at event {pause.index} and the resume of"
                    f" {event.server_id}"
                ),
                observed=f"call {event.call_id} was admitted at event {event.index}",
                where={"call": event.call_id, "server": event.server_id, "index": event.index},
                hint=(
                    "A path bypasses the admission gate (proxy workers not paused: AReaL"
                    " #1618): the call runs while weights are replaced."
                ),
            )


weights_no_admission_while_paused: Check = trace_check(
    "weights.no-admission-while-paused",
    promise="Between the acknowledgement of a pause and the resume, a server admits no call.",
    needs="Call, Admit, Pause and Resume events of the servers",
    exercised_by=("calls sent to a paused server", "calls queued at a pause"),
)(WeightsNoAdmissionWhilePaused)


class WeightsNoTokenWhilePaused(EventCheck):
    """Compares the number of sampled tokens at the pause with that at each event until the
    resume.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._frozen: dict[str, dict[int, int]] = {}
        self._mode: dict[str, PauseMode] = {}
        self._freezes = False

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._freezes = self._freezes or event.mode in _FREEZING
        if event.server_id in self._frozen:
            self._compare(event.server_id, event.progress or {}, event.index, out)
            return
        # A second pause while paused must not reset the counts: it is compared with the first.
        self._mode[event.server_id] = event.mode
        self._frozen[event.server_id] = dict(event.progress or {})

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._compare(event.server_id, event.progress or {}, event.index, out)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._compare(event.server_id, event.progress or {}, event.index, out)
        self._frozen.pop(event.server_id, None)

    def on_reply(self, event: Reply, out: Collector) -> None:
        for server, frozen in self._frozen.items():
            if event.call_id in frozen and not event.duplicate:
                self._compare(
                    server, {event.call_id: len(event.output.token_ids)}, event.index, out
                )
                del frozen[event.call_id]

    def on_fault(self, event: Fault, out: Collector) -> None:
        self._frozen.pop(dead_server(event), None)

    def finish(self, out: Collector) -> None:
        resume = self.context.contract.resume
        if resume is not ResumeBy.ENGINE and not self._freezes:
            out.inapplicable(
                "no pause of this stack freezes calls that only an engine could continue"
                f" (resume={str(resume)!r})"
            )

    def _compare(
        self, server: str, progress: Mapping[int, int], index: int, out: Collector
    ) -> None:
        frozen = self._frozen.get(server)
        if not frozen:
            return
        for call, count in progress.items():
            before = frozen.get(call)
            if before is None:
                continue
            # A call that had not begun cannot show that it was frozen.
            out.exercised("frozen calls", int(before > 0))
            if count > before:
                frozen[call] = count
                out.finding(
                    "a call went on sampling while its server was paused",
                    expected=f"{before} tokens, as at the pause (mode {self._mode[server]})",
                    observed=f"{count} tokens at event {index}, before the resume",
                    where={"call": call, "server": server, "index": index},
                    hint=(
                        "The pause does not reach every worker of the engine (sglang #24445), or"
                        " was acknowledged before its step ended."
                    ),
                )


weights_no_token_while_paused: Check = trace_check(
    "weights.no-token-while-paused",
    promise="A call frozen by a pause samples no token until its server is resumed.",
    needs="progress of the calls in flight at Pause, and at Weights, Resume or the reply",
    exercised_by="frozen calls",
)(WeightsNoTokenWhilePaused)


class WeightsLabelOnlyKeepsCalls(EventCheck):
    """An abort of all calls at the instant of the label belongs to the label, unless it opens a
    pause or a load, or a request ends at that instant, with which it may belong
    (``lifecycle.end-spares-others``).
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._in_flight: dict[int, tuple[str, str]] = {}
        self._abort_all: dict[str, Abort] = {}
        self._label: dict[str, Weights] = {}
        self._suspects_by_call: dict[int, Weights] = {}
        self._aborted: dict[str, list[tuple[Reply, Weights, str]]] = {}
        self._ended: tuple[float, set[str]] = (0.0, set())

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._in_flight, event.call_id, (event.server_id, event.request_id))

    def on_result(self, event: Result, out: Collector) -> None:
        if event.time != self._ended[0]:
            self._ended = (event.time, set())
        self._ended[1].add(event.request_id)
        for server, suspects in self._aborted.items():
            self._aborted[server] = [
                (reply, label, request)
                for reply, label, request in suspects
                if not self._another_ended(label.time, request)
            ]

    def _another_ended(self, time: float, request_id: str) -> bool:
        return time == self._ended[0] and bool(self._ended[1] - {request_id})

    def on_abort(self, event: Abort, out: Collector) -> None:
        if event.wanted == "*":
            self._abort_all[event.server_id] = event
            self._mark_suspects(event.server_id)

    def on_weights(self, event: Weights, out: Collector) -> None:
        if event.loaded:
            self._clear(event.server_id)
            return
        out.exercised(
            "calls in flight when only a label was published",
            sum(server == event.server_id for server, _ in self._in_flight.values()),
        )
        self._label[event.server_id] = event
        self._mark_suspects(event.server_id)

    def _mark_suspects(self, server: str) -> None:
        label, sweep = self._label.get(server), self._abort_all.get(server)
        # miles #2372: the endpoint that sets the label aborts all calls by default, at the same
        # instant.
        if label is not None and sweep is not None and label.time == sweep.time:
            self._suspects_by_call.update(
                (call, label) for call in sweep.call_ids if call in self._in_flight
            )

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._clear(event.server_id)

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._report(event.server_id, out)

    def on_reply(self, event: Reply, out: Collector) -> None:
        server, request = self._in_flight.pop(event.call_id, (None, ""))
        label = self._suspects_by_call.pop(event.call_id, None)
        if (
            server is not None
            and label is not None
            and event.output.finish_reason is FinishReason.ABORT
            and not self._another_ended(label.time, request)
        ):
            self._aborted.setdefault(server, []).append((event, label, request))

    def finish(self, out: Collector) -> None:
        for server in list(self._aborted):
            self._report(server, out)

    def _clear(self, server: str) -> None:
        self._aborted.pop(server, None)
        self._suspects_by_call = {
            call: label
            for call, label in self._suspects_by_call.items()
            if label.server_id != server
        }
        self._abort_all.pop(server, None)

    def _report(self, server: str, out: Collector) -> None:
        for reply, label, _ in self._aborted.pop(server, ()):
            out.finding(
                "publishing a version label aborted a call",
                expected=(
                    f"call {reply.call_id} goes on: only the label {label.label!r} was published,"
                    " no weights were loaded"
                ),
                observed=(
                    f"it ended with finish reason abort after {len(reply.output.token_ids)} tokens"
                ),
                where={"call": reply.call_id, "server": server, "index": reply.index},
                hint=(
                    "The label's endpoint aborts everything in flight by default: pass"
                    " abort_all_requests=False (miles #2372, #2589)."
                ),
            )


weights_label_only_keeps_calls: Check = trace_check(
    "weights.label-only-keeps-calls",
    promise="Publishing only a version label aborts no call in flight.",
    needs="Weights events with loaded=False, and the Abort events of the servers",
    exercised_by="calls in flight when only a label was published",
    applies=lambda contract: (
        None if contract.adapters is None else "labels are those of adapters, and come with them"
    ),
)(WeightsLabelOnlyKeepsCalls)


class WeightsStalenessBound(EventCheck):
    """Counts published updates between a sample's oldest trained token and the newest weights that
    every live server holds. Updates that only the harness made do not count: the stack cannot know
    of them.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._rank: dict[Version, int] = {}
        self._loaded: dict[str, int] = {}

    def on_weights(self, event: Weights, out: Collector) -> None:
        if event.version is None:
            return
        if event.label is not None and event.version not in self._rank:
            self._rank[event.version] = self._new_rank(event, event.label)
        # Weights without a label are not published yet, so that no sample can be judged by them.
        self._loaded[event.server_id] = self._rank.get(
            event.version, self._loaded.get(event.server_id, 0)
        )

    def _new_rank(self, event: Weights, label: Version) -> int:
        # An identity update is no new version for staleness: it keeps the rank of the weights
        # that it repeats.
        if event.identity and event.server_id in self._loaded:
            return self._loaded[event.server_id]
        newest = max(self._rank.values(), default=-1)
        unseen = event.by_harness and not self.context.history.is_known_to_stack(label)
        return max(newest, 0) if unseen else newest + 1

    def on_fault(self, event: Fault, out: Collector) -> None:
        self._loaded.pop(dead_server(event), None)

    def on_result(self, event: Result, out: Collector) -> None:
        view = self.context.open.get(event.request_id)
        bound = self.context.contract.max_staleness
        if view is None or event.rollout is None or bound is None or not self._loaded:
            return
        if view.undecided_calls:
            return
        newest = min(self._loaded.values())
        oldest = self._oldest(
            version for attempt in view.attempts for version in _sampled_by(attempt)
        )
        # The cheap bound over all sampled tokens first; masked-out tokens only matter if it fails.
        if oldest is not None and newest - self._rank[oldest] > bound:
            parts = sample_views(view) if view.contract.delivers_several else [view]
            oldest = self._oldest(
                version
                for part in parts
                if part.rollout is not None
                for version in _trained(part, part.rollout)
            )
        if oldest is None:
            return
        age = newest - self._rank[oldest]
        out.exercised("samples older than the newest weights", int(age > 0))
        if age > bound:
            out.finding(
                "a delivered sample is too old",
                expected=f"at most {bound} updates behind the newest weights",
                observed=(
                    f"its oldest trained token was sampled by version {oldest}, {age} updates"
                    " behind"
                ),
                where={"request": event.request_id, "version": oldest, "index": event.index},
                hint=(
                    "The oldest token decides, not the last version or the one at the start (verl"
                    " #7569, prime-rl #1764)."
                ),
            )

    def _oldest(self, versions: Iterable[Version]) -> Version:
        """Return the version of lowest rank, ``None`` if none of them was published."""
        return min(
            (version for version in versions if version in self._rank),
            key=self._rank.__getitem__,
            default=None,
        )


weights_staleness_bound: Check = trace_check(
    "weights.staleness-bound",
    promise=(
        "No token of a delivered sample is older than max_staleness weight updates at delivery."
    ),
    needs="Weights events with labels, and the versions that sampled each token",
    exercised_by="samples older than the newest weights",
    applies=lambda contract: (
        None if contract.max_staleness is not None else "the contract promises no staleness bound"
    ),
)(WeightsStalenessBound)


class WeightsOneVersionPerSample(EventCheck):
    """Excuses calls that a pause froze across the update: whoever uses such a pause accepts samples
    of several versions.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._partial_off = partial_is_off(context.header, context.contract)
        self._freezing: set[str] = set()
        self._loaded_frozen: set[tuple[str, Version]] = set()
        self._loaded: dict[str, Version] = {}
        self._equal: dict[Version, Version] = {}

    def on_pause(self, event: Pause, out: Collector) -> None:
        if event.mode in _FREEZING:
            self._freezing.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._freezing.discard(event.server_id)

    def on_weights(self, event: Weights, out: Collector) -> None:
        if not event.loaded:
            return
        if event.identity and event.server_id in self._loaded:
            self._equal.setdefault(event.version, self._loaded[event.server_id])
        self._loaded[event.server_id] = self._equal_version(event.version)
        if event.server_id in self._freezing:
            self._loaded_frozen.add((event.server_id, event.version))

    def on_result(self, event: Result, out: Collector) -> None:
        view = self.context.open.get(event.request_id)
        if not self._partial_off or view is None or event.rollout is None:
            return
        if view.undecided_calls:
            return
        if not any(
            attempt.consumed is not None and attempt.consumed.true_tokens
            for attempt in view.attempts
        ):
            out.absent(NO_TRUTH)
            return
        out.exercised("samples delivered with partial rollout off")
        for part in sample_views(view) if view.contract.delivers_several else [view]:
            self._report_mixed(part, out)

    def _report_mixed(self, view: RequestView, out: Collector) -> None:
        """Report the first change of version within a turn that nothing excuses."""
        previous: Stretch | None = None
        for stretch in view.stitched_as(Provenance.AS_SAMPLED).stretches:
            if stretch.attempt < 0:
                previous = None
            if stretch.true is None or (
                stretch.true == MIXED and (previous is None or previous.attempt != stretch.attempt)
            ):
                # A call that is mixed from its first token on was sampled by one version over KV of
                # others.
                continue
            if previous is not None and self._equal_version(previous.true) != self._equal_version(
                stretch.true
            ):
                call = view.attempts[stretch.attempt].call
                if previous.attempt != stretch.attempt or not self._was_frozen(
                    call.server_id, stretch.true
                ):
                    out.finding(
                        "a sample mixes weight versions although partial rollout is off",
                        expected=f"version {previous.true} for the entire turn",
                        observed=(
                            f"from response token {stretch.start} on it was sampled by version"
                            f" {stretch.true}"
                        ),
                        where=view.place(
                            position=len(view.request.prompt_ids) + stretch.start,
                            version=stretch.true,
                            call=call.call_id,
                        ),
                        hint=(
                            "A call was still in flight, or was resumed, across the update: drain"
                            " or drop it first (labs-molt #124). If your stack has no switch for"
                            " partial rollout, leave partial_off out of its contract."
                        ),
                    )
                    return
            previous = stretch

    def _was_frozen(self, server: str, version: Version) -> bool:
        """Return whether a pause froze the calls of ``server`` while ``version`` was loaded (mixed:
        any version).
        """
        return any(
            paused_server == server and version in (loaded, MIXED)
            for paused_server, loaded in self._loaded_frozen
        )

    def _equal_version(self, version: Version) -> Version:
        return self._equal.get(version, version)


weights_one_version_per_sample: Check = trace_check(
    "weights.one-version-per-sample",
    promise=(
        "With partial rollout off, every turn of a delivered sample is sampled by one weight"
        " version."
    ),
    needs=(
        "a case with partial=False (or resume='none'), and replies that say which weights sampled"
        " (true_tokens)"
    ),
    exercised_by="samples delivered with partial rollout off",
    applies=no_partial_flag,
)(WeightsOneVersionPerSample)


def _sampled_by(attempt: Attempt) -> Iterator[Version]:
    """Return the versions that sampled tokens of the received reply: the true ones, otherwise those
    shown, without mixed ones.
    """
    reply = attempt.consumed
    if reply is None or not reply.output.token_ids:
        return
    if reply.true_tokens is None and not reply.output.spans:
        yield reply.output.version
        return
    for span in reply.true_tokens if reply.true_tokens is not None else reply.output.spans:
        if span.end > span.start and span.version is not None and span.version != MIXED:
            yield span.version


def _trained(view: RequestView, rollout: Rollout) -> Iterator[Version]:
    """Return the versions of the tokens that are in the sample and not masked out."""
    mask, size = rollout.loss_mask, len(rollout.response_ids)
    for stretch in view.stitched_as(Provenance.AS_SAMPLED).stretches:
        # Tokens with loss mask 0 are not trained on, so that their age does not matter.
        if stretch.start < size and (
            mask is None or stretch.end > len(mask) or mask[stretch.start : stretch.end].any()
        ):
            yield stretch.true if stretch.true is not None else stretch.shown
