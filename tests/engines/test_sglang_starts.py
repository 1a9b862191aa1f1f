"""Starts of the real SGLang that fail, hang or are broken off: each is told with its cause, and
nothing of it is left.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed here (`nox -s engines` installs it)",
    exc_type=ImportError,
)

from rollproof.core.engine_protocol import EngineSettings, Query
from rollproof.core.records import FinishReason, Scalar
from rollproof.engines.sglang.sglang_engine import SglangEngine
from rollproof.errors import EngineStartError
from rollproof.fakes.tiny_models import make_checkpoint
from tests.support.engine_leftovers import leftovers
from tests.support.real_engine import (
    assert_interrupted_start_leaves_nothing,
    changed_checkpoint,
    failed_start,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what SGLang and its parts warn of is not ours


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "A", "qwen3_moe")


async def _failure(model: Path, extra: Mapping[str, Scalar]) -> str:
    """Return the text of a start that must not succeed."""
    return await failed_start(SglangEngine(EngineSettings(model=model, extra=extra)))


def test_a_start_that_hangs_is_ended(model: Path) -> None:
    """A start that takes longer than its deadline is ended, and the text says how long and what the
    log's end is.
    """
    before = leftovers("sglang")
    text = asyncio.run(_failure(model, {"deadline": 3.0}))
    assert text.startswith(
        "sglang was not ready after 3 s. Its start hangs, or needs longer. The end of its log:"
    )
    assert set() == leftovers("sglang") - before


def test_a_port_that_is_taken_and_weights_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    """SGLang's processes die, and the caller reads the cause in the log's end, not only that they
    died.
    """
    before = leftovers("sglang")
    broken = changed_checkpoint(model, tmp_path / "broken", cut_weights=True)

    async def both() -> tuple[str, str]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port: int = taken.getsockname()[1]
            return await asyncio.gather(_failure(model, {"nccl_port": port}), _failure(broken, {}))

    port, read = asyncio.run(both())
    assert port.startswith(("sglang died while it started", "sglang cannot be started"))
    assert "address already in use" in port.lower()
    assert read.startswith(("sglang died while it started", "sglang cannot be started"))
    assert "safetensors" in read.lower()
    assert set() == leftovers("sglang") - before


def test_ctrl_c_leaves_nothing(model: Path) -> None:
    """A run from the command line that is interrupted while SGLang's processes start ends with code
    130 and leaves nothing.
    """
    assert_interrupted_start_leaves_nothing("sglang", model, "sglang::scheduler")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a full /dev/shm of one's own needs root and unshare",
)
def test_shared_memory_that_is_full(model: Path) -> None:
    """With no shared memory to be had the engine serves, or its start fails with a text that says
    so: it does not hang.
    """
    script = (
        "import asyncio; from tests.engines.test_sglang_starts import without_memory;"
        f" print(asyncio.run(without_memory({str(model)!r})))"
    )
    fill = (
        "mount -t tmpfs -o size=4k tmpfs /dev/shm && { head -c 8192 /dev/zero > /dev/shm/full; exec"
        ' "$0" -W ignore -c "$1"; }'
    )
    before = leftovers("sglang")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", fill, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount of one's own here: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout.strip().splitlines()[-1] in ("length", "advice"), done.stdout + done.stderr
    assert set() == leftovers("sglang") - before


async def without_memory(folder: str) -> str:
    """How a call ends, or that the start said what it lacks."""
    engine = SglangEngine(EngineSettings(model=Path(folder)))
    try:
        await engine.start()
        (output,) = await engine.generate(
            Query(handle="one-", prompt_ids=(5, 6, 7), max_tokens=3), lambda _: None
        )
    except EngineStartError as error:
        return "advice" if "df -h /dev/shm" in str(error) else str(error)
    finally:
        await engine.stop()
    return "length" if output.finish_reason is FinishReason.LENGTH else str(output)
