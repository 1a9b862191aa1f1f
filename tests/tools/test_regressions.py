"""Putting faults back: edits in a copy, and what a report has that the baseline has not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rollproof.errors import UsageError
from tests.support.made_up_reports import checked, finding, reported
from tools.docs.found_page import found_page
from tools.docs.regressions_page import regressions_page
from tools.regressions import (
    FAULTS,
    Edit,
    Fault,
    Regressions,
    compared,
    copied,
    names_cause,
    planted,
    problem,
    store,
)

FIXED = "def cut(rows, tokens):\n    return rows[: len(tokens)]\n"
FAULT = Fault(
    reference="toy#1",
    what="rows are not cut",
    parts=("client",),
    check="routes.rows",
    kind="too many",
    cause="were not cut",
    edits=(Edit(file="toy/core.py", find=r"rows\[: len\((\w+)\)\]", put=r"rows  # \1"),),
)


def toy(folder: Path) -> Path:
    """Write a package ``toy`` in which the fault is repaired."""
    file = folder / "toy" / "core.py"
    file.parent.mkdir()
    file.write_text(FIXED, encoding="utf-8")
    return file


def test_an_edit_lasts_as_long_as_its_context(tmp_path: Path) -> None:
    """The file has the edit, and its compiled form is gone, as afterwards: the interpreter compares
    times of whole seconds only.
    """
    file = toy(tmp_path)
    cached = Path(importlib.util.cache_from_source(str(file)))
    cached.parent.mkdir()
    cached.touch()
    with planted(tmp_path, FAULT.edits):
        assert "def cut(rows, tokens):\n    return rows  # tokens\n" == file.read_text("utf-8")
        assert not cached.exists()
        cached.touch()
    assert FIXED == file.read_text("utf-8")
    assert not cached.exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            Edit(file="toy/core.py", find="columns", put="x"),
            "'columns' matches 0 times in toy/core",
        ),
        (Edit(file="toy/core.py", find="rows", put="x"), "'rows' matches 2 times in toy/core.py"),
        (Edit(file="toy/core.py", find="cut", put="cut"), "'cut' changes nothing in toy/core.py"),
        (Edit(file="toy/gone.py", find="cut", put="x"), "toy/gone.py is not there"),
    ],
)
def test_an_edit_that_does_not_fit_changes_no_file(
    tmp_path: Path, edit: Edit, message: str
) -> None:
    """A release that has moved the code is an error: judged as it is, it would be one more pass."""
    file = toy(tmp_path)
    with pytest.raises(UsageError, match=message), planted(tmp_path, [*FAULT.edits, edit]):
        pytest.fail("nothing is planted")
    assert FIXED == file.read_text("utf-8")


def test_a_checkout_is_copied_without_its_repository(tmp_path: Path) -> None:
    """With git's data the copy would be called a commit, with changes."""
    (tmp_path / "from" / ".git").mkdir(parents=True)
    toy(tmp_path / "from")
    copied("slime", tmp_path / "to", tmp_path / "from")
    assert ["toy"] == [path.name for path in (tmp_path / "to").iterdir()]


def _failed(check: str, *kinds: str, verdict: str = "fail", **more: Any) -> dict[str, Any]:
    findings = [finding("the rows were not cut", kind) for kind in kinds]
    return {**checked(check, verdict, findings), "kinds": dict.fromkeys(kinds, 1), **more}


def _report(*checks: dict[str, Any]) -> dict[str, Any]:
    return {**reported("toy client", *checks), "recipe": {"part": "client"}}


BASELINE = _report(
    _failed("routes.rows", "too few rows", verdict="expected fail"),
    checked("stitch.tokens", "pass"),
)


def test_what_the_release_fails_is_not_the_fault() -> None:
    """The same report finds nothing, and so does a check that is unknown."""
    assert "nothing" == compared(BASELINE, BASELINE, FAULT)["found"]
    other = _report(BASELINE["checks"][0], checked("stitch.tokens", "unknown"))
    assert "nothing" == compared(BASELINE, other, FAULT)["found"]


