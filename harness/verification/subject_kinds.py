"""Kinds of subjects: which there are, and how each is run and judged.

A new kind is one entry of ``_RUNNERS``: every entry point goes through ``run``. The name of a kind
is the ``about`` of its traces and checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollproof.core.case import Case
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Trace
from rollproof.errors import UsageError
from rollproof.judging.known_failures import apply_known_failures
from rollproof.judging.report import Report
from rollproof.verification.options import ROLLOUTS, Options

__all__ = ["KINDS", "kind_of", "run", "run_again"]


# Each runner is imported when it is used: judging rollouts must not import engines and trainers.
def _rollouts(factory: SubjectFactory, options: Options) -> Report:
    from rollproof.verification import rollouts

    return rollouts.run(factory, options)


def _batches(factory: SubjectFactory, options: Options) -> Report:
    from rollproof.verification import batches

    return batches.run(factory, options)


def _replay(factory: SubjectFactory, options: Options) -> Report:
    from rollproof.verification import replay

    return replay.run(factory, options)


def _layouts(factory: SubjectFactory, options: Options) -> Report:
    from rollproof.verification import layouts

    return layouts.run(factory, options)


def _corrections(factory: SubjectFactory, options: Options) -> Report:
    from rollproof.verification import corrections

    return corrections.run(factory, options)


def _engines(factory: SubjectFactory, options: Options) -> Report:
    from rollproof.verification import engines

    return engines.run(factory, options)


_RUNNERS: Mapping[str, Callable[[SubjectFactory, Options], Report]] = {
    ROLLOUTS: _rollouts,
    "batches": _batches,
    "replay": _replay,
    "layouts": _layouts,
    "corrections": _corrections,
    "engines": _engines,
}
KINDS = tuple(_RUNNERS)
"""The kinds of subjects."""


def run(kind: str, factory: SubjectFactory, options: Options) -> Report:
    """Judge the subject that ``factory`` makes by the checks of its kind.

    Raises ``UsageError`` for a kind that does not exist.
    """
    if kind not in _RUNNERS:
        raise UsageError(f"No kind of subject is named {kind!r}; choose one of {list(KINDS)}.")
    report = _RUNNERS[kind](factory, options)
    # a run of rollouts holds each case to the known failures by itself
    return report if kind == ROLLOUTS else apply_known_failures(report, options.known_failures)


def kind_of(factory: SubjectFactory) -> str:
    """Return the kind of subject that a class makes.

    A function counts as one of rollouts: what it makes is only known by calling it.
    """
    if not isinstance(factory, type):
        return ROLLOUTS
    if hasattr(factory, "collate"):
        return "batches"
    if hasattr(factory, "correct"):
        return "corrections"
    if not hasattr(factory, "contract") and hasattr(factory, "layout"):
        return "layouts"
    contract = getattr(factory, "contract", None)
    return "replay" if getattr(contract, "replay", None) is not None else ROLLOUTS


def run_again(factory: SubjectFactory, header: Header) -> Trace:
    """Run on a fresh subject what the trace of ``header`` was made from.

    Raises ``UsageError`` for a trace that does not say what was run.
    """
    if header.case is not None and header.about == ROLLOUTS:
        from rollproof.verification.runner import run_case

        return run_case(
            factory, Case.from_dict(header.case), name=header.subject, recipe=header.recipe
        )
    if header.case is not None and header.about == "replay":
        from rollproof.replay.driver import record_again

        return record_again(factory, header)
    raise UsageError(
        f"This trace of {header.about} does not say what was run, so it cannot be run again."
    )
