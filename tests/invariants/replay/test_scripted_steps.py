"""Findings about steps: which row, layer, sample and step is named if two are wrong, and what a
border case is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Action, Install, Phase, Routing
from rollproof.core.records import IntArray
from rollproof.core.replay_contract import Defect, Recompute
from rollproof.invariants import default_registry
from rollproof.invariants.replay.executed_routes import _misrecorded
from rollproof.invariants.replay.executed_rows import Executed, _resized
from rollproof.judging.checks import Finding, Verdict
from tests.support.scripted_steps import (
    PADDING,
    choice,
    judged,
    padded,
    samples,
    step,
    trainer_contract,
)

_STEP = {"episode": "e", "step": "replay"}
_NATIVE = Action.NATIVE


def _texts(finding: Finding) -> tuple[str, str, str, Mapping[str, Any]]:
    return finding.title, finding.expected, finding.observed, dict(finding.where)


def test_a_right_step_passes() -> None:
    """What is counted: rows with a target, all rows, layers."""
    right = step("replay", shift=4)
    for check, counters in (
        ("forward", {"rows compared": 15}),
        ("assignments", {"rows counted": 24}),
        ("coverage", {"layers counted": 3}),
    ):
        result = judged(check, right)
        assert (Verdict.PASS, counters) == (result.verdict, dict(result.exercised))


@pytest.mark.parametrize("shift", [0, 4])
def test_the_first_wrong_row_is_shown_and_all_are_counted(shift: int) -> None:
    """In the order of the calls; the final tokens and the padding are free."""
    rows = {(1, 5): (7, 0), (2, 1): (0, 2), (2, 3): (0, 2), (0, PADDING): (6, 1)}
    result = judged("forward", step("replay", shift=shift, rows=rows))
    (finding,) = result.findings
    target = sorted(choice(1, 1, 1, shift))
    assert (
        "routers executed other experts than their target",
        f"experts {target} at position 1 of r1 in layer 1",
        "experts [0, 7]; 2 of 15 rows wrong, in 2 layers (1-2)",
        {**_STEP, "request": "r1", "position": 1, "layer": 1, "rank": 0, "recompute": "none"},
    ) == _texts(finding)


def test_rows_of_a_recompute_are_compared_apart() -> None:
    """They are wrong although the forward pass was right, and the hint says so."""
    again = [
        event
        for event in step("replay", rows={(0, 0): (5, 6)}, calls={"phase": Phase.RECOMPUTE})
        if isinstance(event, Routing)
    ]
    recomputed = step("replay", more=again, recompute=Recompute.FULL)
    assert Verdict.PASS is judged("forward", recomputed).verdict
    (finding,) = judged("recompute", recomputed).findings
    assert {**_STEP, "request": "r0", "position": 0, "layer": 0} == {
        name: finding.where[name] for name in ("episode", "step", "request", "position", "layer")
    }
    assert "full" == finding.where["recompute"]
    assert finding.hint.startswith("The forward pass executed the targets")


@pytest.mark.parametrize("check", ["recompute", "recompute-results"])
@pytest.mark.parametrize(
    ("offered", "applies"), [((), False), (("none",), False), (("none", "full"), True)]
)
def test_a_recompute_is_judged_if_it_is_offered(
    check: str, offered: tuple[str, ...], applies: bool
) -> None:
    """No recompute is none, however it is spelled."""
    declared = trainer_contract({"recompute": offered})
    assert applies is (default_registry()[f"replay.{check}"].inapplicable(declared) is None)


@pytest.mark.parametrize(
    ("ids", "right"),
    [((0, 7), True), ((3, 3), False), ((-1, 2), False), ((2, 8), False), ((-1, -1), False)],
)
def test_every_row_executes_distinct_experts(ids: tuple[int, int], right: bool) -> None:
    """Of the first sample, of the last and of padding; the first one is shown."""
    for row, padding in ((0, 0), (6, 0), (PADDING, 1)):
        rows = {(1, row): ids, (1, PADDING): ids}
        result = judged("assignments", step("replay", rows=rows))
        assert {"rows counted": 24} == dict(result.exercised)
        if right:
            assert () == result.findings
            continue
        (finding,) = result.findings
        number, others = 2 - padding, "1 padding row among them"
        assert (
            "rows with fewer experts than top_k",
            "16 assignments of 8 rows to 2 distinct experts each",
            f"{number} of 8 rows with other choices, {others}: row {row} executes {list(ids)}",
            {**_STEP, "layer": 1, "rank": 0, "microbatch": 0, "phase": "forward"},
        ) == _texts(finding)


def test_each_layer_with_wrong_rows_is_a_finding() -> None:
    """Also behind one that is right."""
    rows = {(0, 1): (3, 3), (2, 1): (3, 3)}
    result = judged("assignments", step("replay", rows=rows))
    assert [0, 2] == [finding.where["layer"] for finding in result.findings]


@pytest.mark.parametrize(("native", "found"), [(-1, False), (0, True)])
def test_padding_may_execute_nothing_if_it_does_not_natively_either(
    native: int, found: bool
) -> None:
    """A row of a sample may not; neither may padding that executes expert 0."""
    empty = {(layer, PADDING): (native, native if native < 0 else 1) for layer in range(3)}
    dropped = {(layer, PADDING): (-1, -1) for layer in range(3)}
    first = step("native", _NATIVE, rows=empty)
    assert found == bool(judged("assignments", first, step("replay", rows=dropped)).findings)
    both = judged("assignments", first, step("replay", rows={**dropped, (0, 0): (-1, -1)}))
    assert 0 == both.findings[0].where["layer"]


def _routings(events: Sequence[Event]) -> list[Routing]:
    return [event for event in events if isinstance(event, Routing)]


def _without(events: Sequence[Event], layer: int, *rows: int) -> list[Event]:
    """The step with rows of a layer that no router saw."""
    keep = [row for row in range(PADDING + 1) if row not in rows]
    out: list[Event] = []
    for event in events:
        if isinstance(event, Routing) and event.layer == layer:
            out.append(_rows_of(event, keep))
        else:
            out.append(event)
    return out


def _rows_of(event: Routing, rows: Sequence[int]) -> Routing:
    return Routing(
        layer=event.layer,
        phase=event.phase,
        experts=event.experts[rows],
        samples=event.samples[rows],
        positions=event.positions[rows],
        rank=event.rank,
    )


@pytest.mark.parametrize(
    ("lost", "missing"), [((3,), False), ((6,), False), ((3, 6), False), ((2,), True), ((0,), True)]
)
def test_every_token_but_the_last_is_routed(lost: tuple[int, ...], missing: bool) -> None:
    """The final token of each sample predicts nothing."""
    result = judged("coverage", _without(step("replay"), 1, *lost))
    assert {"layers counted": 3} == dict(result.exercised)
    if not missing:
        assert () == result.findings
        return
    (finding,) = result.findings
    assert (
        "tokens that a layer never routed",
        "7 tokens routed once by layer 1 in the forward pass",
        "6 of 7 tokens routed",
        {**_STEP, "request": "r0", "position": lost[0], "layer": 1},
    ) == _texts(finding)


def test_tokens_that_are_routed_twice_are_counted_once() -> None:
    """On one rank; on two they are divided otherwise."""
    right = step("replay")
    second = _rows_of(_routings(right)[2], [5, 6, 5])
    (finding,) = judged("coverage", [*right[:-1], second, right[-1]]).findings
    assert (
        "tokens that a layer routed twice on one rank",
        "7 tokens routed once by layer 2 in the forward pass",
        "7 of 7 tokens routed, 2 tokens more than once",
        {**_STEP, "request": "r1", "position": 1, "layer": 2},
    ) == _texts(finding)
    elsewhere = step("replay", calls={"rank": 1})
    both = [*right[:-1], *_routings(elsewhere), right[-1]]
    assert () == judged("coverage", both).findings
    lost = [*_without(right, 2, 1)[:-1], second, right[-1]]
    (finding,) = judged("coverage", lost).findings
    assert "tokens that a layer never routed" == finding.title
    assert "6 of 7 tokens routed, 2 tokens more than once" == finding.observed
    assert ("r0", 1) == (finding.where["request"], finding.where["position"])


def test_a_full_recompute_routes_every_token_again() -> None:
    """A selective one need not, nor a pass without a backward; twice is no fault there."""
    right = step("replay")
    again = _routings(step("replay", calls={"phase": Phase.RECOMPUTE}))
    full = step("replay", more=[*again, *again], recompute=Recompute.FULL)
    result = judged("coverage", full)
    assert ({"layers counted": 6}, ()) == (dict(result.exercised), result.findings)
    without = step("replay", recompute=Recompute.FULL)
    findings = judged("coverage", without).findings
    assert [0, 1, 2] == [finding.where["layer"] for finding in findings]
    assert "7 tokens routed once by layer 0 in the recompute pass" == findings[0].expected
    assert "0 of 7 tokens routed" == findings[0].observed
    selective = step("replay", recompute=Recompute.SELECTIVE)
    assert {"layers counted": 3} == dict(judged("coverage", selective).exercised)
    assert {"layers counted": 3} == dict(judged("coverage", right).exercised)


def test_rows_without_a_target_are_the_routers_own() -> None:
    """Final tokens: the first wrong one is shown, and each layer's counts."""
    native = step("native", _NATIVE)
    same = {"same_as": "native"}
    right = judged("free-rows", native, step("replay", **same))
    assert (Verdict.PASS, {"free rows compared": 6}) == (right.verdict, dict(right.exercised))
    rows = {(0, 6): (0, 7), (1, 3): (0, 7)}
    (finding,) = judged("free-rows", native, step("replay", rows=rows, **same)).findings
    assert (
        "rows without a target were replayed",
        f"the router's own experts {sorted(choice(1, 2, 0))}, as in a native pass",
        "experts [0, 7]; 2 of 6 free rows are like that",
        {**_STEP, "request": "r1", "position": 2, "layer": 0},
    ) == _texts(finding)


