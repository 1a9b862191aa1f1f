"""The worked example of docs/replay-megatron.md, and the track record of megatron-core."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PRINTED = DOCS / "track_record" / "megatron_faults.txt"
PAGE = (DOCS / "replay-megatron.md").read_text(encoding="utf-8")


PROGRAMS = {
    "example": (
        *("-c", "from rollproof.cli import main; main()", "verify", "--replay"),
        *("megatron_trainer:MegatronTrainer", "--json", "-"),
    ),
    "track record": (
        str(DOCS / "track_record" / "megatron_faults.py"),
        *("short_targets", "stale_queue", "interleaved_pair", "other_choosers"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Both programs, side by side: each computes on one thread."""
    pytest.importorskip("torch", reason="megatron-core needs PyTorch")
    pytest.importorskip(
        "megatron.core", reason="`pip install --no-deps megatron-core==0.16.1` (Python 3.11)"
    )
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(_run, *arguments) for name, arguments in PROGRAMS.items()}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: the example leaves megatron-core patched."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=DOCS / "example",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_page_shows_the_code_that_is_run() -> None:
    """Each piece of Python on the page is a piece of the example."""
    example = (DOCS / "example" / "megatron_trainer.py").read_text(encoding="utf-8")
    pieces = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    lines = {line.strip() for line in example.splitlines()}
    assert len(pieces) >= 4
    assert [] == [
        line
        for piece in pieces
        for line in piece.splitlines()
        if line.strip() not in {*lines, "..."}
    ]


def test_the_example_keeps_every_promise(
    ran: dict[str, Future[subprocess.CompletedProcess[str]]],
) -> None:
    """`rollproof verify --replay megatron_trainer:MegatronTrainer`: nothing fails, nothing is
    unknown, the planted fault is seen.
    """
    done = ran["example"].result()
    report: Any = json.loads(done.stdout)
    verdicts = {
        check["id"]: check["verdict"]
        for check in report["checks"]
        if check["verdict"] not in ("pass", "not applicable")
    }
    assert ({}, 0) == (verdicts, done.returncode), done.stderr[-2000:]


def test_the_track_record_holds_what_the_scripts_print_of_megatron_core(
    ran: dict[str, Future[subprocess.CompletedProcess[str]]],
) -> None:
    """Line by line, on the installed release."""
    done = ran["track record"].result()
    assert 0 == done.returncode, done.stderr[-2000:]
    release = __import__("importlib.metadata").metadata.version("megatron-core")
    prefix = f"megatron-core {release}:"
    recorded = [
        line for line in PRINTED.read_text(encoding="utf-8").splitlines() if line.startswith(prefix)
    ]
    if not recorded:
        pytest.skip(f"the track record has no lines of megatron-core {release}")
    assert sorted(recorded) == sorted(
        line for line in done.stdout.splitlines() if line.startswith(prefix)
    )
