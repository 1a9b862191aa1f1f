"""verifiers, released and unmodified: prime-rl's rollouts. Its training client, and the message
graph that attributes tokens and routes.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.verifiers.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import verifiers and return its part. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.verifiers.rollout import VerifiersSubject
    from rollproof.stacks.verifiers.upstream import import_verifiers

    verifiers = import_verifiers(found.version)
    part = Part(
        name="train-client",
        make=lambda: VerifiersSubject(verifiers),
        flavours=("vllm-0.26",),
        turns=3,
        thin=5,
    )
    return Stack(name=RELEASE.stack, version=found.version, parts=by_name(part))
