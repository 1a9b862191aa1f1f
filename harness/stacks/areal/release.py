"""The releases of AReaL that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="areal",
    distribution="areal",
    versions=("1.0.4",),
    module_file="areal/infra/remote_inf_engine.py",
)
