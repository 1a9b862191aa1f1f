from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from rollproof.core.source_location import SourceLocation, source_location

MADE: dict[str, object] = {}
exec("def made(): ...", MADE)  # noqa: S102 - code that no file has


class Subject:
    def __call__(self) -> None:
        """Do nothing."""


def make(number: int = 0) -> int:
    return number


@pytest.mark.parametrize(
    ("thing", "written"),
    [
        (Subject, "class Subject:"),
        (Subject(), "class Subject:"),
        (make, "def make(number: int = 0) -> int:"),
        (partial(partial(make, 1)), "def make(number: int = 0) -> int:"),
    ],
)
def test_a_definition_has_a_file_and_a_line(thing: object, written: str) -> None:
    """Of a class, of the class of an object, of a function, and of what ``partial`` makes of it."""
    file = Path(__file__).resolve()
    line = file.read_text(encoding="utf-8").splitlines().index(written) + 1
    assert SourceLocation(file=file, line=line) == source_location(thing)


@pytest.mark.parametrize("thing", [len, int, MADE["made"], 5])
def test_what_no_file_defines_has_none(thing: object) -> None:
    """Builtins, and code that was made at run time."""
    assert source_location(thing) is None


def test_a_file_is_named_from_the_root_if_it_is_below(tmp_path: Path) -> None:
    """So that a report does not differ between two machines."""
    location = SourceLocation(file=tmp_path / "a b" / "c.py", line=3)
    assert {"file": "a b/c.py", "line": 3} == location.to_dict(tmp_path)
    assert str(tmp_path) in location.to_dict(tmp_path / "other")["file"]
