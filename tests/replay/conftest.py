from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """Transformers without its log, torch on one thread; models are gone when the module ends."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    gc.collect()


@pytest.fixture
def model() -> Any:
    """A tiny Qwen3-MoE, to be trained."""
    from rollproof.replay.hf.model_families import tiny_model

    return tiny_model("qwen3_moe").train()
