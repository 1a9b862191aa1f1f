"""Starts of the real vLLM that fail, hang or are broken off: each is told with its cause, and
nothing of it is left.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from rollproof.core.engine_protocol import EngineSettings
from rollproof.engines.vllm.vllm_engine import VllmEngine
from tests.support.engine_leftovers import leftovers
from tests.support.real_engine import (
    assert_interrupted_start_leaves_nothing,
    changed_checkpoint,
    failed_start,
)

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("vllm", "torch", "transformers")),
    reason="vLLM is not installed here (`nox -s engines` installs it)",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    from rollproof.fakes.tiny_models import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("model") / "A", "qwen3_moe")


async def _failure(model: Path, **extra: Any) -> str:
    """Return the text of a start that must not succeed."""
    return await failed_start(
        VllmEngine(EngineSettings(model=model, extra={"offline": True, **extra}))
    )


def test_a_start_that_hangs_is_ended(model: Path) -> None:
    """A start that takes longer than its deadline is ended, and the text says how long and what the
    log's end is.
    """
    before = leftovers("vllm")
    text = asyncio.run(_failure(model, deadline=2.0, offline=False))
    assert text.startswith(
        "vllm was not ready after 2 s. Its start hangs, or needs longer. The end of its log:"
    )
    assert set() == leftovers("vllm") - before


def test_starts_that_cannot_succeed(model: Path, tmp_path: Path) -> None:
    """An unknown architecture, broken weights, an argument that vLLM does not have and a limit of
    open files that is too low: each is told with its cause, where there is something to be done
    with that.
    """
    before = leftovers("vllm")
    foreign = changed_checkpoint(
        model, tmp_path / "foreign", architectures=["NobodysModel"], model_type="qwen3_moe"
    )
    broken = changed_checkpoint(model, tmp_path / "broken", cut_weights=True)
    few = tmp_path / "python"
    few.write_text(f'#!/bin/sh\nulimit -n 12\nexec {sys.executable} "$@"\n')
    few.chmod(0o755)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(
            _failure(foreign),
            _failure(broken),
            _failure(model, no_such_argument=1),
            _failure(model, python=str(few)),
        )

    texts = dict(
        zip(("foreign", "broken", "argument", "files"), asyncio.run(all_of_them()), strict=True)
    )
    assert all(
        text.startswith(("vllm cannot be started", "vllm died while it started"))
        for text in texts.values()
    ), texts
    assert "NobodysModel" in texts["foreign"]
    assert "safetensors" in texts["broken"].lower()
    assert "no_such_argument" in texts["argument"]
    assert "raise the limit (`ulimit -n`)" in texts["files"]
    assert set() == leftovers("vllm") - before


def test_ctrl_c_leaves_nothing(model: Path) -> None:
    """A run from the command line that is interrupted while vLLM's processes start ends with code
    130 and leaves nothing.
    """
    assert_interrupted_start_leaves_nothing("vllm", model, "VLLM::")
