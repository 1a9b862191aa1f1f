"""``routes.filler``: what a row holds where no engine captured a choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollproof.core.events.rollout import Reply, Result
from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.routed_requests import (
    CONVENTIONS,
    MODELS,
    REGISTRY,
    RoutedRequest,
    Segment,
    edited,
    failing,
    filler,
    only_finding,
)


def test_the_wrong_filler_is_told_from_the_declared_one() -> None:
    """Zeros where arange is declared, and a legal choice where filler belongs."""
    story = RoutedRequest(changes={"rows": "T", "final_row": "arange"})
    zeros = only_finding(story.judged(edited(story, -1, 0)), "routes.filler")
    assert (zeros.expected, zeros.observed) == (
        "arange filler, as the contract declares",
        "zeros in 1 row (position 9)",
    )
    choice = only_finding(story.judged(edited(story, -1, story.rows(9, 10, 2)[0])), "routes.filler")
    assert choice.observed == "ids that look like a choice in 1 row (position 9)"


def test_rows_of_arange_are_named_and_two_neighbours_are_not() -> None:
    """Experts 3 and 4 of eight are an ordinary choice; a run through all layers is none."""
    story = RoutedRequest()
    arange = only_finding(story.judged(edited(story, 2, np.arange(2))), "routes.captured")
    assert "arange filler" in arange.observed
    neighbours = story.good().copy()
    cell = neighbours[2, 0]
    neighbours[2, 0] = next(
        pair for pair in ([0, 1], [3, 4], [5, 6]) if sorted(pair) != sorted(cell.tolist())
    )
    judged = story.judged(neighbours)
    assert "arange" not in " ".join(
        finding.observed for result in judged.results for finding in result.findings
    )
    assert failing(judged)


def test_a_row_where_filler_belongs_is_not_called_arange_by_chance() -> None:
    """With one layer of routers two neighbours prove nothing."""
    model = {"num_layers": 1, "moe_layers": (0,)}
    story = RoutedRequest(changes={"rows": "T", "final_row": "zeros", "filler": "zeros", **model})
    finding = only_finding(story.judged(edited(story, -1, [4, 5])), "routes.filler")
    assert "ids that look like a choice in 1 row (position 9)" == finding.observed


def test_a_repeated_row_is_filler_where_it_is_declared_and_only_of_its_neighbour() -> None:
    """The previous row again passes; a row from elsewhere does not, and arange is named as such."""
    story = RoutedRequest(changes={"rows": "T", "final_row": "previous"})
    assert failing(story.judged(story.good())) == set()
    other = only_finding(story.judged(edited(story, -1, story.good()[3])), "routes.filler")
    assert (other.expected, other.observed) == (
        "previous filler, as the contract declares",
        "ids that look like a choice in 1 row (position 9)",
    )
    assert (
        only_finding(story.judged(edited(story, -1, [0, 1])), "routes.filler").observed
        == "arange in 1 row (position 9)"
    )


@pytest.mark.parametrize("prompt", [1, 4])
def test_a_repetition_of_the_row_that_the_engine_returned_is_filler(prompt: int) -> None:
    """The delivered row before it is wrong, which is another check's fault: also if that is the
    first row of all.
    """
    story = RoutedRequest(
        segments=(Segment(1),),
        prompt=prompt,
        changes={**MODELS["wide"], "rows": "T", "final_row": "previous"},
    )
    rows = story.good().copy()
    rows[-2] = RoutedRequest(request_id="r1", changes=story.changes).good()[0]
    assert (rows[-2] != rows[-1]).any()
    assert {"routes.content"} == failing(story.judged(rows))
    # or of the row that was delivered
    rows[-1] = rows[-2]
    assert {"routes.content"} == failing(story.judged(rows))


def test_zeros_are_flagged_where_they_are_declared() -> None:
    """Declared zeros pass, and the report counts them by a name that says what they do."""
    judged = (story := RoutedRequest(changes=CONVENTIONS["T, zeros"])).judged(story.good())
    assert judged["routes.filler"].verdict is Verdict.PASS
    assert judged["routes.filler"].exercised == {
        "filler rows of zeros (a legal expert id: a trainer replays them)": 1
    }


def test_rows_that_nobody_captured_must_be_filler() -> None:
    """The last call returned no routes: T-1 rows can only be filled, and only as declared."""
    segments = (Segment(3, 1), Segment(2, 1, routes=False))
    undeclared = RoutedRequest(segments=segments)
    invented = np.concatenate([undeclared.good(), undeclared.rows(7, 9, 2)])
    assert (
        only_finding(undeclared.judged(invented), "routes.filler").expected
        == "no row: the contract declares no filler"
    )
    declared = RoutedRequest(segments=segments, changes={"filler": "minus-one", "dtype": "int32"})
    filled = np.concatenate([declared.good(), np.full((2, 3, 2), -1, dtype=np.int32)])
    judged = declared.judged(filled)
    assert failing(judged) == set()
    assert judged["routes.filler"].exercised == {"filler rows": 2}


_ZEROS = "filler rows of zeros (a legal expert id: a trainer replays them)"


@pytest.mark.parametrize(
    ("kinds", "expected", "observed"),
    [
        (("zeros", "zeros", "arange"), None, None),
        (("arange", "arange", "arange"), "zeros", "arange in 2 rows (positions 7-8)"),
        (("zeros", "arange", "arange"), "zeros", "arange in 1 row (position 8)"),
        (("arange", "zeros", "arange"), "zeros", "arange in 1 row (position 7)"),
        (("zeros", "zeros", "zeros"), "arange", "zeros in 1 row (position 9)"),
    ],
)
def test_only_the_last_row_may_have_the_filler_of_the_last_token(
    kinds: tuple[str, ...], expected: str | None, observed: str | None
) -> None:
    """The rows before it that nobody captured have the other one."""
    story = RoutedRequest(
        segments=(Segment(3, 1), Segment(2, 1, routes=False)),
        changes={**MODELS["wide"], "rows": "T", "final_row": "arange", "filler": "zeros"},
    )
    captured = story.captured()
    judged = story.judged(np.concatenate([captured, *(filler(kind, captured) for kind in kinds)]))
    assert {_ZEROS: 2, "filler rows": 1} == judged["routes.filler"].exercised
    if expected is None:
        assert set() == failing(judged)
        return
    finding = only_finding(judged, "routes.filler")
    assert f"{expected} filler, as the contract declares" == finding.expected
    assert observed == finding.observed


@pytest.mark.parametrize(
    ("kind", "right"), [("zeros", True), ("arange", False), ("previous", False)]
)
def test_rows_before_the_captured_ones_have_no_final_row(kind: str, right: bool) -> None:
    """The reply begins with the row of position 2. Nothing comes before position 0 that its row
    could repeat.
    """
    declared = kind if kind == "previous" else "zeros"
    story = RoutedRequest(
        segments=(Segment(5),),
        changes={**MODELS["wide"], "rows": "T", "final_row": "arange", "filler": declared},
    )
    rows = story.good().copy()
    rows[:2] = filler("zeros" if kind == "previous" else kind, rows)
    trace = story.trace(rows)
    events = [
        replace(e, output=replace(e.output, routes=story.captured()[2:], routes_start=2))
        if isinstance(e, Reply)
        else e
        for e in trace.events
    ]
    judged = judge(trace.with_events(events), REGISTRY)
    if right:
        assert set() == failing(judged)
    else:
        finding = only_finding(judged, "routes.filler")
        assert f"{declared} filler, as the contract declares" == finding.expected
        assert 0 == finding.where["position"]


def test_the_last_sampled_token_and_an_own_end_token_have_final_rows() -> None:
    """No forward pass saw either of them: the stack adds an end token and masks it out."""
    story = RoutedRequest(
        segments=(Segment(5),),
        changes={"rows": "T", "final_row": "arange", "loss_mask": True, "dtype": "int32"},
    )
    good = story.good()
    trace = story.trace(np.concatenate([good, good[-1:]]))
    result = trace.events[-1]
    assert isinstance(result, Result)
    assert result.rollout is not None
    rollout = replace(
        result.rollout,
        response_ids=(*result.rollout.response_ids, 2),
        loss_mask=np.array([1, 1, 1, 1, 1, 0]),
    )
    ended = trace.with_events([*trace.events[:-1], replace(result, rollout=rollout)])
    judged = judge(ended, REGISTRY)
    assert set() == failing(judged)
    assert {"filler rows": 2} == judged["routes.filler"].exercised


def test_the_last_row_repeated_is_named_as_such() -> None:
    """And an ordinary filler of one layer if its ids are too many for chance."""
    story = RoutedRequest(changes=CONVENTIONS["T, arange"])
    again = only_finding(story.judged(edited(story, -1, story.good()[-2])), "routes.filler")
    assert "previous in 1 row (position 9)" == again.observed
    wide = {**MODELS["wide"], "num_layers": 1, "moe_layers": (0,)}
    single = RoutedRequest(changes={**wide, **CONVENTIONS["T, zeros"]})
    arange = only_finding(single.judged(edited(single, -1, np.arange(8))), "routes.filler")
    assert "arange in 1 row (position 9)" == arange.observed


def test_samples_without_filler_are_counted() -> None:
    """Every row was captured."""
    story = RoutedRequest()
    exercised = story.judged(story.good())["routes.filler"].exercised
    assert {"samples without filler": 1} == exercised


def test_rows_after_a_captured_prefix_are_shown_from_its_end() -> None:
    """Two rows that no call returned."""
    story = RoutedRequest(
        segments=(Segment(3, 1), Segment(2, 1, routes=False)), changes=CONVENTIONS["prefix"]
    )
    captured = story.captured()
    judged = story.judged(np.concatenate([captured, captured[:2] * 0]))
    finding = only_finding(judged, "routes.filler")
    assert "rows up to position 6: the captured prefix, and nothing after it" == finding.expected
    assert "zeros in 2 rows (positions 7-8)" == finding.observed
    assert 7 == finding.where["position"]


def test_filler_that_does_not_fit_the_type_is_blamed_on_the_type() -> None:
    """-1 in uint8 reads as 255: one message, about the type."""
    changes = {"filler": "minus-one", "dtype": "uint8|int16"}
    story = RoutedRequest(segments=(Segment(3, 1), Segment(2, 1, routes=False)), changes=changes)
    filled = np.concatenate([story.good(), np.full((2, 3, 2), 255, dtype=np.uint8)])
    finding = only_finding(story.judged(filled), "routes.dtype")
    assert "filler -1 does not exist in uint8" == finding.title
    assert "uint8: -1 reads as 255" == finding.observed
    assert 7 == finding.where["position"]
