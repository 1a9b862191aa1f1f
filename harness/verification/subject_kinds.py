"""Topics: the kinds of subjects besides rollouts, and who judges each. A new kind is one entry
here; every door reads this table.

A topic's name is the ``about`` of its traces and checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Trace
from rollproof.errors import UsageError
from rollproof.judging.known_failures import Ways, hold
from rollproof.judging.replay_situations import ReplayScenarios
from rollproof.judging.report import Report
from rollproof.judging.situations import Scenarios

__all__ = ["ROLLOUTS", "TOPICS", "Asked", "judge_topic", "run_again", "scenarios_of", "topic_of"]

ROLLOUTS = "rollouts"
"""The topic that ``rollproof.verification.rollouts`` judges, with schedules on fake engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """How a door wants a subject judged; a topic takes what it knows."""

    name: str
    profile: str = "pr"
    seed: int = 0
    only: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    ways: Ways = field(default_factory=dict)
    recipe: Mapping[str, Any] | None = None
    witness_dir: Path | None = None
    progress: Callable[[Progress], None] | None = None


def _batches(factory: SubjectFactory, asked: Asked) -> Report:
    from rollproof.verification.batches import judge_batches

    return judge_batches(
        factory, name=asked.name, seed=asked.seed, only=asked.only, expected=dict(asked.expected)
    )


def _replay(factory: SubjectFactory, asked: Asked) -> Report:
    from rollproof.verification.replay import judge_replay

    return judge_replay(
        factory,
        name=asked.name,
        profile=asked.profile,
        seed=asked.seed,
        only=asked.only,
        expected=asked.expected,
        recipe=asked.recipe,
        witness_dir=asked.witness_dir,
        progress=asked.progress,
    )


def _layouts(factory: SubjectFactory, asked: Asked) -> Report:
    from rollproof.verification.layouts import judge_layouts

    return judge_layouts(
        factory,
        name=asked.name,
        profile=asked.profile,
        seed=asked.seed,
        only=asked.only,
        expected=asked.expected,
        recipe=asked.recipe,
        progress=asked.progress,
    )


def _engines(factory: SubjectFactory, asked: Asked) -> Report:
    from rollproof.verification.engine_choice import judge_engine

    return judge_engine(factory, asked)


TOPICS: Mapping[str, Callable[[SubjectFactory, Asked], Report]] = {
    "batches": _batches,
    "replay": _replay,
    "layouts": _layouts,
    "engines": _engines,
}


def _replayed(factory: SubjectFactory, header: Header) -> Trace:
    from rollproof.replay.driver import record_again

    return record_again(factory, header)


_AGAIN: Mapping[str, Callable[[SubjectFactory, Header], Trace]] = {"replay": _replayed}


def run_again(factory: SubjectFactory, header: Header) -> Trace:
    """Run on a fresh subject what the trace of ``header`` was made from. Raises ``UsageError``
    where it does not say, or cannot be.
    """
    if header.about == ROLLOUTS and header.case is not None:
        from rollproof.core.case import Case
        from rollproof.verification.runner import run_case

        return run_case(
            factory, Case.from_dict(header.case), name=header.subject, recipe=header.recipe
        )
    if header.about not in _AGAIN or header.case is None:
        raise UsageError(
            f"This trace of {header.about} does not say what was run, so it cannot be run again."
        )
    return _AGAIN[header.about](factory, header)


def scenarios_of(about: str) -> Scenarios | ReplayScenarios:
    """What counts the situations of a trace of one kind."""
    return ReplayScenarios() if about == "replay" else Scenarios()


def topic_of(factory: SubjectFactory) -> str:
    """The kind of subject that a class makes; a function could only be told by calling it, and
    counts as one of rollouts.
    """
    if not isinstance(factory, type):
        return ROLLOUTS
    if hasattr(factory, "collate"):
        return "batches"
    if not hasattr(factory, "contract") and hasattr(factory, "layout"):
        return "layouts"
    return (
        "replay"
        if getattr(getattr(factory, "contract", None), "replay", None) is not None
        else ROLLOUTS
    )


def judge_topic(about: str, factory: SubjectFactory, asked: Asked) -> Report:
    """Judge the subject that ``factory`` makes by the checks of its topic. Raises ``UsageError``
    for a topic that does not exist.
    """
    if about not in TOPICS:
        raise UsageError(
            f"No kind of subject is named {about!r}; choose one of {[ROLLOUTS, *TOPICS]}."
        )
    return hold(TOPICS[about](factory, asked), asked.ways)
