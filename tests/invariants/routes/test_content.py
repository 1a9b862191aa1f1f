"""Route checks of content: a fault has one name, says where and how much, and a correct but unusual
sample has none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.case import Model
from rollproof.core.contract import Contract, LayerAxis
from rollproof.core.events.rollout import Weights
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import case
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Judgement
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge
from tests.support.routed_requests import (
    CONVENTIONS,
    MODELS,
    REGISTRY,
    RoutedRequest,
    Segment,
    edited,
    failing,
    only_finding,
)
from tests.support.trace_builder import TraceBuilder

_SEGMENTS = {
    "one call": (Segment(5),),
    "one token": (Segment(1),),
    "update at the resume": (Segment(3, 1), Segment(2, 2)),
    "no update": (Segment(3, 1), Segment(2, 1)),
    "empty first": (Segment(0, 1), Segment(3, 2)),
    "empty middle": (Segment(2, 1), Segment(0, 2), Segment(2, 3)),
    "empty last": (Segment(3, 1), Segment(0, 2)),
    "one at a time": (Segment(1, 1), Segment(1, 2), Segment(1, 3)),
    "reply without routes": (Segment(2, 1), Segment(2, 1, routes=False), Segment(2, 1)),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_correct_sample_is_never_blamed(model: str, convention: str) -> None:
    """Every model, convention, schedule, prompt of one token, and engines with T rows: no finding,
    no crash.
    """
    changes = {**MODELS[model], **CONVENTIONS[convention]}
    for segments, (prompt, engine) in itertools.product(
        _SEGMENTS.values(), ((1, "T-1"), (5, "arange"), (2, "zeros"))
    ):
        story = RoutedRequest(segments=segments, prompt=prompt, changes=changes, engine_rows=engine)
        judged = story.judged(story.good(), RoutedRequest(request_id="r1", changes=changes))
        assert failing(judged) == set(), (segments, prompt, engine)
        assert judged["routes.content"].verdict is Verdict.PASS


def _other_expert(story: RoutedRequest) -> np.ndarray:
    rows, contract = story.good().copy(), story.contract
    column = contract.moe_columns[0]
    rows[1, column, 0] = next(
        e for e in reversed(range(contract.num_experts or 0)) if e not in rows[1, column]
    )
    return rows


def _twice(story: RoutedRequest) -> np.ndarray | None:
    rows, column = story.good().copy(), story.contract.moe_columns[0]
    rows[2, column, 0] = rows[2, column, -1]
    return rows if story.contract.top_k != 1 else None


def _half_of_another(story: RoutedRequest) -> np.ndarray:
    rows = story.good().copy()
    rows[5:] = RoutedRequest(
        segments=story.segments, changes=story.changes, request_id="r1"
    ).good()[5:]
    return rows


def _beyond(story: RoutedRequest) -> np.ndarray:
    rows = story.good().copy()
    rows[1, story.contract.moe_columns[0], 0] = story.contract.num_experts
    return rows


def _replaced(story: RoutedRequest) -> np.ndarray | None:
    rows = story.good().copy()
    first, last = story.returned(0), story.returned(1)
    assert first is not None and last is not None
    rows[:7] = (last if story.contract.provenance == "as-sampled" else first)[:7]
    return rows


_FAULTS: dict[str, tuple[str, Callable[[RoutedRequest], np.ndarray | None]]] = {
    "rows shifted on": ("routes.position", lambda s: np.concatenate([s.good()[:1], s.good()[:-1]])),
    "rows shifted back": (
        "routes.position",
        lambda s: np.concatenate([s.good()[1:], s.good()[-1:]]),
    ),
    "response rows shifted": (
        "routes.position",
        lambda s: np.concatenate([s.good()[:5], s.good()[4:-1]]),
    ),
    "layers shifted on": ("routes.layer", lambda s: np.roll(s.good(), 1, axis=1)),
    "layers shifted back": ("routes.layer", lambda s: np.roll(s.good(), -1, axis=1)),
    "layers reversed": ("routes.layer", lambda s: s.good()[:, ::-1]),
    "older rows replaced, or newer ones not taken": ("routes.provenance", _replaced),
    "boundary row zero": ("routes.captured", lambda s: edited(s, 7, 0)),
    "prompt rows zero": ("routes.captured", lambda s: edited(s, slice(0, 5), 0)),
    "another request's rows": ("routes.isolation", _half_of_another),
    "one expert exchanged": ("routes.content", _other_expert),
    "one expert twice": ("routes.distinct", _twice),
    "one expert beyond the last": ("routes.in-range", _beyond),
    "no routes": ("routes.presence", lambda _: None),
    "one row short": (
        "routes.rows",
        lambda s: s.good()[:-1] if s.contract.rows != "captured-prefix" else s.good()[:0],
    ),
}


@pytest.mark.parametrize(
    "convention", ["T-1", "latest prefill", "T, arange", "T, minus one", "T, previous", "prefix"]
)
@pytest.mark.parametrize(
    "model", ["plain", "dense first", "moe axis", "wide", "many experts", "top 1"]
)
def test_one_fault_blames_one_check(model: str, convention: str) -> None:
    """Each fault, on every model and convention, is found by its own check and by no other."""
    changes = {**MODELS[model], **CONVENTIONS[convention]}
    final = "final_row" in CONVENTIONS[convention]
    for name, (check_id, fault) in _FAULTS.items():
        story = RoutedRequest(changes=changes)
        wrong = fault(story)
        if wrong is None and name != "no routes":
            continue
        if final and wrong is not None and "shifted" in name and "rows" in name:
            wrong = np.concatenate([wrong[: len(story.captured())], story.good()[-1:]])
        want = "routes.presence" if wrong is not None and not len(wrong) else check_id
        assert failing(story.judged(wrong, RoutedRequest(request_id="r1", changes=changes))) == {
            want
        }, name


def test_a_shift_names_the_row_that_stands_there() -> None:
    """Position and distance, how many rows, and the rule that is usually broken."""
    story = RoutedRequest()
    finding = only_finding(
        story.judged(np.concatenate([story.good()[:1], story.good()[:-1]])), "routes.position"
    )
    assert (
        finding.observed
        == "the row at position 1 is that of position 0; so in 8 of 9 rows (positions 1-8)"
    )
    assert finding.expected == "row i is the row of token i of prompt + response"
    assert {"request": "r0", "position": 1} == finding.where


def test_a_shift_in_the_response_names_its_segment() -> None:
    """Position and segment of the first wrong row."""
    story = RoutedRequest()
    rows = np.concatenate([story.good()[:7], story.good()[6:-1]])
    finding = only_finding(story.judged(rows), "routes.position")
    assert {"request": "r0", "position": 7, "segment": 0} == finding.where


def test_a_long_sample_is_looked_into_as_far_as_it_tells() -> None:
    """Of many wrong rows the first 256 are explained, and the message counts the others."""
    story = RoutedRequest(segments=(Segment(300),), prompt=5)
    finding = only_finding(story.judged(np.roll(story.good(), 1, axis=1)), "routes.layer")
    assert re.search(
        r"in 256 of 304 rows \(.*\); \d\d wrong rows after them not examined", finding.observed
    )


def test_a_layer_shift_names_the_layers_of_the_model() -> None:
    """Dense layers count: the layer named is the model's, not the column's ordinal."""
    story = RoutedRequest(changes=MODELS["moe axis"])
    finding = only_finding(story.judged(np.roll(story.good(), -1, axis=1)), "routes.layer")
    assert (
        finding.observed
        == "columns shifted by +1: layer 1's column holds the choice of layer 3; in 9 of 9 rows"
        " (positions 0-8)"
    )
    assert finding.where == {"request": "r0", "position": 0, "layer": 1}
    assert "verl #5037" in finding.hint


def test_a_layer_shift_back_names_the_first_column_with_another_layer() -> None:
    """The first column has nothing before it to hold."""
    story = RoutedRequest(changes=MODELS["moe axis"])
    finding = only_finding(story.judged(np.roll(story.good(), 1, axis=1)), "routes.layer")
    assert (
        "columns shifted by -1: layer 3's column holds the choice of layer 1; in 9 of 9 rows"
        " (positions 0-8)" == finding.observed
    )
    assert {"request": "r0", "position": 0, "layer": 3} == finding.where


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("plain", "column l holds layer l (layer_axis='all')"),
        ("dense first", "column l holds MoE layer number l (layer_axis='all')"),
        ("moe axis", "column l holds MoE layer number l (layer_axis='moe')"),
    ],
)
def test_the_columns_are_those_that_the_contract_declares(model: str, expected: str) -> None:
    """If there are dense layers a column is not its own layer's number."""
    story = RoutedRequest(changes=MODELS[model])
    rows = story.good().copy()
    columns = list(story.contract.moe_columns)
    rows[2:, columns] = rows[2:, columns[::-1]]
    finding = only_finding(story.judged(rows), "routes.layer")
    assert expected == finding.expected
    assert 2 == finding.where["position"]


