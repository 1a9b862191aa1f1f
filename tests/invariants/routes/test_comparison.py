"""What route checks compare: offsets of samples and replies, and what counts as filler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollproof.core.contract import Filler, LayerAxis
from rollproof.core.events.rollout import Reply, Result
from rollproof.core.records import IntArray
from rollproof.core.trace import Trace
from rollproof.invariants.routes.comparison import _unforwarded, filler_chance, is_filler
from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.routed_requests import (
    REGISTRY,
    RoutedRequest,
    Segment,
    failing,
    filler,
    only_finding,
)


def _returning(trace: Trace, number: int, routes: IntArray, start: int) -> Trace:
    """The reply ``number`` returns ``routes`` from position ``start`` on."""
    reply = [event for event in trace.events if isinstance(event, Reply)][number]
    changed = replace(reply, output=replace(reply.output, routes=routes, routes_start=start))
    return trace.with_events([changed if event is reply else event for event in trace.events])


@pytest.mark.parametrize("reply_start", [0, 1, 4])
@pytest.mark.parametrize("sample_start", [0, 2, 3])
def test_rows_of_a_reply_without_tokens_are_found_wherever_they_begin(
    sample_start: int, reply_start: int
) -> None:
    """Sample and reply begin at positions of their own. Rows beyond the prompt of that call were
    not computed by it.
    """
    story = RoutedRequest(segments=(Segment(3, 1), Segment(0, 2), Segment(2, 3)))
    routes = story.good().copy()
    begin = max(sample_start, reply_start)
    routes[begin:8] = story.rows(begin, 8, 2)
    trace = story.trace(routes[sample_start:], routes_start=sample_start)
    assert set() != failing(judge(trace, REGISTRY))
    rows = story.rows(reply_start, 10, 2)
    assert set() == failing(judge(_returning(trace, 1, rows, reply_start), REGISTRY))
    routes[8] = story.rows(8, 9, 2)
    trace = story.trace(routes[sample_start:], routes_start=sample_start)
    assert set() != failing(judge(_returning(trace, 1, rows, reply_start), REGISTRY))


def test_rows_that_begin_behind_the_prompt_are_no_alternative() -> None:
    """A reply without tokens forwarded its prompt alone, wherever its rows claim to begin."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(0, 2), Segment(4, 3)))
    routes = story.good().copy()
    routes[9] = story.rows(9, 10, 2)
    trace = _returning(story.trace(routes), 1, story.rows(9, 12, 2), 9)
    assert set() != failing(judge(trace, REGISTRY))


@pytest.mark.parametrize("declared", ["T-1", "T"])
def test_rows_of_a_hole_are_counted_one_by_one(declared: str) -> None:
    """No reply has the row at position 7; the sample begins at position 1. The final row of T rows
    is counted apart, and has another filler.
    """
    final = {"final_row": "arange"} if declared == "T" else {}
    story = RoutedRequest(changes={"filler": "zeros", "rows": declared, **final})
    routes = story.good().copy()
    routes[7] = 0
    late = story.rows(8, 9, 2)
    trace = _returning(story.trace(routes[1:], routes_start=1), 1, late, 8)
    judged = judge(trace, REGISTRY)
    assert set() == failing(judged)
    name = "filler rows of zeros (a legal expert id: a trainer replays them)"
    counted = {name: 1, "filler rows": 1} if final else {name: 1}
    assert counted == judged["routes.filler"].exercised
    assert {"rows compared": 7} == judged["routes.position"].exercised
    for check_id in ("routes.in-range", "routes.distinct", "routes.live"):
        assert [7] == list(judged[check_id].exercised.values())


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        ([[0, 1], [0, 1]], True),
        ([[0, 1], [1, 2]], False),
        ([[0, 1], [2, 3]], True),
        ([[6, 7], [0, 1]], True),
        ([[7, 6], [5, 4]], False),
        ([[0, 2], [4, 6]], False),
        ([[5, 5], [5, 5]], False),
        ([[7], [0]], True),
        ([[7], [1]], False),
        ([[5]], False),
        ([[0]], True),
    ],
)
def test_what_counts_up_is_arange(row: list[list[int]], counts: bool) -> None:
    """In each cell from 0, or through all cells from any expert, beginning again after the last of
    8. One id alone counts nothing unless it is 0.
    """
    rows = np.array([row], dtype=np.uint8)
    assert [counts] == is_filler(rows, Filler.ARANGE, 8).tolist()


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [("int16", -1, True), ("uint8", 255, True), ("int16", 1, False), ("uint8", 254, False)],
)
def test_minus_one_of_an_unsigned_type_is_its_largest_id(
    dtype: str, value: int, fits: bool
) -> None:
    """Every cell has it; one other id makes it a choice."""
    rows = np.full((1, 2, 2), value, dtype=dtype)
    assert [fits] == is_filler(rows, Filler.MINUS_ONE, 8).tolist()
    rows[0, 1, 1] = 3
    assert [False] == is_filler(rows, Filler.MINUS_ONE, 8).tolist()


