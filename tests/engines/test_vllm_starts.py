"""Starts of the real vLLM that fail, hang or are broken off: each is told with its cause, and
nothing of it is left.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollproof.core.engine_protocol import EngineSettings
from rollproof.engines.vllm.vllm_engine import VllmEngine
from rollproof.errors import EngineStartError
from tests.support.engine_leftovers import leftovers


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


def _changed(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of a checkpoint with other values in its config."""
    shutil.copytree(model, folder)
    held: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**held, **config}))
    return folder


def test_a_start_that_hangs_is_ended(model: Path) -> None:
    """A start that takes longer than its deadline is ended, and the text says how long and what the
    log's end is.
    """
    before = leftovers("vllm")
    told = asyncio.run(_told(model, deadline=2.0, offline=False))
    assert told.startswith(
        "vllm was not ready after 2 s. Its start hangs, or needs longer. The end of its log:"
    )
    assert set() == leftovers("vllm") - before


def test_starts_that_cannot_succeed(model: Path, tmp_path: Path) -> None:
    """An unknown architecture, broken weights, an argument that vLLM does not have and a limit of
    open files that is too low: each is told with its cause, where there is something to be done
    with that.
    """
    before = leftovers("vllm")
    foreign = _changed(
        model, tmp_path / "foreign", architectures=["NobodysModel"], model_type="qwen3_moe"
    )
    broken = _changed(model, tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    few = tmp_path / "python"
    few.write_text(f'#!/bin/sh\nulimit -n 12\nexec {sys.executable} "$@"\n')
    few.chmod(0o755)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(
            _told(foreign),
            _told(broken),
            _told(model, no_such_argument=1),
            _told(model, python=str(few)),
        )

    told = dict(
        zip(("foreign", "broken", "argument", "files"), asyncio.run(all_of_them()), strict=True)
    )
    assert all(
        one.startswith(("vllm cannot be started", "vllm died while it started"))
        for one in told.values()
    ), told
    assert "NobodysModel" in told["foreign"]
    assert "safetensors" in told["broken"].lower()
    assert "no_such_argument" in told["argument"]
    assert "raise the limit (`ulimit -n`)" in told["files"]
    assert set() == leftovers("vllm") - before


def test_ctrl_c_leaves_nothing(model: Path) -> None:
    """A run from the command line that is interrupted while vLLM's processes start ends with code
    130 and leaves nothing.
    """
    before = leftovers("vllm")
    command = [
        sys.executable,
        "-m",
        "rollproof",
        "verify",
        "--engine",
        "vllm",
        "--model",
        str(model),
    ]
    heed = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a runner in the background hands on an ignored SIGINT
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed
    ) as run:
        try:
            end = time.monotonic() + 240
            while not any("VLLM::" in one for one in leftovers("vllm") - before):
                assert run.poll() is None, run.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.2)
            run.send_signal(signal.SIGINT)
            said, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert (130, False) == (run.returncode, "Traceback" in said), said
    assert set() == leftovers("vllm") - before
