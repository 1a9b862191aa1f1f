"""The releases of OpenRLHF that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="openrlhf",
    distribution="openrlhf",
    versions=("0.11.2",),
    module_file="openrlhf/utils/agent.py",
)