def test_a_row_like_the_one_before_it_is_previous() -> None:
    """The first is compared with the row before all of them; without one nothing is filler."""
    rows = np.array([[[1, 2]], [[1, 2]], [[3, 4]]])
    assert [True, True, False] == is_filler(rows, Filler.PREVIOUS, 8, before=rows[:1]).tolist()
    assert [False, True, False] == is_filler(rows, Filler.PREVIOUS, 8, before=rows[2:]).tolist()
    assert not is_filler(rows, Filler.PREVIOUS, 8).any()
    assert not is_filler(rows, Filler.PREVIOUS, 8, before=rows[:0]).any()
    assert not is_filler(rows, Filler.NONE, 8, before=rows[:1]).any()


def test_the_chance_of_a_choice_to_look_like_filler() -> None:
    """56 choices of two of eight experts in a cell; zeros are a choice of one expert alone."""
    assert 9 / 56**3 == pytest.approx(filler_chance(Filler.ARANGE, 3, 2, 8))
    assert 1.0 == filler_chance(Filler.ARANGE, 1, 1, 8)
    assert 8.0**-3 == pytest.approx(filler_chance(Filler.ZEROS, 3, 1, 8))
    assert 0.0 == filler_chance(Filler.ZEROS, 3, 2, 8)
    assert 0.0 == filler_chance(Filler.MINUS_ONE, 3, 1, 8)
    assert 1.0 == filler_chance(Filler.ARANGE, 1, 3, 2)


def test_padding_in_the_middle_of_a_segment_is_not_a_boundary() -> None:
    """Only the row of a segment's last token waits for the next call."""
    story = RoutedRequest(
        segments=(Segment(3, 1), Segment(2, 1)), changes={"filler": "minus-one", "dtype": "int16"}
    )
    for position, boundary in ((6, False), (7, True), (8, False)):
        routes = story.good().copy()
        routes[position] = -1
        finding = only_finding(story.judged(routes), "routes.captured")
        assert boundary is finding.hint.startswith("The row at a segment's end is filler only")
        assert position == finding.where["position"]


def _with_added(story: RoutedRequest, added: int, rows: IntArray, trained: int = 0) -> Trace:
    """The stack adds ``added`` tokens of its own to the response, and ``rows`` for them."""
    mask = np.array([1] * story.segments[0].tokens + [trained] * added)
    trace = story.trace(np.concatenate([story.captured(), rows]), loss_mask=mask)
    result = trace.events[-1]
    assert isinstance(result, Result)
    assert result.rollout is not None
    response = (*result.rollout.response_ids, *range(7, 7 + added))
    longer = replace(result.rollout, response_ids=response)
    return trace.with_events([*trace.events[:-1], replace(result, rollout=longer)])


_FILLED = {"rows": "T", "final_row": "arange", "filler": "zeros"}


def test_routes_of_other_tokens_are_not_compared() -> None:
    """A response with a token that no engine sampled, and is trained on: the sample's rows have no
    rows to be compared with. One that is masked out, as an end token of the stack's own, is no
    obstacle.
    """
    story = RoutedRequest(segments=(Segment(3, 1),), changes=_FILLED)
    final = filler("arange", story.captured())
    obstacle = (
        "the tokens of the sample are not those that the engines returned (the family stitch says"
        " which)"
    )
    for trained, verdict, reason in ((0, Verdict.PASS, ""), (1, Verdict.UNKNOWN, obstacle)):
        trace = _with_added(story, 1, np.concatenate([final, final]), trained)
        judged = judge(trace, REGISTRY)["routes.content"]
        assert (verdict, reason) == (judged.verdict, judged.reason)


