"""The record of a known bug: a published fault, planted on a reference, and the checks that must
detect it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollproof.core.case import Case
from rollproof.core.trace import Trace

__all__ = ["KnownBug"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBug:
    """A fault of the field and how it is shown; ``rollproof.verification.kill_matrix`` runs it.

    id: lower case, with hyphens. The class that ``make`` makes has the same name in camel case.
    summary: the fault in one sentence.
    refs: upstream references, such as ``"verl#6029"``; one that begins with ``cf.`` concerns the
        same area, not this very fault.
    make: makes the subject that has the fault.
    detected_by: ids of the checks that must fail.
    may_fail: ids of checks that may fail too, because the same wrong value breaks another promise.
        Any other failing check is blamed wrongly.
    kind: the kind of subject (``rollproof.verification.subject_kinds.KINDS``).
    cases: the cases in which a subject of rollouts shows the fault; few and small.
    only: the part of the run in which another subject shows it: layout functions, episodes of a
        trainer, or one experiment on an engine.
    flavour: the flavour of an engine.
    edit: changes the trace, for a fault that no subject can have.
    """

    id: str
    summary: str
    refs: tuple[str, ...]
    make: Callable[..., Any]
    detected_by: tuple[str, ...]
    may_fail: tuple[str, ...] = ()
    kind: str = "rollouts"
    cases: tuple[Case, ...] = ()
    only: tuple[str, ...] = ()
    flavour: str = "vllm"
    edit: Callable[[Trace], Trace] | None = None
