"""The releases of verifiers that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="verifiers",
    distribution="verifiers",
    versions=("0.4.0",),
    module_file="verifiers/v1/clients/train.py",
)