def _delivered_columns(
    columns: tuple[int, ...], moe_layers: tuple[int, ...] = (0, 2, 4)
) -> Judgement:
    """Judge a client that takes these columns of its engine for those of the MoE layers."""

    class Client(AsSampled):
        def declared(self, fleet: Fleet) -> Contract:
            return replace(super().declared(fleet), layer_axis=LayerAxis.MOE)

        def on_declared_layers(self, rows: np.ndarray) -> np.ndarray:
            return rows[:, list(columns)]

    model = Model(num_layers=5, moe_layers=moe_layers)
    return judge(run_case(Client, case(model=model)))


def test_consecutive_columns_of_an_engine_are_named() -> None:
    """The last columns are not those of the MoE layers if dense layers lie between them: one has
    zeros, and that alone is not the fault.
    """
    judgement = _delivered_columns((2, 3, 4))
    assert ("routes.layer",) == judgement.failed
    (finding,) = judgement["routes.layer"].findings
    assert finding.observed.startswith(
        "the columns are columns 2 to 4 of the engine's 5, of which 3 is dense; in 8 of 8 rows"
    )
    assert "index the columns by moe_layers" in finding.hint


def test_a_dense_column_beside_right_ones_is_no_filler() -> None:
    """Only one column is wrong, and it has zeros; but all are consecutive columns of the engine."""
    judgement = _delivered_columns((2, 3, 4), moe_layers=(1, 3, 4))
    assert ("routes.layer",) == judgement.failed
    (finding,) = judgement["routes.layer"].findings
    assert finding.observed.startswith(
        "the columns are columns 2 to 4 of the engine's 5, of which 2 is dense; in 8 of 8 rows"
    )


