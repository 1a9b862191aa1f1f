"""miles, released and unmodified: its rollout with abort and resume, by both of its generate
functions, and its way to the ranks.

miles grew out of slime, and is driven as slime is.
"""

from __future__ import annotations

from rollproof.stacks import Found, Release, Stack

__all__ = ["RELEASE", "load"]

RELEASE = Release(distribution="miles-rl", versions=("0.0.2",), stack="miles")
_FLAVOURS = ("sglang", "sglang-0.5.17")
_THIN = 10


def load(found: Found) -> Stack:
    """Import miles and give its parts. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.miles.rollout import SINGLE_TURN, MilesRankData, miles_arguments
    from rollproof.stacks.miles.upstream import import_miles
    from rollproof.stacks.slime.rollout import PartialRollout

    miles = import_miles(found.version)
    parts = (
        Part(
            name="partial-rollout",
            make=lambda: PartialRollout(miles, miles_arguments()),
            flavours=_FLAVOURS,
            thin=_THIN,
        ),
        Part(
            name="single-turn",
            make=lambda: PartialRollout(miles, miles_arguments(SINGLE_TURN)),
            flavours=_FLAVOURS,
            thin=_THIN,
        ),
    )
    return Stack(
        name="miles",
        version=found.version,
        parts={part.name: part for part in parts},
        batches={"rank-data": lambda: MilesRankData(miles)},
    )
