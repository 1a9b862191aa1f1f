"""OpenRLHF, released and unmodified: its agent executors and its loss."""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.openrlhf.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import OpenRLHF's executors. Raises ``StackError`` if they cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks._support.upstream import upstream
    from rollproof.stacks.openrlhf.corrections import corrections
    from rollproof.stacks.openrlhf.executor import ExecutorSubject

    agent = upstream(RELEASE, found.version, {"agent": "openrlhf.utils.agent"})["agent"]
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            Part(
                name="single-turn-executor",
                make=lambda: ExecutorSubject(agent, multi_turn=False),
                flavours=("vllm",),
            ),
            Part(
                name="multi-turn-executor",
                make=lambda: ExecutorSubject(agent, multi_turn=True),
                flavours=("vllm",),
                turns=3,
            ),
        ),
        corrections=corrections(),
    )
