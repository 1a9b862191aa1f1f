from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that a test makes up are claimed in a folder of its own: other tests have cards of the
    same names.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
