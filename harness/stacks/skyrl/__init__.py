"""SkyRL, released and unmodified: its inference client and weight update, its generator, its
batches, its layouts for routing replay.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.skyrl.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import SkyRL and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.skyrl.batch import BatchTensors, TrainingInput
    from rollproof.stacks.skyrl.generator import GeneratorSubject
    from rollproof.stacks.skyrl.inference_client import ClientSubject
    from rollproof.stacks.skyrl.upstream import import_skyrl

    skyrl = import_skyrl(found)
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(
            Part(name="client", make=lambda: ClientSubject(skyrl), flavours=("vllm",), thin=6),
            Part(
                name="generator",
                make=lambda: GeneratorSubject(skyrl),
                flavours=("vllm",),
                turns=3,
                thin=6,
            ),
        ),
        batches={
            "batch-tensors": lambda: BatchTensors(skyrl),
            "training-input": lambda: TrainingInput(skyrl),
        },
    )
