"""AReno, released and unmodified: how it merges the rollouts of chunks and of data-parallel ranks.

Its rollouts run on an engine of its own, which needs a GPU and is not driven.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.areno.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import AReno's merging (3 s). Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.upstream import upstream
    from rollproof.stacks.areno.batch import MergedRollouts

    modules = upstream(RELEASE, found.version, {"rollout": "areno.engine.runtime.rollout"})
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts={},
        batches={"merged-rollouts": lambda: MergedRollouts(modules["rollout"])},
    )
