"""Judging: a released engine's conformance run, with what is known to fail in it judged apart; what
of a trainer's report fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import EngineTarget
from rollproof.engines.experiments import Setting, experiments_for
from rollproof.gpu_suites.engine_variants import Known
from rollproof.gpu_suites.timing import Part
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, judged, run_experiments

__all__ = ["COARSE", "JudgedEngine", "judge_engine", "spent_on", "told"]

COARSE: frozenset[str] = frozenset({"replay.reference", "replay.gate-slope"})
"""What of a trainer in bfloat16 may stay unknown: it has too few digits for a finite difference,
and the reference has others.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedEngine:
    """What a run came to.

    ``report`` is on all experiments but those of which faults are known, ``failed_in`` says in
    which of them a check failed. ``faults`` are the checks that failed in each experiment of which
    one is known, ``left_out`` those that were not run because the engine does not survive them, and
    another one shows the same. ``seconds`` are those of each experiment, ``spent`` those of each
    part.
    """

    report: Report
    failed_in: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]
    left_out: Sequence[str]
    seconds: Mapping[str, float]
    spent: Mapping[Part, float]

    def surprises(self, known: Mapping[str, Known]) -> list[str]:
        """What is otherwise than known, one line each: checks that failed beside the known ones,
        and known faults that are gone.
        """
        told = []
        for name, failed in self.faults.items():
            stray = sorted(set(failed) - set(known[name].checks))
            if stray:
                told.append(
                    f"{name}: {', '.join(stray)} failed, beside what is known"
                    f" ({', '.join(known[name].checks)})"
                )
            if known[name].certain and not failed:
                told.append(
                    f"{name}: nothing failed; remove it from what is known to fail"
                    f" ({known[name].reason})"
                )
        return told


def judge_engine(target: EngineTarget, known: Mapping[str, Known]) -> JudgedEngine:
    """Run the experiments on an engine, those that it does not survive last, and judge. Raises
    ``EngineStartError``.
    """
    began = time.perf_counter()
    deadly = [name for name, one in known.items() if one.ends]
    names = [
        one.name
        for one in experiments_for(target.make(target.settings[Setting.MAIN]).contract)
        if one.name not in deadly[1:]
    ]
    run = run_experiments(target, only=names, last=deadly)
    ran = time.perf_counter()
    clean = [trace for trace in run.traces if trace.header.profile not in known]
    notes = [note for note in run.notes if note.partition(" ")[0] not in known]
    report = judged(target.name, EngineRun(traces=clean, notes=notes), started=began)
    failed_in: dict[str, list[str]] = {}
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
        spent=spent_on(run, judging=time.perf_counter() - ran),
    )


def told(report: Report, unknown: frozenset[str] = frozenset()) -> None:
    """Raise ``AssertionError`` with what failed or stayed unknown, but for ``unknown``, and where a
    canary was missed.
    """
    open_ = {
        result.id: result.reason
        for result in report.results
        if result.verdict is Verdict.UNKNOWN and result.id not in unknown
    }
    assert not open_, open_
    failed = {
        result.id: [f"{one.title}: {one.observed}" for one in result.findings[:3]]
        for result in report.failed
    }
    assert not failed, failed
    assert report.canary is not None
    assert report.canary.red


def spent_on(run: EngineRun, *, judging: float) -> dict[Part, float]:
    """Seconds of each part of a run on an engine."""
    return {
        Part.STARTING: run.spent["starting"] + run.spent["stopping"],
        Part.EXPERIMENTS: sum(run.seconds.values()),
        Part.REFERENCE: run.spent["reference"],
        Part.JUDGING: judging,
    }


def _failing(trace: Trace) -> list[str]:
    return sorted(result.id for result in judged("", EngineRun(traces=[trace])).failed)
