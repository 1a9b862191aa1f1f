"""The mutation runner: which mutants it draws, which tests it runs against each, which survivors it
counts, and what it prints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="nox -s mutation installs cosmic-ray")
pytest.importorskip("coverage", reason="nox -s mutation installs coverage")

from cosmic_ray import work_item
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, WorkerOutcome, WorkItem, WorkResult

from tools import mutation, mutation_tests

MODULE = "rollproof/invariants/routes/content.py"


def mutant(number: int, operator: str = "core/AddNot", line: int = 1) -> WorkItem:
    """A mutant of the module ``content`` of routes."""
    spec = MutationSpec(
        module_path=Path(MODULE),
        operator_name=operator,
        occurrence=number,
        start_pos=(line, 0),
        end_pos=(line, 5),
    )
    return WorkItem.single(f"job-{number}", spec)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one module of two lines."""
    (tmp_path / MODULE).parent.mkdir(parents=True)
    (tmp_path / MODULE).write_text("if TYPE_CHECKING:\n    if rows:\n", encoding="utf-8")
    return tmp_path


def test_a_seed_draws_the_same_mutants_in_any_order_of_the_list(checkout: Path) -> None:
    """The sample depends on the seed and on the mutants, not on the order of a database."""
    items = [mutant(number, line=2) for number in range(50)]
    drawn = mutation.chosen(items, checkout, 5, seed=1)
    assert drawn == mutation.chosen(items[::-1], checkout, 5, seed=1)
    assert drawn != mutation.chosen(items, checkout, 5, seed=2)
    assert len({item.job_id for item in drawn}) == 5


def test_mutants_without_effect_are_left_out(checkout: Path) -> None:
    """No mutant of a line for type checkers, and none of an operator that breaks every program."""
    items = [mutant(0, line=1), mutant(1, "core/RemoveDecorator", line=2), mutant(2, line=2)]
    assert ["job-2"] == [item.job_id for item in mutation.chosen(items, checkout, None, seed=0)]


