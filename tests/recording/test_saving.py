"""Recordings: where the trace is saved, and what happens if it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rollproof
from rollproof.errors import ConformanceError, TraceError, UsageError
from rollproof.store import open_trace
from tests.support.recorded_stack import CONTRACT, Client, Engine, wired


def test_an_exception_of_the_block_passes_and_the_trace_is_saved(tmp_path: Path) -> None:
    """The test's own failure is not replaced by verdicts; the recording up to then is saved."""
    with pytest.raises(ZeroDivisionError):
        with rollproof.record(CONTRACT, save=tmp_path / "trace.json") as trace:
            wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])
            _ = 1 / 0

    assert 6 == len(list(open_trace(tmp_path / "trace.json")))


@pytest.mark.parametrize("save", [5, b"trace.json", "a\0b"])
def test_a_wrong_path_is_refused_before_the_block(save: Any) -> None:
    """In our words, not in those of the file system."""
    with pytest.raises(UsageError, match=r"save must be a path, such as 'out/trace\.json', not "):
        rollproof.record(CONTRACT, save=save)


def test_an_unwritable_place_is_refused_before_the_block(tmp_path: Path) -> None:
    """A recording whose trace could not be saved does not begin; folders are made."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"Cannot write .*file/trace\.json: Not a directory"):
        rollproof.record(CONTRACT, save=tmp_path / "file" / "trace.json")
    with rollproof.record(CONTRACT, save=tmp_path / "deep" / "trace.json") as trace:
        wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])

    assert 6 == len(list(open_trace(tmp_path / "deep" / "trace.json")))


def test_a_place_that_breaks_during_the_block_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block's own exception, and the findings, are raised as ever, with a note; alone, the
    trouble is raised. The trace is saved.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(*, faulty: bool, broken: bool) -> None:
        with rollproof.record(CONTRACT, save=tmp_path / "out" / "trace.json") as trace:
            (tmp_path / "out").touch()
            wired(trace, Client(Engine(), repeat_rows=faulty), [1, 2, 3])([1, 2, 3])
            if broken:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        run(faulty=False, broken=True)
    (saved,) = tmp_path.glob("rollproof-*/trace.json")
    (note,) = error.value.__notes__
    assert (
        f"rollproof: The recorded trace could not be saved as {tmp_path}/out/trace.json:"
        f" FileExistsError: [Errno 17] File exists: '{tmp_path}/out'. It was saved as {saved}."
    ) == note
    assert 6 == len(list(open_trace(saved)))
    (tmp_path / "out").unlink()
    with pytest.raises(ConformanceError, match=r"routes\.rows") as findings:
        run(faulty=True, broken=False)
    assert "It was saved as " in findings.value.__notes__[0]
    (tmp_path / "out").unlink()
    with pytest.raises(TraceError, match=r"could not be saved as .* It was saved as .*trace\.json"):
        run(faulty=False, broken=False)
