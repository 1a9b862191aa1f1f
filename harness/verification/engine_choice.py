"""Doors of engine conformance: how a command line and a test class name an engine, and what they
get.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollproof.core.subjects import SubjectFactory
from rollproof.engines.engine_targets import engine_names, require_installed
from rollproof.errors import SubjectError, UsageError
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineTarget, engine_registry, run_engine_conformance
from rollproof.verification.subject_kinds import Asked

__all__ = ["EngineChoice", "judge_engine"]


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """An engine by name and the model that it is judged on. Calling it returns it, as a factory
    would.

    Raises ``UsageError`` for a name that does not exist.
    """

    engine: str
    model: str | Path | None = None

    def __post_init__(self) -> None:
        if self.engine not in engine_names():
            raise UsageError(f"No engine is named {self.engine!r}; choose among {engine_names()}.")

    def __call__(self) -> EngineChoice:
        return self


def judge_engine(factory: SubjectFactory, asked: Asked) -> Report:
    """The report of the engine that ``factory`` names: an ``EngineChoice``, or an ``EngineTarget``
    of one's own.
    """
    choice: Any = factory()
    engine, model = (
        (choice.engine, choice.model) if isinstance(choice, EngineChoice) else (choice, None)
    )
    if not isinstance(engine, str | EngineTarget):
        raise SubjectError(
            f"An engine to be judged is a name or an EngineTarget, not {type(engine).__name__}."
        )
    if isinstance(engine, str):
        require_installed(engine)
    known = engine_registry()
    own = {name for check in known for name in (check.id, check.family)}
    only = [name for name in asked.only if name in own]
    if asked.only and not only:
        raise UsageError(
            f"None of the checks {list(asked.only)[:4]} judges engines; those that do are"
            f" {list(known.ids)}."
        )
    return run_engine_conformance(
        engine,
        model=model,
        only=only,
        seed=asked.seed,
        expected=asked.expected,
        progress=asked.progress,
        save=asked.witness_dir,
    )
