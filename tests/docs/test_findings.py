"""The pages of docs/findings are issues that can be sent: nothing is left out, and the index lists
them. tests/stacks/test_findings.py runs their scripts.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollproof.invariants import default_registry

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "findings").glob("[0-9]*.md"))
SECTIONS = (
    *("Script", "Observed", "Expected", "Cause"),
    *("Effect on training", "Suggested fix", "Found by"),
)
ROWS = ("release", "install", "kind", "place", "upstream", "run with")

_FENCE = re.compile(r"```(\w+)\n(.*?)```\n", re.DOTALL)
_PLACE = re.compile(r"`(\S+\.py):(\d+)`(?: in `([\w.]+)`)?")
_PINNED = re.compile(r"pip install --no-deps ([\w-]+)==([\w.]+)`")
_COMMAND = re.compile(
    r"--stack ([\w-]+)(?:==([\w.]+))?(?: --checkout \S+)? --only ([\w.-]+)(?: --seed (\d+))?`"
)
_RECORD = re.compile(r"\[(\w+\.py \w+)\]\(\.\./(track_record/\w+\.py)\)")
_ROW = re.compile(
    r"^\| \[(\d+)\]\((\S+)\) \| ([^|]+) \| [^|]+ \| [^|]+ \| (\w+) \| (.*) \|$", re.MULTILINE
)
_CHECKED_OUT = re.compile(r"git clone \S+ ([\w-]+) && git -C \S+ checkout (\w+)`")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A page of docs/findings.

    Fields:
        title: Its heading.
        rows: The table below it, by the first column.
        sections: The text of each section by its heading.
    """

    title: str
    rows: dict[str, str]
    sections: dict[str, str]

    @classmethod
    def read(cls, page: Path) -> Finding:
        """Read a page."""
        head, *parts = page.read_text(encoding="utf-8").split("\n## ")
        rows = re.findall(r"^\| (\w[\w ]*) \| (.*) \|$", head, re.MULTILINE)
        return cls(
            title=head.partition("\n")[0].removeprefix("# "),
            rows=dict(rows),
            sections=dict(part.split("\n", 1) for part in parts),
        )

    @property
    def script(self) -> str:
        """The Python program."""
        ((language, text),) = _FENCE.findall(self.sections["Script"])
        assert "python" == language
        return str(text)

    @property
    def printed(self) -> str:
        """What the program prints."""
        ((language, text),) = _FENCE.findall(self.sections["Observed"])
        assert "text" == language
        return str(text)

    @property
    def places(self) -> list[tuple[str, int, str]]:
        """File, line and function of each place in the release."""
        return [(file, int(line), name) for file, line, name in _PLACE.findall(self.rows["place"])]

    @property
    def distribution(self) -> str:
        """Name on the package index, or of the stack for a checkout."""
        return self._installed()[0]

    @property
    def version(self) -> str:
        """The release, or the commit of a checkout."""
        return self._installed()[1]

    @property
    def needs(self) -> dict[str, str]:
        """Versions of other packages of which the script uses something, by name."""
        return dict(re.findall(r"and ([\w-]+) ([\d.]+)$", self.rows["install"]))

    @property
    def mocks(self) -> dict[str, str]:
        """Packages that were mocked where the script ran, with the version that the mock has."""
        _, _, named = self.rows["run with"].partition("; mocks in place of ")
        pairs = (name.split(" ") for name in re.findall(r"`([^`]+)`", named))
        return {name: version[0] if version else "1.0" for name, *version in pairs}

    def _installed(self) -> tuple[str, str]:
        install = self.rows["install"]
        match = _PINNED.search(install) or _CHECKED_OUT.search(install)
        assert match, install
        return match[1], match[2]


def test_there_are_findings_and_their_numbers_have_no_gap() -> None:
    """At least thirty, numbered from 1 by importance."""
    assert len(PAGES) >= 30
    assert list(range(1, len(PAGES) + 1)) == [int(page.stem.partition("-")[0]) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_all_that_an_issue_needs(page: Path) -> None:
    """A heading, the rows of its table, its sections in order with a text each, one valid program
    of at most 60 lines that imports nothing of rollproof, and what it prints.
    """
    finding = Finding.read(page)
    assert finding.title
    assert list(ROWS) == list(finding.rows)
    assert finding.rows["kind"] in ("fault", "choice")
    assert finding.places
    assert list(SECTIONS) == list(finding.sections)
    for name, text in finding.sections.items():
        assert _FENCE.sub("", text).strip() or name == "Script", name
    ast.parse(finding.script)
    assert "rollproof" not in finding.script
    assert len(re.findall(r"^.*\S", finding.script, re.MULTILINE)) <= 60
    assert finding.printed.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_of_a_page_is_a_run_that_finds_it(page: Path) -> None:
    """A check of a stack that a page repeats is one that docs/track_record/found_by.toml has."""
    found = Finding.read(page).sections["Found by"].replace("\n", " ")
    command = _COMMAND.search(found)
    if command is None:
        return
    ((script, _),) = _RECORD.findall(found)
    runs = tomllib.loads((DOCS / "track_record" / "found_by.toml").read_text(encoding="utf-8"))
    stack, version, check, seed = command.groups()
    assert any(
        (stack, check, int(seed or 0)) == (run["stack"], run["check"], run.get("seed", 0))
        and version in (None, run["version"])
        for run in runs[script]["finds"]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_checks_and_scripts_that_exist(page: Path) -> None:
    """The check that found it, if one did, and the longer script of the track record."""
    found = Finding.read(page).sections["Found by"]
    checks = {check.id for check in default_registry()}
    families = {name.partition(".")[0] for name in checks}
    named = re.findall(r"`([a-z]+)\.([a-z0-9-]+)`", found)
    assert not {f"{family}.{name}" for family, name in named if family in families} - checks
    ((script, link),) = _RECORD.findall(found)
    fault = script.partition(" ")[2]
    assert f"[{fault}]({link})" in (DOCS / "track-record.md").read_text(encoding="utf-8")


def test_the_index_lists_every_page() -> None:
    """In order, with release, kind and upstream as the page has them."""
    index = (DOCS / "findings" / "README.md").read_text(encoding="utf-8")
    expected = []
    for number, page in enumerate(PAGES, 1):
        rows_of_page = Finding.read(page).rows
        texts = (rows_of_page[name] for name in ("release", "kind", "upstream"))
        expected.append((str(number), page.name, *texts))
    assert expected == _ROW.findall(index)