def test_the_report_counts_survivors_that_nothing_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An explained survivor is not counted, another one is printed with its change."""
    lines = (
        (mutation.ROOT / "invariants/routes/content.py").read_text(encoding="utf-8").splitlines()
    )
    number = next(i for i, line in enumerate(lines, 1) if re.match("    if .", line))
    killed, survived = work_item.TestOutcome.KILLED, work_item.TestOutcome.SURVIVED
    outcomes = (killed, survived, survived)
    file = tmp_path / "mutants.sqlite"
    with use_db(str(file)) as database:
        operators = ("core/AddNot", "core/AddNot", "core/ReplaceAndWithOr")
        items = [mutant(i, operator, line=number) for i, operator in enumerate(operators)]
        database.add_work_items(items)
        for item, outcome in zip(items, outcomes, strict=True):
            result = WorkResult(
                worker_outcome=WorkerOutcome.NORMAL,
                test_outcome=outcome,
                diff="--- a\n+++ b\n-old\n+new",
            )
            database.set_result(item.job_id, result)
    explained = mutation.Explained(
        module="invariants/routes/content.py",
        line=lines[number - 1].strip(),
        operator="ReplaceAndWithOr",
        why="for this test",
    )
    assert 1 == mutation.report(file, [explained])
    printed = capsys.readouterr().out
    assert f"invariants/routes/content.py:{number} AddNot\n    -old\n    +new\n" in printed
    assert "routes: 1 of 2 detected" in printed
    assert "1 of 2 mutants detected (50.0 %), 1 explained survivors not counted" in printed


def test_every_explained_survivor_names_a_line_that_exists() -> None:
    """An explanation of a line that has changed explains nothing any more."""
    for entry in mutation.explanations():
        source = (mutation.ROOT / entry.module).read_text(encoding="utf-8")
        assert entry.line in [line.strip() for line in source.splitlines()], entry
        assert entry.why.endswith("."), entry


def test_a_condition_over_several_lines_is_one_statement() -> None:
    """Also within another one, and a line of its body is not."""
    source = "def f(a, b):\n    if (\n        a\n        or b\n    ):\n        return (\n 1)\n"
    lines = [mutation.statement_at(source, line) for line in range(1, 9)]
    assert [1, 2, 2, 2, 2, 6, 6, 8] == lines


def test_the_tests_of_a_line_are_those_that_reach_it(tmp_path: Path) -> None:
    """Quick tests first; an expression over several lines is noted at its first; a line that runs
    at import is tested by whatever uses the module; a test that fails anyway says nothing.
    """
    for part, tests in enumerate((["a", "fails"], ["b"])):
        note = {
            "lines": {MODULE: {"1": [], "4": tests, "9": ["b"]}},
            "seconds": {"a": 2.0, "b": 1.0, "fails": 0.5},
            "imported": ["json"],
            "failed": ["fails"] if part == 0 else [],
        }
        (tmp_path / f"{part}.json").write_text(json.dumps(note), encoding="utf-8")
    reached = mutation_tests.read([tmp_path / "0.json", tmp_path / "1.json"])
    assert ["b", "a"] == reached.tests_of(MODULE, 4, 4)
    assert ["b", "a"] == reached.tests_of(MODULE, 6, 6)
    assert ["b"] == reached.tests_of(MODULE, 9, 9)
    assert ["b", "a"] == reached.tests_of(MODULE, 1, 1)
    assert [] == reached.tests_of("another module", 1, 1)


@pytest.fixture
def small_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one function, a test that needs it to be right, and two others."""
    (tmp_path / MODULE).parent.mkdir(parents=True)
    for folder in (tmp_path / MODULE).relative_to(tmp_path).parents:
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "__init__.py").unlink()
    (tmp_path / MODULE).write_text(
        "def larger(a, b):\n    if a > b:\n        return a\n    return b\n", encoding="utf-8"
    )
    (tmp_path / "test_larger.py").write_text(
        "from rollproof.invariants.routes.content import larger\n\n"
        "def test_it():\n    assert larger(2, 1) == 2\n\n"
        "def test_alike():\n    assert larger(1, 1) == 1\n\n"
        "def test_another():\n    pass\n\n"
        "def test_that_fails():\n    assert larger(1, 2) == 1\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:rollproof")
    return tmp_path


RECORD = """
import sys
from pathlib import Path
from tools import mutation_tests
for part in range(2):
    mutation_tests.record(Path(f"{part}.json"), part, 2, ["test_larger.py"])
"""
DETECT = """
import sys
from pathlib import Path
from tools import mutation_tests
reached = mutation_tests.read([Path("0.json"), Path("1.json")])
sys.dont_write_bytecode = True
print(mutation_tests.detects(reached.tests_of(sys.argv[1], 2, 2), reached))
"""


def run_in(folder: Path, program: str) -> str:
    """Run a program that uses the tool in a folder, and return what it prints last."""
    program = f"import sys; sys.path.append({str(mutation.ROOT)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program, MODULE],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_mutant_is_tested_by_what_reaches_it(small_checkout: Path) -> None:
    """The record names the tests of a line and those that fail anyway; a fault that a test asserts
    is detected, one that none asserts is not.
    """
    run_in(small_checkout, RECORD)
    reached = mutation_tests.read([small_checkout / "0.json", small_checkout / "1.json"])
    assert ("test_larger.py::test_that_fails",) == reached.failed
    assert {"test_larger.py::test_it", "test_larger.py::test_alike"} == set(
        reached.tests_of(MODULE, 2, 2)
    )
    assert ["test_larger.py::test_it"] == reached.tests_of(MODULE, 3, 3)
    source = (small_checkout / MODULE).read_text(encoding="utf-8")
    for operator, detected in ((">", "False"), ("<", "True"), (">=", "False")):
        (small_checkout / MODULE).write_text(source.replace(">", operator), encoding="utf-8")
        assert detected == run_in(small_checkout, DETECT), operator
