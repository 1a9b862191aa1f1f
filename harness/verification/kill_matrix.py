"""Kill matrix: every known bug, the checks that saw it, and the checks that were blamed wrongly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollproof.core.progress import Progress
from rollproof.errors import UsageError
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.invariants import default_registry
from rollproof.judging.judge import Tally
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge_events

__all__ = ["KillResult", "judge_bug", "known_bugs", "run_kill_matrix"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KillResult:
    """What the checks made of one known bug. It is killed when every check that must see it did."""

    bug: KnownBug
    failed: tuple[str, ...]
    examples: int
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether all of ``bug.kills`` failed."""
        return set(self.bug.kills) <= set(self.failed)

    @property
    def blamed_wrongly(self) -> tuple[str, ...]:
        """Failing checks that the bug does not concern."""
        return tuple(sorted(set(self.failed) - {*self.bug.kills, *self.bug.also}))

    def to_dict(self) -> dict[str, Any]:
        """One entry of the JSON of ``rollproof known-bugs`` (schema 1)."""
        return {
            "id": self.bug.id,
            "summary": self.bug.summary,
            "refs": list(self.bug.refs),
            "killed": self.killed,
            "by": list(self.failed),
            "expected_by": list(self.bug.kills),
            "examples": self.examples,
            "seconds": round(self.seconds, 4),
            "blamed_wrongly": list(self.blamed_wrongly),
        }


def known_bugs(only: Iterable[str] = ()) -> tuple[KnownBug, ...]:
    """The shipped known bugs, or those named. Raises ``UsageError`` for an id that does not exist."""
    from rollproof.fakes.known_bugs import KNOWN_BUGS

    wanted = tuple(only)
    stray = sorted(set(wanted) - {bug.id for bug in KNOWN_BUGS})
    if stray:
        raise UsageError(
            f"No known bug is named {' or '.join(map(repr, stray))}; `rollproof known-bugs` lists"
            f" all {len(KNOWN_BUGS)}."
        )
    return tuple(bug for bug in KNOWN_BUGS if not wanted or bug.id in wanted)


def judge_bug(bug: KnownBug, registry: Registry | None = None) -> KillResult:
    """Run a known bug's cases under all checks."""
    start = time.perf_counter()
    tally = Tally(registry or default_registry())
    for trace in bug.traces():
        judge_events(trace.header, trace.events, tally)
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
