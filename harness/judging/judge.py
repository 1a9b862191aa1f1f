"""Judge: runs checks over the events of a trace, streaming.

Memory holds the requests that are open, a bounded number of ended ones, and what trace checks keep;
it does not grow with the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollproof.core.contract import Contract
from rollproof.core.error_text import told
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Admit,
    Call,
    Fault,
    Observation,
    Reply,
    Result,
    Submit,
    Weights,
)
from rollproof.core.oracle import Oracle
from rollproof.core.trace import EVENT_KINDS, Header
from rollproof.judging.checks import (
    Check,
    CheckResult,
    Collector,
    RequestJudge,
    TraceCheck,
    TraceJudge,
    Verdict,
)
from rollproof.judging.partial_replies import keep_partials, streamed
from rollproof.judging.registry import Registry
from rollproof.judging.request_view import Attempt, History, RequestView

__all__ = ["Judge", "JudgeContext", "Judgement", "Tally"]

_NEIGHBOURS = 16
_PLANS = 256
HEDGED = "calls of one prompt overlapped (hedging): which answer the stack used cannot be told"
UNTOLD = (
    "engine calls were recorded of which cannot be told whether they are this request's: give"
    " `request_id` in the EngineCall"
)
_KINDS = tuple(EVENT_KINDS.values())
_Reader: TypeAlias = "Callable[[Any, Any, Collector], None]"
_Readers: TypeAlias = "dict[type[Event], list[tuple[_Reader, int, Collector]]]"
"""Who reads events of a class: how, the number of the trace check, and what takes its findings."""


@dataclass(slots=True)
class _Plan:
    """What judges a trace: request checks, trace checks, and the collectors of both.

    ``readers`` are those of trace checks that read ``kinds``; they are the same from trace to
    trace, so they are sorted out once.
    """

    requests: list[tuple[RequestJudge, Collector]]
    traces: list[tuple[TraceJudge, Collector]]
    collectors: list[Collector]
    kinds: list[Iterable[type[Event]] | None] = field(default_factory=list)
    readers: _Readers = field(default_factory=dict)

    def readers_of(self, folds: Sequence[TraceCheck]) -> _Readers:
        """Twenty folds see a million events: each is only handed the kinds that it says it reads,
        by the shortest way.
        """
        kinds = [fold.kinds for fold in folds]
        if not self.readers or any(
            mine is not known for mine, known in zip(kinds, self.kinds, strict=True)
        ):
            self.kinds, self.readers = kinds, {kind: [] for kind in _KINDS}
            for number, (fold, (_, collector)) in enumerate(zip(folds, self.traces, strict=True)):
                direct, mine = getattr(fold, "direct", None) or {}, kinds[number]
                for kind in self.readers if mine is None else mine:
                    self.readers[kind].append((direct.get(kind, _read), number, collector))
        return self.readers


@dataclass(slots=True)
class JudgeContext:
    """What every check of a trace shares."""

    header: Header
    contract: Contract
    oracle: Oracle | None
    history: History = field(default_factory=History)
    open: dict[str, RequestView] = field(default_factory=dict)
    shared: dict[type, Any] = field(default_factory=dict)
    """What the checks of one family make of a trace together, by its class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Results of all checks, in the order of the registry."""

    results: tuple[CheckResult, ...]

    def __getitem__(self, check_id: str) -> CheckResult:
        for result in self.results:
            if result.id == check_id:
                return result
        raise KeyError(check_id)

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the checks that found something."""
        return tuple(result.id for result in self.results if result.verdict is Verdict.FAIL)


