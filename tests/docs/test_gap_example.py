"""The first example of docs/gap.md: it runs without a checkout, and its fault is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.judging.report import ExitCode

ROOT = Path(__file__).parents[2]


def test_the_gap_of_the_example_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program writes its file in an empty folder, with nothing of this repository on its path;
    the command names the fault that it planted.
    """
    shutil.copy(ROOT / "docs" / "example" / "gap_records.py", tmp_path)
    subprocess.run([sys.executable, "gap_records.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert run(["gap", "gap.parquet"]) == ExitCode.FAIL
    assert "  diagnosis: resume boundary" in capsys.readouterr().out
