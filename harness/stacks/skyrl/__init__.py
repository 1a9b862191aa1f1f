"""SkyRL, released and unmodified: its inference client and weight update, its generator, its
batches, its layouts for routing replay.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.skyrl.upstream import RELEASE

__all__ = ["RELEASE", "load"]

_TURNS = 3
_THIN = 6


def load(found: Found) -> Stack:
    """Import SkyRL and give its parts. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.skyrl.batch import BatchTensors, TrainingInput
    from rollproof.stacks.skyrl.generator import GeneratorSubject
    from rollproof.stacks.skyrl.inference_client import ClientSubject
    from rollproof.stacks.skyrl.upstream import import_skyrl

    skyrl = import_skyrl(found.version, found.line)
    parts = (
        Part(name="client", make=lambda: ClientSubject(skyrl), flavours=("vllm",), thin=_THIN),
        Part(
            name="generator",
            make=lambda: GeneratorSubject(skyrl),
            flavours=("vllm",),
            turns=_TURNS,
            thin=_THIN,
        ),
    )
    batches = {
        "batch-tensors": lambda: BatchTensors(skyrl),
        "training-input": lambda: TrainingInput(skyrl),
    }
    return Stack(
        name="skyrl",
        version=found.version,
        parts={part.name: part for part in parts},
        batches=batches,
    )
