"""Rollouts: run a subject through the schedules of a profile, judge every trace, and report.

The small scope is exhausted first, then seeded random schedules follow, flavour by flavour. What
fails is shrunk to a small case and written down as a trace that ``rollproof replay`` runs and
judges again.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rollproof.core.case import Case
from rollproof.core.contract import Contract, KvPolicy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import describe_error, show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Result
from rollproof.core.files import check_folder
from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Trace
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check, CheckResult, Finding, Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.known_failures import KnownFailureLedger, KnownFailures
from rollproof.judging.registry import Registry
from rollproof.judging.report import Interrupted, Report
from rollproof.reporting.text import KINDS, NO_SAMPLE
from rollproof.simulation.virtual_loop import DEADLOCK
from rollproof.simulation.watchdog import STUCK
from rollproof.verification.argument_checks import (
    as_cases,
    as_checks,
    as_expected,
    as_flavours,
    as_name,
    as_names,
    as_path,
    as_recipe,
    as_seed,
    check_factory,
)
from rollproof.verification.canary import SAMPLE_PLANTS, try_canary
from rollproof.verification.contract_probe import declares, probe
from rollproof.verification.counterexamples import delete_counterexamples, write_counterexample
from rollproof.verification.options import ROLLOUTS, Options, factory_name
from rollproof.verification.reports import make_report, situations
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import (
    LATER_REQUEST,
    corner_families,
    profile_named,
    random_cases,
    scope_families,
    with_fitting_updates,
    with_truncated_sampling,
)
from rollproof.verification.shrinking import shrink
from rollproof.verification.traces import judge_events

__all__ = ["cases_for", "run", "run_conformance"]

# A rollout that polls ten times a second costs a second of real time and more until it counts as
# hanging, and a stuck step costs minutes: a few of them show the fault.
_HANGS = 10
"""Rollouts that hang in the same place before a run stops."""
_STUCK = 2
"""Cases with a step that never ends before a run stops and shrinks nothing."""
_NOT_RUN = "What the other cases would have shown is not known"
_TRIES = 150
"""Cases that shrinking one failure may run."""
_SLOW_TRIES = 15
"""The same if each case may cost seconds."""
_KIND_TRIES = 40
"""Cases that shrinking a further kind of findings of a failing check may run."""


def run_conformance(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int | None = None,
    only: Iterable[str] = (),
    checks: Iterable[Check] = (),
    flavours: str | Iterable[str] | None = None,
    cases: Iterable[Case] | None = None,
    expected: Mapping[str, str] | None = None,
    ways: KnownFailures | None = None,
    progress: Callable[[Progress], None] | None = None,
    witness_dir: str | Path | None = None,
    keep_witnesses: Iterable[str] = (),
    recipe: Mapping[str, Any] | None = None,
    canary: bool = True,
) -> Report:
    """Judge the ``RolloutSubject`` that ``factory`` makes, and return the report.

    Args:
        factory: makes a fresh subject for each case.
        name: what the report calls it (default: the name of the factory).
        profile: which schedules are run: ``pr``, ``nightly`` or ``soak``.
        seed: the seed of drawn schedules (default: that of the profile).
        only: ids or families of checks.
        checks: further checks of your own.
        flavours: engine flavours (default: all that fit the subject's contract).
        cases: replaces the profile's schedules.
        expected: ids of checks that are known to fail, with the reason; they run without shrinking.
        ways: what some of those checks are known to find; anything else is shrunk and fails.
        progress: called while the run goes on.
        witness_dir: where counterexamples are written; those of an earlier run whose checks pass
            now are deleted.
        keep_witnesses: checks whose counterexample stays all the same.
        recipe: how ``rollproof replay`` makes the subject again.
        canary: whether the run tests itself with a planted fault.

    Raises:
        UsageError: an argument of a wrong kind, an unknown profile, check or flavour, a
            ``witness_dir`` that cannot be written to.
        SubjectError: a subject that cannot be run.
        Interrupted: Ctrl-C; it carries the report so far.
    """
    check_factory(factory, "run_conformance()")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function of one Progress, not {show(progress)}.")
    registry = default_registry().extended(as_checks(checks))
    flavour_names = None if flavours is None else as_flavours(flavours)
    folder = None if witness_dir is None else as_path(witness_dir, "witness_dir")
    if folder is not None:
        check_folder(folder)  # before anything that takes time
    options = Options(
        name=as_name(name),
        profile=profile,
        seed=profile_named(profile).seed_for(as_seed(seed)),
        only=as_names(only, "only"),
        expected=as_expected(expected, registry),
        known_failures=ways or {},
        recipe=as_recipe(recipe),
        counterexample_dir=folder,
        keep_counterexamples=frozenset(as_names(keep_witnesses, "keep_witnesses")),
        progress=progress,
        flavours=flavour_names,
        cases=None if cases is None else as_cases(cases),
    )
    return run(factory, options, registry=registry, canary=canary)


def run(
    factory: SubjectFactory,
    options: Options,
    *,
    registry: Registry | None = None,
    canary: bool = True,
) -> Report:
    """Judge a ``RolloutSubject`` by the checks of ``registry`` (default: all that rollproof ships).

    Raises as ``run_conformance``.
    """
    started = time.perf_counter()
    registry = default_registry() if registry is None else registry
    folder = options.counterexample_dir
    campaign = _Campaign(
        factory=factory,
        name=options.name or factory_name(factory),
        options=options,
        registry=registry.select(options.only) if options.only else registry,
        ledger=KnownFailureLedger(options.known_failures),
    )
    if folder is not None:
        check_folder(folder)
    cases = options.cases
    if cases is None:
        cases = cases_for(
            factory, profile=options.profile, seed=options.seed, flavours=options.flavours
        )
    schedule = list(cases)
    try:
        campaign.run_all(schedule)
        results = campaign.conclude()
    except KeyboardInterrupt:
        campaign.notes.append(
            f"interrupted after {campaign.tally.traces} of {len(schedule)} cases: only those were"
            " judged"
        )
        results = campaign.tally.judgement().results
        raise Interrupted(campaign.report(results, started, canary=False)) from None
    if folder is not None:
        passed = {result.id for result in results if result.verdict is Verdict.PASS}
        delete_counterexamples(folder, passed - options.keep_counterexamples, subject=campaign.name)
    return campaign.report(results, started, canary=canary)


def cases_for(
    factory: SubjectFactory,
    *,
    profile: str,
    seed: int,
    flavours: Iterable[str] | None = None,
    thin: int = 1,
) -> Iterator[Case]:
    """Yield the schedules of a profile for the subject, flavour by flavour.

    The subject is started once per flavour to read its contract. A contract with a model of its
    own fixes the size of the coded model; one that follows the fleet is tried on many sizes.
    ``thin`` keeps one case in so many of each family and of the random ones, but all cases with a
    later request, for each of those shows something that no other does. Every case is within the
    limits that the contract declares.
    """
    settings = profile_named(profile)
    probed = probe(factory, flavours)
    # Random cases are divided among the flavours, so that a subject with many takes no longer.
    share = max(1, settings.random_cases // len(probed)) if settings.random_cases else 0
    for flavour, contract, model in probed:
        families = scope_families(flavour, contract, scope=settings.scope, model=model, seed=seed)
        scope = (
            case
            for name, cases in families
            for case in islice(cases, 0, None, 1 if name == LATER_REQUEST else thin)
        )
        corners = (
            case
            for _, cases in corner_families(flavour, contract, model=model, seed=seed)
            # each family on its own, so that its first case is always among them
            for case in islice(cases, 0, None, thin)
        )
        drawn = random_cases(seed, share, flavour=flavour, contract=contract, model=model)
        cases = chain(scope, corners, islice(drawn, 0, None, thin))
        yield from _distinct(_fitted(case, contract) for case in cases)


def _fitted(case: Case, contract: Contract) -> Case:
    """Return the case with weight syncs that the contract's KV policy allows.

    A contract that recomputes the KV cache at an update is only held to syncs that let it do so:
    those that flush the cache, and not in place.
    """
    if contract.kv_policy is not KvPolicy.KEEP and not (
        case.clear_cache and case.pause_mode is not PauseMode.IN_PLACE
    ):
        mode = PauseMode.KEEP if case.pause_mode is PauseMode.IN_PLACE else case.pause_mode
        case = replace(case, clear_cache=True, pause_mode=mode)
    return with_truncated_sampling(with_fitting_updates(case, contract), contract)


def _distinct(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield each case once: a fitted sync is often one that the scope holds anyway."""
    seen: set[str] = set()
    for case in cases:
        key = repr(case)
        if key not in seen:
            seen.add(key)
            yield case


@dataclass
class _Campaign:
    """One run: its cases, their judgements added up, and what is needed to explain failures."""

    factory: SubjectFactory
    name: str
    options: Options
    registry: Registry
    ledger: KnownFailureLedger
    tally: Tally = field(init=False)
    exercised: Counter[str] = field(default_factory=Counter)
    failing: dict[str, dict[str, Case]] = field(default_factory=dict)
    """By check, the first case in which each kind of finding arose."""
    failing_in_a_new_way: dict[str, dict[str, Case]] = field(default_factory=dict)
    """The same for kinds that no known failure of the check explains."""
    clean: list[Trace] = field(default_factory=list)
    """Traces without findings, for the self-test."""
    notes: list[str] = field(default_factory=list)
    hangs: Counter[str] = field(default_factory=Counter)
    slow: set[str] = field(default_factory=set)
    """Checks that failed first in a case with a hang: each try of shrinking costs seconds."""
    stuck: list[tuple[Case, Trace]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """Rollouts that ended with an error, and others."""
    first_error: str = ""
    flavours: dict[str, None] = field(default_factory=dict)
    """The engine flavours of the cases that were run, in their order."""

    def __post_init__(self) -> None:
        self.tally = Tally(self.registry)

    def run_all(self, cases: list[Case]) -> None:
        """Run and judge cases, until many rollouts hang in the same place."""
        for number, case in enumerate(cases):
            self.flavours[case.flavour] = None
            self._progress(number, len(cases), f"{self.name} on {case.flavour}")
            self.run(case)
            reason = self._reason_to_stop()
            if reason is not None and number + 1 < len(cases):
                self.notes.append(
                    f"stopped after {number + 1} of {len(cases)} cases{reason}. {_NOT_RUN}"
                )
                return

    def _reason_to_stop(self) -> str | None:
        """Return why further cases would cost much and show nothing new."""
        if len(self.stuck) >= _STUCK:
            last = self.stuck[-1][1].events
            error = next(error for event in last if (error := _stuck(event)) is not None)
            return f", in {_STUCK} of which {error}"
        place, times = max(self.hangs.items(), key=lambda hang: hang[1], default=("", 0))
        if times >= _HANGS and self.failing:
            return f": {times} rollouts hung alike, awaiting {place}"
        return None

    def report(self, results: tuple[CheckResult, ...], started: float, *, canary: bool) -> Report:
        """Return the report, with the self-test if ``canary`` is set."""
        undelivered = self._undelivered()
        return make_report(
            results,
            subject=self.name,
            profile=self.options.profile,
            seed=self.options.seed,
            started=started,
            cases=self.tally.traces,
            flavours=tuple(self.flavours),
            expected=self.options.expected,
            exercised=self.exercised,
            canary=try_canary(self.clean, self.registry, SAMPLE_PLANTS) if canary else None,
            notes=(*self.notes, undelivered) if undelivered else self.notes,
            undelivered=undelivered,
        )

    def _undelivered(self) -> str:
        """Return why no rollout delivered a sample, if all of them raised or returned nothing."""
        errors, dropped = self.ends["error"], self.ends["dropped"]
        if not errors + dropped or self.ends["other"]:
            return ""
        how = [f"each of {errors + dropped:,} returned nothing"]
        if errors and dropped:
            how = [f"{dropped:,} returned nothing", f"{errors:,} raised an error"]
        elif errors:
            how = [f"each of {errors:,} raised an error"]
        first = f", the first one {self.first_error}" if errors else ""
        return f"{NO_SAMPLE}: {' and '.join(how)}{first}"

    def _count_ends(self, trace: Trace) -> None:
        for event in trace.events:
            if isinstance(event, Result):
                failed = event.error is not None and not event.hung
                nothing = event.rollout is None and not event.hung
                self.ends["error" if failed else "dropped" if nothing else "other"] += 1
                if failed and not self.first_error:
                    self.first_error = event.error or ""

    def run(self, case: Case) -> None:
        """Run and judge one case."""
        trace = self._trace(case)
        before = self.tally.kinds()
        arisen = situations(trace.events, ROLLOUTS, trace.header)
        judge_events(trace.header, trace.events, self.tally)
        self.exercised.update(arisen)
        self._count_ends(trace)
        failed = {
            check_id: {
                kind: count - earlier.get(kind, 0)
                for kind, count in kinds.items()
                if count > earlier.get(kind, 0)
            }
            for check_id, kinds in self.tally.kinds().items()
            if kinds != (earlier := before.get(check_id, {}))
        }
        # What a hanging rollout awaits names the place; the same place again is the same fault.
        hung = [place for event in trace.events if (place := _slow_hang(event)) is not None]
        self.hangs.update(hung)
        for check_id, kinds in failed.items():
            if check_id not in self.failing and hung:
                self.slow.add(check_id)
            unexplained = self.ledger.unexplained(check_id, kinds, arisen)
            self.ledger.record(check_id, kinds, arisen)
            for first_cases, its_kinds in (
                (self.failing, list(kinds)),
                (self.failing_in_a_new_way, unexplained),
            ):
                for kind in its_kinds:
                    first_cases.setdefault(check_id, {}).setdefault(kind, case)
        if not failed:
            self._keep_clean(trace)

    def conclude(self) -> tuple[CheckResult, ...]:
        """Return the verdicts; failures show the findings of their shrunk counterexamples."""
        results = []
        for result in self.tally.judgement().results:
            result = self.ledger.annotated(result)
            known = result.id in self.options.expected and not result.otherwise
            if result.verdict is Verdict.FAIL and not known:
                self._progress(0, 0, f"shrinking {result.id}")
                result = self._shrunk(result)
            results.append(result)
        return tuple(results)

    def _progress(self, done: int, total: int, what: str) -> None:
        if self.options.progress is not None:
            self.options.progress(Progress(done=done, total=total, what=what))

    def _shrunk(self, result: CheckResult) -> CheckResult:
        """Return the result with findings of smallest cases, and those cases on disk.

        The first kinds of findings have a case each; a hint for one kind may be wrong for another.
        """
        first_cases = (self.failing_in_a_new_way if result.otherwise else self.failing)[result.id]
        findings: list[Finding] = []
        for kind, case in first_cases.items():
            shown = {_kind_alone(finding.kind) for finding in findings}
            if _kind_alone(kind) in shown or len(shown) >= KINDS:
                continue
            trace, found = self._smallest(result, kind, case, further=bool(findings))
            found = [finding for finding in found if _kind_alone(finding.kind) not in shown]
            if found:
                number = len({finding.witness for finding in findings}) + 1
                path = self._write(result.id, trace, number)
                findings += [replace(finding, witness=path) for finding in found]
        if not findings:
            self.notes.append(
                f"{result.id} failed, but not when its case was run again: the subject does not"
                " repeat itself"
            )
            return result
        shown = {_kind_alone(finding.kind) for finding in findings}
        # what was not shrunk is shown as it was found, without a counterexample
        findings += [
            finding
            for finding in result.findings
            if finding.kind in first_cases and _kind_alone(finding.kind) not in shown
        ]
        return replace(result, findings=tuple(findings))

    def _smallest(
        self, result: CheckResult, kind: str, first: Case, *, further: bool
    ) -> tuple[Trace, list[Finding]]:
        """Return the trace of the smallest case found that shows ``kind``, and its findings."""
        # One check alone judges the candidates: with all of them another fault could take over
        # while the case shrinks, and the counterexample would show that one.
        alone = Registry([result.check])

        def judged(trace: Trace) -> Tally:
            tally = Tally(alone)
            judge_events(trace.header, trace.events, tally)
            return tally

        def news(trace: Trace, tally: Tally) -> Collection[str]:
            """Return the kinds of findings to explain: the unknown ones of a known failure."""
            kinds = tally.kinds().get(result.id, {})
            if not result.otherwise:
                return kinds
            return self.ledger.unexplained(
                result.id, kinds, situations(trace.events, ROLLOUTS, trace.header)
            )

        def fails(case: Case) -> bool:
            if len(self.stuck) >= _STUCK:
                return False
            trace = self._trace(case)
            shown = {_kind_alone(found) for found in news(trace, judged(trace))}
            # A contract that no longer matches the case's model is not the subject's fault: a
            # contract of a fixed size keeps it while the case shrinks to the smallest model.
            return _kind_alone(kind) in shown and declares(trace.header.contract, case.model)

        # a case with a stuck step is not run again: that would take minutes
        smallest = next((trace for case, trace in self.stuck if case is first), None)
        if smallest is None:
            tries = _KIND_TRIES if further else _TRIES
            tries = min(tries, _SLOW_TRIES) if result.id in self.slow else tries
            smallest = self._trace(shrink(first, fails, tries=tries))
        tally = judged(smallest)
        kinds = news(smallest, tally)
        findings = tally.judgement()[result.id].findings
        return smallest, sorted(
            (finding for finding in findings if finding.kind in kinds),
            key=lambda finding: _kind_alone(finding.kind) != _kind_alone(kind),
        )

    def _write(self, check_id: str, trace: Trace, number: int) -> str | None:
        """Write a counterexample, into a temporary folder if its own cannot be written to."""
        folder = self.options.counterexample_dir
        if folder is None:
            return None
        try:
            return str(write_counterexample(folder, check_id, trace, number))
        except (TraceError, OSError) as error:
            trouble = f"The counterexample of {check_id} could not be kept in {folder}/"
            trouble += f" ({describe_error(error)})"
        try:
            path = write_counterexample(
                Path(tempfile.mkdtemp(prefix="rollproof-")), check_id, trace, number
            )
        except (TraceError, OSError):
            self.notes.append(trouble)
            return None
        self.notes.append(f"{trouble}; it is in {path}")
        return str(path)

    def _trace(self, case: Case) -> Trace:
        trace = run_case(
            self.factory,
            case,
            name=self.name,
            profile=self.options.profile,
            recipe=self.options.recipe,
        )
        if any(_stuck(event) is not None for event in trace.events):
            self.stuck.append((case, trace))
        return trace

    def _keep_clean(self, trace: Trace) -> None:
        """Keep the clean traces in which most happened: a planted fault fits there most often."""
        if not self.clean or len(trace.events) > len(self.clean[-1].events):
            self.clean.append(trace)
            del self.clean[:-4]


def _kind_alone(kind: str) -> str:
    """Return a kind without numbers: a check of a user's own may leave some in its titles."""
    return re.sub(r"\d+", "#", kind)


def _slow_hang(event: Event) -> str | None:
    """Return what a hanging rollout awaited if it took the virtual clock long to find that out.

    ``None`` for any other event.
    """
    if not isinstance(event, Result) or not event.hung or event.error is None:
        return None
    if event.error.startswith((DEADLOCK, STUCK)):
        return None
    return event.error.rpartition(" awaits ")[2]


def _stuck(event: Event) -> str | None:
    """Return why a rollout hung in a step that never ended; ``None`` for any other event."""
    if not isinstance(event, Result) or not event.hung or event.error is None:
        return None
    return event.error if event.error.startswith(STUCK) else None