def test_each_token_that_a_stack_adds_may_have_a_final_row() -> None:
    """Each follows a token that was not forwarded; the filler of a hole is another one, and is
    allowed there too, except in the last row. A wrong row is told by its own position.
    """
    story = RoutedRequest(segments=(Segment(3, 1),), changes=_FILLED)
    final, zeros = (filler(kind, story.captured()) for kind in ("arange", "zeros"))
    choice = story.rows(9, 10, 1)
    for rows, observed in (
        ((final, final, final), None),
        ((zeros, zeros, final), None),
        ((final, final, zeros), "zeros in 1 row (position 9)"),
        ((final, choice, final), "ids that look like a choice in 1 row (position 8)"),
        ((choice, final, final), "ids that look like a choice in 1 row (position 7)"),
        ((choice, choice, final), "ids that look like a choice in 2 rows (positions 7-8)"),
        ((255 + zeros, choice, final), "minus-one in 2 rows (positions 7-8)"),
    ):
        judged = judge(_with_added(story, 2, np.concatenate(rows)), REGISTRY)
        if observed is None:
            assert set() == failing(judged)
            assert 3 == sum(judged["routes.filler"].exercised.values())
        else:
            finding = only_finding(judged, "routes.filler")
            assert observed == finding.observed
            assert (
                int(observed.split("position")[1].strip("s )").split("-")[0])
                == (finding.where["position"])
            )


def test_a_prefix_ends_before_its_first_surplus_row() -> None:
    """Two rows too many are told from the first of them on."""
    story = RoutedRequest(segments=(Segment(3, 1),), changes={"rows": "captured-prefix"})
    surplus = story.rows(7, 9, 1)
    finding = only_finding(judge(_with_added(story, 2, surplus), REGISTRY), "routes.filler")
    assert finding.expected.startswith("rows up to position 6: the captured prefix")
    assert 7 == finding.where["position"]


_DENSE = {"num_layers": 5, "moe_layers": (0, 2, 4)}


@pytest.mark.parametrize("start", [0, 2, 8])
def test_a_choice_in_a_dense_column_is_told_where_it_is(start: int) -> None:
    """Also in a sample that begins at another position than 0, or behind the first call's rows."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(4, 2)), changes=_DENSE)
    routes = story.good().copy()
    routes[9, 3], routes[10, 3] = (5, 3), (3, 7)
    trace = story.trace(routes[start:], routes_start=start)
    finding = only_finding(judge(trace, REGISTRY), "routes.dense-columns")
    assert (9, 3) == (finding.where["position"], finding.where["layer"])
    assert "experts [5, 3] at position 9 in layer 3; so in 2 rows (layer 3)" == finding.observed
    assert "the engine's own value or a filler in 2 dense layers (layer 1, 3)" == finding.expected


@pytest.mark.parametrize(
    ("cells", "choice"),
    [
        (((0, 1, 2), (3, 4, 5)), False),
        (((6, 7, 0), (3, 4, 5)), False),
        (((5, 5, 5), (3, 3, 3)), False),
        (((5, 2, 6), (5, 2, 6)), False),
        (((0, 1, 2), (3, 4, 6)), True),
        (((0, 1, 2), (3, 5, 6)), True),
        (((0, 1, 2), (2, 1, 0)), True),
    ],
)
@pytest.mark.parametrize("axis", ["all", "moe"])
def test_a_dense_column_may_hold_any_filler(
    axis: str, cells: tuple[tuple[int, ...], ...], choice: bool
) -> None:
    """One repeated id, ids that count up, or one cell in all rows; whether or not the engine itself
    returns columns of dense layers.
    """
    story = RoutedRequest(segments=(Segment(5),), changes={**_DENSE, "top_k": 3})
    routes = story.good().copy()
    routes[:, 1], routes[4:, 1] = cells[0], cells[1]
    rows = story.good()[:, [0, 2, 4]] if axis == "moe" else story.good()
    trace = _returning(story.trace(routes), 0, rows, 0)
    engine = replace(story.contract, layer_axis=LayerAxis(axis))
    judged = judge(replace(trace, header=replace(trace.header, engine=engine)), REGISTRY)
    assert ({"routes.dense-columns"} if choice else set()) == failing(judged)
    assert {"rows compared": 9} == judged["routes.dense-columns"].exercised


def test_what_an_engine_returns_in_a_dense_column_is_right() -> None:
    """Even if it looks like a choice, in a sample of several calls of which the last one is cut."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(4, 2)), changes=_DENSE)
    returned = [story.rows(0, 7, 1), story.rows(0, 11, 2)]
    for rows in returned:
        rows[:, 1] = np.arange(len(rows) * 2).reshape(-1, 2) * 3 % 8
    routes = np.concatenate([returned[0], returned[1][7:9]])
    trace = story.trace(routes, keep=5)
    for number, rows in enumerate(returned):
        trace = _returning(trace, number, rows, 0)
    assert set() == failing(judge(trace, REGISTRY))


