"""Starts of the real vLLM that fail or hang: each is told with its cause, and nothing of it is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rollproof.engines.asks import EngineSettings
from rollproof.engines.vllm import VllmEngine
from rollproof.errors import EngineStartError
from tests.engines.test_vllm import pytestmark  # noqa: F401 - where vLLM is not installed, these are skipped too
from tests.support.leftovers import leftovers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    from rollproof.fakes.tiny_models import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("model") / "A", "qwen3_moe")


async def _told(model: Path, **extra: Any) -> str:
    """What a start says that must not succeed."""
    engine = VllmEngine(EngineSettings(model=model, extra={"offline": True, **extra}))
    try:
        await engine.start()
    except EngineStartError as error:
        return str(error)
    finally:
        await engine.stop()
    return "it started"


def test_a_start_that_hangs_is_ended(model: Path) -> None:
    """A start that takes longer than its deadline is ended, and the text says how long and what the log's end is."""
    before = leftovers("vllm")
    told = asyncio.run(_told(model, deadline=2.0, offline=False))
    assert told.startswith("vllm was not ready after 2 s. Its start hangs, or needs longer. The end of its log:")
    assert set() == leftovers("vllm") - before


def test_too_few_files(model: Path, tmp_path: Path) -> None:
    """A limit of open files in which no engine fits is told with what to do; nothing is left."""
    before = leftovers("vllm")
    few = tmp_path / "python"
    few.write_text(f'#!/bin/sh\nulimit -n 12\nexec {sys.executable} "$@"\n')
    few.chmod(0o755)
    told = asyncio.run(_told(model, python=str(few)))
    assert told.startswith(("vllm cannot be started", "vllm died while it started")), told
    assert "raise the limit (`ulimit -n`)" in told
    assert set() == leftovers("vllm") - before
