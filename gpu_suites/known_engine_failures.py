"""Judging a released engine with its known failures apart, and asserting on a trainer's report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import EngineTarget
from rollproof.engines.experiments import Setting, experiments_for
from rollproof.gpu_suites.engine_variants import KnownFailure
from rollproof.gpu_suites.timing import Part
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, judged, run_experiments

__all__ = ["COARSE", "JudgedEngine", "judge_engine", "require_pass", "seconds_by_part"]

COARSE: frozenset[str] = frozenset({"replay.reference", "replay.gate-slope"})
"""Checks that may stay unknown for a trainer in bfloat16: it has too few digits for a finite
difference, and its reference rounds differently.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedEngine:
    """The result of a run.

    Attributes:
        report: the report on all experiments without a known failure.
        failed_in: the experiments in which each check failed.
        faults: the checks that failed in each experiment with a known failure.
        left_out: experiments that were not run, because the engine does not survive them and
            another one shows the same.
        seconds: seconds of each experiment.
        spent: seconds of each part.
    """

    report: Report
    failed_in: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]
    left_out: Sequence[str]
    seconds: Mapping[str, float]
    spent: Mapping[Part, float]

    def surprises(self, known: Mapping[str, KnownFailure]) -> list[str]:
        """Return a line for each new failure, and for each known failure that is gone."""
        lines = []
        for name, failed in self.faults.items():
            failure = known[name]
            unexpected = sorted(set(failed) - set(failure.checks))
            if unexpected:
                lines.append(
                    f"{name}: {', '.join(unexpected)} failed, in addition to the known failures"
                    f" ({', '.join(failure.checks)})"
                )
            if failure.certain and not failed:
                lines.append(
                    f"{name}: nothing failed; remove it from the known failures ({failure.reason})"
                )
        return lines


def judge_engine(target: EngineTarget, known: Mapping[str, KnownFailure]) -> JudgedEngine:
    """Run the experiments on an engine and judge. Raises ``EngineStartError``."""
    began = time.perf_counter()
    # an engine dies once: the experiments that it does not survive come last, and the first of
    # them stands for the others
    deadly = [name for name, failure in known.items() if failure.ends]
    names = [
        experiment.name
        for experiment in experiments_for(target.make(target.settings[Setting.MAIN]).contract)
        if experiment.name not in deadly[1:]
    ]
    run = run_experiments(target, only=names, last=deadly)
    ran = time.perf_counter()
    # a known failure must not hide a new one, so its experiment is judged apart
    clean = [trace for trace in run.traces if trace.header.profile not in known]
    notes = [note for note in run.notes if note.partition(" ")[0] not in known]
    report = judged(target.name, EngineRun(traces=clean, notes=notes), started=began)
    failed_in: dict[str, list[str]] = {}
    # judged a second time by experiment, only to name the experiments of a failure
    for trace in clean if report.failed else ():
        for check in _failing(trace):
            failed_in.setdefault(check, []).append(str(trace.header.profile))
    faults = {
        str(trace.header.profile): _failing(trace)
        for trace in run.traces
        if trace.header.profile in known
    }
    return JudgedEngine(
        report=report,
        failed_in=failed_in,
        faults=faults,
        left_out=deadly[1:],
        seconds={name: round(seconds, 2) for name, seconds in run.seconds.items()},
        spent=seconds_by_part(run, judging=time.perf_counter() - ran),
    )


def require_pass(report: Report, unknown: frozenset[str] = frozenset()) -> None:
    """Raise ``AssertionError`` with the checks that failed or stayed unknown.

    Checks in ``unknown`` may stay so. A canary that was missed raises too.
    """
    undecided = {
        result.id: result.reason
        for result in report.results
        if result.verdict is Verdict.UNKNOWN and result.id not in unknown
    }
    assert not undecided, undecided
    failed = {
        result.id: [f"{finding.title}: {finding.observed}" for finding in result.findings[:3]]
        for result in report.failed
    }
    assert not failed, failed
    assert report.canary is not None
    assert report.canary.red


def seconds_by_part(run: EngineRun, *, judging: float) -> dict[Part, float]:
    """Return the seconds of each part of a run on an engine."""
    return {
        Part.STARTING: run.spent["starting"] + run.spent["stopping"],
        Part.EXPERIMENTS: sum(run.seconds.values()),
        Part.REFERENCE: run.spent["reference"],
        Part.JUDGING: judging,
    }


def _failing(trace: Trace) -> list[str]:
    return sorted(result.id for result in judged("", EngineRun(traces=[trace])).failed)
