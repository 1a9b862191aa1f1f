"""Where the ids come from that routers executed in place of their targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.core.contract import Contract
from rollproof.core.records import FinishReason, IntArray, Rollout
from rollproof.core.trainer_contract import trainer_contract
from rollproof.invariants.replay.row_origins import Mismatches, explain_mismatches
from rollproof.judging.expected_rows import ExpectedRows

_LAYERS = 7
_LENGTHS = (5, 3, 6)


def _contract(experts: int) -> Contract:
    return trainer_contract(
        num_layers=_LAYERS,
        moe_layers=tuple(range(_LAYERS)),
        num_experts=experts,
        top_k=2,
        rows="T",
        final_row="arange",
        mode="R3",
        free_rows="native",
        vocab=64,
    )


def _targets(seed: int, lengths: tuple[int, ...] = _LENGTHS) -> ExpectedRows:
    """Targets of samples of these lengths, final tokens included, without repetition in a row."""
    samples = [
        Rollout(
            request_id=f"r{number}",
            prompt_ids=(1,),
            response_ids=tuple(range(2, length + 1)),
            finish_reason=FinishReason.LENGTH,
        )
        for number, length in enumerate(lengths)
    ]
    targets = ExpectedRows(_contract(300), samples)
    drawn = np.random.default_rng(seed).random((sum(lengths), _LAYERS, 300)).argsort(axis=2)
    targets.experts = drawn[:, :, :2].astype(np.int32)
    return targets


def _told(
    executed: IntArray, targets: ExpectedRows, wrong: Any = None, **more: Any
) -> tuple[str, str]:
    """What is said of ``executed``, ``(tokens, layers, top_k)``, at the places where it differs, or
    at the ``wrong`` ones.
    """
    if wrong is None:
        wrong = (np.sort(executed) != np.sort(targets.experts)).any(axis=2)
    place, column = np.nonzero(wrong)
    return explain_mismatches(
        Mismatches(
            executed=np.sort(executed[place, column], axis=1),
            place=place,
            column=column,
            targets=targets,
            native=more.get("native"),
            earlier=more.get("earlier", ()),
        )
    )


@pytest.mark.parametrize(
    ("offset", "words", "rows"),
    [(-1, "before", 77), (1, "after", 77), (-2, "2 before", 56), (2, "2 after", 56)],
)
def test_a_shift_by_one_or_two_positions_is_named(offset: int, words: str, rows: int) -> None:
    """Within each sample: the first or last rows have no row to be taken from."""
    targets = _targets(0)
    executed = np.full_like(targets.experts, 299)
    for start, length in zip(targets.starts.tolist(), targets.lengths, strict=False):
        for position in range(length):
            if 0 <= position + offset < length:
                executed[start + position] = targets.experts[start + position + offset]
    text, hint = _told(executed, targets)
    assert f"; {rows} of these 98 are the target of the position {words}" == text
    assert "logprobs shift, routes do not" in hint


@pytest.mark.parametrize(
    ("offset", "words", "rows"),
    [(-1, "before", 84), (1, "after", 84), (3, "3 after", 56), (-3, "3 before", 56)],
)
def test_a_shift_by_layers_is_named(offset: int, words: str, rows: int) -> None:
    """The layers at the end have no layer to be taken from."""
    targets = _targets(0)
    executed = np.full_like(targets.experts, 299)
    for column in range(_LAYERS):
        if 0 <= column + offset < _LAYERS:
            executed[:, column] = targets.experts[:, column + offset]
    text, hint = _told(executed, targets)
    assert f"; {rows} of these 98 are the target of the MoE layer {words}" == text
    assert "Map payload columns to routers" in hint


@pytest.mark.parametrize(
    ("swapped", "named"),
    [
        ((0, 2), "layer 0 executes that of layer 2, layer 2 executes that of layer 0"),
        ((0, 3, 1, 6), None),
        ((0, 3, 1, 6, 4), "layer 0 executes that of layer 3, * that of layer 0 and 1 more"),
        ((0, 3, 1, 6, 4, 2), "layer 0 executes that of layer 3, * that of layer 1 and 2 more"),
    ],
)
def test_layers_in_another_order_are_named_four_at_most(
    swapped: tuple[int, ...], named: str | None
) -> None:
    """Each executes the targets of the next one in the list."""
    targets = _targets(0)
    executed = targets.experts.copy()
    for column, source in zip(swapped, (*swapped[1:], swapped[0]), strict=True):
        executed[:, column] = targets.experts[:, source]
    text, _ = _told(executed, targets)
    rows = 14 * len(swapped)
    if named is None:
        assert " more" not in text
        assert 4 == text.count("executes that of")
    else:
        begin, _, end = named.partition("*")
        assert text.startswith(
            f"; {rows} of these {rows} are the target of another MoE layer ({begin}"
        )
        assert text.endswith(f"{end})")
        assert min(4, len(swapped)) == text.count("executes that of")


def test_most_rows_of_a_layer_show_its_source() -> None:
    """Eight of 14 rows do, seven do not."""
    targets = _targets(0)
    for rows, found in ((8, True), (7, False)):
        executed = targets.experts.copy()
        executed[:, 0] = 299, 298
        executed[:rows, 0] = targets.experts[:rows, 2]
        executed[:, 4:6] = targets.experts[:, 1:2]
        text, _ = _told(executed, targets)
        assert found is ("layer 0 executes that of layer 2" in text)
        assert "layer 5 executes that of layer 1" in text


@pytest.mark.parametrize(("offset", "words"), [(1, "after"), (-1, "before"), (2, "2 after")])
def test_targets_of_another_sample_are_named(offset: int, words: str) -> None:
    """At the same position, where that sample has one; the places are those that were replaced."""
    targets = _targets(0, lengths=(4, 4, 4))
    wrong = np.zeros(targets.experts.shape[:2], dtype=bool)
    executed = targets.experts.copy()
    for sample in range(3):
        if 0 <= sample + offset < 3:
            own = slice(4 * sample, 4 * sample + 4)
            executed[own] = targets.experts[4 * (sample + offset) : 4 * (sample + offset) + 4]
            wrong[own] = True
    text, _ = _told(executed, targets, wrong)
    rows = int(wrong.sum())
    assert (
        f"; {rows} of these {rows} are the target of the same position in the sample {words}"
        == text
    )


def test_targets_of_an_earlier_step_are_named() -> None:
    """A step with fewer and shorter samples; one without samples hides nothing."""
    targets, earlier = _targets(0), _targets(1, lengths=(4, 3))
    executed = targets.experts.copy()
    executed[:4], executed[5:8] = earlier.experts[:4], earlier.experts[4:]
    steps = (("empty", ExpectedRows(_contract(300), ())), ("first", earlier))
    text, hint = _told(executed, targets, earlier=steps)
    assert "; 49 of these 49 are the target of step 'first'" == text
    assert "outlived its step" in hint


def test_what_a_router_chooses_by_itself_is_named() -> None:
    """If that is known."""
    targets, native = _targets(0), _targets(1).experts
    assert _told(native, targets)[0] == ""
    text, _ = _told(native, targets, native=native)
    assert "; 98 of these 98 are what the router chooses by itself" == text


@pytest.mark.parametrize(("name", "words"), [("uint8", "uint8"), ("int8", "int8")])
def test_a_narrow_type_is_named(name: str, words: str) -> None:
    """Ids that do not fit wrapped around; those that fit are right."""
    targets = _targets(0)
    executed = targets.experts.astype(name).astype(np.int32)
    text, hint = _told(executed, targets)
    assert text.endswith(f"are the target wrapped into {words}")
    assert "choose it from num_experts" in hint


def test_zeros_are_rows_of_padding() -> None:
    """Every id is 0, or a mark of padding below it; a row with one other id is none."""
    targets = _targets(0)
    for row, found in (((0, 0), True), ((-1, 0), True), ((0, 1), False)):
        executed = np.broadcast_to(np.array(row), targets.experts.shape)
        assert found is _told(executed, targets)[0].endswith("are rows of only expert 0")


@pytest.mark.parametrize(("rows", "named"), [(7, ""), (8, "; 8 of these 14 are rows of only")])
def test_more_than_half_of_the_rows_must_agree(rows: int, named: str) -> None:
    """Half of 14 rows is no explanation. One row alone is told in the singular."""
    targets = _targets(0)
    executed = targets.experts.copy()
    executed[:, 0] = 299, 298
    executed[:rows, 0] = 0
    text, hint = _told(executed, targets)
    assert text.startswith(named)
    assert bool(named) == bool(text) == bool(hint)
    executed = targets.experts.copy()
    executed[0, 0] = 0
    assert "; 1 of these 1 is rows of only expert 0" == _told(executed, targets)[0]
