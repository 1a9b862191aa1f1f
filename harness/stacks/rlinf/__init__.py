"""RLinf, released and unmodified: how its SGLang worker generates a group, how aborted ones
continue on another worker, and its rollout result.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.rlinf.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import RLinf and return its part. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.rlinf.upstream import import_rlinf
    from rollproof.stacks.rlinf.worker import WorkerSubject

    rlinf = import_rlinf(found.version)
    part = Part(
        name="sglang-worker", make=lambda: WorkerSubject(rlinf), flavours=("sglang",), thin=3
    )
    return Stack(name=RELEASE.stack, version=found.version, parts=by_name(part))
