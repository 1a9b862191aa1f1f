"""RLinf, released and unmodified: how its SGLang worker generates a group, how aborted ones go on
elsewhere, and its rollout result.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.rlinf.upstream import RELEASE, import_rlinf

__all__ = ["RELEASE", "load"]

_THIN = 3


def load(found: Found) -> Stack:
    """Import RLinf and give its part. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.rlinf.worker import WorkerSubject

    rlinf = import_rlinf(found.version)
    part = Part(
        name="sglang-worker", make=lambda: WorkerSubject(rlinf), flavours=("sglang",), thin=_THIN
    )
    return Stack(name="rlinf", version=found.version, parts={part.name: part})
