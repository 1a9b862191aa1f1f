"""Checks, verdicts and findings.

A check is a pure function of a trace. It never prints and never raises for a finding: it reports to
a ``Collector`` what it compared (``exercised``) and what was wrong (``finding``). There are two
shapes: a *request check* is called once per ended request, with a ``RequestView``; a *trace check*
is a class that receives the events in order.

If its situation never occurred, its data is absent, or it crashed itself, a check is ``unknown``
with a reason and never counts as passed. What a contract rules out is ``not applicable`` and listed
separately: by ``Applies`` before any event, or by ``Collector.inapplicable`` for a trace in which
the check was never exercised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rollproof.core.contract import Contract
from rollproof.core.records import Scalar
from rollproof.errors import UsageError

if TYPE_CHECKING:
    from rollproof.core.events.base import Event
    from rollproof.judging.judge_context import JudgeContext
    from rollproof.judging.preceding_events import PrecedingEvents
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.story import Moment

__all__ = [
    "SEVERAL_SAMPLES",
    "Applies",
    "Check",
    "CheckResult",
    "Collector",
    "Finding",
    "RequestJudge",
    "Scope",
    "TraceCheck",
    "Verdict",
    "request_check",
    "trace_check",
]


# A user's check may put a number into its titles. Without a bound each of them would be a kind of
# its own, and memory would grow with the trace.
_MAX_KINDS = 64
"""The number of kinds of findings that are counted separately; a check has a handful."""
_OTHER_KINDS = "a kind beyond the first 64"
"""The kind of all others, so that no known failure covers them."""
_TOTALS = (
    "counters",
    "crash",
    "excused",
    "findings",
    "flavours",
    "found",
    "judged",
    "kinds",
    "partial",
    "reasons",
)
"""What a collector has once no trace is being judged."""


class Verdict(StrEnum):
    """Outcome of one check over one or many traces."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not applicable"


class Scope(StrEnum):
    """What a check of rollouts judges if a request delivers several samples."""

    SAMPLE = "sample"
    """Each sample, with the calls that it was made of."""
    REQUEST = "request"
    """The request, with all of its calls and samples."""
    ONLY_SAMPLE = "only sample"
    """Nothing: it reads a request as one sample."""


