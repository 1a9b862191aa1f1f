from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tools" / "locks").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {
    requirement.name: requirement.specifier
    for text in (
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["serve"],
        *PROJECT["optional-dependencies"]["gap"],
    )
    for requirement in [Requirement(text)]
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_locked_versions_are_within_our_bounds(file: Path) -> None:
    """No repository has to move a version that it locks in order to adopt rollproof."""
    pins = [
        Requirement(line.partition("#")[0])
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    refused = [
        str(pin)
        for pin in pins
        if pin.name in NEEDED and str(pin.specifier).removeprefix("==") not in NEEDED[pin.name]
    ]

    assert ([], True) == (refused, bool(pins))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_when_and_from_what_it_was_made(file: Path) -> None:
    """The first line has repository, lock file, commit and date, the second the Python."""
    first, second, *_ = file.read_text(encoding="utf-8").splitlines()

    assert re.fullmatch(
        r"# Versions that [\w/-]+ locks of what rollproof needs: [\w.]+ of [0-9a-f]{9},"
        r" 20\d\d-\d\d-\d\d\.",
        first,
    )
    assert re.fullmatch(r"# python: 3\.\d+", second)
