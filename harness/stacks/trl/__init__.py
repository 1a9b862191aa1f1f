"""TRL, released and unmodified: the rollout loop and weight update of its asynchronous GRPO, its
planners and its packing collator.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.trl.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import TRL and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.trl.batch import PackedRows
    from rollproof.stacks.trl.rollout import LoopSubject
    from rollproof.stacks.trl.upstream import import_trl

    trl = import_trl(found.version)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            Part(
                name="rollout-loop",
                make=lambda: LoopSubject(trl, multi_turn=False),
                flavours=("vllm",),
                thin=6,
            ),
            Part(
                name="tool-loop",
                make=lambda: LoopSubject(trl, multi_turn=True),
                flavours=("vllm",),
                turns=3,
                thin=6,
            ),
        ),
        batches={
            "fixed-count-rows": lambda: PackedRows(trl, budget=0),
            "token-budget-rows": lambda: PackedRows(trl, budget=64),
        },
    )