def test_a_layer_that_was_not_captured_is_filler() -> None:
    """Zeros in one column, where no consecutive columns have zeros."""
    judgement = _delivered_columns((2, 1, 4), moe_layers=(2, 3, 4))
    assert ("routes.captured",) == judgement.failed


def test_other_columns_with_zeros_are_no_consecutive_ones() -> None:
    """A column that was never written has zeros as well, and the others are right."""
    assert ("routes.captured",) == _delivered_columns((0, 1, 4)).failed
    assert () == _delivered_columns((0, 2, 4)).failed


def test_two_exchanged_layers_are_named() -> None:
    """Only two of many layers are exchanged: the finding names both and counts the wrong rows."""
    story = RoutedRequest(changes=MODELS["wide"])
    rows = story.good().copy()
    rows[:, [1, 4]] = rows[:, [4, 1]]
    finding = only_finding(story.judged(rows), "routes.layer")
    assert (
        finding.observed
        == "layer 1's column holds layer 4, layer 4's column holds layer 1; in 9 of 9 rows"
        " (positions 0-8), in 2 of 6 MoE layers"
    )


def test_replaced_rows_name_both_segments_and_versions() -> None:
    """As sampled, and replaced on resume: the versions on both sides, and the choice that the
    developer has.
    """
    story = RoutedRequest()
    finding = only_finding(story.judged(story.returned(1)), "routes.provenance")
    assert (
        finding.expected
        == "provenance='as-sampled': the row at position 0 is that of segment 0 (version 1)"
    )
    assert (
        finding.observed == "it is that of segment 1 (version 2); so in 7 of 9 rows (positions 0-6)"
    )
    assert "declare provenance='latest-prefill'" in finding.hint
    assert "verl #6046" in finding.hint


