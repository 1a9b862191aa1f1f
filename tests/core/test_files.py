from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rollproof.core.files import check_folder, check_target, write_atomically, write_or_keep
from rollproof.errors import TraceError, UsageError
from rollproof.fakes.known_bugs._planting import CLEAN
from rollproof.store import dump_trace
from rollproof.verification.runner import run_case
from tests.support.faulty_subjects import Correct


def test_a_file_is_replaced_completely_and_leaves_no_other(tmp_path: Path) -> None:
    """The old content gives way to the new, missing folders are made, and no temporary file stays
    behind.
    """
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

    with pytest.raises(
        UsageError, match=r"Cannot write .*file/out\.json: .*Choose a file in a folder"
    ):
        write_atomically(tmp_path / "file" / "out.json", "")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """What a link leads to is replaced, not the link."""
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "real")
    write_atomically(tmp_path / "link", "text")

    assert (tmp_path / "link").is_symlink()
    assert "text" == (tmp_path / "deep" / "real").read_text()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A pipe or a device is no file to be replaced: as root, ``--json /dev/null`` would put a file
    in the place of the device.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_target(pipe)
    write_atomically(pipe, "text")
    reader.join()

    assert ["text"] == read
    assert pipe.is_fifo()
    with pytest.raises(
        TraceError,
        match=(
            "pipe is a device or a pipe, and a trace would replace it by a file: name another place"
        ),
    ):
        dump_trace(run_case(Correct, CLEAN), pipe)
    assert pipe.is_fifo()


def test_places_are_tried_without_a_trace(tmp_path: Path) -> None:
    """Trying a place leaves nothing there, and tells a folder, a file in the way, a loop of links
    and too long a name.
    """
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    check_target(tmp_path / "new" / "deep" / "report.json")
    check_folder(tmp_path / "new")

    assert {"file", "loop"} == {item.name for item in tmp_path.iterdir()}
    for path, why in (
        (tmp_path, "it is a folder. Name a file in it"),
        (tmp_path / "file" / "report.json", "Not a directory"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "loop" / "report.json", "Too many levels of symbolic links"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(UsageError, match=f"Cannot write .*: .*{why}"):
            check_target(path)
    with pytest.raises(
        UsageError,
        match=(
            r"Cannot write into .*file/deep: .*Not a directory.* Choose a folder that you may"
            r" write to"
        ),
    ):
        check_folder(tmp_path / "file" / "deep")


def test_unwritable_text_is_saved_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report whose place broke meanwhile is kept in the folder for temporary files, and where is
    told.
    """
    (tmp_path / "spare").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    note = write_or_keep(tmp_path / "file" / "report.json", "all of it")

    (saved,) = (tmp_path / "spare").glob("*/report.json")
    assert f"Cannot write {tmp_path}/file/report.json: Not a directory" in str(note)
    assert str(note).endswith(f"It was kept as {saved}.")
    assert "all of it" == saved.read_text()
    assert write_or_keep(tmp_path / "fine.json", "") is None


def test_lone_surrogates_are_written_as_escapes(tmp_path: Path) -> None:
    """Text that is no valid Unicode, as an exception may hold, does not cost a report."""
    write_atomically(tmp_path / "report.json", '"caf\udce9"')

    assert b'"caf\\udce9"' == (tmp_path / "report.json").read_bytes()


def test_a_link_that_somebody_planted_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write into the folder cannot choose, by a link of a name that a trace or a report
    uses on its way, what else is overwritten.
    """
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for folder in ("trace", "report"):
        (tmp_path / folder).mkdir()
        for name in (f".x.json.{os.getpid()}.part", f"x.{os.getpid()}.part", ".x.json", ".x.json."):
            (tmp_path / folder / name).symlink_to(mine)
    dump_trace(run_case(Correct, CLEAN), tmp_path / "trace" / "x.json")
    write_atomically(tmp_path / "report" / "x.json", "new")

    assert "kept" == mine.read_text()
