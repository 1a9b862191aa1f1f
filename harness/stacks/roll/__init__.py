"""ROLL, from a checkout, unmodified: its partial rollouts, from the router to the sample, and its
conversion of engine outputs for the ranks.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.roll.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import ROLL and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.roll.batch import OutputBatch
    from rollproof.stacks.roll.rollout import LoopSubject
    from rollproof.stacks.roll.upstream import import_roll

    roll = import_roll(found.version)
    part = Part(name="rollout-loop", make=lambda: LoopSubject(roll), flavours=("sglang",), thin=3)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(part),
        batches={"output-batch": lambda: OutputBatch(roll)},
    )
