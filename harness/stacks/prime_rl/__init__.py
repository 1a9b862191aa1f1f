"""prime-rl, from a checkout, unmodified: its dispatcher and weight updates over verifiers'
rollouts, and its way to micro-batches.
"""

from __future__ import annotations

from rollproof.stacks import Found, Release, Stack

__all__ = ["RELEASE", "load"]

RELEASE = Release(
    distribution="prime-rl",
    versions=("559b44772",),
    stack="prime-rl",
    repository="https://github.com/PrimeIntellect-ai/prime-rl",
    package="src/prime_rl/orchestrator/trajectories.py",
    roots=("src", "packages/prime-rl-configs/src"),
    beside=(
        "verifiers==0.3.1.dev62",
    ),  # the same files as the commit that this one has as its submodule
)
_THIN = 5
_TURNS = 3


def load(found: Found) -> Stack:
    """Import prime-rl from its checkout and give its parts. Raises ``StackError`` where it cannot
    be imported.
    """
    from rollproof.stacks._support.part import Part
    from rollproof.stacks.prime_rl.batch import MicroBatches
    from rollproof.stacks.prime_rl.orchestrator import Orchestrated
    from rollproof.stacks.prime_rl.upstream import import_prime_rl

    prime = import_prime_rl(found.version)
    part = Part(
        name="orchestrator",
        make=lambda: Orchestrated(prime),
        flavours=("vllm-0.26",),
        turns=_TURNS,
        thin=_THIN,
    )
    return Stack(
        name="prime-rl",
        version=found.version,
        parts={part.name: part},
        batches={"micro-batches": lambda: MicroBatches(prime)},
    )
