"""The commits of NeMo-RL that the adapters know."""

from __future__ import annotations

from rollproof.stacks.releases import Release

__all__ = ["RELEASE"]

RELEASE = Release(
    stack="nemo-rl",
    distribution="nemo-rl",
    versions=("7ea279abf",),
    repository="https://github.com/NVIDIA-NeMo/RL",
    module_file="nemo_rl/experience/rollouts.py",
)
