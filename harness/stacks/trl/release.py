"""The releases of TRL that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="trl",
    distribution="trl",
    versions=("1.16.0",),
    module_file="trl/experimental/async_grpo/async_rollout_worker.py",
)
