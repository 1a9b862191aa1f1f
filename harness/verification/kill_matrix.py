"""Kill matrix: every known bug, the checks that detected it, and the checks blamed wrongly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rollproof.core.extras import require_extra
from rollproof.core.progress import Progress
from rollproof.core.trace import Trace
from rollproof.errors import UsageError
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.invariants import default_registry
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge_events

__all__ = ["KillResult", "judge_bug", "known_bugs", "record_traces", "run_kill_matrix", "tally_of"]

_MOST_CALLS = 70
"""Calls of a layout function; a larger small scope is thinned, so that 52 bugs take seconds."""

_DRAWS = 2
"""Batches of a correction for each situation: those of odd and of even numbers differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillResult:
    """The checks that failed on one known bug; it is killed when all that must fail did."""

    bug: KnownBug
    failed: tuple[str, ...]
    examples: int
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether all of ``bug.detected_by`` failed."""
        return set(self.bug.detected_by) <= set(self.failed)

    @property
    def blamed_wrongly(self) -> tuple[str, ...]:
        """Failing checks that the bug does not concern."""
        return tuple(sorted(set(self.failed) - {*self.bug.detected_by, *self.bug.may_fail}))

    def to_dict(self) -> dict[str, Any]:
        """One entry of the JSON of ``rollproof known-bugs`` (schema 1)."""
        return {
            "id": self.bug.id,
            "summary": self.bug.summary,
            "refs": list(self.bug.refs),
            "killed": self.killed,
            "by": list(self.failed),
            "expected_by": list(self.bug.detected_by),
            "examples": self.examples,
            "seconds": round(self.seconds, 4),
            "blamed_wrongly": list(self.blamed_wrongly),
        }


def known_bugs(only: Iterable[str] = ()) -> tuple[KnownBug, ...]:
    """Return the shipped known bugs, or those named.

    Raises:
        UsageError: No bug has such an id.
        ExtraError: All are meant, or an id may be that of a bug that needs an extra.
    """
    from rollproof.fakes.known_bugs import KNOWN_BUGS

    ids = tuple(only)
    unknown = sorted(set(ids) - {bug.id for bug in KNOWN_BUGS})
    if unknown or not ids:
        # Fewer bugs without a word would read as if all were detected.
        require_extra("serve", "The known bugs of HTTP clients")
    if unknown:
        raise UsageError(
            f"No known bug is named {' or '.join(map(repr, unknown))}; `rollproof known-bugs` lists"
            f" all {len(KNOWN_BUGS)}."
        )
    return tuple(bug for bug in KNOWN_BUGS if not ids or bug.id in ids)


def record_traces(bug: KnownBug) -> Iterator[Trace]:
    """Run a known bug, and yield the traces in which it shows."""
    for trace in _RECORDERS[bug.kind](bug):
        yield trace if bug.edit is None else bug.edit(trace)


def tally_of(bug: KnownBug, registry: Registry | None = None) -> Tally:
    """Run a known bug and return what all checks report of its traces."""
    tally = Tally(registry or default_registry())
    for trace in record_traces(bug):
        judge_events(trace.header, trace.events, tally)
    return tally


def judge_bug(bug: KnownBug, registry: Registry | None = None) -> KillResult:
    """Run a known bug and judge its traces by all checks."""
    start = time.perf_counter()
    tally = tally_of(bug, registry)
    failed = tally.judgement().failed
    return KillResult(
        bug=bug, failed=failed, examples=tally.traces, seconds=time.perf_counter() - start
    )


def run_kill_matrix(
    only: Iterable[str] = (), progress: Callable[[Progress], None] | None = None
) -> tuple[KillResult, ...]:
    """Judge all known bugs (or those named)."""
    bugs = known_bugs(only)
    registry = default_registry()
    results = []
    for i, bug in enumerate(bugs):
        if progress is not None:
            progress(Progress(done=i, total=len(bugs), what=bug.id))
        results.append(judge_bug(bug, registry))
    return tuple(results)


# Each recorder imports its runner when it is used: `rollproof known-bugs ID` of a rollout bug must
# not wait for the imports of engines and trainers.
def _record_rollouts(bug: KnownBug) -> Iterator[Trace]:
    from rollproof.verification.runner import run_case

    for case in bug.cases:
        yield run_case(bug.make, case, name=bug.id)


def _record_batches(bug: KnownBug) -> Iterator[Trace]:
    from rollproof.verification.batches import record_batches

    yield record_batches(bug.make, name=bug.id)


def _record_layouts(bug: KnownBug) -> Iterator[Trace]:
    from rollproof.layouts.layout_cases import layout_calls
    from rollproof.verification.layouts import record_layouts

    calls = []
    for function in bug.only:
        scope = list(layout_calls(function, bug.make().layout, draws=0))
        picked = sorted(Random(0).sample(range(len(scope)), min(len(scope), _MOST_CALLS)))
        calls += [(function, scope[i]) for i in picked]
    yield record_layouts(bug.make, name=bug.id, calls=calls)


def _record_corrections(bug: KnownBug) -> Iterator[Trace]:
    from rollproof.corrections.correction_cases import correction_cases
    from rollproof.corrections.correction_subject import correction_terms_of
    from rollproof.verification.corrections import record_corrections

    terms = correction_terms_of(bug.make().contract)
    cases = correction_cases(terms, draws=_DRAWS)
    yield record_corrections(bug.make, name=bug.id, cases=cases)


def _record_replay(bug: KnownBug) -> Iterator[Trace]:
    from rollproof.replay.driver import record_replay

    yield record_replay(bug.make, name=bug.id, only=bug.only)


def _record_engines(bug: KnownBug) -> Iterator[Trace]:
    from rollproof.engines.engine_targets import fake_target
    from rollproof.verification.engines import run_experiments

    target = fake_target(bug.flavour, make=lambda settings: bug.make(settings, bug.flavour))
    yield run_experiments(target, only=bug.only).traces[0]


_RECORDERS: Mapping[str, Callable[[KnownBug], Iterator[Trace]]] = {
    "rollouts": _record_rollouts,
    "batches": _record_batches,
    "layouts": _record_layouts,
    "corrections": _record_corrections,
    "replay": _record_replay,
    "engines": _record_engines,
}
