"""The commits of slime that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="slime",
    distribution="slime",
    versions=("624b824a8",),
    repository="https://github.com/THUDM/slime",
    module_file="slime/rollout/sglang_rollout.py",
)
