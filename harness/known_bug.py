"""Known bug: a published fault of the field, planted on top of a reference, that named checks must kill."""

from __future__ import annotations

from dataclasses import dataclass

from rollproof.case import Case
from rollproof.subjects import SubjectFactory

__all__ = ["KnownBug"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBug:
    """A planted fault.

    ``make`` makes a subject that has it; ``cases`` are the cases in which it shows (few, small). ``kills`` are the ids
    of the checks that must fail; ``also`` those that may fail as an honest consequence (the same wrong value seen from
    another promise). Any other failing check is blamed wrongly. ``refs`` are the upstream references, such as
    ``"verl#6029"``.
    """

    id: str
    summary: str
    refs: tuple[str, ...]
    make: SubjectFactory
    cases: tuple[Case, ...]
    kills: tuple[str, ...]
    also: tuple[str, ...] = ()