@pytest.mark.parametrize("lost", ["replay", "native"])
@pytest.mark.parametrize("value", [None, 2.0])
def test_rows_behind_the_first_layer_need_the_same_loss(lost: str, value: float | None) -> None:
    """If either step reports none, or another one, those of the first layer alone are compared."""
    outcomes = {lost: {"loss": value, "logprobs": {}}}
    steps = (
        step("native", _NATIVE, outcome=outcomes.get("native")),
        step("replay", same_as="native", outcome=outcomes.get("replay")),
    )
    assert {"free rows compared": 2} == dict(judged("free-rows", *steps).exercised)


def test_an_earlier_step_without_an_end_gives_no_loss() -> None:
    """Its calls show the routers' own choice nevertheless."""
    result = judged("free-rows", step("native", _NATIVE)[:-1], step("replay", same_as="native"))
    assert () == result.findings


def test_a_reference_that_was_skipped_excuses_no_other_step() -> None:
    """A step of the trainer itself that was skipped says nothing about its reference."""
    skipped = {"loss": None, "skipped": "the subject has no `reference`"}
    ordinary = judged("reference", step("replay", outcome=skipped))
    assert "not exercised" in ordinary.reason
    variant = step("again", same_as="replay", variant="reference", outcome=skipped)
    result = judged("reference", step("replay"), variant)
    assert Verdict.NOT_APPLICABLE is result.verdict
    assert "(the optional method `reference`)" in result.reason