def test_a_new_kind_of_finding_of_the_expected_check_finds_it() -> None:
    """The new kinds are listed by check, and the text of the expected one names the cause."""
    report = _report(
        _failed("routes.rows", "too few rows", "too many rows"), _failed("stitch.tokens", "lost")
    )
    result = compared(BASELINE, report, FAULT)
    assert "expected" == result["found"]
    assert {"routes.rows": ["too many rows"], "stitch.tokens": ["lost"]} == result["checks"]
    assert names_cause(FAULT, result)
    assert None is problem(FAULT, result)


def test_a_known_kind_in_a_new_situation_finds_it() -> None:
    """A known failure excuses its kind of finding only after certain events."""
    fault = Fault(**{**_fields(FAULT), "kind": "too few"})
    report = _report(_failed("routes.rows", "too few rows", otherwise={"too few rows": 3}))
    assert "expected" == compared(BASELINE, report, fault)["found"]


def test_another_check_does_not_count() -> None:
    """Whoever reads its finding looks in another place."""
    result = compared(BASELINE, _report(_failed("stitch.tokens", "lost")), FAULT)
    assert "other" == result["found"]
    assert "routes.rows does not find it; new: stitch.tokens" == problem(FAULT, result)


def test_a_finding_that_does_not_name_the_cause_is_a_problem() -> None:
    """And so is one of a fault that is said to be missed."""
    report = _report(_failed("routes.rows", "too many rows"))
    unnamed = Fault(**{**_fields(FAULT), "cause": "numpy"})
    result = compared(BASELINE, report, unnamed)
    assert "routes.rows finds it, but its finding does not name the cause" == problem(
        unnamed, result
    )
    missed = Fault(**{**_fields(FAULT), "missed": "nothing shows it"})
    assert "it is found, though the file says that it is missed" == problem(missed, result)
    assert None is problem(missed, compared(BASELINE, BASELINE, missed))


def _fields(fault: Fault) -> dict[str, Any]:
    return {name: getattr(fault, name) for name in Fault.__slots__}


def test_a_file_with_mistakes_is_refused(tmp_path: Path) -> None:
    """All of them at once; a stack without a file is answered with those that have one."""
    (tmp_path / "toy.toml").write_text(
        """
        version = "1.0"
        [[fault]]
        reference = "toy#1"
        what = "rows"
        check = "routes.row"
        [[not_planted]]
        reference = "toy#1"
        what = "rows"
        why = "gone"
        in_scope = true
        """,
        encoding="utf-8",
    )
    with pytest.raises(UsageError) as error:
        Regressions.read("toy", tmp_path)
    for text in (
        "toy#1 is listed twice",
        "toy#1 has no edit",
        "toy#1 must name parts or a subject",
        "no check is named routes.row",
    ):
        assert text in str(error.value)
    (tmp_path / "toy.toml").write_text("[[fault]]\nwords = 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"toy\.toml is not as tools/regressions\.py says"):
        Regressions.read("toy", tmp_path)
    with pytest.raises(UsageError, match=r"No faults are listed for 'gone'; .* for: toy\."):
        Regressions.read("gone", tmp_path)


@pytest.mark.parametrize("file", sorted(FAULTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_can_be_read_and_is_shown(file: Path) -> None:
    """One page has those that were run, another each fault that is not put back."""
    known = Regressions.read(file.stem)
    assert f"## {known.stack} {known.version}" in "\n".join(regressions_page())
    left = "\n".join(found_page())
    assert [] == [each for each in known.not_planted if each.reference not in left]


def test_a_result_replaces_that_of_its_fault_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other faults stay, in the order of the file, and all go if the release is another:
    a table has the results of one release.
    """
    monkeypatch.setattr("tools.regressions.RESULTS", tmp_path)
    second = Fault(**{**_fields(FAULT), "reference": "toy#2"})
    known = Regressions(stack="toy", version="1.0", faults=(FAULT, second), not_planted=())
    for fault, seconds in ((second, 1), (FAULT, 2), (second, 3)):
        store(known, 0, fault, {"seconds": seconds})
    stored = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))
    assert [("toy#1", {"seconds": 2}), ("toy#2", {"seconds": 3})] == list(stored["faults"].items())
    newer = Regressions(stack="toy", version="2.0", faults=(FAULT, second), not_planted=())
    store(newer, 0, second, {"seconds": 4})
    stored = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))
    assert {
        "stack": "toy",
        "version": "2.0",
        "seed": 0,
        "faults": {"toy#2": {"seconds": 4}},
    } == stored
