from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def command_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command runs in a folder with one plain file and two modules that cannot be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    (tmp_path / "exiting.py").write_text("raise SystemExit(0)")
    (tmp_path / "broken.py").write_text("raise RuntimeError('one\\ntwo')")
