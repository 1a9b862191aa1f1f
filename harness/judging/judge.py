"""Runs checks over the events of a trace as a stream.

Memory holds the open requests, a bounded number of ended ones, and what trace checks store; it does
not grow with the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error
from rollproof.core.events.base import Event
from rollproof.core.events.layouts import Laid
from rollproof.core.events.replay import Outcome, Step
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Fault,
    Flush,
    Observation,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Unrecorded,
    Update,
    Weights,
)
from rollproof.core.events.training import Batch
from rollproof.core.events.weights import Adapter
from rollproof.core.oracle import Oracle
from rollproof.core.trace import EVENT_KINDS, Header
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import (
    Check,
    CheckResult,
    Collector,
    RequestJudge,
    Scope,
    TraceCheck,
    TraceJudge,
    Verdict,
)
from rollproof.judging.guessed_calls import GuessedCalls
from rollproof.judging.judge_context import JudgeContext
from rollproof.judging.parallel_chains import set_aside_chains
from rollproof.judging.partial_replies import assign_partial_replies, streamed
from rollproof.judging.preceding_events import PrecedingEvents
from rollproof.judging.prefill_calls import add_internal_prefills, set_aside_prefills
from rollproof.judging.races import set_aside_losers
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import UNATTRIBUTED_CALLS, RequestView
from rollproof.judging.sample_views import sample_views
from rollproof.judging.stale_samples import set_aside_stale
from rollproof.judging.stop_cuts import cut_at_stops, cut_turns
from rollproof.judging.turn_samples import take_turn

__all__ = ["Judge", "Judgement", "Tally"]

# Enough to find the owner of misplaced values (results matched by order hit a neighbour), and few
# enough to search all of them for every wrong row.
_NEIGHBOURS = 16
_PLANS = 256
OVERLAPPING_CALLS = (
    "Calls of one prompt overlapped (hedging): the trace does not show which answer the stack used."
)
_KINDS = tuple(EVENT_KINDS.values())
_Reader: TypeAlias = "Callable[[Any, Any, Collector], None]"
_Readers: TypeAlias = "dict[type[Event], list[tuple[_Reader, int, Collector]]]"
"""The trace checks that read events of a class: function, number of the check, collector."""


@dataclass(slots=True)
class _Plan:
    """The request checks and trace checks that judge a trace, and the collectors of both.

    ``readers`` are the trace checks by the ``kinds`` of events that they read. They are the same
    for every trace under one contract, so they are computed once.
    """

    requests: list[tuple[RequestJudge, Collector]]
    traces: list[tuple[TraceJudge, Collector]]
    collectors: list[Collector]
    kinds: list[Iterable[type[Event]] | None] = field(default_factory=list)
    readers: _Readers = field(default_factory=dict)

    def of_scope(self, scope: Scope) -> list[tuple[RequestJudge, Collector]]:
        """Return the request checks of a scope."""
        return [entry for entry in self.requests if entry[1].check.scope is scope]

    def readers_of(self, trace_checks: Sequence[TraceCheck]) -> _Readers:
        """Return the trace checks that read each class of events."""
        # Twenty trace checks see a million events: each gets only the kinds that it reads, by the
        # shortest way.
        kinds = [trace_check.kinds for trace_check in trace_checks]
        if not self.readers or any(
            kinds_read is not cached for kinds_read, cached in zip(kinds, self.kinds, strict=True)
        ):
            self.kinds, self.readers = kinds, {kind: [] for kind in _KINDS}
            for number, (trace_check, (_, collector)) in enumerate(
                zip(trace_checks, self.traces, strict=True)
            ):
                handlers, kinds_read = getattr(trace_check, "handlers", {}), kinds[number]
                for kind in self.readers if kinds_read is None else kinds_read:
                    self.readers[kind].append((handlers.get(kind, _feed_event), number, collector))
        return self.readers


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The results of all checks, in the order of the registry."""

    results: tuple[CheckResult, ...]

    def __getitem__(self, check_id: str) -> CheckResult:
        for result in self.results:
            if result.id == check_id:
                return result
        raise KeyError(check_id)

    @property
    def failed(self) -> tuple[str, ...]:
        """The ids of the checks that found something."""
        return tuple(result.id for result in self.results if result.verdict is Verdict.FAIL)


