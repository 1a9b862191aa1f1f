"""Where a sample holds the runs of its reference."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.records import FinishReason, Rollout
from rollproof.invariants._shared.delivery import Delivery
from rollproof.judging.stitching import Answer, Run, Stitched

_RUNS = (
    Run(0, (11, 12), 0, None),
    Run(2, (91, 92), -1, None),
    Run(4, (13, 14), 1, None),
    Run(6, (93,), -1, None),
    Run(7, (), 2, None),
    Run(7, (15,), 3, None),
)
"""Two turns of two tokens and one of one; two answers of the environment between them."""


def _delivery(response: tuple[int, ...], **more: Any) -> Delivery:
    answers = tuple(
        Answer(run.start, run.ids, 0, FinishReason.STOP, True) for run in _RUNS if run.attempt < 0
    )
    reference = Stitched((1,), _RUNS, FinishReason.STOP, (), answers=answers)
    rollout = Rollout(
        request_id="r",
        prompt_ids=(1,),
        response_ids=response,
        finish_reason=FinishReason.STOP,
    )
    return Delivery(rollout, reference, True, **more)


def _placed(delivery: Delivery) -> list[tuple[tuple[int, ...], int, int]]:
    return [(run.ids, run.attempt, start) for run, start in delivery.placed()]


@pytest.mark.parametrize(
    ("count", "runs", "last"),
    [(0, 0, ()), (1, 1, (11,)), (2, 1, (11, 12)), (3, 2, (91,)), (6, 3, (13, 14)), (8, 6, (15,))],
)
def test_a_run_is_cut_where_the_sample_is(count: int, runs: int, last: tuple[int, ...]) -> None:
    """A run that begins there is left out."""
    placed = _placed(_delivery((), aligned=True, count=count))
    assert [(run.attempt, run.start) for run in _RUNS[:runs]] == [
        (attempt, start) for _, attempt, start in placed
    ]
    assert [run.ids for run in _RUNS[: max(runs - 1, 0)]] == [ids for ids, *_ in placed[:-1]]
    assert [last] * bool(runs) == [ids for ids, *_ in placed[-1:]]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((b"", b""), [((11, 12), 0, 0), ((13, 14), 1, 2), ((15,), 3, 4)]),
        (
            (b"a", b"bcd"),
            [
                ((11, 12), 0, 0),
                ((97,), -1, 2),
                ((13, 14), 1, 3),
                ((98, 99, 100), -1, 5),
                ((15,), 3, 8),
            ],
        ),
        (
            (b"", b"b"),
            [((11, 12), 0, 0), ((13, 14), 1, 2), ((98,), -1, 4), ((15,), 3, 5)],
        ),
        (
            (b"abc", b""),
            [((11, 12), 0, 0), ((97, 98, 99), -1, 2), ((13, 14), 1, 5), ((15,), 3, 7)],
        ),
    ],
)
def test_runs_move_with_the_answers_before_them(
    answers: tuple[bytes, bytes], expected: list[tuple[tuple[int, ...], int, int]]
) -> None:
    """An answer in another form moves what follows it, and one that is left out is no run."""
    first, second = (tuple(answer) for answer in answers)
    response = (11, 12, *first, 13, 14, *second, 15)
    begin = 4 + len(first)
    places = ((2, 2 + len(first)), (begin, begin + len(second)))
    delivery = _delivery(response, aligned=False, answers=places)
    assert expected == _placed(delivery)
    for ids, _, start in expected:
        assert ids == response[start : start + len(ids)]


def test_a_sample_of_other_tokens_holds_no_run() -> None:
    """Nothing is known of its places."""
    assert [] == _delivery((7, 8), aligned=False).placed()


@pytest.mark.parametrize(
    ("reliable", "aligned", "fitting"),
    [(True, False, {2, 8}), (True, True, {2}), (False, False, {2}), (False, True, {2})],
)
def test_a_field_fits_the_response_or_the_reference_of_a_wrong_one(
    reliable: bool, aligned: bool, fitting: set[int]
) -> None:
    """Two tokens, where eight were sampled."""
    delivery = _delivery((11, 9), aligned=aligned)
    delivery = Delivery(delivery.rollout, delivery.reference, reliable, aligned)
    assert fitting == {length for length in range(10) if delivery.fits(length)}
