"""The kill matrix: the named checks detect every known bug, no other check fails, and each check
has a bug.
"""

from __future__ import annotations

import re

import pytest

from rollproof.fakes.clients.reference_clients import (
    REFERENCES,
    AsSampledAdapters,
    ClientOptions,
)
from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.invariants import default_registry
from rollproof.verification.kill_matrix import record_traces
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import with_fitting_updates, within_limits
from rollproof.verification.traces import judge
from tests.support import bug_findings
from tests.support.trace_builder import contract

BY_ID = {bug.id: bug for bug in KNOWN_BUGS}
CASES = list({repr(case.to_dict()): case for bug in KNOWN_BUGS for case in bug.cases}.values())


@pytest.mark.parametrize("bug", KNOWN_BUGS, ids=BY_ID)
def test_every_bug_is_killed_and_nothing_else_is_blamed(bug: KnownBug) -> None:
    """All checks in ``detected_by`` and ``may_fail`` fail, and no other does."""
    failed = set(bug_findings.judgement_of(bug).failed)
    assert set(bug.detected_by) <= failed
    assert {*bug.detected_by, *bug.may_fail} == failed


@pytest.mark.parametrize("bug", KNOWN_BUGS, ids=BY_ID)
def test_the_findings_of_every_bug_are_the_recorded_ones(bug: KnownBug) -> None:
    """Counts, words and places of the findings change only on purpose: then record them again with
    ``python -m tests.support.bug_findings``, and read the difference.
    """
    assert bug_findings.recorded()["bugs"].get(bug.id) == bug_findings.findings_of(bug)


def test_the_checks_look_as_often_as_recorded() -> None:
    """Over all known bugs, each check counts the same situations, and gives the same reasons for
    what it could not judge.
    """
    assert bug_findings.recorded()["checks"] == bug_findings.counts_of_checks()


def test_the_class_of_a_bug_has_its_id() -> None:
    """Searching for an id in camel case finds the class that has the fault."""
    for bug in KNOWN_BUGS:
        name = bug.make.__name__ if bug.edit is None else bug.edit.__name__
        assert bug.id.replace("-", "") == name.replace("_", "").lower()


@pytest.mark.parametrize("name", REFERENCES)
def test_the_cases_alone_find_nothing(name: str) -> None:
    """The cases of known bugs, within the limits of a client, are clean under every reference
    client: only the planted fault is detected.
    """
    client = REFERENCES[name]
    limits = getattr(client, "options", ClientOptions()).limits
    adapters = "moving-base" if client is AsSampledAdapters else None
    declared = contract(limits=limits, multi_turn=limits is not None, adapters=adapters)
    for case in CASES:
        fitting = within_limits(with_fitting_updates(case, declared), declared)
        assert () == judge(run_case(client, fitting)).failed, case


def test_every_check_is_killed_by_a_known_bug() -> None:
    """A check without a known bug has never been seen to fail."""
    assert set(default_registry().ids) == {
        check_id for bug in KNOWN_BUGS for check_id in bug.detected_by
    }


def test_bugs_are_named_once_and_say_where_they_come_from() -> None:
    """Ids are distinct and in one style; each bug has a reference, a one-line summary and a check
    that must detect it.
    """
    assert len(BY_ID) == len(KNOWN_BUGS) >= 45
    for bug in KNOWN_BUGS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", bug.id), bug.id
        assert (
            bug.refs and bug.detected_by and bug.summary.endswith(".") and "\n" not in bug.summary
        ), bug.id
        assert not set(bug.detected_by) & set(bug.may_fail), bug.id


@pytest.mark.parametrize(
    "bug", [bug for bug in KNOWN_BUGS if bug.kind == "rollouts"][::6], ids=lambda bug: bug.id
)
def test_a_bug_gives_the_same_traces_each_time(bug: KnownBug) -> None:
    """Known bugs are as repeatable as references: the same events, twice."""
    first, second = ([repr(trace.events) for trace in record_traces(bug)] for _ in range(2))
    assert first == second
