from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the README of one kind."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [part.partition("```")[0] for part in text.split(f"```{kind}\n")[1:]]


def block_with(words: str) -> list[str]:
    """The lines of the one console block of the README that contains the words."""
    (block,) = (block for block in blocks("console") if words in block)
    return block.splitlines()


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_closed(page: Path) -> None:
    """No heading and no table is within a block: one that is left open turns the rest of its page
    inside out.
    """
    within, swallowed = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            within = not within
        elif within and line.startswith(("## ", "### ", "|---")):
            swallowed.append(f"{number}: {line}")

    assert not swallowed, f"{page.name}: a block before line {swallowed[0]} is not closed"
    assert not within, f"{page.name}: its last block is not closed"


def run_example(pytester: pytest.Pytester, *files: str) -> pytest.RunResult:
    """What pytest says of some files of docs/example."""
    for file in files:
        shutil.copy(ROOT / "docs" / "example" / file, pytester.path)
    return pytester.runpytest_subprocess("-q")


def test_the_readme_shows_the_example_as_it_is() -> None:
    """The code of the README is the file of docs/example."""
    assert (ROOT / "docs" / "example" / "test_my_stack.py").read_text(encoding="utf-8") == blocks(
        "python"
    )[0]


def test_the_readme_has_the_test_command_that_ci_runs() -> None:
    """Both commands set themselves up, and CI starts from the second one."""
    verify, cpu = block_with("nox -s cpu")

    assert verify.endswith("pip install -q nox && .venv/bin/nox -s verify")
    assert f"{cpu} lint types docs\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def matches(shown: str, printed: str) -> bool:
    """Whether a line of a page is a line that was printed: ``...`` stands for anything, and a rule
    has any length.
    """
    texts = [
        line.strip("=_ ") if line.startswith(("==", "__")) else line for line in (shown, printed)
    ]
    pattern = ".*".join(map(re.escape, texts[0].split("...")))
    return re.fullmatch(pattern, texts[1]) is not None


def test_the_example_fails_as_the_readme_says(pytester: pytest.Pytester) -> None:
    """Run as a user would, the example's fault is found, nothing else fails, and each line that the
    README shows is printed, in this order.
    """
    result = run_example(pytester, "test_my_stack.py", "my_client.py")
    assert 1 == result.parseoutcomes()["failed"]

    printed = iter(result.outlines)
    missing = [
        shown
        for shown in block_with("rerun")
        if shown.strip() != "..." and not any(matches(shown, line) for line in printed)
    ]
    assert [] == missing


def test_the_tagged_example_is_green(pytester: pytest.Pytester) -> None:
    """The example that appends only what is missing, and tags its samples, passes with both ways to
    show versions.
    """
    result = run_example(pytester, "test_my_tagged_stack.py", "my_tagged_client.py")

    assert pytest.ExitCode.OK == result.ret
    assert 100 < result.parseoutcomes()["passed"]
