"""The first example of docs/gap.md: it runs without a checkout, and says what the page shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.judging.report import ExitCode

ROOT = Path(__file__).parents[2]


def test_the_gap_of_the_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program writes its file in an empty folder, with nothing of this repository on its path;
    the command names the fault that it planted, in the words of the page.
    """
    shutil.copy(ROOT / "docs" / "example" / "gap_records.py", tmp_path)
    subprocess.run([sys.executable, "gap_records.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert run(["gap", "gap.parquet"]) == ExitCode.FAIL
    shown = capsys.readouterr().out
    page = (ROOT / "docs" / "gap.md").read_text("utf-8")
    for beginning in ("gap.parquet  [", "  FAIL         F5", "  diagnosis: resume boundary"):
        (line,) = [line for line in shown.splitlines() if line.startswith(beginning)]
        assert line in page.splitlines()
