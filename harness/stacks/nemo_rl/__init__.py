"""NeMo-RL, from a checkout, unmodified: its SingleController, its asynchronous GRPO, its SGLang
client, and its training batches.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.nemo_rl.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import NeMo-RL and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.nemo_rl.batch import AsyncBatch, ShardedBatch
    from rollproof.stacks.nemo_rl.collector import CollectorSubject
    from rollproof.stacks.nemo_rl.controller import ControllerSubject
    from rollproof.stacks.nemo_rl.sglang_generation import SglangSubject
    from rollproof.stacks.nemo_rl.upstream import import_nemo_rl

    nemo = import_nemo_rl(found.version)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            Part(
                name="single-controller",
                make=lambda: ControllerSubject(nemo),
                flavours=("vllm",),
                turns=3,
                thin=3,
            ),
            Part(
                name="async-grpo",
                make=lambda: CollectorSubject(nemo),
                flavours=("vllm",),
                turns=3,
                thin=3,
            ),
            Part(
                name="sglang-rollouts",
                make=lambda: SglangSubject(nemo),
                flavours=("sglang-0.5.17",),
                thin=3,
            ),
        ),
        batches={
            "data-plane": lambda: ShardedBatch(nemo),
            "async-grpo-batch": lambda: AsyncBatch(nemo),
        },
    )
