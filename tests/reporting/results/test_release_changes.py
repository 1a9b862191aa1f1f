"""What changed between stored releases, and since when something fails."""

from __future__ import annotations

from rollproof.reporting.results.release_changes import (
    changes_of,
    faults_of,
    releases_by_name,
)
from rollproof.reporting.results.stored_runs import StoredCheck, StoredPart, StoredRun


def run(
    version: str, checks: dict[str, str], date: str = "2026-11-30", part: str = "client"
) -> StoredRun:
    stored = {check: StoredCheck(verdict=verdict) for check, verdict in checks.items()}
    return StoredRun(
        results="stack",
        name="verl",
        version=version,
        date=date,
        rollproof="0.1.0",
        profile="pr",
        seed=0,
        parts={part: StoredPart(checks=stored)},
    )


def test_releases_are_in_the_order_of_their_numbers() -> None:
    """Whichever was judged last; commits have no numbers, and are in the order of their days."""
    numbered = [run("0.10.0", {}, "2026-01-01"), run("0.9.1", {}, "2026-02-01")]
    commits = [run("b9", {}, "2026-01-01"), run("a1", {}, "2026-02-01")]
    for runs, order in ((numbered, ["0.9.1", "0.10.0"]), (commits, ["b9", "a1"])):
        (found,) = releases_by_name(runs).values()
        assert order == [release.version for release in found]


def test_the_newest_run_of_a_release_counts() -> None:
    runs = [run("1", {"a": "fail"}, "2026-02-01"), run("1", {"a": "pass"}, "2026-01-01")]
    ((only,),) = releases_by_name(runs).values()
    assert "fail" == only.parts["client"].checks["a"].verdict


def test_changes_are_those_of_verdicts() -> None:
    """An expected failure is a failure; a check that does not apply is as one that was not run."""
    older = {"a": "pass", "b": "fail", "c": "not applicable", "d": "pass", "e": "unknown"}
    newer = {"a": "expected fail", "b": "expected fail", "d": "not applicable", "f": "pass"}
    changes = changes_of(releases_by_name([run("1", older), run("2", newer)]))

    assert {
        "verl 2, client: a was pass in 1, and is fail": True,
        "verl 2, client: d is not judged any more (was pass in 1)": False,
        "verl 2, client: e is not judged any more (was unknown in 1)": False,
        "verl 2, client: f is pass, and was not judged in 1": False,
    } == {change.text: change.is_worse for change in changes}


def test_a_new_part_is_no_change_of_its_checks() -> None:
    runs = [run("1", {"a": "pass"}), run("2", {"a": "fail"}, part="loop")]
    assert [] == changes_of(releases_by_name(runs))


def test_the_age_of_a_fault_is_that_of_the_releases_in_a_row() -> None:
    """One that was repaired in between began anew; one of a release before the newest is no fault
    of it.
    """
    runs = [
        run("1", {"a": "fail", "b": "fail", "c": "fail"}),
        run("2", {"a": "fail", "b": "pass", "c": "fail"}),
        run("3", {"a": "expected fail", "b": "fail", "c": "pass"}),
    ]
    faults = faults_of(releases_by_name(runs))
    assert [("a", "1", 3), ("b", "3", 1)] == [
        (fault.check, fault.since, fault.releases) for fault in faults
    ]
