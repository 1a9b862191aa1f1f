"""NeMo-RL, from a checkout, unmodified: its SingleController, its asynchronous GRPO, its SGLang
client, and its training batches.
"""

from __future__ import annotations

from rollproof.stacks import Found, Release, Stack

__all__ = ["RELEASE", "load"]

RELEASE = Release(
    distribution="nemo-rl",
    versions=("7ea279abf",),
    stack="nemo-rl",
    repository="https://github.com/NVIDIA-NeMo/RL",
    package="nemo_rl/experience/rollouts.py",
)
_THIN = 3
_TURNS = 3


def load(found: Found) -> Stack:
    """Import NeMo-RL from its checkout and give its parts. Raises ``StackError`` where it cannot be
    imported.
    """
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.nemo_rl.batch import AsyncBatch, ShardedBatch
    from rollproof.stacks.nemo_rl.collector import CollectorSubject
    from rollproof.stacks.nemo_rl.controller import ControllerSubject
    from rollproof.stacks.nemo_rl.sglang_generation import SglangSubject
    from rollproof.stacks.nemo_rl.upstream import import_nemo_rl

    nemo = import_nemo_rl(found.version)
    parts = (
        Part(
            name="single-controller",
            make=lambda: ControllerSubject(nemo),
            flavours=("vllm",),
            turns=_TURNS,
            thin=_THIN,
        ),
        Part(
            name="async-grpo",
            make=lambda: CollectorSubject(nemo),
            flavours=("vllm",),
            turns=_TURNS,
            thin=_THIN,
        ),
        Part(
            name="sglang-rollouts",
            make=lambda: SglangSubject(nemo),
            flavours=("sglang-0.5.17",),
            thin=_THIN,
        ),
    )
    return Stack(
        name="nemo-rl",
        version=found.version,
        parts={part.name: part for part in parts},
        batches={
            "data-plane": lambda: ShardedBatch(nemo),
            "async-grpo-batch": lambda: AsyncBatch(nemo),
        },
    )
