"""TRL, released and unmodified: the rollout loop and weight update of its asynchronous GRPO, its
planners and its packing collator.
"""

from __future__ import annotations

from rollproof.errors import StackError
from rollproof.stacks import Found, Release, Stack

__all__ = ["RELEASE", "load"]

VERSIONS = ("1.16.0",)
RELEASE = Release(distribution="trl", versions=VERSIONS, stack="trl")
_TURNS = 3
_THIN = 6


def load(found: Found) -> Stack:
    """Import TRL and give its parts. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.trl.batch import PackedRows
    from rollproof.stacks.trl.rollout import LoopSubject
    from rollproof.stacks.trl.upstream import import_trl

    if found.line not in VERSIONS:
        raise StackError(
            f"trl {found.line} is not in the table of known releases ({', '.join(VERSIONS)})."
        )
    trl = import_trl(found.version)
    parts = (
        Part(
            name="rollout-loop",
            make=lambda: LoopSubject(trl, multi_turn=False),
            flavours=("vllm",),
            thin=_THIN,
        ),
        Part(
            name="tool-loop",
            make=lambda: LoopSubject(trl, multi_turn=True),
            flavours=("vllm",),
            turns=_TURNS,
            thin=_THIN,
        ),
    )
    batches = {
        "fixed-count-rows": lambda: PackedRows(trl, budget=0),
        "token-budget-rows": lambda: PackedRows(trl, budget=64),
    }
    return Stack(
        name="trl",
        version=found.version,
        parts={part.name: part for part in parts},
        batches=batches,
    )
