"""The releases of AReno that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="areno",
    distribution="areno",
    versions=("0.10.0",),
    module_file="areno/engine/runtime/rollout.py",
)