def test_a_boundary_row_of_the_wrong_segment_is_told_as_such() -> None:
    """The row of a segment's last token belongs to the next segment: the rule is in the hint."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(3, 2), Segment(2, 3)))
    rows = story.good().copy()
    third = story.returned(2)
    assert third is not None
    rows[7] = third[7]
    finding = only_finding(story.judged(rows), "routes.provenance")
    assert (
        finding.observed == "it is that of segment 2 (version 3); so in 1 of 12 rows (position 7)"
    )
    assert "let the next one start there" in finding.hint


_EACH_ONE = (Segment(3, 1), Segment(1, 2), Segment(1, 3), Segment(2, 4))


@pytest.mark.parametrize(
    ("provenance", "segments", "prompt", "positions", "call", "hint"),
    [
        ("as-sampled", _EACH_ONE, 5, [8], 3, "On resume keep all rows that are there"),
        ("as-sampled", _EACH_ONE, 5, [7], 3, "The last token of a segment is forwarded"),
        ("as-sampled", _EACH_ONE, 5, [6], 3, "The older rows were replaced"),
        ("as-sampled", _EACH_ONE, 5, [7, 8], 3, "The older rows were replaced"),
        ("as-sampled", _EACH_ONE, 1, [0], 3, "On resume keep all rows that are there"),
        ("as-sampled", _EACH_ONE, 2, [1], 3, "The last token of a segment is forwarded"),
        ("latest-prefill", _EACH_ONE, 5, [8], 2, "Rows of an earlier call were kept"),
        ("latest-prefill", _EACH_ONE, 5, [6], 2, "Rows of an earlier call were kept"),
    ],
)
def test_the_hint_says_which_rows_of_which_segment_were_taken(
    provenance: str,
    segments: tuple[Segment, ...],
    prompt: int,
    positions: list[int],
    call: int,
    hint: str,
) -> None:
    """One row at the end of a segment, which may be all of it; other rows; and what is declared."""
    story = RoutedRequest(
        segments=segments, prompt=prompt, changes={**MODELS["wide"], "provenance": provenance}
    )
    rows, other = story.good().copy(), story.returned(call)
    assert other is not None
    rows[positions] = other[positions]
    finding = only_finding(story.judged(rows), "routes.provenance")
    assert finding.hint.startswith(hint)
    assert (positions[0], call + 1) == (finding.where["position"], finding.where["version"])
    last = positions[-1] - prompt
    sampled = [number for number, part in enumerate(segments) for _ in range(part.tokens)]
    assert (sampled[last] if last >= 0 else None) == finding.where.get("segment")


def test_rows_of_two_wrong_segments_are_one_fault() -> None:
    """An overlap that is one row too wide moves each boundary row to the segment after its own: one
    cause, although the rows come from different calls.
    """
    story = RoutedRequest(
        segments=(Segment(3, 1), Segment(3, 2), Segment(3, 3), Segment(3, 4)),
    )
    rows = story.good().copy()
    for boundary, segment in ((6, 1), (9, 2), (12, 3)):
        returned = story.returned(segment)
        assert returned is not None
        rows[boundary] = returned[boundary]
    finding = only_finding(story.judged(rows), "routes.provenance")
    assert (
        "it is that of segment 1 (version 2); so in 1 of 16 rows (position 6); 2 more rows"
        " (positions 9, 12) of the same sample are also wrong"
    ) == finding.observed


def test_rows_of_weights_that_no_reply_holds_are_named_by_the_oracle() -> None:
    """A row recomputed under another version than any call used is traced to that version."""
    story = RoutedRequest(segments=(Segment(5, 1),))

    class Oracle:
        def routes(self, version: Any, ids: Sequence[int], start: int = 0) -> np.ndarray:
            return story.rows(start, len(ids), int(version))

        def logprobs(self, version: Any, ids: Sequence[int], start: int) -> np.ndarray:
            raise NotImplementedError("route checks ask for no logprobs")

    trace = story.trace(story.rows(0, 9, 2))
    trace = trace.with_events([Weights(server_id="s1", version=2, label=2), *trace.events])
    judged = judge(trace, REGISTRY, Oracle())
    finding = only_finding(judged, "routes.provenance")
    assert (
        finding.observed
        == "it is that of weights 2 (no reply holds it); so in 9 of 9 rows (positions 0-8)"
    )
    assert judged["routes.engine"].exercised == {"engine rows compared": 9}


def test_filler_over_a_capture_at_a_boundary_says_where_the_row_is() -> None:
    """An engine with T rows, merged by tail: its filler is where the next segment's row belongs."""
    story = RoutedRequest(engine_rows="minus-one", changes={"dtype": "int32"})
    first, second = story.returned(0), story.returned(1)
    assert first is not None and second is not None
    finding = only_finding(story.judged(np.concatenate([first, second[8:9]])), "routes.captured")
    assert finding.expected == "the captured row at position 7 (captured by segment 1 (version 2))"
    assert finding.observed == "minus-one filler in 1 of 9 rows (position 7)"
    assert "Engines with T rows" in finding.hint


