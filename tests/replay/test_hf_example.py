"""The training loop of docs/replay-hf.md, and the example of the tutorial on replay."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.replay.driver import record_replay
from rollproof.verification.traces import judge

DOCS = Path(__file__).parents[2] / "docs"


def _on_one_line(text: str) -> str:
    return "".join(text.split())


def tutorial() -> list[str]:
    """The pieces of Python of the tutorial."""
    text = (DOCS / "tutorials" / "replay-trainer.md").read_text(encoding="utf-8")
    return re.findall(r"```python(?: title=\"[^\"]+\")?\n(.*?)```", text, re.DOTALL)


def test_the_tutorial_shows_the_code_that_is_run() -> None:
    """Each piece of the trainer in the tutorial is a piece of the example."""
    example = (DOCS / "example" / "hf_trainer.py").read_text(encoding="utf-8")
    pieces = [piece for piece in tutorial() if "class " not in piece and "def " not in piece]
    assert 2 == len(pieces)
    # the page shows code of a method without its indentation, and so wraps it elsewhere
    code = _on_one_line(example)
    assert [] == [
        piece for piece in pieces if _on_one_line(piece.replace("# fmt: skip", "")) not in code
    ]


def test_the_loop_on_the_page_trains() -> None:
    """The first piece, a complete training loop, runs as it stands."""
    pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
    pytest.importorskip(
        "transformers",
        minversion="5.24",
        reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
    )
    loop = re.search(
        r"```python\n(.*?)```", (DOCS / "replay-hf.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert loop is not None
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", loop[1]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stdout), done.stderr[-2000:]


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
def test_a_users_own_code_is_judged_as_the_page_says(tmp_path: Path) -> None:
    """The last piece of the tutorial is a complete module; its trainer runs an episode and replays
    its routes.
    """
    torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
    pytest.importorskip(
        "transformers",
        minversion="5.24",
        reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
    )
    (piece,) = (piece for piece in tutorial() if "def my_replay" in piece)
    (tmp_path / "mine.py").write_text(piece, encoding="utf-8")
    trace = record_replay(
        runpy.run_path(str(tmp_path / "mine.py"))["trainer"], only=["self-replay"]
    )

    assert torch.get_num_threads() == 1
    assert (
        judge(trace, default_registry().select(["replay.forward"]))["replay.forward"].verdict
        is Verdict.PASS
    )


def test_the_example_keeps_every_promise() -> None:
    """`rollproof verify --replay hf_trainer:HfTrainer`: nothing fails, nothing is unknown, the
    planted fault is seen.
    """
    pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
    pytest.importorskip(
        "transformers",
        minversion="5.24",
        reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
    )
    command = "import torch; torch.set_num_threads(1); from rollproof.cli import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            command,
            "verify",
            "--replay",
            "hf_trainer:HfTrainer",
            "--json",
            "-",
        ],
        cwd=DOCS / "example",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    report = json.loads(done.stdout)
    verdicts = {
        check["id"]: check["reason"]
        for check in report["checks"]
        if check["verdict"] not in ("pass", "not applicable")
    }
    assert ({}, 0) == (verdicts, done.returncode), done.stderr[-2000:]
