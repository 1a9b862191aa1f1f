"""Sampling masks as records: their forms, equality, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rollproof.core.record_validation import validate_output, validate_rollout, validate_row
from rollproof.core.records import BatchRow, EngineOutput, FinishReason, Rollout
from rollproof.core.sampling_masks import SamplingMask, as_sampling_mask, leaves_tokens_out
from rollproof.errors import SubjectError, UsageError

_LISTS = [[7, 3], [], [5], [1, 2, 3]]


def _mask() -> SamplingMask:
    return SamplingMask.from_lists(_LISTS)


def _lists(mask: SamplingMask | None) -> list[list[int]]:
    assert mask is not None
    return [ids.tolist() for ids in np.split(mask.token_ids, mask.offsets[1:-1])]


def test_the_forms_of_engines_make_one_record() -> None:
    """Lists by token (SGLang) and ids with offsets (vLLM) say the same."""
    by_offsets = SamplingMask.from_offsets([7, 3, 5, 1, 2, 3], [0, 2, 2, 3, 6])
    assert _LISTS == _lists(_mask()) == _lists(by_offsets) == _lists(as_sampling_mask(_LISTS))


def test_parts_join_to_the_mask_that_was_cut() -> None:
    """Cutting and joining lose nothing, at tokens without a mask and at both ends, too."""
    for middle in range(5):
        parts = [_mask().cut(0, middle), _mask().cut(middle, 4)]
        assert _LISTS == _lists(SamplingMask.joined(parts))
    assert [] == _lists(SamplingMask.joined([]))[1:]
    assert [[], []] == _lists(SamplingMask.none(2))


@pytest.mark.parametrize("far", [0, 2**40, -(2**40)], ids=["small ids", "large", "negative"])
@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ([[7, 3], [], [5], [1, 2, 3]], [True, True, True, True]),
        ([[3, 7], [], [5], [3, 1, 2]], [True, True, True, True]),
        ([[3, 8], [], [5], [3, 1, 2]], [False, True, True, True]),
        ([[7], [], [5], [1, 2, 3]], [False, True, True, True]),
        ([[7, 3], [5], [], [1, 2, 4]], [True, False, False, False]),
        ([[7, 7], [], [5], [1, 2, 3]], [False, True, True, True]),
    ],
)
def test_equality_is_by_token_and_in_any_order(
    other: list[list[int]], equal: list[bool], far: int
) -> None:
    """A token whose mask differs does not change what is said of its neighbours; ids may be any
    integer, as files may hold them.
    """
    first, second = (
        SamplingMask.from_lists([[token + far for token in ids] for ids in masks])
        for masks in (_LISTS, other)
    )
    assert equal == first.equal(second).tolist()


def test_a_mask_holds_the_ids_that_it_lists() -> None:
    """A token without a mask holds none, and the ids of a neighbour do not count."""
    assert [True, False, False, True] == _mask().holds([3, 3, 7, 2]).tolist()
    assert (3, 7) == _mask().ids_of(0)


@pytest.mark.parametrize(
    ("counts", "ids"),
    [
        ([2, 2], [1, 2, 3]),
        ([-1, 4], [1, 2, 3]),
        ([[1, 2]], [1, 2, 3]),
        ([1, 2], [[1, 2, 3]]),
        ([2**62, 2**62, 2**62, 2**62 + 3], [1, 2, 3]),
    ],
)
def test_counts_that_are_not_those_of_the_ids_do_not_fit(counts: Any, ids: Any) -> None:
    """A file may hold anything, sums that wrap around among it."""
    assert not SamplingMask(counts=np.array(counts), token_ids=np.array(ids)).fits
    assert _mask().fits
    assert SamplingMask.none(0).fits


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (
            SamplingMask(counts=np.array([2, -1]), token_ids=np.array([1])),
            r"sampling_mask.counts\[1\] must be a number of ids, not -1",
        ),
        (
            SamplingMask(counts=np.array([2, 1]), token_ids=np.array([1])),
            "sampling_mask.counts must add up to the number of ids, 1, not to 3",
        ),
        (
            SamplingMask(counts=np.array([0.5]), token_ids=np.array([1])),
            "sampling_mask.counts must be integers",
        ),
        ([[1], ["a"]], r"sampling_mask\[1\]\[0\] must be integers, not str"),
        ({"counts": [1]}, "sampling_mask must be a SamplingMask, or a list .*, not dict"),
    ],
)
def test_masks_of_a_broken_form_are_refused_with_row_and_field(mask: Any, problem: str) -> None:
    """Rollouts, outputs of engines and rows of batches say the same of one field."""
    row = BatchRow(
        request_id="r7",
        token_ids=np.array([7, 8]),
        attention=np.ones(2, np.int64),
        sampling_mask=mask,
    )
    with pytest.raises(SubjectError, match=f"unusable BatchRow for 'r7': {problem}"):
        validate_row(row, "rows")
    with pytest.raises(SubjectError, match=f"unusable Rollout: {problem}"):
        validate_rollout(_rollout(sampling_mask=mask), "to_record")
    output = EngineOutput(
        token_ids=(1,),
        logprobs=None,
        routes=None,
        finish_reason=FinishReason.STOP,
        sampling_mask=mask,
    )
    with pytest.raises(SubjectError, match=f"unusable EngineOutput: {problem}"):
        validate_output(output, "to_output")


def _rollout(**changes: Any) -> Rollout:
    return Rollout(
        request_id="r0",
        prompt_ids=(1,),
        response_ids=(2, 3),
        finish_reason=FinishReason.STOP,
        **changes,
    )


def test_a_record_has_masks_of_its_own() -> None:
    """Lists become arrays, and later changes of the stack's arrays do not reach the record."""
    mask = _mask()
    record = validate_rollout(_rollout(sampling_mask=mask), "to_record")
    mask.token_ids[:] = 0
    assert _LISTS == _lists(record.sampling_mask)
    assert [[1, 2], []] == _lists(
        validate_rollout(_rollout(sampling_mask=[[1, 2], None]), "to_record").sampling_mask
    )