def test_another_requests_rows_are_traced_to_it() -> None:
    """The position and the request that the row really belongs to."""
    story, other = RoutedRequest(), RoutedRequest(request_id="r1")
    rows = story.good().copy()
    rows[3:6] = other.good()[2:5]
    finding = only_finding(story.judged(rows, other), "routes.isolation")
    assert (
        finding.observed
        == "the row at position 3 is that of position 2 of request r1; so in 3 of 9 rows (positions"
        " 3-5)"
    )


class _SameChoices(RoutedRequest):
    """Another request for which the router chose as for r0, as for a shared prefix."""

    def rows(self, start: int, stop: int, version: int) -> np.ndarray:
        return RoutedRequest(segments=self.segments).rows(start, stop, version)


def test_rows_with_two_explanations_are_one_fault_next_to_rows_without_any() -> None:
    """A shifted row may also be another request's; once it is explained, only the other rows are
    left, and nothing is said of the second explanation.
    """
    story = RoutedRequest(segments=(Segment(8),))
    other = _SameChoices(segments=story.segments, request_id="r1")
    rows = story.good().copy()
    rows[:2] = story.good()[1:3]
    for row in rows[4:9]:
        row[0, 0] = next(e for e in range(story.contract.expert_count) if e not in row[0])
    judged = story.judged(rows, other)
    assert {"routes.position", "routes.content"} == failing(judged)
    assert "so in 2 of 12 rows (positions 0-1)" in judged["routes.position"].findings[0].observed
    (content,) = judged["routes.content"].findings
    assert "wrong in 5 of 12 rows (positions 4-8)" in content.observed
    assert 4 == content.where["position"]


def test_the_order_of_experts_within_a_cell_does_not_count() -> None:
    """A stack that sorts the ids of a cell loses nothing: replay gathers by id."""
    story = RoutedRequest()
    assert failing(story.judged(np.sort(story.good(), axis=2))) == set()


def test_dense_columns_may_hold_any_filler() -> None:
    """Dense layers have no capture under layer_axis='all': zeros, -1, repetitions, and ids that
    count up through the rows.
    """
    story = RoutedRequest(changes={**MODELS["dense first"], "dtype": "int32"})
    rows = story.good().copy()
    running = np.arange(rows[:, 0].size).reshape(rows[:, 0].shape) % 8
    for value in (0, -1, 7, np.array([5, 2]), np.arange(len(rows))[:, None], running):
        rows[:, 0] = value
        judged = story.judged(rows)
        assert failing(judged) == set()
        assert judged["routes.dense-columns"].exercised == {"rows compared": len(rows)}


def test_a_choice_in_a_dense_column_is_found() -> None:
    """What looks like a capture of a layer that has no router is replayed by a trainer that counts
    columns.
    """
    story = RoutedRequest(changes=MODELS["dense first"])
    rows = story.good().copy()
    rows[3:, 0] = np.roll(rows[3:, 1], 1, axis=0)
    rows[0, 0] = (3, 1)
    finding = only_finding(story.judged(rows), "routes.dense-columns")
    assert finding.title == "the column of a dense layer holds what looks like a choice of experts"
    assert finding.expected == "the engine's own value or a filler in 1 dense layer (layer 0)"
    assert finding.where["layer"] == 0
    assert "verl #5037" in finding.hint


