from __future__ import annotations

from pathlib import Path

import pytest

from rollproof.errors import UsageError
from rollproof.files import write_atomically


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    """The old content gives way to the new, missing folders are made, and no temporary file stays behind."""
    path = tmp_path / "deep" / "report.json"
    write_atomically(path, "old")
    write_atomically(path, "new ü\n")

    assert path.read_text(encoding="utf-8") == "new ü\n"
    assert [path] == list(path.parent.iterdir())


def test_an_ordinary_file_is_readable_by_whom_the_umask_says(tmp_path: Path) -> None:
    """A written file has the permissions of any new file, not those of a temporary one."""
    write_atomically(tmp_path / "a", "")
    (tmp_path / "b").touch()

    assert (tmp_path / "b").stat().st_mode == (tmp_path / "a").stat().st_mode


def test_an_impossible_place_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    """Where the folder is a file, the error says which path cannot be written and what to do."""
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match=r"Cannot write .*file/out\.json: .*Choose a file in a folder"):
        write_atomically(tmp_path / "file" / "out.json", "")
