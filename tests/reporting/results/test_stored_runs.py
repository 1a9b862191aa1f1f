"""Stored runs hold what a report says of a release, and damaged or foreign files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollproof.errors import UsageError
from rollproof.reporting.results.stored_runs import (
    StoredRun,
    read_runs,
    runs_of_report,
    write_run,
)
from tests.support.made_up_reports import checked, finding, moment, reported

DAY = "2026-11-30"


def of_stack(version: str = "0.9.1", *checks: dict[str, Any], part: str = "client") -> Any:
    recipe = {"stack": "verl", "version": version, "part": part}
    return {**reported(f"verl.{part}", *checks), "recipe": recipe}


def stored(*reports: Any, **options: Any) -> list[StoredRun]:
    whole = {**reports[0], "reports": list(reports)}
    return runs_of_report(whole, **{"date": DAY, **options})


def test_parts_of_a_release_are_one_run() -> None:
    """With verdict, reason and number of findings of each check, and the command for each part."""
    rows = checked("routes.rows", "fail", [finding("a"), finding("b")], "2 findings")
    (run,) = stored(of_stack("0.9.1", rows), of_stack("0.9.1", part="loop"))

    assert ("stack", "verl", "0.9.1") == run.key
    assert {"client", "loop"} == set(run.parts)
    check = run.parts["client"].checks["routes.rows"]
    assert ("fail", "2 findings", 2) == (check.verdict, check.reason, check.found)
    assert (
        "rollproof verify --stack verl==0.9.1 --part client --profile pr --seed 0"
        == run.parts["client"].command
    )


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Findings with their stories, one of each kind; files of the run's machine are left out."""
    story = [moment(number, f"event {number}") for number in range(30)]
    story[2]["broke"] = True
    found = [
        {
            **finding("a", "one kind", story),
            "where": {"request": "r0", "index": 3, "value": -0.5, "padded": True, "list": [1]},
            "witness": "/home/me/.rollproof/a.json",
        },
        finding("b", "one kind"),
        finding("c", "another kind"),
    ]
    (run,) = stored(of_stack("0.9.1", checked("routes.rows", "fail", found)))
    file = write_run(run, tmp_path)

    assert [run] == read_runs([tmp_path]) == read_runs([file])
    assert "/home/me" not in file.read_text()
    first, second = run.parts["client"].checks["routes.rows"].findings
    assert ("a", "c") == (first.title, second.title)
    # the end of a story, and what broke the promise
    assert [2, *range(18, 30)] == [event.index for event in first.story]


def test_a_release_that_is_judged_again_replaces_its_file(tmp_path: Path) -> None:
    for verdict in ("fail", "pass"):
        (run,) = stored(of_stack("0.9.1", checked("routes.rows", verdict)))
        write_run(run, tmp_path)
    (run,) = read_runs([tmp_path])
    assert "pass" == run.parts["client"].checks["routes.rows"].verdict


def test_a_subject_needs_a_version() -> None:
    """A report does not say which version of a subject was judged."""
    report = {**reported("Mine", checked("a", "pass")), "recipe": {"subject": "mine:Client"}}
    with pytest.raises(UsageError, match="which version of mine:Client was judged: --version"):
        stored(report)
    (run,) = stored(report, name="mine", version="7")
    assert ("subject", "mine", "7") == run.key
    assert (
        "rollproof verify --subject mine:Client --profile pr --seed 0"
        == run.parts["mine:Client"].command
    )


@pytest.mark.parametrize("date", ["30.11.2026", "2026-02-30", "2026-11-3", ""])
def test_a_date_must_be_a_day(date: str) -> None:
    with pytest.raises(UsageError, match="must be a day, such as 2026-11-30"):
        stored(of_stack(), date=date)


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"reports": [7]},
        {"checks": []},
        {**of_stack(), "seed": "many"},
        {**of_stack(), "checks": [{"id": "a"}]},
        {**of_stack(), "recipe": {"stack": "verl"}},
    ],
)
def test_what_is_no_report_is_refused(report: Any) -> None:
    with pytest.raises(UsageError, match=r"no report of `rollproof verify --json`|--version"):
        runs_of_report(report, date=DAY)


def test_the_name_of_a_stack_is_the_reports() -> None:
    with pytest.raises(UsageError, match=r"the report names the stack verl 0\.9\.1"):
        stored(of_stack(), name="other")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    """Each with its name: an edit without a new checksum, a wrong type at a leaf, another schema,
    a report in the place of a stored run, a file that is cut.
    """
    (run,) = stored(of_stack("0.9.1", checked("routes.rows", "fail", [finding("a")])))
    file = write_run(run, tmp_path)
    text = file.read_text()
    data = json.loads(text)
    del data["checksum"]
    leaf = json.loads(json.dumps(data))
    leaf["parts"]["client"]["checks"]["routes.rows"]["findings"][0]["story"][0]["index"] = "x"
    cases = {
        text.replace('"fail"', '"pass"'): "does not fit its checksum",
        json.dumps(leaf): r"Expected `int`, got `str` .*story\[0\]\.index",
        json.dumps({**data, "schema": 2}): "has schema 2, and this rollproof reads schema 1",
        json.dumps(of_stack()): "is no stored run",
        text[:100]: "is no stored run",
        "[]": "is no stored run",
    }
    for content, message in cases.items():
        file.write_text(content)
        with pytest.raises(UsageError, match=message) as caught:
            read_runs([tmp_path])
        assert str(file) in str(caught.value)


def test_a_folder_without_runs_names_the_command_that_stores_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rollproof matrix add REPORT\.json --to DIR"):
        read_runs([tmp_path])