_TWO_DENSE: dict[str, Any] = {"num_layers": 5, "moe_layers": (1, 3, 4), "dtype": "int32"}


@pytest.mark.parametrize(("segments", "low"), [((Segment(5),), 5), ((Segment(3), Segment(2)), 7)])
def test_the_dense_layer_with_a_choice_is_named(segments: tuple[Segment, ...], low: int) -> None:
    """One of two, with its first row, also if that is in the rows of a later call."""
    story = RoutedRequest(segments=segments, changes=_TWO_DENSE)
    rows = story.good().copy()
    rows[[low, low + 1], 2] = [[3, 5], [6, 1]]
    if low == 7:
        rows[7, 2] = 0
    first, count = (5, "2 rows") if low == 5 else (8, "1 row")
    finding = only_finding(story.judged(rows), "routes.dense-columns")
    assert finding.observed == (
        f"experts {rows[first, 2].tolist()} at position {first} in layer 2; so in {count} (layer 2)"
    )
    assert "the engine's own value or a filler in 2 dense layers (layer 0, 2)" == finding.expected
    segment = 0 if low == 5 else 1
    assert finding.where == {"request": "r0", "position": first, "layer": 2, "segment": segment}


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ((3, 4), 0),
        ((7, 0), 0),
        ((3, 3), 0),
        ((3, 5), 1),
        ((4, 3), 1),
        ((6, 7, 0), 0),
        ((5, 5, 5), 0),
        ((3, 4, 6), 1),
    ],
)
def test_ids_that_repeat_or_count_up_are_no_choice(cell: tuple[int, ...], found: int) -> None:
    """Modulo the number of experts; those that count by two or down may be one."""
    story = RoutedRequest(changes={**_TWO_DENSE, "top_k": len(cell)})
    rows = story.good().copy()
    rows[2, 0] = cell
    assert found == story.judged(rows)["routes.dense-columns"].found


class _ChoosesInDenseLayers(RoutedRequest):
    """The engine's buffer holds something in the column of a dense layer."""

    def rows(self, start: int, stop: int, version: int) -> np.ndarray:
        rows = super().rows(start, stop, version)
        rows[:, 0] = rows[:, 1, ::-1]
        return rows


def test_the_engines_own_value_in_a_dense_column_is_right() -> None:
    """Another one that looks like a choice is not."""
    story = _ChoosesInDenseLayers(changes=_TWO_DENSE)
    rows = story.good().copy()
    assert set() == failing(story.judged(rows))
    rows[3, 0] = next(p for p in ([3, 6], [6, 3]) if p != rows[3, 0].tolist())
    assert 3 == only_finding(story.judged(rows), "routes.dense-columns").where["position"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "no dense layer has a column"),
        (MODELS["moe axis"], "no dense layer has a column"),
        ({**MODELS["dense first"], "top_k": 1}, "top_k is 1"),
    ],
)
def test_where_no_dense_layer_has_a_column_there_is_none_to_judge(
    changes: dict[str, Any], reason: str
) -> None:
    """Or where one id could be anything."""
    story = RoutedRequest(changes=changes)
    judged = story.judged(story.good())["routes.dense-columns"]
    assert (Verdict.NOT_APPLICABLE, True) == (judged.verdict, reason in judged.reason)


def test_an_engine_that_counts_moe_layers_feeds_a_stack_that_counts_all() -> None:
    """The engine's axis is its own: rows are compared layer by layer."""
    story = RoutedRequest(changes={**MODELS["moe axis"]})
    wide = np.zeros((9, 5, 2), dtype=np.uint8)
    wide[:, [1, 3, 4]] = story.good()
    trace = story.trace(wide)
    stack = RoutedRequest(changes={**MODELS["moe axis"], "layer_axis": "all"}).contract
    trace = type(trace)(
        header=type(trace.header)(subject="by hand", contract=stack, engine=story.contract),
        events=trace.events,
    )
    judged = judge(trace, REGISTRY)
    assert failing(judged) == set()
    assert judged["routes.layer"].exercised == {"rows compared": 9}
    wide[:, [1, 3, 4]] = wide[:, [3, 4, 1]]
    spoiled = judge(
        type(trace)(header=trace.header, events=(*trace.events[:-1], story.trace(wide).events[-1])),
        REGISTRY,
    )
    assert failing(spoiled) == {"routes.layer"}


