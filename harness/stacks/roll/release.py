"""The commits of ROLL that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="roll",
    distribution="roll",
    versions=("8eb27cc2",),
    repository="https://github.com/alibaba/ROLL",
    module_file="roll/distributed/scheduler/user_defined_rollout_loop.py",
)
