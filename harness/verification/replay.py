"""Trainers with routing replay: run through the episodes of a profile, judged and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Outcome, Phase, Routing, Step
from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Trace
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.registry import Registry
from rollproof.judging.report import Report
from rollproof.replay.driver import record_replay
from rollproof.verification.argument_checks import (
    as_expected,
    as_name,
    as_names,
    as_path,
    as_recipe,
    as_seed,
    check_factory,
)
from rollproof.verification.canary import Plant, replaced, try_canary
from rollproof.verification.counterexamples import delete_counterexamples, write_counterexample
from rollproof.verification.options import Options
from rollproof.verification.reports import make_report, situations
from rollproof.verification.traces import judge

__all__ = ["FAMILY", "PLANTS", "judge_replay", "run"]

FAMILY = "replay"
"""The family of checks that judges trainers."""
_TRIES = 8
"""Places of a trace in which one fault is planted before the self-test gives up."""


def judge_replay(
    factory: SubjectFactory,
    *,
    name: str | None = None,
    profile: str = "pr",
    seed: int = 0,
    only: Iterable[str] = (),
    expected: Mapping[str, str] | None = None,
    recipe: Mapping[str, Any] | None = None,
    witness_dir: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Run the ``ReplaySubject`` that ``factory`` makes through a profile, and return the report.

    Args:
        factory: makes a fresh trainer.
        name: what the report calls it.
        profile: which episodes are run: ``pr``, ``nightly`` or ``soak``.
        seed: the seed of samples and routes.
        only: ids or families of checks (default: the family ``replay``).
        expected: ids of checks that are known to fail, with the reason.
        recipe: how ``rollproof replay`` makes the trainer again.
        witness_dir: where the episode in which a check fails is written.
        progress: called while the run goes on.

    Raises ``SubjectError`` for a subject that does not implement the protocol.
    """
    check_factory(factory, "judge_replay()")
    folder = None if witness_dir is None else as_path(witness_dir, "witness_dir")
    return run(
        factory,
        Options(
            name=as_name(name),
            profile=profile,
            seed=as_seed(seed) or 0,
            only=as_names(only, "only"),
            expected=as_expected(expected),
            recipe=as_recipe(recipe),
            counterexample_dir=folder,
            progress=progress,
        ),
    )


def run(factory: SubjectFactory, options: Options) -> Report:
    """Judge a ``ReplaySubject``."""
    started = time.perf_counter()
    registry = default_registry().select(options.only or (FAMILY,))
    trace = record_replay(
        factory,
        name=options.name,
        profile=options.profile,
        seed=options.seed,
        recipe=options.recipe,
        progress=options.progress,
    )
    results = judge(trace, registry).results
    if options.counterexample_dir is not None:
        results = _written(results, trace, options.counterexample_dir, options.expected)
    return make_report(
        results,
        subject=trace.header.subject,
        profile=options.profile,
        seed=options.seed,
        started=started,
        cases=len(_episodes(trace)),
        expected=options.expected,
        exercised=situations(trace.events, "replay"),
        canary=try_canary([trace], registry, PLANTS),
    )


def _episodes(trace: Trace) -> list[str]:
    return list(dict.fromkeys(event.episode for event in trace.events if isinstance(event, Step)))


def _only_episode(trace: Trace, episode: str) -> Trace:
    """Return the part of a trace that belongs to one episode, as a trace that can be run again."""
    events = []
    inside = False
    for event in trace.events:
        if isinstance(event, Step):
            inside = event.episode == episode
        if inside:
            events.append(event)
    header = replace(trace.header, case={"episodes": [episode]})
    return replace(trace, header=header).with_events(events)


def _written(
    results: tuple[CheckResult, ...], trace: Trace, folder: Path, expected: Mapping[str, str]
) -> tuple[CheckResult, ...]:
    """Write the first episode that shows each failure; delete those of checks that pass now.

    Returns the results, with the file named in each finding.
    """
    episodes = [_only_episode(trace, episode) for episode in _episodes(trace)]
    written = []
    for result in results:
        if result.verdict is Verdict.FAIL and result.id not in expected:
            alone = Registry([result.check])
            shown = next((part for part in episodes if judge(part, alone).failed), None)
            if shown is not None:
                path = str(write_counterexample(folder, result.id, shown))
                result = replace(
                    result,
                    findings=tuple(replace(finding, witness=path) for finding in result.findings),
                )
        written.append(result)
    passed = [result.id for result in results if result.verdict is Verdict.PASS]
    delete_counterexamples(folder, passed, subject=trace.header.subject)
    return tuple(written)


def _in_steps(
    spoil: Callable[[Step, Event], Event | None],
) -> Callable[[Trace], Iterator[Trace]]:
    """Plant a fault into the events of a step, one event after the other."""

    def spoil_each(trace: Trace) -> Iterator[Trace]:
        step: Step | None = None
        for place, event in enumerate(trace.events):
            step = event if isinstance(event, Step) else step
            if step is not None and _replays(step) and (spoiled := spoil(step, event)) is not None:
                yield replaced(trace, place, spoiled)

    return lambda trace: islice(spoil_each(trace), _TRIES)


def _replays(step: Step) -> bool:
    """Whether the step replays routes of the policy, with nothing out of the ordinary."""
    ordinary = step.defect is None and not step.edge and not step.variant and step.fail_at is None
    return ordinary and step.action is Action.REPLAY and step.model == "policy" and step.backward


def _shift(_step: Step, event: Event) -> Event | None:
    """Move the rows of a router call by one: they follow one another within a sample."""
    if (
        not isinstance(event, Routing)
        or event.phase is not Phase.FORWARD
        or event.model != "policy"
        or len(event.experts) < 3
    ):
        return None
    moved = np.roll(event.experts, 1, axis=0)
    if (np.sort(moved, axis=1) == np.sort(event.experts, axis=1)).all():
        return None
    return replace(event, experts=moved)


def _repeat(_step: Step, event: Event) -> Event | None:
    """Name one expert twice in a row."""
    if not isinstance(event, Routing) or event.model != "policy":
        return None
    if not len(event.experts) or event.experts.shape[1] < 2:
        return None
    spoiled = event.experts.copy()
    spoiled[0, 1] = spoiled[0, 0]
    return replace(event, experts=spoiled)


def _change_loss(step: Step, event: Event) -> Event | None:
    if not isinstance(event, Outcome) or event.loss is None or not event.done or not step.same_as:
        return None
    return replace(event, loss=event.loss * 2 + 1)


PLANTS = (
    Plant("the experts of one router call shifted by a row", "replay.forward", _in_steps(_shift)),
    Plant("an expert executed twice in one row", "replay.assignments", _in_steps(_repeat)),
    Plant("another loss in a self-replay", "replay.self-loss", _in_steps(_change_loss)),
)