@pytest.mark.parametrize(
    ("gates", "dead"),
    [
        ({0: 1.0, 1: 1.0, 2: 1.0}, {}),
        ({0: 0.0, 1: 1.0, 2: float("nan")}, {0: "norm 0", 2: "norm nan"}),
        ({1: 1.0}, {0: "none", 2: "none"}),
    ],
)
def test_a_dead_gate_is_one_that_lives_in_native_steps(
    gates: dict[int, float], dead: dict[int, str]
) -> None:
    """Its gradient is zero, not a number or gone; a gate that is dead there tells nothing."""
    sketches = {layer: np.array([norm, 9.0, 9.0]) for layer, norm in gates.items()}
    native = step("native", _NATIVE, outcome={"gates": {i: np.array([2.5, 0]) for i in range(3)}})
    result = judged("gate-gradients", native, step("replay", outcome={"gates": sketches}))
    assert {"gates": 3} == dict(result.exercised)
    assert dead == {finding.where["layer"]: finding.observed for finding in result.findings}
    for finding in result.findings:
        assert "a gradient, as in native steps (norm 2.5)" == finding.expected
    frozen = {"gates": {0: np.array([2.5, 0]), 1: np.array([0.0, 1])}}
    native = step("native", _NATIVE, outcome=frozen)
    result = judged("gate-gradients", native, step("replay", outcome={"gates": sketches}))
    assert {"gates": 1} == dict(result.exercised)