class Tally:
    """Adds up the judgements of many traces, which may be run under different contracts."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._taken: dict[str, Collector] = {}
        self._ruled_out: dict[str, str] = {}
        self._plans: dict[tuple[Contract, str], _Plan] = {}
        self.traces: int = 0

    def collector(self, check: Check) -> Collector:
        """The running total of one check."""
        if check.id not in self._taken:
            self._taken[check.id] = Collector(check)
        return self._taken[check.id]

    def rule_out(self, check: Check, reason: str) -> None:
        """Note that a contract ruled the check out of one trace."""
        self._ruled_out[check.id] = reason

    def plan(self, contract: Contract, about: str) -> _Plan:
        """The checks of a trace of ``about`` under ``contract``, with their totals; notes the
        others as ruled out.
        """
        found = self._plans.get((contract, about))
        if found is None:
            applicable, ruled_out = self.registry.split(contract, about)
            for check, reason in ruled_out:
                self.rule_out(check, reason)
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
            found = _Plan(requests, traces, [self.collector(check) for check in applicable])
            if len(self._plans) < _PLANS:
                self._plans[contract, about] = found
        return found

    def add(self, other: Tally) -> None:
        """Add what another tally over the same registry took."""
        for check in other.registry:
            taken = other._taken.get(check.id)
            if taken is not None:
                self.collector(check).merge(taken)
        self._ruled_out.update(other._ruled_out)
        self.traces += other.traces

    def counts(self) -> dict[str, int]:
        """How often each check has found something so far; only those that have."""
        return {check_id: taken.found for check_id, taken in self._taken.items() if taken.found}

    def kinds(self) -> dict[str, dict[str, int]]:
        """As ``counts``, by kind of finding."""
        return {
            check_id: dict(taken.kinds) for check_id, taken in self._taken.items() if taken.found
        }

    def found(self) -> tuple[str, ...]:
        """Ids of the checks that have found something so far."""
        return tuple(check_id for check_id, taken in self._taken.items() if taken.found)

    def judgement(self) -> Judgement:
        """The verdicts over everything added. A check that applied to no trace is not applicable."""
        results = []
        for check in self.registry:
            if check.id in self._taken:
                results.append(self._taken[check.id].result())
            else:
                reason = self._ruled_out.get(check.id, "no trace was judged")
                verdict = Verdict.NOT_APPLICABLE if check.id in self._ruled_out else Verdict.UNKNOWN
                results.append(CheckResult(check=check, verdict=verdict, reason=reason))
        return Judgement(results=tuple(results))


class Judge:
    """Takes the events of one trace in order; ``finish`` adds what was found to the tally."""

    def __init__(self, header: Header, tally: Tally, oracle: Oracle | None = None) -> None:
        self.context: JudgeContext = JudgeContext(
            header=header,
            contract=header.contract,
            oracle=oracle,
        )
        self._tally = tally
        self._calls: dict[int, tuple[RequestView, Attempt]] = {}
        self._ended: deque[RequestView] = deque(maxlen=_NEIGHBOURS)
        self._plan = tally.plan(header.contract, header.about)
        self._folds = [make(self.context) for make, _ in self._plan.traces]
        self._crashed: set[int] = set()
        self._readers = self._plan.readers_of(self._folds)

    def feed(self, event: Event) -> None:
        """Take one event."""
        kind = type(event)
        folds = self._folds
        for read, number, collector in self._readers[kind]:
            try:
                read(folds[number], event, collector)
            except Exception as error:  # noqa: BLE001 - a crashing check is unknown, never a pass and never the end of the run
                collector.crashed(told(error))
                self._drop(number)
        assemble = _ASSEMBLY.get(kind)
        if assemble is not None:
            assemble(self, event)

    def _drop(self, crashed: int) -> None:
        """A fold that crashed sees nothing more of this trace."""
        self._crashed.add(crashed)
        self._readers = {
            kind: [entry for entry in readers if entry[1] != crashed]
            for kind, readers in self._readers.items()
        }

    def finish(self) -> None:
        """The trace has ended: judge the requests that ended, and let the trace checks conclude."""
        for view in list(self.context.open.values()):
            self._close(view)
        for number, (fold, (_, collector)) in enumerate(
            zip(self._folds, self._plan.traces, strict=True)
        ):
            if number in self._crashed:
                continue
            try:
                fold.finish(collector)
            except Exception as error:  # noqa: BLE001 - as above
                collector.crashed(told(error))
        for collector in self._plan.collectors:
            collector.close()
        self._tally.traces += 1

    def _reply(self, event: Reply) -> None:
        if event.call_id in self._calls:
            view, attempt = self._calls[event.call_id]
            attempt.replies.append(event)
            if not event.delivered and streamed(attempt):
                keep_partials(view)

    def _call(self, event: Call) -> None:
        view = self.context.open.get(event.request_id)
        if view is not None:
            attempt = Attempt(number=len(view.attempts), call=event)
            view.attempts.append(attempt)
            self._calls[event.call_id] = (view, attempt)
            if attempt.number and (streamed(view.attempts[-2]) or view.attempts[-2].broke):
                keep_partials(view)
        for request_id in event.candidates:
            if request_id in self.context.open:
                self.context.open[request_id].untold = True

    def _admit(self, event: Admit) -> None:
        if event.call_id in self._calls:
            attempt = self._calls[event.call_id][1]
            attempt.admit = (
                attempt.admit or event
            )  # a preempted call is admitted again; its first admission counts

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
        self.context.history.updates.append(event)

    def _observation(self, event: Observation) -> None:
        if event.request_id in self.context.open:
            self.context.open[event.request_id].observations.append(event)

    def _fault(self, event: Fault) -> None:
        if event.call_id in self._calls:
            view, attempt = self._calls[event.call_id]
            attempt.faults.append(event)
            if attempt.broke:
                keep_partials(view)

    def _result(self, event: Result) -> None:
        view = self.context.open.get(event.request_id)
        if view is not None:
            view.results.append(event)
            self._close(view)

    def _close(self, view: RequestView) -> None:
        if view.attempts and (streamed(view.attempts[-1]) or view.attempts[-1].broke):
            keep_partials(view)
        view.settle()
        view.neighbours = [
            *self._ended,
            *(
                other
                for other in list(self.context.open.values())[:_NEIGHBOURS]
                if other is not view
            ),
        ]
        hedged = view.hedged
        for check, collector in self._plan.requests:
            if view.untold:
                collector.absent(UNTOLD)
                continue
            if (
                hedged and collector.check.family != "lifecycle"
            ):  # that family says what may happen to such calls
                collector.absent(HEDGED)
                continue
            try:
                check(view, collector)
            except Exception as error:  # noqa: BLE001 - as above
                collector.crashed(told(error))
        self.context.open.pop(view.request.request_id, None)
        for attempt in view.attempts:
            self._calls.pop(attempt.call.call_id, None)
        view.neighbours = ()
        self._ended.append(view)


def _read(fold: TraceCheck, event: Event, out: Collector) -> None:
    fold.event(event, out)


_ASSEMBLY: Mapping[type[Event], Callable[[Judge, Any], None]] = {
    Reply: Judge._reply,
    Call: Judge._call,
    Admit: Judge._admit,
    Submit: Judge._submit,
    Weights: Judge._weights,
    Observation: Judge._observation,
    Fault: Judge._fault,
    Result: Judge._result,
}
