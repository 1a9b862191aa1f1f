"""Checks on rows and tokens: each says what a row holds, and is silent about what may be
anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from rollproof.core.contract import Rows
from rollproof.core.events.layouts import Laid
from rollproof.judging.checks import Verdict
from rollproof.layouts import Alignment, Fill, Mesh, Order, Side
from tests.support.layout_script import (
    LAYOUT,
    Arrays,
    call,
    counted,
    laid,
    place,
    told,
    turned,
    verdict,
    with_array,
    with_row,
)

FOUR = call(4, held=(3,))
"""A sample of four tokens, the last without a row."""
_FILLER = "a token without a row is routed by another's, or by none"
_FREE = "a row that the router may ignore, or k distinct experts"


def _ending(out: Arrays, row: int) -> Arrays:
    return (np.concatenate([out[0][:3], out[0][row : row + 1]]), *out[1:])


@pytest.mark.parametrize(
    ("by", "holds", "named"),
    [
        (1, "ids [0, 1], which no position has", ": this is a shift by one row"),
        (-1, "position 1 of sample 0", ": this is a shift by one row to the front"),
        (2, "position 2 of sample 0", ""),
    ],
)
def test_moved_captured_rows_are_named_by_what_they_hold(by: int, holds: str, named: str) -> None:
    """A shift by one row has a name, another one has none."""
    result = verdict("layout.final-row", laid("complete", FOUR, turned(by)))
    assert "captured rows moved when filler was added" == result.findings[0].title
    assert "row 0: position 0 of sample 0" == result.findings[0].expected
    assert f"row 0 holds {holds}; so for 3 of 3 rows{named}" == result.findings[0].observed


@pytest.mark.parametrize("held", [1, 3])
def test_rows_that_filler_was_written_over_did_not_move(held: int) -> None:
    """A row that is in no place any more was lost; one that is in another place moved."""
    made = call(held + 1, held=(held,))
    lost = verdict("layout.final-row", laid("complete", made, with_row(0, [0, 1])))
    assert "captured rows were overwritten" == lost.findings[0].title
    assert "shift" not in lost.findings[0].observed
    moved = verdict("layout.final-row", laid("complete", made, turned(1)))
    assert "captured rows moved when filler was added" == moved.findings[0].title
    assert moved.findings[0].observed.endswith(": this is a shift by one row")


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda out: (out[0][:3],), 3),
        (lambda out: (np.concatenate([out[0], out[0][:1]]),), 5),
    ],
)
def test_another_number_of_rows_than_tokens_is_counted(
    change: Callable[[Arrays], Arrays], rows: int
) -> None:
    """One row less and one row more are both findings, and nothing else is compared."""
    event = laid("complete", FOUR, change)
    assert (
        "a sample's rows and tokens differ in number",
        "4 rows",
        f"{rows}, from 3 captured ones",
    ) == told("layout.final-row", event)
    assert {} == dict(verdict("layout.final-row", event).exercised)


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ([0, 0], "experts [0, 0], which are not distinct"),
        ([-1, -1], "ids [-1, -1] for 64 experts"),
        ([-1, 2], "ids [-1, 2] for 64 experts"),
        ([64, 1], "ids [64, 1] for 64 experts"),
        ([63, 1], ""),
        ([0, 1], ""),
    ],
)
def test_the_filler_of_a_final_row_is_ids_of_distinct_experts(ids: list[int], fault: str) -> None:
    """The largest id is one, the next is none; -1 is none unless it is declared."""
    event = laid("complete", FOUR, with_row(3, ids))
    if fault:
        assert (_FILLER, _FREE, f"position 3: {fault}") == told("layout.final-row", event)
        assert {"function": "complete", "lengths": "4", "position": 3} == place(
            "layout.final-row", event
        )
    else:
        assert {"rows compared": 3, "tokens without a row": 1} == counted("layout.final-row", event)


@pytest.mark.parametrize("row", [0, 2])
def test_a_final_row_that_repeats_another_is_named(row: int) -> None:
    """Whichever it repeats, unless ids are spread and may meet by chance."""
    event = laid("complete", FOUR, lambda out: _ending(out, row))
    assert (_FILLER, _FREE, f"position 3: it repeats position {row} of sample 0") == told(
        "layout.final-row", event
    )
    spread = call(4, held=(3,), layout=replace(LAYOUT, final=Fill.SPREAD))
    counted("layout.final-row", laid("complete", spread, lambda out: _ending(out, row)))


def test_a_declared_minus_one_is_whole() -> None:
    """-1 in every cell is what the layout declares; half of it is an id that no expert has."""
    declared = call(4, held=(3,), layout=replace(LAYOUT, final=Fill.SENTINEL))
    counted("layout.final-row", laid("complete", declared, with_row(3, -1)))
    assert (_FILLER, _FREE, "position 3: ids [-1, 1] for 64 experts") == told(
        "layout.final-row", laid("complete", declared, with_row(3, [-1, 1]))
    )


def test_a_side_tensor_may_hold_any_number_but_a_row_of_the_sample() -> None:
    """Numbers show no fault of their own."""
    numbers = call(4, held=(3,), numbers=True)
    counted("layout.final-row", laid("complete", numbers, with_row(3, 0)))
    assert (_FILLER, _FREE, "position 3: it repeats position 2 of sample 0") == told(
        "layout.final-row", laid("complete", numbers, lambda out: _ending(out, 2))
    )


@pytest.mark.parametrize(
    ("mask", "finding"),
    [
        ([1, 1, 1, 0], None),
        (
            [1, 1, 1, 1],
            (
                "a token without a row is marked as captured",
                "the mask is 0 at position 3",
                "1, with ids [0, 1], which no position has",
            ),
        ),
        (
            [1, 1, 0, 0],
            (
                "captured rows are marked as free",
                "the mask is 1 at 3 captured positions",
                "0 at 1 of 3 positions",
            ),
        ),
        (
            [0, 0, 0, 0],
            (
                "captured rows are marked as free",
                "the mask is 1 at 3 captured positions",
                "0 at 3 of 3 positions",
            ),
        ),
    ],
)
def test_a_mask_marks_the_captured_rows_and_no_other(
    mask: list[int], finding: tuple[str, str, str] | None
) -> None:
    """A mask makes filler free, and must be 1 at every captured row."""
    event = laid("complete", FOUR, lambda out: (*with_row(3, 0)(out)[:1], np.array(mask)))
    if finding is None:
        counted("layout.final-row", event)
        return
    title, expected, observed = told("layout.final-row", event)
    assert finding[:2] == (title, expected)
    assert finding[2].replace("ids [0, 1]", "ids [0, 0]") == observed


def test_the_first_token_marked_wrongly_is_the_one_that_is_told() -> None:
    """Of two uncaptured tokens the second may be the one."""
    prefix = call(5, held=(3,), layout=replace(LAYOUT, held=Rows.CAPTURED_PREFIX))
    event = laid("complete", prefix, with_array(1, [1, 1, 1, 0, 1]))
    assert "the mask is 0 at position 4" == told("layout.final-row", event)[1]


@pytest.mark.parametrize(
    ("by", "named"),
    [
        (-1, ": this is the shift of labels, applied to routes"),
        (1, ": this is a shift by one to the back"),
        (2, ""),
    ],
)
def test_a_shift_of_routes_against_tokens_is_named(by: int, named: str) -> None:
    """One to the front as labels are, one to the back, or by another amount."""
    title, expected, observed = told(
        "layout.no-shift", laid("pair", call(5, held=(4,)), turned(by, 1))
    )
    assert "routes are shifted against the tokens that they route" == title
    assert "row 0: position 0 of sample 0" == expected
    assert observed.startswith("row 0 holds ")
    assert observed.endswith(f" of 4 rows{named}")


def test_the_last_token_may_be_left_out_of_what_the_model_is_fed() -> None:
    """One token less is the usual shift of labels; two less, or unequal numbers, are findings."""
    pair = call(5, held=(4,))
    shorter = laid("pair", pair, lambda out: (out[0][:-1], out[1][:-1]))
    assert {"pairs compared": 4} == counted("layout.no-shift", shorter)
    for change, observed in (
        (lambda out: (out[0][:-2], out[1][:-2]), "3 tokens and 3 rows"),
        (lambda out: (out[0], out[1][:-1]), "5 tokens and 4 rows"),
    ):
        assert (
            "the model's input tokens and the rows differ in number",
            "at least 4 tokens with a row each",
            observed,
        ) == told("layout.no-shift", laid("pair", pair, change))


_PADDED = replace(LAYOUT, packed=False)
_SIDES = {side: call(3, 5, prompts=(2, 1), layout=replace(_PADDED, side=side)) for side in Side}


@pytest.mark.parametrize("side", Side)
def test_padding_on_the_declared_side_passes(side: Side) -> None:
    """All rows of both samples are compared."""
    assert {"rows compared": 8} == counted("layout.padding", laid("pad", _SIDES[side]))


@pytest.mark.parametrize(("side", "other"), [(Side.LEFT, Side.RIGHT), (Side.RIGHT, Side.LEFT)])
def test_padding_on_the_other_side_is_named(side: Side, other: Side) -> None:
    """Only the shorter sample has moved."""
    event = replace(laid("pad", _SIDES[side]), out=laid("pad", _SIDES[other]).out[:1])
    title, _, observed = told("layout.padding", event)
    assert "padded rows are not at their tokens' places" == title
    assert observed.endswith(
        f"so for 3 of 8 rows: this is padding on the {other}, where padding on the {side} is"
        " declared"
    ), observed


@pytest.mark.parametrize(
    "change",
    [
        lambda out: (out[0].reshape(-1, 2),),
        lambda out: (out[0][:1],),
        lambda out: (out[0][:, :4],),
    ],
)
def test_a_batch_of_another_shape_is_told(change: Callable[[Arrays], Arrays]) -> None:
    """Rows of no sample, a sample too few, a width that the longest does not fit into."""
    event = laid("pad", _SIDES[Side.RIGHT], change)
    assert ("a batch of another shape", "(2, at least 5, columns, k)", str(event.out[0].shape)) == (
        told("layout.padding", event)
    )


@pytest.mark.parametrize("mask", [None, np.ones((2, 3)), np.ones((1, 6))])
def test_padding_on_both_sides_needs_the_attention_mask(mask: np.ndarray | None) -> None:
    """Without one, or with one of another shape, nothing is known of the places."""
    event = laid(
        "pad",
        _SIDES[Side.BOTH],
        lambda out: out[:1] if mask is None else (out[0], mask.astype(np.int64)),
    )
    result = verdict("layout.padding", event)
    assert Verdict.UNKNOWN == result.verdict
    assert (
        "padding on both sides can only be judged with the attention mask: return (batch,"
        " attention)"
    ) == result.reason


_SHORT = call(4, held=(2,))
_MASKED = np.array([1, 1, 0, 0])


@pytest.mark.parametrize(
    ("fill", "mask", "observed"),
    [
        (-1, None, ""),
        (-2, None, "positions 2 to 3 were filled with [-2, -2, -2, -2], and are replayed"),
        (0, None, "positions 2 to 3 were filled with [0, 0, 0, 0], and are replayed"),
        (0, _MASKED, ""),
        (-1, 1 - _MASKED, ""),
        (0, np.array([1, 1, 1, 0]), "positions 2 to 3 were filled with [0, 0, 0, 0], and are"),
        (0, _MASKED[:3], "positions 2 to 3 were filled with [0, 0, 0, 0], and are replayed"),
        (0, np.zeros(0, dtype=int), "positions 2 to 3 were filled with [0, 0, 0, 0], and are"),
    ],
)
def test_rows_that_are_lost_must_be_marked(
    fill: int, mask: np.ndarray | None, observed: str
) -> None:
    """Where rows were lost, -1 marks the others, or a mask as long as the sample does."""
    rows = np.full((4, LAYOUT.columns, LAYOUT.top_k), fill)
    rows[:2] = laid("complete", call(4)).out[0][:2]
    accepted = replace(
        laid("complete", replace(_SHORT, defect="fewer rows than tokens")),
        refused=None,
        misfit=None,
        out=(rows,) if mask is None else (rows, mask),
    )
    result = verdict("layout.refuses", accepted)
    assert [observed] * bool(observed) == [
        finding.observed[: len(observed)] for finding in result.findings
    ]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({0: [-1, 2]}, "ids [-1, 2] for 64 experts"),
        ({2: [-1, 2], 3: [7, 64]}, "ids [-1, 2] for 64 experts"),
        ({3: [64, 2]}, "ids [64, 2] for 64 experts"),
        ({1: [5, 5]}, "experts [5, 5], which are not distinct"),
        ({2: [6, 6], 3: [7, 7]}, "experts [6, 6], which are not distinct"),
        ({0: [6, 6], 3: [-2, 7]}, "ids [-2, 7] for 64 experts"),
    ],
)
def test_the_layer_at_which_filler_is_wrong_is_shown(
    columns: dict[int, list[int]], fault: str
) -> None:
    """The first of them, although the ids of other layers are right."""
    ids = np.array([[0, 1]] * LAYOUT.columns)
    for column, wrong in columns.items():
        ids[column] = wrong
    event = laid("complete", FOUR, with_row(3, ids))
    assert (_FILLER, _FREE, f"position 3: {fault}") == told("layout.final-row", event)


_DIVIDED = replace(LAYOUT, mesh=Mesh(tp=4, cp=3, dp=7), alignment=Alignment(by=("tp", "2cp")))


@pytest.mark.parametrize(
    ("function", "rows", "named"),
    [
        ("pack", 11, "1 = 1"),
        ("pack", 12, "tp = 4"),
        ("pack", 15, "cp = 3"),
        ("pack", 18, "2 * cp = 6"),
        ("pack", 24, "tp * cp = 12"),
        ("pack", 14, "dp = 7"),
        ("pack", 13, ""),
        ("context", 4, "tp = 4"),
        ("context", 5, "cp = 3"),
        ("context", 6, "2 * cp = 6"),
        ("context", 8, "tp * cp = 12"),
        ("context", 15, ""),
    ],
)
def test_the_multiple_that_gives_another_number_of_rows_is_named(
    function: str, rows: int, named: str
) -> None:
    """Of samples of 4 and 7 tokens, padded to 24 each; a rank of three has a third of the rows."""
    made = call(4, 7, layout=_DIVIDED)
    expected = {"pack": 48, "context": 16}[function]
    assert {"lengths compared": 1} == counted("layout.alignment", laid(function, made))
    title, rule, observed = told(
        "layout.alignment", laid(function, made, lambda out: (out[0][:rows], *out[1:]))
    )
    assert "rows and tokens differ in number" == title
    assert (
        f"{expected} rows: sequences padded to multiples of 24 (cumulative lengths [0, 24, 48])"
        == rule
    )
    words = f", as multiples of {named} give" if named else ""
    assert f"{rows} rows{words}" == observed


def _targets(side: Side, order: Order = Order.SEQUENCE_MAJOR) -> Laid:
    """The targets of each router for a padded batch."""
    layout = replace(LAYOUT, packed=False, side=side, order=order)
    made = call(3, 3, 5, prompts=(2, 1, 1), layout=layout)
    rows = laid("pad", made).out[0]
    if order is Order.SEQUENCE_MAJOR:
        rows = rows.swapaxes(0, 1)
    rows = rows.reshape(-1, *rows.shape[2:])
    layers = np.array(LAYOUT.moe_layers)
    return laid("targets", made, lambda _: (layers, *(rows[:, layer] for layer in layers)))


_OTHER_SIDE = "padding on the {}, where padding on the {} is declared"
_OTHER_ORDER = "{} order, where {} is declared"


@pytest.mark.parametrize(
    ("declared", "other", "named"),
    [
        ((Side.LEFT,), (Side.RIGHT,), _OTHER_SIDE.format("right", "left")),
        ((Side.RIGHT,), (Side.LEFT,), _OTHER_SIDE.format("left", "right")),
        *(
            ((Side.LEFT, first), (Side.LEFT, second), _OTHER_ORDER.format(second, first))
            for first, second in permutations(Order)
        ),
    ],
)
def test_targets_of_a_batch_in_another_form_are_named(
    declared: tuple[Any, ...], other: tuple[Any, ...], named: str
) -> None:
    """Padded on the other side, or in the other order."""
    counted("layout.targets", _targets(*declared))
    moved = replace(_targets(*declared), out=_targets(*other).out)
    finding = verdict("layout.targets", moved).findings[0]
    assert "a router is given another row's or layer's choice" == finding.title
    assert finding.observed.endswith(f": this is {named}"), finding.observed
