"""Values of replies against independent forward passes: two wrong places, two versions, near-ties
on both sides of the border, with the whole finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.contract import Logprobs
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Reference, Reply
from rollproof.invariants.engine.independent_forward import NEAR_TIE, logprobs_of, readable
from rollproof.judging.checks import CheckResult, Verdict
from tests.support.scripted_engine import (
    call,
    engine_contract,
    judged,
    load,
    reference,
    reply,
    texts,
    with_rows,
)

_BELOW = NEAR_TIE * (1 - 1e-9)


def _margins(made: Reference, name: str, value: float, *cells: tuple[int, int]) -> Reference:
    """The reference with this margin at some positions and layers."""
    margins = getattr(made, name).copy()
    for cell in cells:
        margins[cell] = value
    return replace(made, **{name: margins})


@pytest.mark.parametrize("start", [0, 1, 2])
def test_the_first_wrong_row_is_shown_and_all_are_counted(start: int) -> None:
    """With its position in the sequence, and in how many layers it is wrong."""
    made = call(routes_start=start)
    expected = reference(made)
    wrong = with_rows(
        reply(made, expected),
        {(2 - start, 2): (6, 5), (4 - start, 0): (6, 7), (4 - start, 2): (0, 1)},
    )
    result = judged("engine.routes", made, wrong, expected)
    assert {"rows compared": 6 - start} == dict(result.exercised)
    (finding,) = result.findings
    rows = f"2 rows of {6 - start} (position 2, 4) fit no weights that were served"
    assert (
        "an engine's rows are not what its weights choose",
        "experts [4, 5], by weights 0",
        f"experts [6, 5]; {rows}; here in 1 of 2 layers",
        {"call": 1, "position": 2, "layer": 2, "server": "e0"},
    ) == texts(finding)


def test_a_row_that_is_wrong_in_all_layers_is_shown_in_the_first() -> None:
    """The last row of a reply, too."""
    made = call()
    expected = reference(made)
    wrong = with_rows(reply(made, expected), {(5, 0): (1, 2), (5, 2): (1, 2)})
    (finding,) = judged("engine.routes", made, wrong, expected).findings
    assert "experts [5, 6], by weights 0" == finding.expected
    assert finding.observed.startswith("experts [1, 2]; 1 row of 6 (position 5) fit no weights")
    assert finding.observed.endswith("in 2 of 2 layers")
    assert {"call": 1, "position": 5, "layer": 0, "server": "e0"} == dict(finding.where)


@pytest.mark.parametrize(("old", "best"), [(2, 3), (4, 0)])
def test_the_expected_row_is_that_of_the_version_that_explains_most(old: int, best: int) -> None:
    """Rows of two served versions in one reply are right; another one fits neither."""
    made = call()
    first, second = reference(made), reference(made, version=3)
    routes = np.concatenate([first.routes[:old], second.routes[old:6]]).astype(np.uint8)
    mixed = reply(made, second, routes=routes)
    assert Verdict.PASS is judged("engine.routes", made, mixed, first, second).verdict
    wrong = with_rows(mixed, {(5, 2): (4, 6)})
    (finding,) = judged("engine.routes", made, wrong, first, second).findings
    shown = {3: "[2, 3]", 0: "[5, 6]"}[best]
    assert f"experts {shown}, by weights {best}" == finding.expected


def test_a_row_beyond_the_tokens_has_nothing_expected() -> None:
    """The reference has seven places."""
    made = call()
    expected = reference(made)
    for rows, found in ((7, False), (8, True)):
        answer = reply(made, expected, routes=np.resize(expected.routes, (rows, 3, 2)))
        result = judged("engine.routes", made, answer, expected)
        assert found == bool(result.findings)
    (finding,) = result.findings
    assert "nothing: no token was forwarded there" == finding.expected
    assert (
        "experts [0, 1]; 1 row of 8 (position 7) fit no weights that were served; here in 0 of 2"
        " layers"
    ) == finding.observed
    assert {"call": 1, "position": 7, "layer": 0, "server": "e0"} == dict(finding.where)


@pytest.mark.parametrize(
    ("start", "cached", "counted"), [(0, 4, 4), (1, 4, 3), (3, 2, 0), (0, None, 0), (0, 1, 1)]
)
def test_rows_of_cached_tokens_are_counted_from_the_offset(
    start: int, cached: int | None, counted: int
) -> None:
    """Those before it are not in the reply."""
    made = call(routes_start=start)
    expected = reference(made)
    result = judged("engine.routes", made, reply(made, expected, cached_tokens=cached), expected)
    rows = {"rows compared": 6 - start}
    if counted:
        rows["rows of cached tokens"] = counted
    assert rows == {name: times for name, times in result.exercised.items() if times}


def test_rows_at_and_behind_a_near_tie_are_not_counted() -> None:
    """Of rows that differ there, in a MoE layer; the rows before it are."""
    made = call()
    for layer, counted in ((2, 3), (1, 6)):
        expected = _margins(reference(made), "margins", _BELOW, (3, layer))
        answer = reply(made, expected, cached_tokens=5)
        if layer == 2:
            answer = with_rows(answer, {(3, 2): (5, 7)})
        result = judged("engine.routes", made, answer, expected)
        assert () == result.findings
        assert {"rows compared": counted, "rows of cached tokens": min(counted, 5)} == dict(
            result.exercised
        )


def test_tokens_behind_a_near_tie_are_doubtful() -> None:
    """Its own token is not: the row of a token comes after its logprob."""
    made = call()
    expected = _margins(reference(made), "margins", _BELOW, (4, 2))
    answer = with_rows(reply(made, expected), {(4, 2): (6, 0)})
    assert answer.output.logprobs is not None
    for token, found in ((0, True), (1, True), (2, False), (3, False)):
        values = answer.output.logprobs.copy()
        values[token] -= 1
        wrong = replace(answer, output=replace(answer.output, logprobs=values))
        result = judged("engine.logprobs", made, wrong, expected)
        assert found == bool(result.findings)
        assert {"logprobs compared": 2} == dict(result.exercised)


def test_wrong_logprobs_are_counted_and_the_first_is_shown() -> None:
    """With what each version gives; a token of either version is right."""
    made = call()
    first, second = reference(made), reference(made, version=3)
    values = first.logprobs[3:].copy()
    values[1] = second.logprobs[4]
    assert (
        Verdict.PASS
        is judged(
            "engine.logprobs", made, reply(made, first, logprobs=values), first, second
        ).verdict
    )
    values[[2, 3]] = -9.0
    result = judged("engine.logprobs", made, reply(made, first, logprobs=values), first, second)
    assert {"logprobs compared": 4} == dict(result.exercised)
    (finding,) = result.findings
    assert (
        "an engine's logprobs are not those of its weights",
        "-1.62500 by weights 0 or -4.62500 by weights 3, within 0.0001",
        "-9.00000; so for 2 of 4 tokens (token 2-3)",
        {"call": 1, "index": 2, "server": "e0"},
    ) == texts(finding)


@pytest.mark.parametrize("logprobs", [None, np.zeros(0), np.zeros(3), np.zeros(5)])
def test_logprobs_of_another_number_are_not_compared(logprobs: Any) -> None:
    """stitch.logprobs-length reports them."""
    made = call()
    expected = reference(made)
    for check in ("engine.logprobs", "engine.logprob-mode"):
        result = judged(check, made, reply(made, expected, logprobs=logprobs), expected)
        assert ({}, ()) == (dict(result.exercised), result.findings)


@pytest.mark.parametrize(
    ("temperature", "returned", "found"),
    [(0.5, "raw", False), (0.5, "scaled", True), (1.0, "scaled", True)],
)
def test_logprobs_of_another_mode_are_one_finding(
    temperature: float, returned: str, found: bool
) -> None:
    """Of the mode, with the parameters of the call."""
    made = call(sampling={"temperature": temperature, "top_p": 0.9})
    expected = reference(made)
    answer = reply(made, expected)
    if returned == "scaled":
        answer = reply(made, expected, logprobs=expected.scaled[3:])
    assert () == judged("engine.logprobs", made, answer, expected).findings
    result = judged("engine.logprob-mode", made, answer, expected)
    if not found:
        assert {"replies whose logprobs differ between modes": 1} == dict(result.exercised)
        assert () == result.findings
        return
    (finding,) = result.findings
    parameters = f"temperature {temperature}, top_p=0.9"
    assert (
        "logprobs are of another mode than the declared one",
        "raw logprobs (the contract declares logprobs='raw')",
        f"temperature-scaled ones for all 4 tokens of a call with {parameters}",
        {"call": 1, "server": "e0", "version": "0"},
    ) == texts(finding)


def test_one_logprob_of_another_mode_is_a_wrong_logprob() -> None:
    """A mode is that of all tokens."""
    made = call()
    expected = reference(made)
    values = expected.logprobs[3:].copy()
    values[1] = expected.scaled[4]
    answer = reply(made, expected, logprobs=values)
    assert 1 == judged("engine.logprobs", made, answer, expected).found
    assert () == judged("engine.logprob-mode", made, answer, expected).findings


def test_modes_that_are_alike_tell_nothing() -> None:
    """As at temperature 1 without further parameters."""
    made = call()
    expected = reference(made)
    alike = replace(expected, scaled=expected.logprobs)
    result = judged("engine.logprob-mode", made, reply(made, alike), alike)
    assert ({}, ()) == (dict(result.exercised), result.findings)


def _left_out(made: Reference, *tokens: int, value: float = -np.inf) -> Reference:
    processed = made.logprobs.copy()
    processed[[3 + token for token in tokens]] = value
    return replace(made, processed=processed)


_TOP_K = {"temperature": 0.7, "top_k": 2}


def test_tokens_that_were_left_out_are_counted_and_the_first_is_shown() -> None:
    """With the parameters of the call."""
    made = call(sampling=_TOP_K)
    expected = _left_out(reference(made), 1, 3)
    result = judged("engine.sampling", made, reply(made, expected), expected)
    assert {"tokens sampled under top-p, top-k or min-p": 4} == dict(result.exercised)
    (finding,) = result.findings
    assert (
        "a token was sampled that the call's parameters leave out",
        "a token that temperature 0.7, top_k=2 leaves",
        "token 31; so for 2 of 4 tokens (token 1, 3)",
        {"call": 1, "index": 1, "server": "e0"},
    ) == texts(finding)


def test_a_token_that_one_version_leaves_is_right() -> None:
    """Each served version may have sampled it; one without these values says nothing."""
    made = call(sampling=_TOP_K)
    both = _left_out(reference(made), 1, 2), _left_out(reference(made, version=3), 2)
    result = judged("engine.sampling", made, reply(made, both[0]), *both)
    assert ["token 32; so for 1 of 4 tokens (token 2)"] == [f.observed for f in result.findings]
    silent = reference(made, version=3)
    result = judged("engine.sampling", made, reply(made, both[0]), silent, both[0])
    assert [2] == [int(f.observed.split("for ")[1][0]) for f in result.findings]
    none = judged("engine.sampling", made, reply(made, silent), silent)
    assert ({}, ()) == (dict(none.exercised), none.findings)


@pytest.mark.parametrize(
    ("sampling", "counted"),
    [
        ({"temperature": 1.0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"min_p": 0.1}, True),
        ({"top_p": 0.9, "presence_penalty": 1.0}, True),
    ],
)
def test_only_parameters_that_leave_tokens_out_are_judged(
    sampling: dict[str, float], counted: bool
) -> None:
    """A penalty leaves every token."""
    made = call(sampling=sampling)
    expected = _left_out(reference(made), 1)
    result = judged("engine.sampling", made, reply(made, expected), expected)
    assert (counted, counted) == (bool(result.exercised), bool(result.findings))


@pytest.mark.parametrize(
    ("ties", "margin", "found"),
    [
        ((), _BELOW, (0, 1, 2, 3)),
        (((3, 0),), _BELOW, (0,)),
        (((3, 1),), _BELOW, (0, 1, 2, 3)),
        (((4, 2), (6, 0)), _BELOW, (0, 1)),
        (((4, 2), (6, 0)), NEAR_TIE, (0, 1, 2, 3)),
        (((0, 0),), _BELOW, ()),
        (((2, 0), (5, 2)), _BELOW, ()),
    ],
)
def test_tokens_behind_a_near_tie_may_be_left_out(
    ties: tuple[tuple[int, int], ...], margin: float, found: tuple[int, ...]
) -> None:
    """Behind the first one, in a MoE layer; the token at that place was sampled before it."""
    made = call(sampling=_TOP_K)
    expected = _margins(_left_out(reference(made), 0, 1, 2, 3), "margins", margin, *ties)
    result = judged("engine.sampling", made, reply(made, expected), expected)
    assert [len(found)] * bool(found) == [
        int(f.observed.split("for ")[1][0]) for f in result.findings
    ]
    assert list(found[:1]) == [f.where["index"] for f in result.findings]


def _turned(made: Reply, *cells: tuple[int, int]) -> Reply:
    assert made.output.routes is not None
    routes = made.output.routes
    return with_rows(made, {cell: routes[cell][::-1].tolist() for cell in cells})


@pytest.mark.parametrize("start", [0, 2])
def test_experts_in_another_order_are_counted(start: int) -> None:
    """The first is shown, by its position in the sequence; two layers of six rows are compared."""
    made = call(routes_start=start)
    expected = reference(made)
    answer = _turned(reply(made, expected), (2 - start, 2), (4 - start, 0))
    result = judged("engine.order", made, answer, expected)
    choices = 2 * (6 - start)
    assert {"choices compared in order": choices} == dict(result.exercised)
    (finding,) = result.findings
    assert (
        "the chosen experts are not in the order of their scores",
        "experts [4, 5]",
        f"[5, 4]; so in 2 of {choices} choices",
        {"call": 1, "position": 2, "layer": 2, "version": "0"},
    ) == texts(finding)


@pytest.mark.parametrize("name", ["margins", "orders"])
def test_the_order_of_close_scores_is_not_compared(name: str) -> None:
    """At a near-tie itself it is."""
    made = call()
    for value, found in ((NEAR_TIE, True), (_BELOW, False)):
        expected = _margins(reference(made), name, value, (2, 2))
        result = judged("engine.order", made, _turned(reply(made, expected), (2, 2)), expected)
        assert found == bool(result.findings)
        assert {"choices compared in order": 11 + found} == dict(result.exercised)


def test_the_order_is_that_of_the_version_that_fits() -> None:
    """One that explains no row is passed over."""
    made = call()
    other, expected = reference(made, version=3), reference(made)
    result = judged("engine.order", made, _turned(reply(made, expected), (2, 2)), other, expected)
    assert ["0"] == [finding.where["version"] for finding in result.findings]
    assert {"choices compared in order": 12} == dict(result.exercised)


_VALUES = ("engine.routes", "engine.order", "engine.logprobs", "engine.logprob-mode")


@pytest.mark.parametrize("check", _VALUES)
def test_values_are_compared_until_an_identity_update(check: str) -> None:
    """engine.identity judges those after it; a later update to other weights ends that."""
    made = call()
    expected = reference(made)
    answer = (made, reply(made, expected), expected)
    for before, judged_of in (
        ((load(),), True),
        ((load(), load(identity=True)), False),
        ((load(), load(identity=True), load(1)), True),
    ):
        result = judged(check, *before, *answer)
        assert judged_of == bool(result.exercised)


@pytest.mark.parametrize("check", _VALUES)
def test_without_a_reference_a_reply_with_tokens_stays_open(check: str) -> None:
    """One without tokens needs none."""
    made = call()
    expected = reference(made)
    open_ = judged(check, made, reply(made, expected))
    assert Verdict.UNKNOWN is open_.verdict
    assert "the trace holds no independent forward pass (Reference events)" in open_.reason
    empty = reply(made, expected, "abort", token_ids=(), logprobs=None, routes=None)
    assert "independent forward pass (Reference events)" not in judged(check, made, empty).reason


def _identity(
    before: Callable[[Call], list[Event]],
    after: Callable[[Call], list[Event]],
    *between: Event,
    start: int = 0,
    **more: Any,
) -> CheckResult:
    """The result on a call before and after an update to equal weights."""
    first, second = call(1, routes_start=start), call(2, routes_start=start)
    events = [first, *before(first), load(identity=True), *between, second, *after(second)]
    return judged("engine.identity", load(), *events, **more)


def _right(made: Call) -> list[Event]:
    expected = reference(made)
    return [reply(made, expected), expected]


_CHANGED = "an update to equal weights changed what the engine returns"
_SAME = "the same tokens, logprobs and rows for the same call, before and after"


@pytest.mark.parametrize("start", [0, 2])
def test_layers_with_other_experts_are_named(start: int) -> None:
    """Whichever row they are in, up to the last; the order within a row is another fault."""

    def other(made: Call) -> list[Event]:
        expected = reference(made)
        cells = {(5 - start, 2): (2, 3), (3 - start, 0): (4, 3)}
        return [with_rows(reply(made, expected), cells), expected]

    result = _identity(_right, other, start=start)
    assert {"calls repeated after an identity update": 1} == dict(result.exercised)
    (finding,) = result.findings
    place = {"call": 2, "server": "e0", "index": 6, "layer": 2}
    observed = "rows differ in 1 of 3 layers (layers [2])"
    assert (_CHANGED, _SAME, observed, place) == texts(finding)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("row", [2, 5])
def test_layers_with_another_order_are_named(start: int, row: int) -> None:
    """If the scores decide it in every reference; at a near-tie they do."""

    def turned(made: Call, name: str = "orders", value: float = 1.0) -> list[Event]:
        expected = _margins(reference(made), name, value, (row, 2))
        return [_turned(reply(made, expected), (row - start, 2)), expected]

    observed = "the experts of a row are in another order, in layers [2]"
    for name in ("orders", "margins"):
        for value, found in ((1.0, True), (NEAR_TIE, True), (_BELOW, False)):
            result = _identity(_right, lambda m: turned(m, name, value), start=start)  # noqa: B023
            assert [observed] * found == [finding.observed for finding in result.findings]
    assert {"call": 2, "server": "e0", "index": 6} == dict(
        _identity(_right, turned, start=start).findings[0].where
    )
    unseeded = {"terms": {"seeded": False}}
    assert 1 == _identity(_right, turned, start=start, **unseeded).found
    silent = _identity(_right, lambda made: turned(made)[:1], start=start)
    assert () == silent.findings


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("start", [0, 2])
def test_values_are_compared_up_to_the_first_other_token(seeded: bool, start: int) -> None:
    """Rows of tokens that both calls have, wherever the rows begin."""
    for row, seen in ((3, True), (4, True), (5, False)):

        def other(made: Call, row: int = row) -> list[Event]:
            expected = reference(made)
            values = expected.logprobs[3:] - np.array([0.0, 0.25, 9.0, 9.0])
            answer = reply(made, expected, token_ids=(30, 31, 39, 33), logprobs=values)
            return [with_rows(answer, {(row - start, 2): (0, 3)}), expected]

        (finding,) = _identity(_right, other, start=start, terms={"seeded": seeded}).findings
        parts = ["token 2 of 4 is different"] * seeded
        parts.append("logprobs differ by up to 0.25 nats")
        parts += ["rows differ in 1 of 3 layers (layers [2])"] * seen
        assert "; ".join(parts) == finding.observed


def test_a_first_other_token_leaves_the_rows_of_the_prompt() -> None:
    """And no logprob."""

    def other(made: Call) -> list[Event]:
        expected = reference(made)
        answer = reply(made, expected, token_ids=(39, 31, 32, 33), logprobs=np.zeros(4))
        return [with_rows(answer, {(2, 0): (0, 5), (3, 2): (0, 3)}), expected]

    (finding,) = _identity(_right, other).findings
    words = "token 0 of 4 is different; rows differ in 1 of 3 layers (layers [0])"
    assert words == finding.observed


@pytest.mark.parametrize(("start", "prompt"), [(3, 3), (5, 3)])
def test_rows_behind_another_token_are_not_compared(start: int, prompt: int) -> None:
    """Also if no row is before it."""
    first, second = (call(i, prompt, routes_start=start) for i in (1, 2))
    expected = reference(first), reference(second)
    answer = reply(second, expected[1], token_ids=(39, 31, 32, 33))
    assert answer.output.routes is not None
    moved = replace(answer, output=replace(answer.output, routes=answer.output.routes[::-1]))
    events = [first, reply(first, expected[0]), load(identity=True), second, moved]
    unseeded = {"seeded": False}
    assert () == judged("engine.identity", load(), *events, expected[1], terms=unseeded).findings


def test_rows_from_another_offset_are_not_compared() -> None:
    """The two calls of a pair may request other rows."""
    first, second = call(1), call(2, routes_start=1)
    events = [first, *_right(first), load(identity=True), second, *_right(second)]
    result = judged("engine.identity", load(), *events)
    assert (Verdict.PASS, ()) == (result.verdict, result.findings)


def test_a_call_is_compared_with_the_same_call_alone() -> None:
    """Of the same prompt, parameters and budget, whatever came before it."""
    for changes in ({"prompt_ids": (1, 2, 3)}, {"sampling": {}}, {"max_tokens": 9}):
        first, second = call(1), call(2, **changes)
        wrong = reply(second, reference(second), token_ids=(1, 1, 1, 1))
        events = [first, *_right(first), load(identity=True), second, wrong]
        assert {} == dict(judged("engine.identity", load(), *events).exercised)
    others = [call(3, max_tokens=9), call(1)]
    before = [event for made in others for event in (made, *_right(made))]
    again = call(2)
    wrong = reply(again, reference(again), token_ids=(30, 31, 32, 9))
    result = judged("engine.identity", load(), *before, load(identity=True), again, wrong)
    assert ["token 3 of 4 is different"] == [finding.observed for finding in result.findings]


def test_an_update_to_other_weights_makes_calls_incomparable() -> None:
    """And a second one to equal weights does not."""
    wrong = lambda made: [reply(made, reference(made, version=1))]  # noqa: E731
    assert {} == dict(_identity(_right, wrong, load(1)).exercised)
    twice = _identity(_right, wrong, load(identity=True))
    assert {"calls repeated after an identity update": 1} == dict(twice.exercised)
    assert 1 == twice.found


def test_the_filler_of_the_last_token_is_no_row() -> None:
    """It may hold anything; the row before it may not."""
    made = call()
    expected = reference(made)
    for row, found in ((6, False), (5, True), (0, True)):
        answer = reply(made, expected, routes=expected.routes.astype(np.uint8))
        wrong = with_rows(answer, {(row, 2): (2, 6)})
        result = judged("engine.routes", made, wrong, expected, rows="T", final_row="zeros")
        assert 6 == result.exercised["rows compared"]
        assert found == bool(result.findings)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_kv_of_older_weights_is_not_compared_where_it_may_be_kept(policy: str) -> None:
    """From the first update to other weights on."""
    made = call()
    expected = reference(made)
    for loads, judged_of in (((load(),), True), ((load(), load(1)), policy == "recompute")):
        events = (*loads, made, reply(made, expected), expected)
        result = judged("engine.logprobs", *events, kv_policy=policy)
        assert judged_of == bool(result.exercised)


@pytest.mark.parametrize("after", [None, False, True])
@pytest.mark.parametrize(
    ("sampling", "penalties"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"top_p": 0.5}, False),
        ({"presence_penalty": 1.0}, True),
        ({"top_k": 3, "repetition_penalty": 1.1}, True),
    ],
)
def test_what_a_reference_expects_of_a_call_in_each_mode(
    after: bool | None, sampling: dict[str, float], penalties: bool
) -> None:
    """Before or after penalties, as the engine declares; an undeclared order leaves it open."""
    made = call(sampling=sampling)
    values = {name: np.full(7, i) for i, name in enumerate(("penalised", "penalised_scaled"))}
    expected = replace(reference(made), processed=np.full(7, 5.0), **values)
    contract = engine_contract(terms={"penalised_logprobs": after})
    raw, scaled = expected.logprobs, expected.scaled
    if penalties and after is not False:
        raw = values["penalised"] if after else None
        scaled = values["penalised_scaled"] if after else None
    result = logprobs_of(contract, made, expected)
    assert raw is result[Logprobs.RAW]
    assert scaled is result[Logprobs.TEMPERATURE_SCALED]
    options = set(sampling) - {"temperature"}
    processed = expected.processed if options else expected.scaled
    assert processed is result[Logprobs.PROCESSED]


def test_routes_of_the_declared_layers_and_choices_are_readable() -> None:
    """No others, none at all, and none that the contract does not promise."""
    made = call()
    output = reply(made, reference(made)).output
    assert output.routes is not None
    contract = engine_contract()
    assert readable(contract, output)
    for routes in (None, output.routes[:0], output.routes[:, :2], output.routes[:, :, :1]):
        assert not readable(contract, replace(output, routes=routes))
    silent = dict.fromkeys(
        ("layer_axis", "num_layers", "moe_layers", "num_experts", "top_k", "filler", "dtype")
    )
    assert not readable(engine_contract(rows="none", provenance=None, **silent), output)


def test_the_first_of_two_near_ties_makes_what_follows_doubtful() -> None:
    """Up to the second one and behind it."""
    made = call()
    expected = _margins(reference(made), "margins", _BELOW, (2, 0), (4, 2))
    flipped = with_rows(reply(made, expected), {(2, 0): (2, 6), (4, 2): (1, 6)})
    for row, found in ((1, True), (3, False), (5, False)):
        wrong = with_rows(flipped, {(row, 2): (2, 6)})
        result = judged("engine.routes", made, wrong, expected)
        assert found == bool(result.findings)
        assert {"rows compared": 2} == dict(result.exercised)


def test_the_first_of_two_layers_is_the_place() -> None:
    """Of rows that an update to equal weights changed."""

    def other(made: Call) -> list[Event]:
        expected = reference(made)
        return [with_rows(reply(made, expected), {(1, 2): (0, 6), (4, 0): (0, 6)}), expected]

    (finding,) = _identity(_right, other).findings
    assert "rows differ in 2 of 3 layers (layers [0, 2])" == finding.observed
    assert 0 == finding.where["layer"]
