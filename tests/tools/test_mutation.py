"""The mutation runner: which mutants it draws, which survivors it counts, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="nox -s mutation installs cosmic-ray")

from cosmic_ray import work_item
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, WorkerOutcome, WorkItem, WorkResult

from tools import mutation

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


def test_each_family_of_checks_has_tests_of_its_own() -> None:
    """The quick tests come first, and they exist."""
    for folder in (mutation.ROOT / "invariants").iterdir():
        if folder.is_dir() and not folder.name.startswith("_"):
            first = mutation.tests_of(folder.name)[0]
            paths = [argument for argument in first if argument.startswith("tests/")]
            assert paths, folder.name
            assert all((mutation.ROOT / path).exists() for path in paths), paths
