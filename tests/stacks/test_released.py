"""Released stacks where they are installed: their adapters add nothing of their own. Verdicts of
whole campaigns: ``nox -s upstream``.

Those of ``CHECKOUTS`` are looked for where an environment variable says, at the folder of a
checkout.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any

import pytest

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.events.rollout import Result, Weights
from rollproof.core.records import Request
from rollproof.judging.known_failures import apply_known_failures
from rollproof.stacks import Stack, load_stack, requirements_file
from rollproof.stacks.matrix import Matrix
from rollproof.verification.batches import judge_batches
from rollproof.verification.corrections import judge_corrections
from rollproof.verification.expected_failures import Outcome
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.runner import run_case

# a framework's own warnings, and those of what it imports, are not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")

PARTS = {
    "skyrl": ("client", "generator"),
    "trl": ("rollout-loop", "tool-loop"),
    "openrlhf": ("single-turn-executor", "multi-turn-executor"),
    "slime": ("partial-rollout",),
    "miles": ("partial-rollout", "single-turn"),
    "areal": ("remote-engine", "inference-bridge"),
    "verifiers": ("train-client",),
    "rlinf": ("sglang-worker",),
    "nemo-rl": ("single-controller", "async-grpo", "sglang-rollouts"),
    "roll": ("rollout-loop",),
    "prime-rl": ("orchestrator",),
}
BATCHES = {
    "skyrl": ("batch-tensors", "training-input"),
    "trl": ("fixed-count-rows", "token-budget-rows"),
    "slime": ("rank-data",),
    "miles": ("rank-data",),
    "areno": ("merged-rollouts",),
    "nemo-rl": ("data-plane", "async-grpo-batch"),
    "roll": ("output-batch",),
    "prime-rl": ("micro-batches",),
}
CORRECTIONS = {
    "openrlhf": ("tis", "icepop", "sequence-mask", "sequence-binary-kl", "token-tv"),
    "prime-rl": ("dppo", "ipo"),
    "areal": (
        "token-mask",
        "token-clamp",
        "sequence-mask",
        "sequence-clamp",
        "token-k2",
        "token-k3",
        "sequence-k3",
    ),
    "slime": ("tis", "icepop"),
    "miles": ("tis", "icepop"),
}
NUMBERED = (
    ("trl", "rollout-loop"),
    ("trl", "tool-loop"),
    ("slime", "partial-rollout"),
    ("miles", "partial-rollout"),
    ("miles", "single-turn"),
    ("nemo-rl", "single-controller"),
    ("nemo-rl", "async-grpo"),
)
"""Parts of stacks that number every update themselves."""
CHECKOUTS = {
    "slime": "ROLLPROOF_SLIME",
    "nemo-rl": "ROLLPROOF_NEMO_RL",
    "prime-rl": "ROLLPROOF_PRIME_RL",
    "roll": "ROLLPROOF_ROLL",
}
_LOADED: dict[str, Stack] = {}


def loaded(name: str) -> Stack:
    """The stack, imported once; skips where it is not there."""
    variable = CHECKOUTS.get(name)
    checkout = os.environ.get(variable) if variable else None
    if variable and checkout is None:
        pytest.skip(
            f"{name} is a checkout: {variable} names its folder (see {requirements_file(name)})"
        )
    if not variable and importlib.util.find_spec(name) is None:
        pytest.skip(
            f"{name} is not installed: pip install -r {requirements_file(name)} && pip"
            f" install --no-deps {name}"
        )
    if name not in _LOADED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _LOADED[name] = load_stack(name, checkout=checkout)
    return _LOADED[name]


def each(table: dict[str, tuple[str, ...]]) -> list[Any]:
    """Pairs of stack and part."""
    return [
        pytest.param(name, part, id=f"{name}-{part}")
        for name, parts in table.items()
        for part in parts
    ]


@pytest.mark.parametrize(("name", "part"), each(PARTS))
def test_a_quiet_run_is_clean(name: str, part: str) -> None:
    """Without aborts, updates and faults there is nothing to find, but for what a stack does to its
    caller's objects always.
    """
    factory: Any = loaded(name).parts[part]
    known = Matrix.read(name).reasons(loaded(name).version, part)
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(2 + i, 12, 13), max_tokens=3 + i) for i in range(3)
    )
    for flavour in factory.flavours:
        cases = [Case(flavour=flavour, requests=requests, servers=2)]
        report = run_conformance(factory, name=part, cases=cases, canary=False, expected=known)
        assert () == report.failed
        assert set() == {
            result.id for result in report.results if result.id in known and result.findings
        } - {"stitch.caller-objects"}


@pytest.mark.parametrize(("name", "part"), each(PARTS))
def test_one_case_gives_one_trace(name: str, part: str) -> None:
    """HTTP, session ids and seeds that a stack draws change nothing of what is recorded."""
    factory: Any = loaded(name).parts[part]
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(2 + i, 12, 13), max_tokens=5) for i in range(3)
    )
    actions = (
        Action(when=Trigger(request="r0", tokens=2), do=ActionKind.ABORT),
        Action(when=Trigger(request="r1", tokens=3), do=ActionKind.SYNC),
    )
    case = Case(flavour=factory.flavours[0], requests=requests, actions=actions, servers=2, seed=4)
    first, second = (run_case(factory, case) for _ in range(2))
    assert [repr(event) for event in first] == [repr(event) for event in second]


@pytest.mark.parametrize(("name", "part"), each(BATCHES))
def test_each_batch_conversion_is_judged_as_the_matrix_says(name: str, part: str) -> None:
    """Every check: what fails is known, what is known fails, nothing is unknown."""
    stack = loaded(name)
    matrix = Matrix.read(name)
    report = apply_known_failures(
        judge_batches(stack.batches[part], name=part), matrix.known_failures(stack.version, part)
    )
    assert [] == matrix.deviations(stack.version, part, Outcome.of_report(report.to_dict()))


@pytest.mark.parametrize(("name", "part"), each(CORRECTIONS))
def test_each_correction_is_judged_as_the_matrix_says(name: str, part: str) -> None:
    """As conversions are."""
    stack = loaded(name)
    matrix = Matrix.read(name)
    report = apply_known_failures(
        judge_corrections(stack.corrections[part], name=part),
        matrix.known_failures(stack.version, part),
    )
    assert [] == matrix.deviations(stack.version, part, Outcome.of_report(report.to_dict()))


@pytest.mark.parametrize(("name", "part"), NUMBERED)
def test_a_stack_that_numbers_its_updates_has_no_unlabelled_ones(name: str, part: str) -> None:
    """An update that the schedule gives no label has the stack's own number: a sample that begins
    after it is tagged with that.
    """
    factory: Any = loaded(name).parts[part]
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(2 + i, 12, 13), max_tokens=6) for i in range(2)
    )
    update = Action(when=Trigger(request="r0", tokens=2), do=ActionKind.SYNC_UNLABELLED)
    trace = run_case(
        factory,
        Case(
            flavour=factory.flavours[0],
            requests=requests,
            arrivals=(0, 40),
            actions=(update,),
            servers=1,
        ),
    )

    loads = [event for event in trace.events if isinstance(event, Weights)]
    last = [event.rollout for event in trace.events if isinstance(event, Result)][-1]
    assert [0, 1] == [load.label for load in loads if load.loaded]
    assert last is not None
    assert {1} == set(
        last.call_versions or {last.version if last.min_version is None else last.min_version}
    )
