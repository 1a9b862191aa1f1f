"""miles, released and unmodified: its rollout with abort and resume, by both of its generate
functions, and its conversion of samples for the ranks, and its truncated importance sampling.

miles grew out of slime, and is driven as slime is.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.miles.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import miles and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks._support.truncated_is import truncated_is
    from rollproof.stacks.miles.rollout import SINGLE_TURN, MilesRankData, miles_arguments
    from rollproof.stacks.miles.upstream import import_loss, import_miles
    from rollproof.stacks.slime.rollout import FLAVOURS, PartialRollout

    miles = import_miles(found.version)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            Part(
                name="partial-rollout",
                make=lambda: PartialRollout(miles, miles_arguments()),
                flavours=FLAVOURS,
                thin=10,
            ),
            Part(
                name="single-turn",
                make=lambda: PartialRollout(miles, miles_arguments(SINGLE_TURN)),
                flavours=FLAVOURS,
                thin=10,
            ),
        ),
        batches={"rank-data": lambda: MilesRankData(miles)},
        corrections=truncated_is(lambda: import_loss(found.version)),
    )
