"""verifiers, released and unmodified: prime-rl's rollouts. Its training client, and the message
graph that attributes tokens and routes.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.verifiers.upstream import RELEASE, import_verifiers

__all__ = ["RELEASE", "load"]

_THIN = 5
_TURNS = 3


def load(found: Found) -> Stack:
    """Import verifiers and give its part. Raises ``StackError`` where it cannot be imported."""
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.verifiers.rollout import RolloutSubject

    verifiers = import_verifiers(found.version)
    part = Part(
        name="train-client",
        make=lambda: RolloutSubject(verifiers),
        flavours=("vllm-0.26",),
        turns=_TURNS,
        thin=_THIN,
    )
    return Stack(name="verifiers", version=found.version, parts={part.name: part})