def test_an_unexplained_row_is_shown_beside_the_right_one() -> None:
    """Nothing known fits: both experts are shown, with layer and position, and how many layers."""
    story = RoutedRequest(changes=MODELS["wide"])
    finding = only_finding(story.judged(_other_expert(story)), "routes.content")
    want, got = story.good()[1, 0].tolist(), _other_expert(story)[1, 0].tolist()
    assert finding.expected == f"experts {want} at position 1, as the engine returned"
    assert (
        finding.observed
        == f"experts {got}; wrong in 1 of 9 rows (position 1), in 1 of 6 MoE layers"
    )
    assert finding.where == {"request": "r0", "position": 1, "layer": 0}


def test_the_first_wrong_layer_of_an_unexplained_row_is_shown() -> None:
    """The layers before it are right, whatever the order of their experts."""
    story = RoutedRequest(changes={"num_layers": 5, "moe_layers": (1, 3, 4)})
    rows = story.good().copy()
    rows[7] = rows[7, :, ::-1]
    right = story.good()[7, 3]
    other = next(e for e in range(8) if e not in right)
    rows[7, 3] = (other, right[0])
    rows[7, 4, 0] = next(e for e in range(8) if e not in rows[7, 4])
    finding = only_finding(story.judged(rows), "routes.content")
    assert f"experts {right.tolist()} at position 7, as the engine returned" == finding.expected
    assert finding.observed.startswith(f"experts {[other, int(right[0])]}; wrong in 1 of 9 rows")
    assert finding.where == {"request": "r0", "position": 7, "layer": 3, "segment": 0}


def test_a_trace_without_replies_is_judged_by_what_it_has() -> None:
    """A production dump holds samples only: shape, count and values are judged, content is unknown
    with its reason.
    """
    story = RoutedRequest()
    builder = TraceBuilder(story.contract).submit("r0", story.ids[:5], max_tokens=5)
    builder.result(story.ids[5:], "r0", story.ids[:5], routes=story.good())
    judged = judge(builder.trace(), REGISTRY)
    assert failing(judged) == set()
    assert judged["routes.rows"].verdict is judged["routes.distinct"].verdict is Verdict.PASS
    assert (
        judged["routes.position"].reason == "the trace holds no reply with routes to compare with"
    )


def test_rows_of_other_tokens_are_not_compared() -> None:
    """If the tokens are wrong the family stitch reports it; rows that fit the sampled tokens are
    not blamed as well.
    """
    story = RoutedRequest()
    builder = TraceBuilder(story.contract)
    story.record_in(builder, story.good())
    events = list(builder.trace().events)
    builder = TraceBuilder(story.contract)
    builder.add(*events[:-1]).result(
        story.ids[5:-1] + (1,) * 3, "r0", story.ids[:5], routes=story.good()
    )
    judged = judge(builder.trace(), REGISTRY)
    assert failing(judged) == set()
    assert "family stitch" in judged["routes.rows"].reason


def test_one_row_of_few_experts_is_no_exchange_of_layers() -> None:
    """The row before, repeated, often has choices of other layers of its own row: by chance, for
    there are few.
    """
    story = RoutedRequest(
        segments=(Segment(300),),
        changes={"num_experts": 4, "top_k": 2, "num_layers": 5, "moe_layers": tuple(range(5))},
    )
    good = story.good()
    alike = (good[:-1, :, None] == good[1:, None]).all(axis=3).any(axis=2).sum(axis=1)
    places = np.flatnonzero(alike >= 3)[:12] + 1
    assert len(places) == 12
    for place in places:
        assert failing(story.judged(edited(story, int(place), good[place - 1]))) <= {
            "routes.position",
            "routes.content",
        }


def test_zeros_in_all_columns_are_filler() -> None:
    """Columns of dense layers alone are no choice of columns: nothing in them is right."""
    assert ("routes.captured",) == _delivered_columns((0, 1), moe_layers=(3, 4)).failed
