"""Judging: runs a trainer through the episodes of a profile, judges the trace, and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollproof.core.events.replay import Step
from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Trace
from rollproof.errors import ConformanceError
from rollproof.judging.checks import Registry, Verdict, default_registry
from rollproof.judging.judge import Judgement, judge
from rollproof.judging.replay_situations import ReplayScenarios
from rollproof.judging.report import Report
from rollproof.replay.driver import record_replay
from rollproof.reporting.text import check_lines, summary_text, text_of
from rollproof.verification.counterexamples import drop_witnesses, write_witness
from rollproof.verification.replay_canary import try_canary

__all__ = ["judge_replay", "raise_for_failures"]

FAMILY = "replay"


def judge_replay(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    only: Iterable[str] = (),
    expected: Mapping[str, str] | None = None,
    recipe: Mapping[str, Any] | None = None,
    witness_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Ask the ``ReplaySubject`` that ``factory`` makes for the episodes of a profile, and report.

    ``only`` selects checks by id or family (default: the family ``replay``), ``expected`` maps ids
    of checks that are known to fail to the reason. The episode in which a check fails goes to
    ``witness_dir``, where ``rollproof replay`` can take it up. Raises ``SubjectError`` for a
    subject that does not implement the protocol.
    """
    start = time.perf_counter()
    registry = default_registry().select(tuple(only) or (FAMILY,))
    trace = record_replay(
        factory, name=name, profile=profile, seed=seed, recipe=recipe, progress=progress
    )
    judgement = judge(trace, registry)
    if witness_dir is not None:
        judgement = _witnessed(judgement, trace, registry, witness_dir, dict(expected or {}))
    return Report(
        subject=trace.header.subject,
        profile=profile,
        seed=seed,
        results=judgement.results,
        exercised=_exercised(trace),
        canary=try_canary(trace, registry),
        expected={
            check_id: reason
            for check_id, reason in (expected or {}).items()
            if check_id in registry.ids
        },
        cases=len(_episodes(trace)),
        seconds=time.perf_counter() - start,
    )


def raise_for_failures(report: Report) -> None:
    """Raise ``ConformanceError`` with the findings where checks failed that were not expected to."""
    if report.failed:
        data = report.to_dict()
        lines = [
            line
            for check in data["checks"]
            if check["verdict"] == "fail"
            for line in check_lines(check)
        ]
        raise ConformanceError(f"{report.subject}: {summary_text(data)}\n{text_of(lines)}")


def _exercised(trace: Trace) -> dict[str, int]:
    scenarios = ReplayScenarios()
    for event in trace.events:
        scenarios.event(event)
    return scenarios.counts


def _episodes(trace: Trace) -> list[str]:
    return list(dict.fromkeys(event.episode for event in trace.events if isinstance(event, Step)))


def _alone(trace: Trace, episode: str) -> Trace:
    """The trace of one episode."""
    events = []
    inside = False
    for event in trace.events:
        if isinstance(event, Step):
            inside = event.episode == episode
        if inside:
            events.append(event)
    return replace(trace, header=replace(trace.header, case={"episodes": [episode]})).with_events(
        events
    )


def _witnessed(
    judgement: Judgement,
    trace: Trace,
    registry: Registry,
    folder: Path,
    expected: Mapping[str, str],
) -> Judgement:
    """The judgement with the path of the first episode that shows it in each finding; episodes of
    checks that pass now are deleted.
    """
    results = []
    for result in judgement.results:
        if result.verdict is Verdict.FAIL and result.id not in expected:
            alone = Registry([registry[result.id]])
            shown = next(
                (
                    one
                    for name in _episodes(trace)
                    if judge(one := _alone(trace, name), alone).failed
                ),
                None,
            )
            if shown is not None:
                path = str(write_witness(folder, result.id, shown))
                result = replace(
                    result,
                    findings=tuple(replace(finding, witness=path) for finding in result.findings),
                )
        results.append(result)
    drop_witnesses(
        folder,
        [one.id for one in results if one.verdict is Verdict.PASS],
        subject=trace.header.subject,
    )
    return Judgement(results=tuple(results))