class Tally:
    """Sums the results of many traces, which may have been recorded under different contracts."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._collectors: dict[str, Collector] = {}
        self._ruled_out: dict[str, str] = {}
        self._plans: dict[tuple[Contract, str], _Plan] = {}
        self.traces: int = 0

    def collector(self, check: Check) -> Collector:
        """Return the running total of one check."""
        if check.id not in self._collectors:
            self._collectors[check.id] = Collector(check)
        return self._collectors[check.id]

    def add_ruled_out(self, check: Check, reason: str) -> None:
        """Note that a contract ruled the check out for one trace."""
        self._ruled_out[check.id] = reason

    def plan(self, contract: Contract, about: str) -> _Plan:
        """Return the checks for a trace of kind ``about`` under ``contract``; note the others as
        ruled out.
        """
        plan = self._plans.get((contract, about))
        if plan is None:
            applicable, ruled_out = self.registry.split(contract, about)
            for check, reason in ruled_out:
                self.add_ruled_out(check, reason)
            requests = [
                (check.request, self.collector(check))
                for check in applicable
                if check.request is not None
            ]
            traces = [
                (check.trace, self.collector(check))
                for check in applicable
                if check.trace is not None
            ]
            plan = _Plan(requests, traces, [self.collector(check) for check in applicable])
            # Contracts may be random (a campaign draws them), so the cache is bounded.
            if len(self._plans) < _PLANS:
                self._plans[contract, about] = plan
        return plan

    def add(self, other: Tally) -> None:
        """Add the results of another tally over the same registry."""
        for check in other.registry:
            collector = other._collectors.get(check.id)
            if collector is not None:
                self.collector(check).merge(collector)
        self._ruled_out.update(other._ruled_out)
        self.traces += other.traces

    def totals(self) -> dict[str, Any]:
        """Return the results as plain values, which can go to another process."""
        return {
            "checks": {
                check_id: collector.totals() for check_id, collector in self._collectors.items()
            },
            "ruled_out": dict(self._ruled_out),
            "traces": self.traces,
        }

    def add_totals(self, totals: Mapping[str, Any]) -> None:
        """Add what ``totals`` returned in another process, for the same registry."""
        other = Tally(self.registry)
        other._collectors = {
            check_id: Collector.of_totals(self.registry[check_id], values)
            for check_id, values in totals["checks"].items()
        }
        other._ruled_out, other.traces = totals["ruled_out"], totals["traces"]
        self.add(other)

    @property
    def collectors(self) -> Mapping[str, Collector]:
        """The running totals, by the id of the check."""
        return self._collectors

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each check that has any."""
        return {
            check_id: collector.found
            for check_id, collector in self._collectors.items()
            if collector.found
        }

    def kinds(self) -> dict[str, dict[str, int]]:
        """Return the number of findings by check and kind."""
        return {
            check_id: dict(collector.kinds)
            for check_id, collector in self._collectors.items()
            if collector.found
        }

    def found(self) -> tuple[str, ...]:
        """Return the ids of the checks that have found something so far."""
        return tuple(
            check_id for check_id, collector in self._collectors.items() if collector.found
        )

    def judgement(self) -> Judgement:
        """Return the verdicts so far. A check that applied to no trace is not applicable."""
        results = []
        for check in self.registry:
            if check.id in self._collectors:
                results.append(self._collectors[check.id].result())
            else:
                reason = self._ruled_out.get(check.id, "no trace was judged")
                verdict = Verdict.NOT_APPLICABLE if check.id in self._ruled_out else Verdict.UNKNOWN
                results.append(CheckResult(check=check, verdict=verdict, reason=reason))
        return Judgement(results=tuple(results))


