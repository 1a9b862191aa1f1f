"""Options of a run: how an entry point wants a subject judged, whatever kind it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollproof.core.case import Case
from rollproof.core.progress import Progress
from rollproof.core.subjects import SubjectFactory
from rollproof.judging.known_failures import KnownFailures

__all__ = ["ROLLOUTS", "Options", "factory_name"]

ROLLOUTS = "rollouts"
"""The kind of subject that runs schedules on fake engines (``RolloutSubject``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a subject is to be judged; each kind of subject uses what concerns it.

    name: what the report calls the subject (default: the name of its factory).
    profile, seed: which schedules, episodes or calls are drawn.
    only: ids or families of checks (default: all that judge this kind of subject).
    expected: ids of checks that are known to fail, with the reason.
    known_failures: kinds of findings that those checks are known to show; others are news.
    recipe: how ``rollproof replay`` makes the subject again.
    counterexample_dir: where traces that show a failure go; ``None``: nowhere.
    keep_counterexamples: checks whose file stays although they pass now.
    progress: called while the run goes on.
    flavours, cases: engine flavours and schedules, for rollouts.
    """

    name: str | None = None
    profile: str = "pr"
    seed: int = 0
    only: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    known_failures: KnownFailures = field(default_factory=dict)
    recipe: Mapping[str, Any] | None = None
    counterexample_dir: Path | None = None
    keep_counterexamples: frozenset[str] = frozenset()
    progress: Callable[[Progress], None] | None = None
    flavours: Iterable[str] | None = None
    cases: Iterable[Case] | None = None


def factory_name(factory: SubjectFactory) -> str:
    """Return what a report calls a subject that has no name of its own."""
    return str(getattr(factory, "__qualname__", type(factory).__name__))
