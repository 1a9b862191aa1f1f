"""verl itself, where it is installed: its verdicts are those of its matrix, and its subjects keep
rollproof's rules.

Importing verl takes 10 to 25 s, so it happens once, in a fixture.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.records import Request
from rollproof.judging.known_failures import apply_known_failures
from rollproof.judging.report import Report
from rollproof.stacks import Stack, load_stack
from rollproof.stacks.matrix import Matrix
from rollproof.stacks.verl.release import VERSIONS
from rollproof.verification.batches import judge_batches
from rollproof.verification.expected_failures import Outcome
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.runner import run_case

MATRIX = Matrix.read("verl")
PARTS = ("client", "single-turn-agent-loop", "tool-agent-loop", "checkpoint-manager")
BATCHES = ("sample-dicts", "padded-batch", "unpadded-batch")
CORRECTIONS = (
    *("token-tis", "normalised-token-tis", "sequence-tis", "icepop"),
    *("rejection", "bypass-reinforce"),
)

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason=(
        "verl is not installed: pip install -r harness/stacks/verl/requirements.txt && pip install"
        " --no-deps verl==0.9.1"
    ),
)
# a framework's own warnings, and those of what it imports, are not ours to fix
quiet = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def verl() -> Iterator[Stack]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield load_stack("verl")


def _compare(report: Report, version: str, part: str) -> None:
    outcome = Outcome.of_report(report.to_dict())
    # verdicts that stay unknown in one part are decided in another: the whole is what `verify
    # --matrix` judges
    decided = {check: said for check, said in outcome.verdicts.items() if said != "unknown"}
    assert [] == MATRIX.deviations(version, part, replace(outcome, verdicts=decided))
    assert not [result.id for result in report.results if "crashed" in result.reason]


@needs_verl
@quiet
@pytest.mark.parametrize("part", PARTS)
def test_each_part_fails_the_checks_that_the_matrix_names_and_no_others(
    verl: Stack, part: str
) -> None:
    """A release is judged as it was when its faults were shown by hand: a new finding is a new
    fault, or a false alarm.
    """
    factory: Any = verl.parts[part]
    known, ways = MATRIX.reasons(verl.version, part), MATRIX.known_failures(verl.version, part)
    report = run_conformance(
        factory, name=part, cases=factory.cases("pr", 0), seed=0, expected=known, ways=ways
    )
    _compare(report, verl.version, part)
    assert report.canary is not None and (report.canary.red or report.canary.planted is None)


@needs_verl
@quiet
@pytest.mark.parametrize("name", BATCHES)
def test_each_batch_conversion_fails_the_checks_that_the_matrix_names_and_no_others(
    verl: Stack, name: str
) -> None:
    """As for the parts, on samples that need no engine."""
    if name not in verl.batches:
        pytest.skip(f"verl {verl.version} needs flash-attn for {name}")
    _compare(
        apply_known_failures(
            judge_batches(verl.batches[name], name=name), MATRIX.known_failures(verl.version, name)
        ),
        verl.version,
        name,
    )


@needs_verl
@quiet
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_one_case_gives_one_trace(verl: Stack, part: str, flavour: str) -> None:
    """The request ids that verl draws, and the server that it takes among equals, are not in the
    trace.
    """
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(2 + i, 12, 13), max_tokens=5) for i in range(3)
    )
    actions = tuple(
        Action(when=Trigger(request=f"r{i}", tokens=1 + i), do=ActionKind.ABORT) for i in range(3)
    )
    case = Case(flavour=flavour, requests=requests, actions=actions, servers=3, seed=4)
    first, second = (run_case(verl.parts[part], case) for _ in range(2))
    assert [repr(event) for event in first] == [repr(event) for event in second]


@needs_verl
@quiet
def test_a_quiet_run_of_the_newest_release_is_clean(verl: Stack) -> None:
    """Without aborts, updates and faults there is nothing to find: what the matrix lists comes from
    schedules, not from the adapter.
    """
    if verl.version != "0.9.1":
        pytest.skip("older releases change what their caller hands in, whatever happens")
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(2 + i, 12, 13), max_tokens=3 + i) for i in range(3)
    )
    for part in PARTS:
        for flavour in ("vllm", "sglang"):
            report = run_conformance(
                verl.parts[part],
                name=part,
                cases=[Case(flavour=flavour, requests=requests, servers=2)],
                canary=False,
            )
            assert () == report.failed


def test_the_matrix_names_what_exists() -> None:
    """Parts, releases and scripts of the matrix exist (checks are looked up when it is read)."""
    assert set(MATRIX.pinned) <= set(VERSIONS)
    for entry in MATRIX.entries:
        named = {
            part
            for table in (entry.fails, entry.may_fail, entry.unknown)
            for parts in table.values()
            for part in parts
        }
        assert named <= {*PARTS, *BATCHES, *CORRECTIONS}, entry.name