def test_a_previous_row_needs_one() -> None:
    """Without a row before them, the rows of a hole at the start are no copies of it."""
    story = RoutedRequest(segments=(Segment(5),), changes={"filler": "previous"})
    trace = _returning(story.trace(story.good()), 0, story.good()[2:], 2)
    finding = only_finding(judge(trace, REGISTRY), "routes.filler")
    assert "previous filler, as the contract declares" == finding.expected
    assert 0 == finding.where["position"]


def test_a_choice_of_one_expert_in_a_thousand_is_not_called_zeros() -> None:
    """Three layers of ten experts: expert 0 everywhere is a choice now and then; in four layers it
    is none.
    """
    for layers, named in ((3, "ids that look like a choice"), (4, "zeros")):
        model = {"num_layers": layers, "moe_layers": tuple(range(layers)), "num_experts": 10}
        story = RoutedRequest(
            segments=(Segment(5),), changes={**model, "top_k": 1, "filler": "none"}
        )
        rows = story.good().copy()
        rows[:2] = 0
        trace = _returning(story.trace(rows), 0, story.good()[2:], 2)
        finding = only_finding(judge(trace, REGISTRY), "routes.filler")
        assert f"{named} in 2 rows (positions 0-1)" == finding.observed


@pytest.mark.parametrize(
    ("wrong", "boundary"), [((7,), True), ((7, 8), False), ((8,), False), ((9,), False)]
)
def test_the_rule_of_the_boundary_is_told_of_a_boundary_alone(
    wrong: tuple[int, ...], boundary: bool
) -> None:
    """One row, and that of the last token of a segment."""
    story = RoutedRequest(segments=(Segment(3, 1), Segment(3, 2), Segment(2, 3)))
    rows, third = story.good().copy(), story.returned(2)
    assert third is not None
    rows[list(wrong)] = third[list(wrong)]
    finding = only_finding(story.judged(rows), "routes.provenance")
    assert boundary is finding.hint.startswith("The last token of a segment is forwarded by")


def test_a_layer_that_was_never_captured_is_placed_at_the_first_row() -> None:
    """Also if a hole divides the captured rows."""
    story = RoutedRequest(changes={"filler": "zeros"})
    routes = story.good().copy()
    routes[:, 1], routes[7] = 0, 0
    trace = story.trace(routes)
    for number, (rows, start) in enumerate(((routes[:7], 0), (routes[8:], 8))):
        trace = _returning(trace, number, rows, start)
    finding = only_finding(judge(trace, REGISTRY), "routes.live")
    assert (0, 1) == (finding.where["position"], finding.where["layer"])
    assert "expert 0 in all 8 rows of 1 of 3 MoE layers (layer 1)" == finding.observed


@pytest.mark.parametrize(
    ("gaps", "rows", "excused"),
    [(True, "T-1", True), (False, "T-1", False), (True, "T", True), (False, "T", False)],
)
def test_rows_of_filler_need_no_capture_where_replies_may_lack_them(
    gaps: bool, rows: str, excused: bool
) -> None:
    """The final row of T may have another filler."""
    final = {"final_row": "arange"} if rows == "T" else {}
    changes = {"filler": "zeros", "rows": rows, "reply_gaps": gaps, **final}
    story = RoutedRequest(segments=(Segment(12, 1, routes=False),), changes=changes)
    filled = story.rows(0, 16, 1) * 0
    if final:
        filled = np.concatenate([filled, filler("arange", filled)])
    judged = judge(story.trace(filled), REGISTRY)["routes.live"]
    assert (Verdict.UNKNOWN if excused else Verdict.FAIL) is judged.verdict
    if excused:
        assert "no reply had routes, and every row is the declared filler" == judged.reason
        filled[3] = story.rows(3, 4, 1)
        other = judge(story.trace(filled), REGISTRY)["routes.live"]
        assert Verdict.PASS is other.verdict


@pytest.mark.parametrize(
    ("length", "count"), [(9, 4), (8, 3), (6, 1), (5, 0), (3, 0), (1, 0), (20, 4)]
)
def test_words_of_the_environment_at_the_end_were_never_forwarded(length: int, count: int) -> None:
    """As far as the sample holds them; a call that sampled nothing forwarded nothing."""
    runs = [
        SimpleNamespace(attempt=attempt, ids=ids, start=start, end=start + len(ids))
        for attempt, ids, start in (
            (0, (1, 2), 0),
            (-1, (3,), 2),
            (1, (4, 5), 3),
            (-1, (6, 7), 5),
            (2, (), 7),
            (-1, (8, 9), 7),
        )
    ]
    view: Any = SimpleNamespace(stitched=SimpleNamespace(runs=runs))
    assert count == _unforwarded(view, length)