def _chosen(shift: int = 0, total: int = 4) -> IntArray:
    return np.array(
        [[choice(0, position, layer, shift) for layer in range(3)] for position in range(total)]
    )


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (_chosen(), None),
        (_chosen()[:-1], None),
        (_chosen().astype(np.uint8)[:, :, ::-1], None),
        (None, "nothing"),
        (_chosen()[:2], "2 rows"),
        (_chosen(total=5), "5 rows"),
        (_chosen().astype(float), "an array float64 (4, 3, 2), not integers (rows, 3, 2)"),
        (_chosen()[:, :2], "an array int64 (4, 2, 2), not integers (rows, 3, 2)"),
        (_chosen()[:, :, :1], "an array int64 (4, 3, 1), not integers (rows, 3, 2)"),
        (_chosen()[:, 0], "an array int64 (4, 2), not integers (rows, 3, 2)"),
    ],
)
def test_a_recording_has_the_rows_that_were_chosen(
    recorded: IntArray | None, problem: str | None
) -> None:
    """With or without that of the final token, as integers in any order."""
    assert problem == _misrecorded(trainer_contract(), recorded, _chosen())


def test_a_wrong_recording_names_its_layers_and_first_row() -> None:
    """Rows of dropped tokens may hold anything."""
    recorded, chosen = _chosen(), _chosen()
    recorded[2, 2], recorded[3, 0], recorded[3, 2] = (0, 3), (7, 1), (1, 7)
    assert (
        "other experts in 2 of 4 rows, layers 0, 2: row 2 holds [0, 3] where the router chose"
        f" {sorted(choice(0, 2, 2))}"
    ) == _misrecorded(trainer_contract(), recorded, chosen)
    chosen[2, 2, 0] = -1
    problem = _misrecorded(trainer_contract(), recorded, chosen)
    assert problem is not None
    assert problem.startswith("other experts in 1 of 4 rows, layers 0, 2: row 3 holds [1, 7]")


def test_every_sample_of_a_recording_is_compared() -> None:
    """Also behind one that shows nothing: an expert of each of its tokens was dropped."""
    dropped = {(layer, row): (row, -1) for layer in range(3) for row in range(4)}
    wrong = np.array([[choice(1, p, layer, 1) for layer in range(3)] for p in range(2)])
    made = step("record", Action.RECORD, rows=dropped, outcome={"recorded": {"r1": wrong}})
    result = judged("recorded", made, terms={"records": True})
    assert {"samples compared": 1} == dict(result.exercised)
    (finding,) = result.findings
    assert (
        "a recording is not what the routers chose",
        "the 3 rows that the routers chose for r1",
        {"episode": "e", "step": "record", "request": "r1"},
    ) == (finding.title, finding.expected, dict(finding.where))
    both = step("record", Action.RECORD)
    findings = judged("recorded", both, terms={"records": True}).findings
    assert [("r0", "nothing"), ("r1", "nothing")] == [
        (finding.where["request"], finding.observed) for finding in findings
    ]


@pytest.mark.parametrize("per", ["per-call", "per-step"])
def test_routers_get_the_targets_that_they_need(per: str) -> None:
    """One for each call or for the step; a router that is never called needs none."""
    calls = _routings(step("replay"))
    need = {0: 2, 1: 2, 2: 2} if per == "per-call" else {0: 1, 1: 1, 2: 1}
    for layers in ((0, 1, 2), (0, 0, 1, 1, 2, 2), (0, 0, 0, 2, 2, 5)):
        made = step("replay", more=[*calls, *(Install(layer=layer) for layer in layers)])
        result = judged("installs", made, terms={"installs": per})
        routers = sorted({0, 1, 2, *layers})
        assert {"routers given targets": len(routers)} == dict(result.exercised)
        assert [layer for layer in routers if layers.count(layer) != need.get(layer, 0)] == [
            finding.where["layer"] for finding in result.findings
        ]
    findings = result.findings
    (first, *_) = findings
    number = 2 if per == "per-call" else 1
    assert (
        "a router does not get the targets that it needs",
        f"{number} target{'s' * (number > 1)} for 2 forward calls ({per})",
        "3 targets",
        {**_STEP, "layer": 0, "rank": 0},
    ) == _texts(first)


def test_a_step_that_replays_nothing_needs_no_target() -> None:
    """All that it got are counted."""
    installs = [Install(layer=0), Install(layer=2), Install(layer=0, rank=1)]
    for more, found in (((), False), (installs, True)):
        made = step("native", _NATIVE, more=more)
        result = judged("installs", made, terms={"installs": "per-call"})
        assert {"steps without targets": 1} == dict(result.exercised)
        assert found == bool(result.findings)
    (finding,) = result.findings
    assert (
        "targets were given in a step that replays nothing",
        "no target in a step of action native",
        "3 targets for layers 0, 2",
        {"episode": "e", "step": "native"},
    ) == _texts(finding)


