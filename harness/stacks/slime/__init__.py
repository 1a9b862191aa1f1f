"""slime, from a checkout, unmodified: its rollout with abort and resume, and its way from samples
to the data-parallel ranks.
"""

from __future__ import annotations

from rollproof.stacks import Found, Release, Stack

__all__ = ["RELEASE", "load"]

RELEASE = Release(
    distribution="slime",
    versions=("624b824a8",),
    stack="slime",
    repository="https://github.com/THUDM/slime",
    package="slime/rollout/sglang_rollout.py",
)
_FLAVOURS = ("sglang", "sglang-0.5.17")
_THIN = 10


def load(found: Found) -> Stack:
    """Import slime from its checkout and give its parts. Raises ``StackError`` where it cannot be
    imported.
    """
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.slime.batch import RankData
    from rollproof.stacks.slime.rollout import PartialRollout
    from rollproof.stacks.slime.upstream import import_slime

    slime = import_slime(found.version)
    part = Part(
        name="partial-rollout", make=lambda: PartialRollout(slime), flavours=_FLAVOURS, thin=_THIN
    )
    return Stack(
        name="slime",
        version=found.version,
        parts={part.name: part},
        batches={"rank-data": lambda: RankData(slime)},
    )
