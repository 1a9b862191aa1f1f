"""The column "found by" of docs/track-record.md: what a run of a release finds, and where.

docs/track_record/found_by.toml has the parts and kinds of findings of each check that a cell names.
The runs take as long as ``rollproof verify --stack``: they are for environments in which a stack is
installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollproof.stacks import installed_version, release_of, requirements_file
from rollproof.stacks.matrix import Entry, Matrix
from tests.stacks.test_released import CHECKOUTS

DOCS = Path(__file__).parents[2] / "docs"
RECORD = (DOCS / "track-record.md").read_text(encoding="utf-8")
FOUND_BY = DOCS / "track_record" / "found_by.toml"
HELD = (
    *("verl", "skyrl", "trl", "openrlhf"),
    *("areal", "verifiers", "rlinf", "slime", "miles", "prime-rl", "nemo-rl", "roll"),
)
"""The stacks whose cells are held."""

_LINK = re.compile(r"\[(\w+)\]\(track_record/(\w+\.py)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run of a release: ``rollproof verify --stack STACK --profile PROFILE --seed N``."""

    stack: str
    version: str
    profile: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Find:
    """What a run finds in a part, and the script that shows it by hand."""

    run: Run
    part: str
    check: str
    kind: str
    script: str


def cells() -> list[tuple[str, str]]:
    """Every cell of the column, with the script of its row."""
    out, script = [], ""
    for line in RECORD.splitlines():
        columns = line.split(" | ")
        if re.match(r"\| \d+ \| ", line) and len(columns) == 4:
            link = _LINK.search(columns[1])
            # a row without a link is shown by the function of the row before
            script = f"{link[2]} {link[1]}" if link else script
            out.append((script, columns[2]))
    return out


def finds() -> list[Find]:
    """What found_by.toml says."""
    return [
        Find(
            run=Run(
                stack=found["stack"],
                version=found["version"],
                profile=found.get("profile", "pr"),
                seed=found.get("seed", 0),
            ),
            part=part,
            check=found["check"],
            kind=found["kind"],
            script=script,
        )
        for script, entry in tomllib.loads(FOUND_BY.read_text(encoding="utf-8")).items()
        for found in entry["finds"]
        for part in found["parts"]
    ]


FINDS = finds()
RUNS = sorted({find.run for find in FINDS}, key=repr)


def entries_of(find: Find) -> list[Entry]:
    """The entries of the matrix for what ``find`` says."""
    return [
        entry
        for entry in Matrix.read(find.run.stack).entries
        if entry.script == find.script
        and find.kind in entry.shows.get(find.check, ())
        and any(
            find.check in entry.checks(table, find.run.version, find.part)
            for table in ("fails", "may_fail")
        )
    ]


def test_each_cell_names_the_checks_that_find_its_fault() -> None:
    """Those of found_by.toml, or it says that no run finds it."""
    held = {
        entry.script
        for stack in HELD
        for entry in Matrix.read(stack).entries
        if entry.kind in ("fault", "choice")
    }
    expected: dict[str, set[str]] = defaultdict(set)
    for find in FINDS:
        expected[find.script].add(find.check)
    named: dict[str, set[str]] = defaultdict(set)
    for script, cell in cells():
        if script in held:
            checks = re.findall(r"`([a-z]+\.[a-z0-9-]+)`", cell)
            assert checks or cell.startswith(("none", "by hand", "by reading", "with")), cell
            named[script].update(checks)
    assert dict(expected) == {script: checks for script, checks in named.items() if checks}


@pytest.mark.parametrize("find", FINDS, ids=lambda find: f"{find.run.stack}-{find.check}")
def test_the_finds_are_those_of_the_matrix(find: Find) -> None:
    """The script of the row belongs to an entry in which the check fails, or may fail, in that part
    with that kind of finding.
    """
    assert 1 == len(entries_of(find)), find


@pytest.mark.parametrize("stack", HELD)
def test_every_failing_check_of_the_matrix_is_among_the_finds(stack: str) -> None:
    """Each part of each check that a fault or a choice fails."""
    expected = {
        (entry.script, check, part)
        for entry in Matrix.read(stack).entries
        if entry.kind in ("fault", "choice")
        for check, parts in entry.fails.items()
        for part in parts
    }
    said = {(find.script, find.check, find.part) for find in FINDS if find.run.stack == stack}
    assert set() == expected - said


@pytest.mark.parametrize(
    # `nox -s upstream -- NAME --track-record` selects those of a release
    "run",
    RUNS,
    ids=lambda run: f"{run.stack}-{run.version}-{run.profile}-{run.seed}",
)
def test_a_run_of_the_release_finds_what_the_cells_say(run: Run, tmp_path: Path) -> None:
    """In each part, each kind of finding, in a case in which the fault of the row can occur."""
    report = judged(run, tmp_path)
    known: dict[tuple[str, str], list[str]] = {}
    kinds: dict[tuple[str, str], set[str]] = defaultdict(set)
    for part in report.get("reports", [report]):
        for check in part["checks"]:
            place = (part["recipe"]["part"], check["id"])
            known[place], kinds[place] = check.get("known", []), set(check.get("kinds", ()))
    missing = [
        find
        for find in FINDS
        if find.run == run
        and not (
            find.kind in kinds[find.part, find.check]
            and any(entry.reason in known[find.part, find.check] for entry in entries_of(find))
        )
    ]
    assert [] == missing


def judged(run: Run, folder: Path) -> dict[str, Any]:
    """The report of ``run``, in a process of its own; skips where the release is not there."""
    variable, options = CHECKOUTS.get(run.stack), []
    if variable is not None and variable not in os.environ:
        pytest.skip(f"{variable} does not name a checkout (see {requirements_file(run.stack)})")
    if variable is not None:
        options = ["--checkout", os.environ[variable]]
    elif run.version != (version := installed_version(release_of(run.stack).distribution)):
        pytest.skip(
            f"{run.stack} {run.version} is not installed, but {version}: see"
            f" {requirements_file(run.stack)}"
        )
    parts = sorted({find.part for find in FINDS if find.run == run})
    file = folder / "report.json"
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("rollproof")), "verify", "--matrix", "-j", "1"),
            *("--stack", f"{run.stack}=={run.version}", "--profile", run.profile),
            *("--seed", str(run.seed), "--json", str(file), *options),
            *(option for part in parts for option in ("--part", part)),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report
