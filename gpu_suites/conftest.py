"""Gating of the GPU suites: without a GPU every item is skipped with the reason, or fails where a GPU is required."""

from __future__ import annotations

import pytest

from rollproof.gpu_suites.gate import GpuFindings, find_gpus
from rollproof.plugin import STATE


@pytest.fixture(scope="session")
def rollproof_gpus() -> GpuFindings:
    """The GPUs of this host."""
    return find_gpus()


@pytest.fixture(autouse=True)
def _gate(rollproof_gpus: GpuFindings, pytestconfig: pytest.Config) -> None:
    if rollproof_gpus.reason is None:
        return
    if pytestconfig.stash[STATE].settings.require_gpu:
        pytest.fail(f"{rollproof_gpus.reason}; a GPU was required (--rollproof-require-gpu)", pytrace=False)
    pytest.skip(rollproof_gpus.reason)
