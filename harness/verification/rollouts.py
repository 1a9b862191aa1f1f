"""Conformance: runs a subject through the schedules of a profile, judges every trace, and reports.

The small scope is exhausted first, then seeded random schedules follow, flavour by flavour. What
fails is shrunk to a small case and written down as a trace that ``rollproof replay`` runs and
judges again.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rollproof.core.case import Case
from rollproof.core.contract import Contract, KvPolicy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import told
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Result
from rollproof.core.files import check_folder
from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Trace
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check, CheckResult, Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.known_failures import Ledger, Ways
from rollproof.judging.registry import Registry
from rollproof.judging.report import Canary, Interrupted, Report
from rollproof.judging.situations import Scenarios
from rollproof.simulation.virtual_loop import DEADLOCK
from rollproof.simulation.watchdog import STUCK
from rollproof.store.values import show
from rollproof.verification.argument_checks import (
    as_cases,
    as_checks,
    as_expected,
    as_name,
    as_names,
    as_path,
    as_recipe,
    as_seed,
    check_factory,
)
from rollproof.verification.canary import try_canary
from rollproof.verification.contract_probe import declares, probe
from rollproof.verification.counterexamples import drop_witnesses, write_witness
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import (
    LATER_REQUEST,
    profile_named,
    random_cases,
    scope_families,
)
from rollproof.verification.shrinking import shrink
from rollproof.verification.traces import judge_events

__all__ = ["Campaign", "cases_for", "merge_reports", "run_conformance"]

_HANGS = 10
"""Rollouts that hang alike before a campaign stops; one that polls ten times a second costs a
second of real time and more.
"""
_STUCK = 2
"""Cases with a step that never ends before a campaign stops, and shrinks nothing: each costs
minutes.
"""
_OTHERS = "What the other cases would have shown is not known"
_TRIES = 150
"""Cases that shrinking one fault may run."""
_SLOW_TRIES = 15
"""The same where each case may cost seconds."""


def run_conformance(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int | None = None,
    only: Iterable[str] = (),
    checks: Iterable[Check] = (),
    flavours: Iterable[str] | None = None,
    cases: Iterable[Case] | None = None,
    expected: Mapping[str, str] | None = None,
    ways: Ways | None = None,
    progress: Callable[[Progress], None] | None = None,
    witness_dir: str | Path | None = None,
    keep_witnesses: Iterable[str] = (),
    recipe: Mapping[str, Any] | None = None,
    canary: bool = True,
) -> Report:
    """Judge the subject that ``factory`` makes, and return the report.

    ``only`` selects checks by id or family, ``checks`` adds some of your own, ``flavours``
    restricts the engine flavours (default: all whose conventions fit the subject's contract),
    ``cases`` replaces the profile's schedules. ``expected`` maps ids of checks that are known to
    fail to the reason: they run without shrinking. ``ways`` says of some of them what they are
    known to find: one that finds anything else fails otherwise than expected, and that is shrunk.
    Counterexamples go to ``witness_dir``; those of an earlier run whose checks now pass are
    deleted, but for the checks of ``keep_witnesses``. Raises ``UsageError`` for an argument of a
    wrong kind, an unknown profile, check or flavour, and a ``witness_dir`` that cannot be written
    to; ``SubjectError`` for a subject that cannot be run; and ``Interrupted``, with the report so
    far, where Ctrl-C ends it.
    """
    start = time.perf_counter()
    check_factory(factory, "run_conformance()")
    used_seed = profile_named(profile).seed_for(as_seed(seed))
    registry = default_registry().extended(as_checks(checks))
    chosen, kept = as_names(only, "only"), as_names(keep_witnesses, "keep_witnesses")
    folder = None if witness_dir is None else as_path(witness_dir, "witness_dir")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function of one Progress, not {show(progress)}.")
    campaign = Campaign(
        factory=factory,
        name=as_name(name) or _name(factory),
        profile=profile,
        registry=registry.select(chosen) if chosen else registry,
        expected=as_expected(expected, registry),
        ledger=Ledger(ways or {}),
        witness_dir=folder,
        recipe=as_recipe(recipe),
    )
    if folder is not None:
        check_folder(folder)
    named = None if flavours is None else as_names(flavours, "flavours")
    if named == ():
        raise UsageError(
            "flavours names no engine flavour, so nothing would be judged: leave it out for all"
            " that fit the contract."
        )
    todo = (
        as_cases(cases)
        if cases is not None
        else list(cases_for(factory, profile=profile, seed=used_seed, flavours=named))
    )
    try:
        campaign.run_all(todo, progress)
        results = campaign.conclude(progress)
    except KeyboardInterrupt:
        campaign.notes.append(
            f"interrupted after {campaign.tally.traces} of {len(todo)} cases: only those were"
            " judged"
        )
        raise Interrupted(
            campaign.report(campaign.tally.judgement().results, used_seed, start)
        ) from None
    if folder is not None:
        passed = [result.id for result in results if result.verdict is Verdict.PASS]
        drop_witnesses(folder, set(passed).difference(kept), subject=campaign.name)
    return campaign.report(
        results,
        used_seed,
        start,
        canary=try_canary(campaign.clean, campaign.registry) if canary else None,
    )


def cases_for(
    factory: SubjectFactory,
    *,
    profile: str,
    seed: int,
    flavours: Iterable[str] | None = None,
    thin: int = 1,
) -> Iterator[Case]:
    """The schedules of a profile for the subject, flavour by flavour.

    The subject is started once per flavour to ask for its contract. A contract with a model of its
    own fixes the size of the coded model; one that follows the fleet is tried on many sizes.
    ``thin`` keeps one case in so many of each family and of the random ones, but all with a later
    request: there each case shows what no other one does.
    """
    settings = profile_named(profile)
    found = probe(factory, flavours)
    if not found:
        raise UsageError(
            "No engine flavour fits the subject's contract (rows, layer axis, dtype): name the ones"
            " that it speaks with `flavours`."
        )
    share = max(1, settings.random_cases // len(found)) if settings.random_cases else 0
    for flavour, contract, model in found:
        families = scope_families(flavour, contract, scope=settings.scope, model=model, seed=seed)
        scope = (
            case
            for name, cases in families
            for case in islice(cases, 0, None, 1 if name == LATER_REQUEST else thin)
        )
        yield from _distinct(_honest(case, contract) for case in scope)
        drawn = islice(
            random_cases(seed, share, flavour=flavour, contract=contract, model=model),
            0,
            None,
            thin,
        )
        yield from (_honest(case, contract) for case in drawn)


def _honest(case: Case, contract: Contract) -> Case:
    """A contract that recomputes the KV at an update is only held to syncs that let it: a flush,
    and not in place.
    """
    if contract.kv_policy is KvPolicy.KEEP or (
        case.clear_cache and case.pause_mode is not PauseMode.IN_PLACE
    ):
        return case
    mode = PauseMode.KEEP if case.pause_mode is PauseMode.IN_PLACE else case.pause_mode
    return replace(case, clear_cache=True, pause_mode=mode)


def _distinct(cases: Iterable[Case]) -> Iterator[Case]:
    """Each case once: syncs that were made honest are often those that the scope holds anyway."""
    seen: set[str] = set()
    for case in cases:
        shown = repr(case)
        if shown not in seen:
            seen.add(shown)
            yield case


@dataclass
class Campaign:
    """Runs cases, adds up their judgements, remembers the first failing case of each check and
    clean traces for the canary.
    """

    factory: SubjectFactory
    name: str
    profile: str
    registry: Registry
    expected: dict[str, str] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger({}))
    witness_dir: Path | None = None
    recipe: Mapping[str, Any] | None = None
    tally: Tally = field(init=False)
    exercised: Counter[str] = field(default_factory=Counter)
    failing: dict[str, Case] = field(default_factory=dict)
    failing_otherwise: dict[str, Case] = field(default_factory=dict)
    clean: list[Trace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hangs: Counter[str] = field(default_factory=Counter)
    slow: set[str] = field(default_factory=set)
    stuck: list[tuple[Case, Trace]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally = Tally(self.registry)

    def run_all(
        self, cases: list[Case], progress: Callable[[Progress], None] | None = None
    ) -> None:
        """Run and judge cases, unless one rollout after the other hangs alike: each may cost
        seconds, and shows the same fault.
        """
        for number, case in enumerate(cases):
            if progress is not None:
                progress(
                    Progress(done=number, total=len(cases), what=f"{self.name} on {case.flavour}")
                )
            self.run(case)
            if len(self.stuck) >= _STUCK and number + 1 < len(cases):
                why = next(
                    error
                    for event in self.stuck[-1][1].events
                    if (error := _stuck(event)) is not None
                )
                self.notes.append(
                    f"stopped after {number + 1} of {len(cases)} cases, in {_STUCK} of which {why}."
                    f" {_OTHERS}"
                )
                return
            place, times = max(self.hangs.items(), key=lambda hang: hang[1], default=("", 0))
            if times >= _HANGS and self.failing and number + 1 < len(cases):
                self.notes.append(
                    f"stopped after {number + 1} of {len(cases)} cases: {times} rollouts hung"
                    f" alike, awaiting {place}. {_OTHERS}"
                )
                return

    def report(
        self,
        results: tuple[CheckResult, ...],
        seed: int,
        start: float,
        canary: Canary | None = None,
    ) -> Report:
        """The report of a campaign that began at ``start`` (``time.perf_counter``)."""
        return Report(
            subject=self.name,
            profile=self.profile,
            seed=seed,
            results=results,
            exercised=dict(self.exercised),
            canary=canary,
            expected={
                check_id: reason
                for check_id, reason in self.expected.items()
                if check_id in self.registry.ids
            },
            cases=self.tally.traces,
            seconds=time.perf_counter() - start,
            notes=tuple(self.notes),
        )

    def run(self, case: Case) -> None:
        """Run and judge one case."""
        trace = self._trace(case)
        before = self.tally.kinds()
        situations = _situations(trace)
        judge_events(trace.header, trace.events, self.tally)
        self.exercised.update(situations)
        failed = {
            check_id: {
                kind: count - known.get(kind, 0)
                for kind, count in kinds.items()
                if count > known.get(kind, 0)
            }
            for check_id, kinds in self.tally.kinds().items()
            if kinds != (known := before.get(check_id, {}))
        }
        hung = [place for event in trace.events if (place := _slow_hang(event)) is not None]
        self.hangs.update(hung)
        for check_id, kinds in failed.items():
            if check_id not in self.failing and hung:
                self.slow.add(check_id)
            self.failing.setdefault(check_id, case)
            if not self.ledger.take(check_id, kinds, situations):
                self.failing_otherwise.setdefault(check_id, case)
        if not failed:
            self._keep(trace)

    def conclude(
        self, progress: Callable[[Progress], None] | None = None
    ) -> tuple[CheckResult, ...]:
        """The verdicts, with the findings of the shrunk counterexamples in place of the first ones
        met.
        """
        judgement = self.tally.judgement()
        results = []
        for result in judgement.results:
            result = self.ledger.settled(result)
            if result.verdict is Verdict.FAIL and (
                result.otherwise or result.id not in self.expected
            ):
                if progress is not None:
                    progress(Progress(done=0, total=0, what=f"shrinking {result.id}"))
                result = self._shrunk(result)
            results.append(result)
        return tuple(results)

    def _shrunk(self, result: CheckResult) -> CheckResult:
        alone = Registry([result.check])

        def judged(trace: Trace) -> Tally:
            tally = Tally(alone)
            judge_events(trace.header, trace.events, tally)
            return tally

        def strange(trace: Trace, tally: Tally) -> Collection[str]:
            kinds = tally.kinds().get(result.id, {})
            return (
                self.ledger.strange(result.id, kinds, _situations(trace))
                if result.otherwise
                else kinds
            )

        def fails(case: Case) -> bool:
            if len(self.stuck) >= _STUCK:
                return False
            trace = self._trace(case)
            tally = judged(trace)
            return bool(strange(trace, tally)) and declares(trace.header.contract, case.model)

        first = (self.failing_otherwise if result.otherwise else self.failing)[result.id]
        known = next((trace for case, trace in self.stuck if case is first), None)
        if known is None:
            case = shrink(first, fails, tries=_SLOW_TRIES if result.id in self.slow else _TRIES)
            known = self._trace(case)
        trace, tally = known, judged(known)
        kinds = strange(trace, tally)
        shown = [
            finding for finding in tally.judgement()[result.id].findings if finding.kind in kinds
        ]
        if not shown:
            self.notes.append(
                f"{result.id} failed, but not when its case was run again: the subject does not"
                " repeat itself"
            )
            return result
        witness = self._write(result.id, trace)
        return replace(
            result, findings=tuple(replace(finding, witness=witness) for finding in shown)
        )

    def _write(self, check_id: str, trace: Trace) -> str | None:
        if self.witness_dir is None:
            return None
        try:
            return str(write_witness(self.witness_dir, check_id, trace))
        except (TraceError, OSError) as error:
            trouble = (
                f"The counterexample of {check_id} could not be kept in {self.witness_dir}/"
                f" ({told(error)})"
            )
        try:
            kept = write_witness(Path(tempfile.mkdtemp(prefix="rollproof-")), check_id, trace)
        except (TraceError, OSError):
            self.notes.append(trouble)
            return None
        self.notes.append(f"{trouble}; it is in {kept}")
        return str(kept)

    def _trace(self, case: Case) -> Trace:
        trace = run_case(
            self.factory, case, name=self.name, profile=self.profile, recipe=self.recipe
        )
        if any(_stuck(event) is not None for event in trace.events):
            self.stuck.append((case, trace))
        return trace

    def _keep(self, trace: Trace) -> None:
        """Keep the clean trace in which most happened: the canary needs something to plant its
        fault in.
        """
        if not self.clean or len(trace.events) > len(self.clean[-1].events):
            self.clean.append(trace)
            del self.clean[:-4]


def _situations(trace: Trace) -> Mapping[str, int]:
    """How often each situation arose in a trace."""
    scenarios = Scenarios()
    for event in trace.events:
        scenarios.event(event)
    return scenarios.counts


def _slow_hang(event: Event) -> str | None:
    """What a rollout awaited that hung, where that took the clock long to find out; ``None`` for
    any other event.
    """
    if (
        not isinstance(event, Result)
        or not event.hung
        or event.error is None
        or event.error.startswith((DEADLOCK, STUCK))
    ):
        return None
    return event.error.rpartition(" awaits ")[2]


def _stuck(event: Event) -> str | None:
    """Why a rollout hung through a step that never ended; ``None`` for any other event."""
    if (
        not isinstance(event, Result)
        or not event.hung
        or event.error is None
        or not event.error.startswith(STUCK)
    ):
        return None
    return event.error


def _name(factory: SubjectFactory) -> str:
    return getattr(factory, "__qualname__", type(factory).__name__)


def merge_reports(subject: str, reports: Iterable[Report]) -> Report:
    """One report over several subjects: a check fails if it failed anywhere, and passes if it
    passed somewhere and failed nowhere.
    """
    reports = list(reports)
    if not reports:
        raise UsageError("There is no report to merge.")
    exercised: Counter[str] = Counter()
    for report in reports:
        exercised.update(report.exercised)
    return Report(
        subject=subject,
        profile=reports[0].profile,
        seed=reports[0].seed,
        results=tuple(
            _merged([report.results[i] for report in reports])
            for i in range(len(reports[0].results))
        ),
        exercised=dict(exercised),
        canary=_weakest([report.canary for report in reports if report.canary is not None]),
        expected=_expected_by_all(reports),
        cases=sum(report.cases for report in reports),
        seconds=sum(report.seconds for report in reports),
        notes=tuple(note for report in reports for note in report.notes),
    )


def _expected_by_all(reports: list[Report]) -> dict[str, str]:
    """The expected failures, but for those of checks that fail unexpectedly elsewhere."""
    unexpected = {result.id for report in reports for result in report.failed}
    return {
        check: reason
        for report in reports
        for check, reason in report.expected.items()
        if check not in unexpected
    }


_ORDER = (Verdict.FAIL, Verdict.PASS, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE)


def _merged(results: list[CheckResult]) -> CheckResult:
    crashed = [
        result
        for result in results
        if result.verdict is Verdict.UNKNOWN and "crashed" in result.reason
    ]
    leading = min(crashed or results, key=lambda result: _ORDER.index(result.verdict))
    if crashed:
        leading = next((result for result in results if result.verdict is Verdict.FAIL), leading)
    exercised: Counter[str] = Counter()
    for result in results:
        exercised.update(result.exercised)
    news_first = sorted(results, key=lambda result: bool(result.known) and not result.otherwise)
    return replace(
        leading,
        exercised=dict(exercised),
        findings=tuple(finding for result in news_first for finding in result.findings)[:8],
        found=sum(result.found for result in results),
        kinds=_added(result.kinds for result in results),
        known=tuple(dict.fromkeys(reason for result in results for reason in result.known)),
        otherwise=_added(result.otherwise for result in results),
    )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _weakest(canaries: list[Canary]) -> Canary | None:
    planted = [canary for canary in canaries if canary.planted is not None]
    return (
        min(planted, key=lambda canary: canary.red)
        if planted
        else (canaries[0] if canaries else None)
    )
