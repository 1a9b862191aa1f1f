"""prime-rl, from a checkout, unmodified: its dispatcher and weight updates over verifiers'
rollouts, its conversion of samples into micro-batches, and its losses.
"""

from __future__ import annotations

from rollproof.stacks import Found, Stack
from rollproof.stacks.prime_rl.release import RELEASE

__all__ = ["RELEASE", "load"]


def load(found: Found) -> Stack:
    """Import prime-rl and return its parts. Raises ``StackError`` if it cannot be imported."""
    from rollproof.stacks._support.part import Part, by_name
    from rollproof.stacks.prime_rl.batch import MicroBatches
    from rollproof.stacks.prime_rl.corrections import corrections
    from rollproof.stacks.prime_rl.orchestrator import OrchestratorSubject
    from rollproof.stacks.prime_rl.upstream import import_prime_rl

    prime = import_prime_rl(found.version)
    part = Part(
        name="orchestrator",
        make=lambda: OrchestratorSubject(prime),
        flavours=("vllm-0.26",),
        turns=3,
        thin=5,
    )
    return Stack(
        name=RELEASE.stack,
        version=found.version,
        parts=by_name(part),
        batches={"micro-batches": lambda: MicroBatches(prime)},
        corrections=corrections(prime),
    )
