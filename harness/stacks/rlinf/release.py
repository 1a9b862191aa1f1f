"""The releases of RLinf that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="rlinf",
    distribution="rlinf",
    versions=("0.3.0",),
    module_file="rlinf/data/io_struct.py",
)
