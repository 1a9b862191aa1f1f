"""ROLL, from a checkout, unmodified: its partial rollouts, from the router to the sample, and its
way from engine outputs to the ranks.
"""

from __future__ import annotations

from rollproof.stacks import Found, Release, Stack

__all__ = ["RELEASE", "load"]

RELEASE = Release(
    distribution="roll",
    versions=("8eb27cc2",),
    stack="roll",
    repository="https://github.com/alibaba/ROLL",
    package="roll/distributed/scheduler/user_defined_rollout_loop.py",
)
_THIN = 3


def load(found: Found) -> Stack:
    """Import ROLL from its checkout and give its part. Raises ``StackError`` where it cannot be
    imported.
    """
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.roll.batch import OutputBatch
    from rollproof.stacks.roll.rollout import LoopSubject
    from rollproof.stacks.roll.upstream import import_roll

    roll = import_roll(found.version)
    part = Part(
        name="rollout-loop", make=lambda: LoopSubject(roll), flavours=("sglang",), thin=_THIN
    )
    return Stack(
        name="roll",
        version=found.version,
        parts={part.name: part},
        batches={"output-batch": lambda: OutputBatch(roll)},
    )