SEVERAL_SAMPLES = (
    "a request delivers several samples (samples): how they share its turns and its budget is not"
    " declared"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault that a check found.

    check_id: The id of the check.
    title: What is wrong.
    expected: What the promise requires at that place.
    observed: What was there.
    where: The place, with keys among ``request``, ``call`` (the id of the call in the trace),
        ``segment``, ``position``, ``layer``, ``version``, ``server`` and ``index``.
    hint: What usually causes it.
    kind: The title without what differs from place to place and from run to run. It distinguishes a
        known fault from another one of the same check.
    witness: The path of the counterexample, filled in by the entry point.
    flavour: The engine flavour of its trace, filled in by the judge; ``""`` if the trace has none.
    after: The last events that preceded it, in words, filled in by the judge.
    story: What happened to its request or server, event by event, filled in by the judge.
    """

    check_id: str
    title: str
    expected: str
    observed: str
    where: Mapping[str, Scalar] = field(default_factory=dict)
    hint: str = ""
    kind: str = ""
    witness: str | None = None
    flavour: str = ""
    after: tuple[str, ...] = ()
    story: tuple[Moment, ...] = ()


Applies: TypeAlias = "Callable[[Contract], str | None]"
"""Returns why a contract rules the check out, or ``None`` if it applies."""


class TraceCheck(Protocol):
    """A check over a whole trace. One is made per trace, fed the events that it reads, then
    finished.

    ``kinds`` are the event classes that it reads (``None``: all). Its memory must not grow with the
    trace.
    """

    @property
    def kinds(self) -> Iterable[type[Event]] | None: ...

    def event(self, event: Event, out: Collector) -> None:
        """Take one event."""

    def finish(self, out: Collector) -> None:
        """Conclude; the trace has ended."""


RequestJudge: TypeAlias = "Callable[[RequestView, Collector], None]"
TraceJudge: TypeAlias = "Callable[[JudgeContext], TraceCheck]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise about rollouts, and the code that judges it. Exactly one of ``request`` and
    ``trace`` is set.

    id: ``family.name``.
    promise: One sentence.
    needs: The data that the trace must hold.
    exercised_by: The counters that the check may increment. It is exercised if one is above zero.
    about: The kind of traces that it judges (``Header.about``).
    also: Other kinds of traces that it judges.
    applies: Returns why a contract rules the check out.
    reads_calls: Whether it reads the engine calls of a request. If it does, it cannot judge a
        request whose calls are not known.
    scope: What it judges if a request delivers several samples.
    request: The function of a request check.
    trace: The class of a trace check.
    """

    id: str
    promise: str
    needs: str
    exercised_by: tuple[str, ...]
    about: str = "rollouts"
    also: tuple[str, ...] = ()
    applies: Applies | None = None
    reads_calls: bool = True
    scope: Scope = Scope.SAMPLE
    request: RequestJudge | None = None
    trace: TraceJudge | None = None

    @property
    def family(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    def judges(self, about: str) -> bool:
        """Return whether the check judges traces of that kind."""
        return about == self.about or about in self.also

    def inapplicable(self, contract: Contract) -> str | None:
        """Return why ``contract`` rules this check out, or ``None`` if it applies."""
        if self.scope is Scope.ONLY_SAMPLE and contract.delivers_several:
            return SEVERAL_SAMPLES
        return self.applies(contract) if self.applies else None


def request_check(
    id: str,
    *,
    promise: str,
    needs: str,
    exercised_by: str | tuple[str, ...],
    applies: Applies | None = None,
    reads_calls: bool = True,
    scope: Scope = Scope.SAMPLE,
) -> Callable[[RequestJudge], Check]:
    """Make a ``Check`` of a function ``(view, out)`` that is called once per ended request."""

    def make(judge: RequestJudge) -> Check:
        return Check(
            id=id,
            promise=promise,
            needs=needs,
            exercised_by=_as_tuple(exercised_by),
            applies=applies,
            reads_calls=reads_calls,
            scope=scope,
            request=judge,
        )

    return make


def trace_check(
    id: str,
    *,
    promise: str,
    needs: str,
    exercised_by: str | tuple[str, ...],
    applies: Applies | None = None,
    about: str = "rollouts",
    scope: Scope = Scope.REQUEST,
) -> Callable[[TraceJudge], Check]:
    """Make a ``Check`` of a ``TraceCheck`` class that is constructed with the ``JudgeContext``."""

    def make(judge: TraceJudge) -> Check:
        names = _as_tuple(exercised_by)
        return Check(
            id=id,
            promise=promise,
            needs=needs,
            exercised_by=names,
            applies=applies,
            about=about,
            scope=scope,
            trace=judge,
        )

    return make


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class Collector:
    """Collects what one check reports.

    It stores the first ``keep`` findings and the first one of each kind, and counts the others.
    ``excused`` counts by reason the traces for which the check said that it is inapplicable,
    ``partial`` those with a request that it was not shown, ``judged`` the other ones; ``reasons``
    counts the traces in which data was absent, by the reason. ``flavours`` are the engine flavours
    on which each kind was found, ``preceding`` are the events of the trace that is being judged.
    ``worst`` is the request with the most findings in a row, and how many these were.
    """

    __slots__ = (
        "_absent",
        "_inapplicable",
        "_limit",
        "_row",
        "_skipped",
        "check",
        "counters",
        "crash",
        "excused",
        "findings",
        "flavours",
        "found",
        "judged",
        "kinds",
        "partial",
        "preceding",
        "reasons",
        "worst",
    )

    def __init__(self, check: Check, keep: int = 8) -> None:
        self.check: Check = check
        # Plain dicts: there is one collector per check and case, and a Counter costs ten times as
        # much to make.
        self.counters: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.found: int = 0
        self.kinds: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.crash: str | None = None
        self.excused: dict[str, int] = {}
        self.judged: int = 0
        self.partial: int = 0
        self.flavours: dict[str, dict[str, None]] = {}
        self.preceding: PrecedingEvents | None = None
        self.worst: tuple[str, int] = ("", 0)
        self._row: tuple[str, int] = ("", 0)
        self._absent: set[str] = set()
        self._inapplicable: str | None = None
        self._skipped = False
        self._limit = keep

    def exercised(self, counter: str, times: int = 1) -> None:
        """Report that the promise was tested ``times`` times.

        Raises:
            UsageError: The check does not declare the counter.
        """
        if counter in self.counters:
            self.counters[counter] += times
        # docs/checks.md and the coverage table list the declared counters, so an undeclared one
        # would be invisible.
        elif counter not in self.check.exercised_by:
            raise UsageError(
                f"{self.check.id} counts {counter!r}, but declares only"
                f" {list(self.check.exercised_by)} in exercised_by."
            )
        elif times:
            self.counters[counter] = times

    def finding(
        self,
        title: str,
        *,
        expected: str,
        observed: str,
        where: Mapping[str, Scalar] | None = None,
        hint: str = "",
        kind: str | None = None,
    ) -> None:
        """Report a fault. It also counts as exercise: a check that fails has been tested.

        Args:
            title: What is wrong.
            expected: What the promise requires.
            observed: What was there.
            where: The place.
            hint: What usually causes it.
            kind: The title without counts and names; by default the title.
        """
        kind = self._count(title if kind is None else kind, 1)
        self.found += 1
        self._rank(where)
        preceding = self.preceding
        flavour = "" if preceding is None else preceding.flavour
        if flavour:
            self.flavours.setdefault(kind, {})[flavour] = None
        # The first finding of each kind is always stored: a known failure with a thousand findings
        # must not hide a new one.
        if len(self.findings) < self._limit or self.kinds.get(kind) == 1:
            place = dict(where or {})
            self.findings.append(
                Finding(
                    check_id=self.check.id,
                    title=title,
                    expected=expected,
                    observed=observed,
                    where=place,
                    hint=hint,
                    kind=kind,
                    flavour=flavour,
                    after=() if preceding is None else preceding.before(place),
                    story=() if preceding is None else preceding.story(place),
                )
            )

    def _rank(self, where: Mapping[str, Scalar] | None) -> None:
        """Count a finding for the request that it is about."""
        request = (where or {}).get("request")
        if not isinstance(request, str):
            return
        # findings of a request come one after the other, so nothing is stored by request
        self._row = (request, self._row[1] + 1 if request == self._row[0] else 1)
        if self._row[1] > self.worst[1]:
            self.worst = self._row

    def take_worst(self) -> tuple[str, int]:
        """Return ``worst`` of what was found since the last call, and begin again."""
        worst, self.worst, self._row = self.worst, ("", 0), ("", 0)
        return worst

    def totals(self) -> dict[str, Any]:
        """Return all that ``merge`` adds, as plain values: for another process, or a file."""
        return {name: getattr(self, name) for name in _TOTALS}

    @classmethod
    def of_totals(cls, check: Check, totals: Mapping[str, Any]) -> Collector:
        """Return a collector of what ``totals`` returned in another process."""
        collector = cls(check)
        for name in _TOTALS:
            setattr(collector, name, totals[name])
        return collector

    def _count(self, kind: str, times: int) -> str:
        """Count findings of a kind and return the kind under which they are counted."""
        kind = kind if kind in self.kinds or len(self.kinds) < _MAX_KINDS else _OTHER_KINDS
        self.kinds[kind] = self.kinds.get(kind, 0) + times
        return kind

    def absent(self, reason: str) -> None:
        """Report that the trace lacks data that the check needs: the reason of a verdict
        ``unknown``.
        """
        # a trace with many requests counts once
        if reason not in self._absent:
            self._absent.add(reason)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def skipped(self, reason: str) -> None:
        """Report that a request was not shown to the check, which would perhaps have said that the
        situation cannot occur.
        """
        self.absent(reason)
        self._skipped = True

    def inapplicable(self, reason: str) -> None:
        """Report that, by what the subject or the engines declare, the situation cannot occur in
        this trace.

        This is weaker than ``Applies``: exercise, a finding or a crash in any trace still counts.
        The verdict is ``not applicable`` only if there is none of them and all traces were reported
        so.
        """
        self._inapplicable = reason

    def close(self) -> None:
        """Note at the end of a trace whether it was reported as inapplicable."""
        skipped, self._skipped = self._skipped, False
        self._absent.clear()
        if self._inapplicable is None:
            self.judged += not skipped
            self.partial += skipped
            return
        self.excused[self._inapplicable] = self.excused.get(self._inapplicable, 0) + 1
        self._inapplicable = None

    def crashed(self, reason: str) -> None:
        """Report that the check itself raised: its verdict cannot be ``pass``."""
        self.crash = self.crash or reason

    def merge(self, other: Collector) -> None:
        """Add what another collector of the same check has."""
        for counts, added in (
            (self.counters, other.counters),
            (self.reasons, other.reasons),
            (self.excused, other.excused),
        ):
            for name, times in added.items():
                counts[name] = counts.get(name, 0) + times
        for finding in other.findings:
            is_new = len(self.findings) < _MAX_KINDS and all(
                finding.kind != stored.kind for stored in self.findings
            )
            if len(self.findings) < self._limit or is_new:
                self.findings.append(finding)
        self.found += other.found
        for kind, times in other.kinds.items():
            self._count(kind, times)
        for kind, flavours in other.flavours.items():
            self.flavours.setdefault(kind, {}).update(flavours)
        self.judged += other.judged
        self.partial += other.partial
        self.crash = self.crash or other.crash

    def _unknown_reason(self) -> str:
        """Return why the check was never exercised."""
        # Data that is absent from some traces only is not the reason: the others did not exercise
        # the check either.
        unexercised = f"not exercised: no {' or '.join(self.check.exercised_by)} occurred"
        traces = self.judged + self.partial
        # The most frequent reason is shown, since a report has one line per check.
        reason, times = max(
            self.reasons.items(), key=lambda item: item[1], default=(unexercised, traces)
        )
        if times >= traces:
            return reason
        return f"{unexercised} ({times} times in {traces} traces: {reason})"

    def result(self) -> CheckResult:
        """Return the verdict on everything so far."""
        if self.found:
            verdict, reason = Verdict.FAIL, f"{self.found} finding{'s' if self.found > 1 else ''}"
        # A crash after a finding does not hide the finding; a crash without one is never a pass.
        elif self.crash:
            verdict, reason = Verdict.UNKNOWN, f"the check itself crashed: {self.crash}"
        elif sum(self.counters.values()):
            verdict, reason = Verdict.PASS, ""
        elif self.excused and not self.judged:
            verdict, reason = (
                Verdict.NOT_APPLICABLE,
                max(self.excused, key=self.excused.__getitem__),
            )
        else:
            verdict, reason = Verdict.UNKNOWN, self._unknown_reason()
        return CheckResult(
            check=self.check,
            verdict=verdict,
            reason=reason,
            exercised=dict(self.counters),
            findings=tuple(self.findings),
            found=self.found,
            kinds=dict(self.kinds),
            flavours={kind: tuple(names) for kind, names in self.flavours.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Verdict of one check.

    check: The check.
    verdict: Its verdict.
    reason: Why, unless it passed.
    exercised: How often each counter was incremented.
    findings: The stored findings.
    found: The number of all findings.
    kinds: The number of findings of each kind.
    known: The reasons of the known failures that it showed.
    otherwise: The findings that no known failure explains, by kind.
    flavours: The engine flavours on which each kind was found, in the order of the run.
    """

    check: Check
    verdict: Verdict
    reason: str
    exercised: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    found: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    otherwise: Mapping[str, int] = field(default_factory=dict)
    flavours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The id of the check."""
        return self.check.id
