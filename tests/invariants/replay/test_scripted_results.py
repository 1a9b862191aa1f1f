"""Findings about results of scripted steps, about steps that must be refused, and about what a step
leaves behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Install, Purpose, Residue, Routing
from rollproof.judging.checks import Finding, Verdict
from tests.support.scripted_steps import judged, samples, step

_NATIVE = Action.NATIVE
_STEP = {"episode": "e", "step": "replay"}
_ERROR = {"error": "RuntimeError: no", "loss": None, "logprobs": {}, "gradients": {}, "gates": {}}


def _texts(finding: Finding) -> tuple[str, str, str, Mapping[str, Any]]:
    return finding.title, finding.expected, finding.observed, dict(finding.where)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, True),
        ({"outcome": _ERROR}, False),
        ({"outcome": {"skipped": "no"}}, False),
        ({"weights": 1}, False),
        ({"nudge": 0.5, "nudge_layer": 0}, False),
        ({"model": "critic"}, False),
        ({"variant": "reference"}, False),
        ({"edge": "odd"}, False),
        ({"microbatches": (samples(None, (4, 4)),)}, False),
        ({"microbatches": (samples(None)[::-1],)}, False),
        ({"action": Action.OFF}, True),
        ({"action": Action.RECORD}, True),
    ],
)
def test_the_routers_own_choice_is_that_of_an_equal_step(
    changes: dict[str, Any], counted: bool
) -> None:
    """Of the same tokens under the same weights, that ran to its end without replay."""
    native = step("native", **{"action": _NATIVE, **changes})
    result = judged("free-rows", native, step("replay", same_as="native"))
    assert counted == bool(result.exercised)


def _drift(
    shift: int = 4, native: Mapping[str, Any] | None = None, **fields: Any
) -> list[list[Event]]:
    first = step("native", _NATIVE, weights=1, **(native or {}))
    return [first, step("replay", shift=shift, weights=1, differs_from="native", **fields)]


def test_a_replay_of_other_experts_changes_the_results() -> None:
    """If it changes none, it did nothing."""
    result = judged("drift", *_drift())
    assert {"drifted replays": 1} == dict(result.exercised)
    (finding,) = result.findings
    rerouted = "15 of 15 rows have a target that is not the router's own choice"
    assert (
        "replay changes nothing",
        f"other results than those of step 'native': {rerouted}",
        "the same loss, logprobs and gradients, bit for bit",
        _STEP,
    ) == _texts(finding)
    for outcome in (
        {"loss": 1.5},
        {"logprobs": {"r0": np.array([-1.0, -2.5])}},
        {"gradients": {"w": np.array([2.0, 1.0, 1.5])}},
    ):
        changed = judged("drift", *_drift(outcome=outcome))
        assert (Verdict.PASS, {"drifted replays": 1}) == (changed.verdict, dict(changed.exercised))


@pytest.mark.parametrize("rows", [0, 1])
def test_weights_that_choose_the_same_experts_show_nothing(rows: int) -> None:
    """One of 15 rows is enough."""
    chosen = {(1, 5): (0, 7)} if rows else {}
    result = judged("drift", *_drift(0, {"rows": chosen}))
    assert rows == len(result.findings)
    if not rows:
        assert "would choose other experts: the weights drift too little" in result.reason


@pytest.mark.parametrize("failed", ["native", "replay"])
def test_a_drifted_replay_needs_the_results_of_both_steps(failed: str) -> None:
    """The one without them is named."""
    native, replay = _drift(outcome=_ERROR if failed == "replay" else None)
    if failed == "native":
        native = step("native", _NATIVE, weights=1, outcome=_ERROR)
    result = judged("drift", native, replay)
    assert Verdict.UNKNOWN is result.verdict
    assert f"step '{failed}' ended with an error" in result.reason


_NOTHING: dict[str, Any] = {"loss": None, "logprobs": {}, "gradients": {}, "gates": {}}


@pytest.mark.parametrize("silent", ["native", "replay"])
@pytest.mark.parametrize(
    ("reported", "comparable"),
    [
        ({}, False),
        ({"loss": 1.0}, True),
        ({"logprobs": {"r0": np.array([-1.0, -2.0])}}, True),
        ({"gradients": {"w": np.array([2.0, 1.0])}}, True),
        ({"gates": {0: np.array([2.0, 1.0])}}, True),
    ],
)
def test_two_steps_are_comparable_if_both_report_something_alike(
    reported: dict[str, Any], comparable: bool, silent: str
) -> None:
    """One of them alone is not enough."""
    both = {**_NOTHING, **reported}
    steps = _drift(native={"outcome": both}, outcome=both)
    assert comparable == bool(judged("drift", *steps).findings)
    outcomes = {"native": both, "replay": both, silent: _NOTHING}
    steps = _drift(native={"outcome": outcomes["native"]}, outcome=outcomes["replay"])
    assert () == judged("drift", *steps).findings


_OTHER = {"loss": 1.5}


@pytest.mark.parametrize(
    ("check", "counter", "fields", "title", "blamed"),
    [
        (
            "aftermath",
            "steps repeated",
            {"action": _NATIVE},
            "a step gives other results than it did before",
            "first",
        ),
        (
            "off",
            "steps with replay off",
            {"action": Action.OFF},
            "replay acts although it is switched off",
            "first",
        ),
        (
            "reference",
            "steps compared",
            {"action": _NATIVE, "variant": "reference"},
            "replay gives other results than the reference",
            "second",
        ),
    ],
)
def test_a_step_that_repeats_another_has_its_results(
    check: str, counter: str, fields: dict[str, Any], title: str, blamed: str
) -> None:
    """A reference is right, whatever came before it."""
    first = step("first", _NATIVE)
    same = judged(check, first, step("second", same_as="first", **fields))
    assert (Verdict.PASS, {counter: 1}) == (same.verdict, dict(same.exercised))
    # two native steps that differ are a trainer that does not repeat
    between = step("between")
    result = judged(
        check, first, between, step("second", same_as="first", outcome=_OTHER, **fields)
    )
    assert {counter: 1} == dict(result.exercised)
    (finding,) = result.findings
    values = ("1.0", "1.5") if blamed == "first" else ("1.5", "1.0")
    place = {"episode": "e", "step": "second" if blamed == "first" else "first"}
    assert (title, f"the loss of step '{blamed}': {values[0]}", values[1], place) == _texts(finding)


def test_two_native_steps_that_differ_leave_all_results_open() -> None:
    """The first difference is told."""
    steps = (
        step("first", _NATIVE),
        step("second", _NATIVE, same_as="first", outcome=_OTHER),
        step("replay", same_as="first"),
    )
    for check in ("aftermath", "self-loss", "free-rows"):
        result = judged(check, *steps)
        assert Verdict.UNKNOWN is result.verdict
        assert (
            "step 'second' repeats 'first' without any replay before it, and its loss is 1.5, not"
            " 1.0: seed random numbers"
        ) in result.reason


def _critic(name: str, action: Action, **fields: Any) -> list[Event]:
    return step(name, action, model="critic", calls={"model": "critic"}, **fields)


@pytest.mark.parametrize(
    ("rows", "outcome", "observed"),
    [
        ({}, {}, None),
        ({(1, 0): (0, 7)}, {}, "1 of 3 calls differ"),
        (
            {(1, 0): (0, 7), (2, 3): (0, 2)},
            _OTHER,
            "1.5; 1 more value differ, among them the choice of its routers",
        ),
    ],
)
def test_another_model_routes_by_itself(
    rows: dict[tuple[int, int], tuple[int, int]], outcome: dict[str, Any], observed: str | None
) -> None:
    """Its results and its routers are compared."""
    native = _critic("native", _NATIVE)
    # the rows of a replayed critic are its own choice
    replay = _critic("replay", Action.OFF, rows=rows, outcome=outcome, same_as="native")
    result = judged("models", native, replay, terms={"models": ("critic",)})
    assert {"passes of other models": 1} == dict(result.exercised)
    assert [observed] * (observed is not None) == [f.observed for f in result.findings]
    for finding in result.findings:
        assert "the critic is replayed with the policy's routes" == finding.title
    for check in ("coverage", "forward", "assignments", "installs"):
        silent = judged(check, native, replay, terms={"installs": "per-call"})
        assert {} == dict(silent.exercised)


def test_routers_of_another_model_may_differ_in_number() -> None:
    """Calls that are missing, or surplus, differ."""
    native = _critic("native", _NATIVE)
    replay = _critic("replay", Action.OFF, same_as="native")
    for first, second, words in (
        (native, [*replay[:3], *replay[4:]], "1 of 3 calls differ"),
        ([*native[:3], *native[4:]], replay, "1 of 3 calls differ"),
    ):
        (finding,) = judged("models", first, second, terms={"models": ("critic",)}).findings
        assert words == finding.observed
    tolerant = {"models": ("critic",), "tolerance": 1e-3}
    assert () == judged("models", native, [*replay[:3], *replay[4:]], terms=tolerant).findings


@pytest.mark.parametrize(
    ("rows", "error", "calls", "observed"),
    [
        ({}, False, True, None),
        ({(0, 0): (5, 6)}, True, True, None),
        ({(0, 0): (5, 6)}, False, True, "results; 1 of 15 rows executed other experts"),
        ({}, False, False, "results; no router was seen"),
    ],
)
def test_a_router_that_must_be_refused(
    rows: dict[tuple[int, int], tuple[int, int]], error: bool, calls: bool, observed: str | None
) -> None:
    """Or replayed nevertheless."""
    made = step("replay", variant="fused", rows=rows, outcome=_ERROR if error else None)
    if not calls:
        made = [event for event in made if not isinstance(event, Routing)]
    result = judged("routers", made, terms={"unsupported": ("fused",)})
    assert {"unsupported routers": 1} == dict(result.exercised)
    assert [observed] * (observed is not None) == [f.observed for f in result.findings]
    for finding in result.findings:
        assert "an error for the router 'fused', or the targets executed" == finding.expected
        assert _STEP == dict(finding.where)
    assert {} == dict(
        judged("routers", step("replay"), terms={"unsupported": ("fused",)}).exercised
    )


@pytest.mark.parametrize(
    ("rows", "outcome", "counter", "observed"),
    [
        ({}, {}, "edges handled", None),
        ({(0, 0): (5, 6)}, _ERROR, "edges refused", None),
        (
            {(0, 0): (5, 6), (2, 4): (0, 6)},
            {},
            "edges handled",
            "2 of 15 rows with a valid target executed other experts (3 router calls)",
        ),
        (
            {(1, 2): (4, 4), (1, 6): (5, 5)},
            {},
            "edges handled",
            "2 of 24 rows without top_k distinct experts, such as [4, 4] (3 router calls)",
        ),
    ],
)
def test_an_unusual_step_is_handled_or_refused(
    rows: dict[tuple[int, int], tuple[int, int]],
    outcome: dict[str, Any],
    counter: str,
    observed: str | None,
) -> None:
    """By its targets, as any other one."""
    made = step("replay", edge="an empty microbatch", rows=rows, outcome=outcome)
    result = judged("edges", made)
    assert {counter: 1} == dict(result.exercised)
    assert [observed] * (observed is not None) == [f.observed for f in result.findings]
    for finding in result.findings:
        assert "a step with an empty microbatch is mishandled" == finding.title
    ordinary = judged("edges", step("replay"))
    assert {} == dict(ordinary.exercised)
    broken = judged("edges", step("before", rows={(0, 0): (5, 6)}), made)
    if counter == "edges handled":
        assert ({}, ()) == (dict(broken.exercised), broken.findings)
        assert "the ordinary step 'before' executed other experts" in broken.reason


def test_a_well_formed_step_that_failed_is_shown() -> None:
    """In the words of the error; one that is odd, or in which a failure was raised, may fail."""
    result = judged("runs", step("replay", outcome=_ERROR))
    assert {"steps run": 1} == dict(result.exercised)
    (finding,) = result.findings
    assert (
        "a well-formed step failed",
        "results of a step with action replay, purpose train, recompute none",
        "RuntimeError: no",
        _STEP,
    ) == _texts(finding)
    for fields in ({"edge": "odd"}, {"fail_at": 0}, {"variant": "fused"}):
        odd = judged("runs", step("replay", outcome=_ERROR, **fields))
        assert {} == dict(odd.exercised)
    assert {} == dict(judged("runs", step("replay")[:-1]).exercised)


@pytest.mark.parametrize(
    ("purpose", "error", "counter", "words"),
    [
        (Purpose.TRAIN, False, "steps", "a step"),
        (Purpose.EVAL, False, "evaluations", "an evaluation"),
        (Purpose.TRAIN, True, "failed steps", "a step that failed"),
        (Purpose.EVAL, True, "failed steps", "a step that failed"),
    ],
)
def test_what_is_left_of_replay_is_counted(
    purpose: Purpose, error: bool, counter: str, words: str
) -> None:
    """By name, and only what is left."""
    made = step("replay", purpose=purpose, outcome=_ERROR if error else None)
    for left in ({"queues": 0, "hooks": 0}, {"queues": 2, "hooks": 0, "modes": 1}):
        result = judged("residue", [*made, Residue(after="replay", left=left)])
        assert {counter: 1} == dict(result.exercised)
        assert any(left.values()) == bool(result.findings)
    (finding,) = result.findings
    assert (
        f"state of replay is left after {words}",
        "nothing: every count is 0",
        "1 modes and 2 queues",
        _STEP,
    ) == _texts(finding)


def test_samples_that_a_step_changed_are_named_up_to_six() -> None:
    """Names of fields."""
    names = tuple(f"f{i}" for i in range(8))
    (finding,) = judged("input", step("replay", outcome={"changed": names})).findings
    assert (
        "a step changes its samples",
        "arrays as they were passed in",
        "changed: f0, f1, f2, f3, f4 and f5",
        _STEP,
    ) == _texts(finding)


def test_targets_are_counted_on_each_rank() -> None:
    """The rank of the router that lacks one is named."""
    made = step("replay")
    second = [
        replace(event, rank=1) for event in made if isinstance(event, Routing) and event.layer == 1
    ]
    installs = [Install(layer=layer) for layer in range(3)]
    findings = judged(
        "installs", [*made[:-1], *second, *installs, made[-1]], terms={"installs": "per-call"}
    ).findings
    assert [(1, 1)] == [(finding.where["rank"], finding.where["layer"]) for finding in findings]
