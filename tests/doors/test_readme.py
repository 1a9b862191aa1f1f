from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the README of one kind."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [part.partition("```")[0] for part in text.split(f"```{kind}\n")[1:]]


def test_the_readme_shows_the_example_as_it_is() -> None:
    """The code of the README is the file of docs/example."""
    assert (ROOT / "docs" / "example" / "test_my_stack.py").read_text(encoding="utf-8") == blocks("python")[0]


def test_the_readme_has_the_test_command_that_ci_runs() -> None:
    """Both commands set themselves up, and CI starts from the second one."""
    verify, cpu = blocks("console")[0].splitlines()

    assert verify.endswith("pip install -q nox && .venv/bin/nox -s verify")
    assert f"{cpu} lint types docs\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_example_fails_as_the_readme_says(pytester: pytest.Pytester) -> None:
    """Run as a user would, the example's fault is found with the finding that the README shows, and nothing else fails."""
    for file in (ROOT / "docs" / "example").glob("*.py"):
        shutil.copy(file, pytester.path)
    result = pytester.runpytest_subprocess("-q")
    shown = blocks("console")[1].splitlines()
    finding = shown[: next(i for i, line in enumerate(shown) if "witness" in line)]

    assert finding[1:] == result.outlines[(start := result.outlines.index(finding[1])) : start + len(finding) - 1]
    assert 1 == result.parseoutcomes()["failed"]
