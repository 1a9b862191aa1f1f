"""The commits of prime-rl that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="prime-rl",
    distribution="prime-rl",
    versions=("559b44772",),
    repository="https://github.com/PrimeIntellect-ai/prime-rl",
    module_file="src/prime_rl/orchestrator/trajectories.py",
    roots=("src", "packages/prime-rl-configs/src"),
    # the same files as the commit of verifiers that this commit has as its submodule
    no_deps=("verifiers==0.3.1.dev62",),
)
