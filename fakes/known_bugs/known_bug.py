"""Known bug: a published fault of the field, planted on top of a reference, that named checks must
kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollproof.core.case import Case
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Trace

__all__ = ["KnownBug"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBug:
    """A planted fault.

    ``make`` makes a subject that has it; ``cases`` are the cases in which it shows (few, small). A
    fault that is not one of a rollout subject (a batch conversion) gives ``record`` instead: it
    returns the trace. ``kills`` are the ids of the checks that must fail; ``also`` those that may
    fail as an honest consequence (the same wrong value seen from another promise). Any other
    failing check is blamed wrongly. ``refs`` are the upstream references, such as ``"verl#6029"``;
    one that begins with ``cf.`` is of the same area, and not of this very fault.
    """

    id: str
    summary: str
    refs: tuple[str, ...]
    kills: tuple[str, ...]
    make: SubjectFactory | None = None
    cases: tuple[Case, ...] = ()
    record: Callable[[], Trace] | None = None
    also: tuple[str, ...] = ()

    def traces(self) -> Iterator[Trace]:
        """The traces in which the fault shows, made anew."""
        if self.record is not None:
            yield self.record()
        if self.make is not None:
            from rollproof.verification.runner import run_case

            for case in self.cases:
                yield run_case(self.make, case, name=self.id)
