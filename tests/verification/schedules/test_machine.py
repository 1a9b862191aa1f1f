"""The state machine: quiet on a correct manager, and small replayable cases on a broken one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rollproof.core.case import ActionKind, Case
from rollproof.errors import UsageError
from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.verification.runner import run_case
from rollproof.verification.schedules import Limits, profile_named
from rollproof.verification.schedules.machine import machine_for
from rollproof.verification.shrinking import shrink
from rollproof.verification.traces import judge

BOUNDED = settings(
    max_examples=25, stateful_step_count=12, deadline=None, derandomize=True, database=None
)
SMALL = Limits(requests=3, prompt=4, response=6, actions=5, servers=2)


def failing_case(machine: Any) -> tuple[str, Case]:
    """The text of the machine's failure, unshrunk, and the case that it names."""
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine, settings=settings(BOUNDED, phases=[Phase.generate]))
    text = str(caught.value)
    found = re.search(r"The case: (\{.*\})$", text, re.MULTILINE)
    assert found is not None
    return text, Case.from_dict(json.loads(found[1]))


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("as-sampled", "vllm"),
        ("latest-prefill", "sglang"),
        ("engine-keep", "vllm"),
        ("partial-off", "vllm"),
        ("as-sampled-adapters", "vllm"),
    ],
)
def test_correct_managers_pass(name: str, flavour: str) -> None:
    """Whatever the machine does to a reference manager, nothing is found."""
    run_state_machine_as_test(
        machine_for(REFERENCES[name], flavour=flavour, limits=SMALL),
        settings=settings(BOUNDED, phases=[Phase.generate]),
    )


def test_a_planted_bug_is_found_and_its_case_replays() -> None:
    """A manager that concatenates routes on resume is caught; the case in the failure's text shows
    the fault when run again.
    """
    bug = next(bug for bug in KNOWN_BUGS if bug.id == "concat-on-resume")
    make = bug.make
    machine = machine_for(
        make, limits=SMALL, kinds=(ActionKind.ABORT, ActionKind.SYNC), only=("routes",)
    )
    text, case = failing_case(machine)
    assert any(check_id in text for check_id in bug.detected_by)

    def shows(candidate: Case) -> bool:
        return bool(set(judge(run_case(make, candidate)).failed) & set(bug.detected_by))

    assert shows(case)
    smallest = shrink(case, shows)
    assert (1, 1) == (len(smallest.requests), len(smallest.actions))


def test_settings_follow_the_profile() -> None:
    """A profile sets the number of examples and steps, and pr draws the same ones every time."""
    machine = machine_for(REFERENCES["as-sampled"], profile="nightly")
    nightly = profile_named("nightly")
    assert (nightly.max_examples, nightly.steps) == (
        machine.TestCase.settings.max_examples,
        machine.TestCase.settings.stateful_step_count,
    )
    assert not machine.TestCase.settings.derandomize
    assert machine_for(REFERENCES["as-sampled"]).TestCase.settings.derandomize


def test_names_that_do_not_exist_are_refused() -> None:
    """Unknown flavours, checks and profiles are refused when the machine is made."""
    with pytest.raises(UsageError, match="No engine flavour is named"):
        machine_for(REFERENCES["as-sampled"], flavour="nosuch")
    with pytest.raises(UsageError, match="No check or family is named 'nosuch'"):
        machine_for(REFERENCES["as-sampled"], only=("nosuch",))
    with pytest.raises(UsageError, match="No profile is named 'nosuch'"):
        machine_for(REFERENCES["as-sampled"], profile="nosuch")
