"""slime, from a checkout, unmodified: its rollout with abort and resume, and its conversion of
samples for the data-parallel ranks, and its truncated importance sampling.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.slime.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import slime and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks._support.truncated_is import truncated_is
    from rollproof.stacks.slime.batch import RankData
    from rollproof.stacks.slime.rollout import FLAVOURS, PartialRollout
    from rollproof.stacks.slime.upstream import import_loss, import_slime

    slime = import_slime(found.version)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            Part(
                name="partial-rollout",
                make=lambda: PartialRollout(slime),
                flavours=FLAVOURS,
                thin=10,
            )
        ),
        batches={"rank-data": lambda: RankData(slime)},
        corrections=truncated_is(lambda: import_loss(found.version)),
    )