def _mtp(events: list[Event], *, wrong: Sequence[int] = ()) -> list[Event]:
    """The step with four calls of MTP layers: two layers on two ranks."""
    calls = [
        Routing(
            layer=layer,
            rank=rank,
            phase=Phase.FORWARD,
            experts=np.array([[7, 6] if number in wrong else [0, 1]]),
            samples=np.zeros(1, dtype=int),
            positions=np.zeros(1, dtype=int),
            model="mtp",
        )
        for number, (layer, rank) in enumerate([(3, 0), (3, 1), (4, 0), (4, 1)])
    ]
    return [*events[:-1], *calls, events[-1]]


@pytest.mark.parametrize(
    ("wrong", "first"), [((), None), ((1, 2), (3, 1)), ((3,), (4, 1)), ((0, 1, 2, 3), (3, 0))]
)
def test_mtp_layers_route_by_their_own_scores(
    wrong: tuple[int, ...], first: tuple[int, int] | None
) -> None:
    """The first that does not is named, and all are counted."""
    native = _mtp(step("native", _NATIVE))
    replay = _mtp(step("replay", same_as="native"), wrong=wrong)
    result = judged("models", native, replay, terms={"mtp": True})
    assert {"calls of MTP layers": 4} == dict(result.exercised)
    if first is None:
        assert () == result.findings
        return
    (finding,) = result.findings
    layer, rank = first
    number = len(wrong)
    assert (
        "MTP layers are replayed with the policy's routes",
        "the routers' own choice, as in the native pass",
        f"{number} of 4 calls choose other experts",
        {**_STEP, "layer": layer, "rank": rank},
    ) == _texts(finding)


def test_a_call_of_an_mtp_layer_that_is_gone_is_another_choice() -> None:
    """And without calls in the native step there is nothing to compare."""
    native, replay = step("native", _NATIVE), step("replay", same_as="native")
    (finding,) = judged("models", _mtp(native), replay, terms={"mtp": True}).findings
    assert finding.observed.startswith("4 of 4 calls")
    result = judged("models", native, _mtp(replay), terms={"mtp": True})
    assert "no call of one was reported" in result.reason


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            {"loss": 2.0},
            "self-loss",
            ("the loss of step 'native': 1.0", "2.0"),
        ),
        (
            {"loss": 2.0, "logprobs": {"r0": np.array([-1.0, -9.0]), "r1": np.array([-5.0, -4.0])}},
            "self-loss",
            (
                "the loss of step 'native': 1.0",
                "2.0; 2 more values differ, among them the logprobs of r1",
            ),
        ),
        (
            {"gradients": {"w": np.array([2.0, 2.0, 1.0])}},
            "self-gradients",
            (
                "the gradient of w of step 'native': norm 2",
                "norm 2, at a relative distance of 0.35",
            ),
        ),
    ],
)
def test_a_self_replay_gives_the_results_of_the_native_step(
    first: dict[str, Any], second: str, expected: tuple[str, str]
) -> None:
    """The first difference in full, the last one by name."""
    native = step("native", _NATIVE)
    result = judged(second, native, step("replay", same_as="native", outcome=first))
    assert {"self-replays": 1} == dict(result.exercised)
    (finding,) = result.findings
    assert expected == (finding.expected, finding.observed)
    assert _STEP == dict(finding.where)
    clean = judged(second, native, step("replay", same_as="native"))
    assert (Verdict.PASS, {"self-replays": 1}) == (clean.verdict, dict(clean.exercised))


@pytest.mark.parametrize("silent", ["native", "replay"])
@pytest.mark.parametrize(
    ("check", "lost", "reason"),
    [
        ("self-loss", {"loss": None}, "the subject reports no loss"),
        (
            "self-gradients",
            {"gradients": {}, "gates": {}},
            "the subject reports no gradients",
        ),
    ],
)
def test_a_self_replay_without_results_of_both_steps_is_open(
    check: str, lost: dict[str, Any], reason: str, silent: str
) -> None:
    """Whichever step reports none."""
    steps = (
        step("native", _NATIVE, outcome=lost if silent == "native" else None),
        step("replay", same_as="native", outcome=lost if silent == "replay" else None),
    )
    result = judged(check, *steps)
    assert (Verdict.UNKNOWN, {}) == (result.verdict, dict(result.exercised))
    assert reason in result.reason


