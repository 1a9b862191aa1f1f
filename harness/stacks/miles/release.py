"""The releases of miles that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="miles",
    distribution="miles-rl",
    versions=("0.0.2",),
    module_file="miles/rollout/sglang_rollout.py",
)