def test_a_trainer_renormalises_over_the_mask() -> None:
    """As a softmax over the ids alone; among all ids without a mask, and never outside of one."""
    scores = np.log([[0.4, 0.3, 0.2, 0.1]] * 4)
    mask = SamplingMask.from_lists([[0, 1], [], [2], [1, 3]])
    expected = np.log([0.4 / 0.7, 0.3, 1.0, 0.1 / 0.4])
    np.testing.assert_allclose(expected, mask.renormalised(scores, [0, 1, 2, 3]), atol=1e-15)
    # logits differ from log-probabilities by a constant of each token
    np.testing.assert_allclose(expected, mask.renormalised(scores + 3.0, [0, 1, 2, 3]), atol=1e-12)
    assert -np.inf == mask.renormalised(scores, [2, 1, 2, 3])[0]


@pytest.mark.parametrize(
    ("scores", "tokens", "problem"),
    [
        (np.zeros(4), [0, 1, 2, 3], r"Scores of the shape \(4,\), 4 tokens and 4 masks"),
        (np.zeros((4, 9)), [0, 1], r"2 tokens and 4 masks"),
        (np.zeros((4, 5)), [0, 1, 2, 3], "Ids must be 0 to 4"),
        (np.zeros((4, 9)), [0, 1, 2, -1], "Ids must be 0 to 8"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores: Any, tokens: list[int], problem: str) -> None:
    """Numpy would broadcast them, or count a negative id from the end."""
    with pytest.raises(UsageError, match=problem):
        _mask().renormalised(scores, tokens)


@pytest.mark.parametrize(
    ("sampling", "some"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0}, False),
        ({"top_k": 0}, False),
        ({"top_k": 20}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 1}, False),
        ({"top_p": 0.5, "temperature": 0}, False),
        ({"top_p": None, "top_k": "20"}, False),
    ],
)
def test_filters_leave_tokens_out(sampling: Mapping[str, Any], some: bool) -> None:
    """Values that switch a filter off leave all tokens in, and a greedy call draws nothing."""
    assert some == leaves_tokens_out(sampling)