def test_wrong_rows_take_the_blame_for_other_results() -> None:
    """The hint names the step, whichever of the two it is."""
    native = step("native", _NATIVE)
    wrong = step("replay", same_as="native", rows={(0, 0): (5, 6)}, outcome={"loss": 2.0})
    (finding,) = judged("self-loss", native, wrong).findings
    assert finding.hint.startswith("Routers of step 'replay' executed other experts")
    first = step("before", rows={(0, 0): (5, 6)})
    again = step("again", same_as="before", outcome={"loss": 2.0})
    (finding,) = judged("aftermath", first, again).findings
    assert finding.hint.startswith("Routers of step 'before' executed other experts")
    clean = judged("self-loss", native, step("replay", same_as="native", outcome={"loss": 2.0}))
    assert clean.findings[0].hint.startswith("The same experts are executed")


def test_a_recomputed_step_is_compared_with_one_without() -> None:
    """A recomputed self-replay has two suspects, and the hint says so."""
    native, replay = step("native", _NATIVE), step("replay", same_as="native")
    more = _routings(step("replay", calls={"phase": Phase.RECOMPUTE}))
    fields: dict[str, Any] = {"more": more, "recompute": Recompute.FULL, "outcome": {"loss": 2.0}}
    for before, title, words in (
        ("native", "self-replay with recompute changes the results", "If self-replay changes"),
        ("replay", "recompute changes the results", "The recompute must execute"),
    ):
        again = step("again", same_as=before, **fields)
        result = judged("recompute-results", native, replay, again)
        assert {"recomputed steps": 1} == dict(result.exercised)
        (finding,) = result.findings
        assert title == finding.title
        assert finding.hint.startswith(words)


def test_executed_rows_have_the_width_of_a_target() -> None:
    """Missing experts are none, and one too many equals no target; rows may be fewer than columns
    or as many.
    """
    for rows in (1, 2, 3):
        for width in (1, 2, 3):
            experts = np.arange(rows * width).reshape(rows, width) % 8
            resized = _resized(experts, 2)
            if width <= 2:
                assert padded(experts, 2).tolist() == resized.tolist()
            else:
                assert [[-2, row[1]] for row in experts.tolist()] == resized.tolist()


@pytest.mark.parametrize(
    ("place", "ids", "dropped"),
    [(-1, (-1, -1), True), (-1, (-1, 0), False), (-1, (0, 0), False), (0, (-1, -1), False)],
)
def test_padding_that_executed_nothing_is_dropped(
    place: int, ids: tuple[int, int], dropped: bool
) -> None:
    """Expert 0 is an expert, and the first token is none of padding."""
    view: Any = None
    number = np.array([place])
    rows = Executed(view=view, place=number, column=number, rank=number, experts=np.array([ids]))
    assert [dropped] == rows.dropped.tolist()


def test_bad_routes_name_the_row_that_is_neither_target_nor_own_choice() -> None:
    """In the first layer, of the tokens without a valid target."""
    native = step("native", _NATIVE)
    made = samples()
    defective = {"defect": Defect.TOO_LARGE, "defective": "r1"}
    routes = made[1].routes
    assert routes is not None
    routes[1] = 9
    fields: dict[str, Any] = {"microbatches": (made,), "same_as": "native", **defective}
    right = judged("targets", native, step("replay", **fields))
    assert (Verdict.PASS, {"bad routes handled": 1}) == (right.verdict, dict(right.exercised))
    wrong = step("replay", rows={(0, 5): (0, 7), (0, 6): (2, 7), (1, 5): (1, 3)}, **fields)
    (finding,) = judged("targets", native, wrong).findings
    assert "r1" == finding.where["request"]
    assert (
        "experts [0, 7] at position 1 of r1, which are neither a target nor the router's own"
        f" {sorted(choice(1, 1, 0))}"
    ) == finding.observed
    twice = step("replay", rows={(0, 2): (3, 3), (1, 5): (4, 4)}, **fields)
    (finding,) = judged("targets", native, twice).findings
    assert "2 of 24 rows without top_k distinct experts, such as [3, 3]" == finding.observed
    other = step("replay", rows={(0, 0): (5, 6), (2, 4): (0, 6)}, **fields)
    (finding,) = judged("targets", native, other).findings
    assert "2 of 12 rows with a valid target executed other experts" == finding.observed
