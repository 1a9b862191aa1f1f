"""Checks, verdicts and findings: the one registry behind every door.

A check is a pure function of a trace. It never prints and never raises for a finding: it tells a
``Collector`` what it compared (``exercised``) and what was wrong (``finding``). There are two
shapes: a *request check* is called once per ended request, with a ``RequestView``; a *trace check*
is a class that is fed every event in order.

Three verdicts. A check whose trigger never fired, whose data is absent, or which itself crashed is
``unknown`` with a reason and never counts as passed. What a contract rules out is ``not
applicable``, listed apart: the subject's before any event (``Applies``), or, where a check was
never exercised, what it says of a trace (``Collector.inapplicable``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rollproof.core.contract import Contract
from rollproof.core.records import Scalar
from rollproof.errors import UsageError

if TYPE_CHECKING:
    from rollproof.core.events.base import Event
    from rollproof.judging.judge import JudgeContext
    from rollproof.judging.request_view import RequestView

__all__ = [
    "Applies",
    "Check",
    "CheckResult",
    "Collector",
    "Finding",
    "RequestJudge",
    "TraceCheck",
    "Verdict",
    "request_check",
    "trace_check",
]


_KINDS = 64
"""Kinds of findings that are counted apart; a check has a handful."""
_FURTHER = "a kind beyond the first 64"
"""What others count as, so that no known fault covers them."""


class Verdict(StrEnum):
    """Outcome of one check over one or many traces."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault: what was expected, what was observed, where, what it usually means.

    ``where`` names the place with keys among ``request``, ``call``, ``segment``, ``position``,
    ``layer``, ``version``, ``server``, ``index``. ``kind`` says the same as ``title`` without what
    differs from place to place and from run to run: by it a known fault is told from another one of
    the same check. ``witness`` is the path of the counterexample that shows it, filled in by the
    door.
    """

    check_id: str
    title: str
    expected: str
    observed: str
    where: Mapping[str, Scalar] = field(default_factory=dict)
    hint: str = ""
    kind: str = ""
    witness: str | None = None


Applies: TypeAlias = "Callable[[Contract], str | None]"
"""Returns why a contract rules the check out, or ``None`` where it applies."""


class TraceCheck(Protocol):
    """A check over the whole trace: made anew per trace, fed the events that it reads, then
    finished.

    ``kinds`` are the event classes that it reads (``None``: every event). Keep memory independent
    of the trace's length.
    """

    @property
    def kinds(self) -> Iterable[type[Event]] | None: ...

    def event(self, event: Event, out: Collector) -> None:
        """Take one event."""

    def finish(self, out: Collector) -> None:
        """The trace has ended."""


RequestJudge: TypeAlias = "Callable[[RequestView, Collector], None]"
TraceJudge: TypeAlias = "Callable[[JudgeContext], TraceCheck]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise about rollouts, and the code that judges it.

    ``id`` is ``family.name``. ``promise`` is one sentence, ``needs`` the data that the trace must
    hold, ``exercised_by`` the names of the counters that the check may count: it is exercised when
    one of them is above zero. Exactly one of ``request`` and ``trace`` is set. ``about``
    names the traces that it judges (``Header.about``), ``also`` other kinds of them.
    """

    id: str
    promise: str
    needs: str
    exercised_by: tuple[str, ...]
    about: str = "rollouts"
    also: tuple[str, ...] = ()
    applies: Applies | None = None
    request: RequestJudge | None = None
    trace: TraceJudge | None = None

    @property
    def family(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    def judges(self, about: str) -> bool:
        """Whether it judges traces of that kind."""
        return about == self.about or about in self.also

    def inapplicable(self, contract: Contract) -> str | None:
        """Why ``contract`` rules this check out; ``None`` where it applies."""
        return self.applies(contract) if self.applies else None


def request_check(
    id: str,
    *,
    promise: str,
    needs: str,
    exercised_by: str | tuple[str, ...],
    applies: Applies | None = None,
) -> Callable[[RequestJudge], Check]:
    """Make a ``Check`` of a function ``(view, out)`` that is called once per ended request."""

    def make(judge: RequestJudge) -> Check:
        return Check(
            id=id,
            promise=promise,
            needs=needs,
            exercised_by=_names(exercised_by),
            applies=applies,
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
) -> Callable[[TraceJudge], Check]:
    """Make a ``Check`` of a ``TraceCheck`` class whose constructor takes the ``JudgeContext``."""

    def make(judge: TraceJudge) -> Check:
        names = _names(exercised_by)
        return Check(
            id=id,
            promise=promise,
            needs=needs,
            exercised_by=names,
            applies=applies,
            about=about,
            trace=judge,
        )

    return make


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class Collector:
    """Takes what one check says. Keeps the first ``keep`` findings and the first of each kind in
    full, and counts the others.

    ``excused`` counts the traces that the check called inapplicable, by reason, ``judged`` the
    other ones.
    """

    __slots__ = (
        "_excuse",
        "_keep",
        "check",
        "counters",
        "crash",
        "excused",
        "findings",
        "found",
        "judged",
        "kinds",
        "reasons",
    )

    def __init__(self, check: Check, keep: int = 8) -> None:
        self.check: Check = check
        # plain dicts: one collector per check and case is made, and a Counter costs ten times as
        # much
        self.counters: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.found: int = 0
        self.kinds: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.crash: str | None = None
        self.excused: dict[str, int] = {}
        self.judged: int = 0
        self._excuse: str | None = None
        self._keep = keep

    def exercised(self, counter: str, times: int = 1) -> None:
        """Say that the promise was put to the test ``times`` times. Raises ``UsageError`` for an
        undeclared counter.
        """
        if counter in self.counters:
            self.counters[counter] += times
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
        """Report a fault. A finding also counts as exercise: a check that fails has been put to the
        test.

        ``kind`` is for a title that holds counts or names; where it is left out, the title says the
        same of every such fault.
        """
        kind = self._count(title if kind is None else kind, 1)
        self.found += 1
        if len(self.findings) < self._keep or self.kinds.get(kind) == 1:
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
                )
            )

    def _count(self, kind: str, times: int) -> str:
        """Count findings of a kind; returns what they count as."""
        kind = kind if kind in self.kinds or len(self.kinds) < _KINDS else _FURTHER
        self.kinds[kind] = self.kinds.get(kind, 0) + times
        return kind

    def absent(self, reason: str) -> None:
        """Say that data the check needs is not in the trace; becomes the reason of an ``unknown``
        verdict.
        """
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def inapplicable(self, reason: str) -> None:
        """Say that what the trace's subject or engines declare leaves its situation no way to arise
        in this trace.

        Softer than ``Applies``: exercise, a finding or a crash in any trace counts all the same.
        The verdict is ``not applicable``, with this reason, only where there is none of them and
        every trace was called so.
        """
        self._excuse = reason

    def close(self) -> None:
        """The trace has ended: take down whether it was called inapplicable."""
        if self._excuse is None:
            self.judged += 1
            return
        self.excused[self._excuse] = self.excused.get(self._excuse, 0) + 1
        self._excuse = None

    def crashed(self, reason: str) -> None:
        """The check itself raised: its verdict cannot be ``pass``."""
        self.crash = self.crash or reason

    def merge(self, other: Collector) -> None:
        """Add what another collector of the same check took."""
        for counts, added in (
            (self.counters, other.counters),
            (self.reasons, other.reasons),
            (self.excused, other.excused),
        ):
            for name, times in added.items():
                counts[name] = counts.get(name, 0) + times
        for finding in other.findings:
            new = len(self.findings) < _KINDS and all(
                finding.kind != kept.kind for kept in self.findings
            )
            if len(self.findings) < self._keep or new:
                self.findings.append(finding)
        self.found += other.found
        for kind, times in other.kinds.items():
            self._count(kind, times)
        self.judged += other.judged
        self.crash = self.crash or other.crash

    def _unexercised(self) -> str:
        """Why nothing came of the check. What was absent from some traces alone is not why: the
        others did not give rise to it.
        """
        silent = f"not exercised: no {' or '.join(self.check.exercised_by)} occurred"
        reason, times = max(
            self.reasons.items(), key=lambda one: one[1], default=(silent, self.judged)
        )
        return (
            reason
            if times >= self.judged
            else f"{silent} ({times} times in {self.judged} traces: {reason})"
        )

    def result(self) -> CheckResult:
        """The verdict on everything taken so far."""
        if self.found:
            verdict, reason = Verdict.FAIL, f"{self.found} finding{'s' if self.found > 1 else ''}"
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
            verdict, reason = Verdict.UNKNOWN, self._unexercised()
        return CheckResult(
            check=self.check,
            verdict=verdict,
            reason=reason,
            exercised=dict(self.counters),
            findings=tuple(self.findings),
            found=self.found,
            kinds=dict(self.kinds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Verdict of one check, with its reason, what it was exercised by, and the findings.

    ``found`` counts all of them, ``kinds`` those of each kind. Of a check that is known to fail,
    ``known`` are the reasons for which it did, and ``otherwise`` counts the findings that none of
    them explains, by kind.
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

    @property
    def id(self) -> str:
        """The id of the check."""
        return self.check.id