class Judge:
    """Takes the events of one trace in order; ``finish`` adds the findings to the tally."""

    def __init__(self, header: Header, tally: Tally, oracle: Oracle | None = None) -> None:
        self.context: JudgeContext = JudgeContext(
            header=header,
            contract=header.contract,
            oracle=oracle,
        )
        self._tally = tally
        self._calls: dict[int, tuple[RequestView | None, Attempt]] = {}
        self._dead: set[str] = set()
        self._driven = header.case is not None
        self._guessed = GuessedCalls()
        self._owners_guessed = False
        self._internal: list[Attempt] = []
        self._ended: deque[RequestView] = deque(maxlen=_NEIGHBOURS)
        self._plan = tally.plan(header.contract, header.about)
        self._trace_checks = [make(self.context) for make, _ in self._plan.traces]
        self._crashed: set[int] = set()
        self._readers = self._plan.readers_of(self._trace_checks)
        self._preceding = PrecedingEvents(header, self.context.open, self._ended, self._calls)
        for collector in self._plan.collectors:
            collector.preceding = self._preceding

    def feed(self, event: Event) -> None:
        """Take one event."""
        kind = type(event)
        self._preceding.now = event
        if isinstance(event, Result):
            self._end(event)
        trace_checks = self._trace_checks
        for read, number, collector in self._readers[kind]:
            try:
                read(trace_checks[number], event, collector)
            # A trace is untrusted input and users write checks too. One that raises must not end
            # the run, and must not pass either.
            except Exception as error:  # noqa: BLE001 - a crashing check is unknown, never a pass and never the end of the run
                collector.crashed(describe_error(error))
                self._drop(number)
        assemble = _ASSEMBLY.get(kind)
        if assemble is not None:
            assemble(self, event)

    def _drop(self, crashed: int) -> None:
        """Stop showing this trace to the check with that number, which crashed."""
        self._crashed.add(crashed)
        self._readers = {
            kind: [entry for entry in readers if entry[1] != crashed]
            for kind, readers in self._readers.items()
        }

    def finish(self) -> None:
        """Judge the requests that are still open and let the trace checks conclude."""
        self._preceding.now = None
        # Requests that never ended are judged as well: a hang is a finding of its own, and what
        # they did before it counts.
        for view in list(self.context.open.values()):
            self._resolve(view)
            self._close(view)
        for number, (trace_check, (_, collector)) in enumerate(
            zip(self._trace_checks, self._plan.traces, strict=True)
        ):
            if number in self._crashed:
                continue
            try:
                trace_check.finish(collector)
            except Exception as error:  # noqa: BLE001 - as above
                collector.crashed(describe_error(error))
        for collector in self._plan.collectors:
            collector.close()
            collector.preceding = None
        self._tally.traces += 1

    def _reply(self, event: Reply) -> None:
        self._preceding.add(event)
        if event.call_id not in self._calls:
            self._preceding.add_in_words(event)
        else:
            view, attempt = self._calls[event.call_id]
            attempt.replies.append(event)
            if self.context.contract.own_stops is not None:
                cut_at_stops(attempt, self.context.contract.own_stops)
            if view is not None and not event.delivered and streamed(attempt):
                assign_partial_replies(view)

    def _call(self, event: Call) -> None:
        view = self.context.open.get(event.request_id)
        if view is not None:
            attempt = self._attempt(event, len(view.attempts))
            view.attempts.append(attempt)
            self._calls[event.call_id] = (view, attempt)
            if attempt.number and (streamed(view.attempts[-2]) or view.attempts[-2].broke):
                assign_partial_replies(view)
        else:
            self._preceding.add_in_words(event)
        # A recorder without request ids attributes calls by prompt; requests of a group share
        # theirs. It may miss calls: only those of a driven run are resolved, when a request ends.
        if self._driven and not self.context.contract.delivers_several:
            self._owners_guessed = self._owners_guessed or bool(event.candidates)
            if event.internal:
                attempt = self._attempt(event)
                self._calls[event.call_id] = (None, attempt)
                self._internal.append(attempt)
            # a worker may go on in the context of a request that has ended
            elif event.candidates and view is None:
                attempt = self._attempt(event)
                self._calls[event.call_id] = (None, attempt)
                self._guessed.add(attempt)
            return
        for request_id in event.candidates:
            if request_id in self.context.open:
                self.context.open[request_id].unattributed_calls = True

    def _attempt(self, event: Call, number: int = 0) -> Attempt:
        dead = event.server_id in self._dead
        return Attempt(number=number, call=event, died=event.index if dead else None)

    def _admit(self, event: Admit) -> None:
        if event.call_id in self._calls:
            attempt = self._calls[event.call_id][1]
            # A preempted call is admitted again: its first admission counts.
            attempt.admit = attempt.admit or event

    def _abort(self, event: Abort) -> None:
        self._precede(event)
        # "*" and a case's action come from outside: whoever stops one call by its id means it.
        if event.injected or event.wanted == "*":
            return
        attempts = [self._calls[call][1] for call in event.call_ids if call in self._calls]
        view = self.context.open.get(event.wanted)
        # A recording shows the id, and not which calls it found.
        if not event.call_ids and view is not None and view.attempts:
            attempts = view.attempts[-1:]
        for attempt in attempts:
            attempt.stopped_by_stack = True

    def _submit(self, event: Submit) -> None:
        context = self.context
        context.open[event.request.request_id] = RequestView(
            event,
            context.contract,
            context.history,
            context.oracle,
            context.header.engine,
            context.header,
        )

    def _weights(self, event: Weights) -> None:
        self._preceding.add(event)
        self.context.history.published(event)

    def _update(self, event: Update) -> None:
        self._precede(event)
        self.context.history.asked(event)

    def _observation(self, event: Observation) -> None:
        self._preceding.add(event)
        if event.request_id in self.context.open:
            self.context.open[event.request_id].observations.append(event)

    def _fault(self, event: Fault) -> None:
        self._preceding.add(event)
        if event.call_id in self._calls:
            view, attempt = self._calls[event.call_id]
            attempt.faults.append(event)
            if view is not None and attempt.broke:
                assign_partial_replies(view)
        elif event.server_id is not None and event.what == "death":
            self._dead.add(event.server_id)
            for _, attempt in self._calls.values():
                if attempt.call.server_id == event.server_id and not attempt.replies:
                    attempt.died = attempt.died or event.index
        elif event.server_id is not None and event.what == "revive":
            self._dead.discard(event.server_id)

    def _unrecorded(self, event: Unrecorded) -> None:
        """Leave the requests unknown that lost events concern. If that may be any, the checks over
        the whole trace start again: what they remember is not all that happened.
        """
        views = self.context.open
        named = views.get(event.request_id)
        if named is None and event.call_id in self._calls:
            named = self._calls[event.call_id][0]
        if named is not None:
            named.unrecorded = event.reason
        elif not event.request_id and event.call_id is None:
            for view in views.values():
                view.unrecorded = event.reason
            for number, (make, collector) in enumerate(self._plan.traces):
                self._trace_checks[number] = make(self.context)
                collector.skipped(event.reason)

    def _precede(self, event: Event) -> None:
        self._preceding.add(event)

    def _precede_in_words(self, event: Event) -> None:
        self._preceding.add_in_words(event)

    def _end(self, event: Result) -> None:
        """Resolve which calls made the sample of a request, before a check sees that it ended."""
        view = self.context.open.get(event.request_id)
        if view is not None:
            view.results.append(event)
            self._resolve(view)

    def _result(self, event: Result) -> None:
        view = self.context.open.get(event.request_id)
        if view is not None:
            self._close(view)

    def _resolve(self, view: RequestView) -> None:
        if view.attempts and (streamed(view.attempts[-1]) or view.attempts[-1].broke):
            assign_partial_replies(view)
        # While the request was open, neighbours may have computed values from an incomplete view.
        view.settle()
        # their calls are found by their tokens, sample by sample
        if view.contract.delivers_several:
            return
        cut_turns(view)
        set_aside_stale(view)
        set_aside_chains(view)
        # before races: whose calls are alike is known only without these
        take_turn(view)
        set_aside_prefills(view)
        if self._driven:
            self._settle_owners(view)
        else:
            set_aside_losers(view)

    def _close(self, view: RequestView) -> None:
        view.neighbours = [
            *self._ended,
            *(
                other
                for other in islice(self.context.open.values(), _NEIGHBOURS)
                if other is not view
            ),
        ]
        self._preceding.view = view
        if not view.contract.delivers_several:
            self._judge(view, self._plan.requests)
        else:
            parts = sample_views(view)
            self._judge(view, self._plan.of_scope(Scope.REQUEST))
            for part in parts:
                self._judge(part, self._plan.of_scope(Scope.SAMPLE))
            # they would stay alive as long as the request is a neighbour of others
            view.parts = None
            view.memo.clear()
        self._preceding.view = None
        self.context.open.pop(view.request.request_id, None)
        for attempt in (*view.attempts, *view.set_aside):
            # calls that may be those of another request stay
            if self._calls.get(attempt.call.call_id, (view,))[0] is view:
                self._calls.pop(attempt.call.call_id, None)
        # Neighbours refer to each other: without this the views of a whole trace would stay alive.
        view.neighbours = ()
        # Ended requests stay neighbours for a while, since swapped results often end one after the
        # other.
        self._ended.append(view)

    def _judge(self, view: RequestView, checks: Iterable[tuple[RequestJudge, Collector]]) -> None:
        undecided_race = view.undecided_race
        for check, collector in checks:
            if view.unrecorded:
                collector.skipped(view.unrecorded)
                continue
            if view.unattributed_calls and collector.check.reads_calls:
                collector.skipped(UNATTRIBUTED_CALLS)
                continue
            # The lifecycle family says what may happen to such calls, so it still judges them.
            if undecided_race and collector.check.family != "lifecycle":
                collector.skipped(OVERLAPPING_CALLS)
                continue
            try:
                check(view, collector)
            except Exception as error:  # noqa: BLE001 - as above
                collector.crashed(describe_error(error))

    def _settle_owners(self, view: RequestView) -> None:
        """Resolve which calls are those of a request that has ended."""
        # others matter only to calls that may be theirs; thousands may be open during an update
        others = (
            [other for other in self.context.open.values() if other is not view]
            if self._owners_guessed
            else []
        )
        for attempt in self._guessed.settle(view, others):
            self._calls[attempt.call.call_id] = (None, attempt)
        add_internal_prefills(view, self._internal)
        if view.uncalled:
            prompt = view.request.prompt_ids
            view.internal_calls = [
                attempt
                for attempt in self._internal
                if attempt.call.prompt_ids[: len(prompt)] == prompt
            ]


def _feed_event(trace_check: TraceCheck, event: Event, out: Collector) -> None:
    trace_check.event(event, out)


_ASSEMBLY: Mapping[type[Event], Callable[[Judge, Any], None]] = {
    Reply: Judge._reply,
    Abort: Judge._abort,
    Call: Judge._call,
    Admit: Judge._admit,
    Submit: Judge._submit,
    Weights: Judge._weights,
    Observation: Judge._observation,
    Fault: Judge._fault,
    Result: Judge._result,
    Update: Judge._update,
    Unrecorded: Judge._unrecorded,
    **dict.fromkeys((Pause, Resume, Flush, Adapter), Judge._precede),
    **dict.fromkeys((Step, Outcome, Batch, Laid), Judge._precede_in_words),
}
