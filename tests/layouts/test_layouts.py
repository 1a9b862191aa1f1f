"""Layouts, piece by piece: what each transformation gives on cases that can be checked by eye."""

from __future__ import annotations

import numpy as np
import pytest

from rollproof.core.contract import LayerAxis
from rollproof.errors import LayoutError
from rollproof.layouts import (
    Alignment,
    Coding,
    Context,
    Fill,
    Layout,
    Mesh,
    Order,
    Rank,
    Side,
    Source,
    Stages,
    moe_layers,
)
from rollproof.layouts.merged_rows import Segment, joined_segments, scattered
from rollproof.layouts.padding import (
    completed,
    cumulative_lengths,
    fill_rows,
    packed,
    padded,
    unpadded,
)
from rollproof.layouts.pipeline import (
    columns_of,
    operations,
    schedule_table,
)
from rollproof.layouts.row_slices import (
    contiguous_rows,
    contiguous_rows_of_each,
    flat_rows,
    zigzag_rows,
)


def test_final_rows_are_filled_behind_the_captured_ones() -> None:
    """Seven tokens, five rows: positions 5 and 6 are free, and hold distinct experts."""
    rows, captured = completed(
        Coding(samples=1, positions=7, columns=2, experts=64).payload(0, 5), 7, Fill.ARANGE, 64
    )
    assert (7, 2, 2) == rows.shape
    assert [True] * 5 + [False] * 2 == captured.tolist()
    assert [[0, 1], [0, 1]] == rows[6].tolist()


@pytest.mark.parametrize(
    ("fill", "rows"),
    [
        (Fill.ARANGE, [[[0, 1]], [[0, 1]], [[0, 1]]]),
        (Fill.SPREAD, [[[0, 1]], [[2, 3]], [[4, 0]]]),
        (Fill.SENTINEL, [[[-1, -1]]] * 3),
        (Fill.ZEROS, [[[0, 0]]] * 3),
    ],
)
def test_fillers(fill: Fill, rows: list[list[list[int]]]) -> None:
    """The four fillers of the field, for five experts."""
    assert rows == fill_rows(3, 1, 2, fill, 5).tolist()


@pytest.mark.parametrize(
    ("side", "positions"),
    [
        (Side.LEFT, [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]),
        (Side.RIGHT, [[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]),
        (Side.BOTH, [[-1, 0, 1, 2, -1], [0, 1, 2, 3, 4]]),
    ],
)
def test_padding_sides(side: Side, positions: list[list[int]]) -> None:
    """Prompts of 1 and 2 tokens, responses of 2 and 3; and back."""
    batch = padded([1, 2], [2, 3], side)
    assert positions == batch.position.tolist()
    payloads = [np.arange(3)[:, None] + 10, np.arange(5)[:, None] + 20]
    back = unpadded(batch.take(payloads), batch.filled.astype(np.int64))
    assert [payload.tolist() for payload in payloads] == [rows.tolist() for rows in back]


def test_packing_and_its_alignment() -> None:
    """Sequences of 5 and 2 tokens: aligned to 4 each, then the sum to 16."""
    assert [0, 8, 12] == cumulative_lengths([5, 2], 4).tolist()
    cumulative = cumulative_lengths([5, 2], 4, 16)
    assert [0, 8, 16] == cumulative.tolist()
    assert [0, 1, 2, 3, 4, -1, -1, -1, 0, 1, -1, -1, -1, -1, -1, -1] == packed(
        [5, 2], cumulative
    ).position.tolist()


@pytest.mark.parametrize(
    ("alignment", "multiple", "total"),
    [
        (Alignment(), 1, 1),
        (Alignment(by=("tp",)), 2, 2),
        (Alignment(by=("tp", "2cp")), 12, 12),
        (Alignment(by=("tp", "cp")), 6, 6),
        (Alignment(by=("tp", "2cp"), constant=16, total=128, total_scales=True), 48, 128 * 12),
        (Alignment(by=("2cp",), total=128), 6, 384),
    ],
)
def test_alignment_constants(alignment: Alignment, multiple: int, total: int) -> None:
    """With tp 2 and cp 3: verl's packed rows, its FP8, slime's multiplier; and 2 * cp is 1 without
    context parallelism.
    """
    mesh = Mesh(tp=2, cp=3)
    assert (multiple, total) == (alignment.multiple(mesh), alignment.total_multiple(mesh))
    assert 1 == Alignment(by=("2cp",)).multiple(Mesh())


def test_divisions_over_context_parallel_ranks() -> None:
    """With cp 2, sequences of 8 and 4 padded rows: zigzag by sequence, one piece of all, one piece
    of each.
    """
    cumulative = np.array([0, 8, 12])
    assert [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]] == [
        zigzag_rows(cumulative, 2, rank).tolist() for rank in (0, 1)
    ]
    assert [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]] == [
        contiguous_rows(12, 2, rank).tolist() for rank in (0, 1)
    ]
    assert [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11]] == [
        contiguous_rows_of_each(cumulative, 2, rank).tolist() for rank in (0, 1)
    ]


def test_flat_orders() -> None:
    """A batch of 2 x 3 place by place, or sample by sample."""
    assert [0, 3, 1, 4, 2, 5] == flat_rows(Order.SEQUENCE_MAJOR, 2, 3).tolist()
    assert [0, 1, 2, 3, 4, 5] == flat_rows(Order.BATCH_MAJOR, 2, 3).tolist()


def test_layers_with_a_router_and_their_columns() -> None:
    """Megatron's frequency, a list, DeepSeek's first dense layers; a column for each layer or for
    MoE layers only.
    """
    assert (0, 2, 4) == moe_layers(5, 2)
    assert (1, 2, 4) == moe_layers(5, [0, 1, 1, 0, 1])
    assert (3, 4) == moe_layers(5, 1, first_dense=3)
    assert {1: 1, 4: 4} == columns_of((1, 4), LayerAxis.ALL)
    assert {1: 0, 4: 1} == columns_of((1, 4), LayerAxis.MOE)


@pytest.mark.parametrize(
    ("stages", "layers", "pp", "vpp", "chunks"),
    [
        (Stages(), 8, 2, 2, (((0, 1), (4, 5)), ((2, 3), (6, 7)))),
        (Stages(), 6, 3, 1, (((0, 1),), ((2, 3),), ((4, 5),))),
        (Stages(first=1), 7, 3, 1, (((0,),), ((1, 2, 3),), ((4, 5, 6),))),
        (Stages(first=2, last=4), 10, 3, 2, (((0,), (5,)), ((1, 2), (6, 7)), ((3, 4), (8, 9)))),
        (Stages(embedding=True, loss=True), 6, 2, 2, (((0,), (3, 4)), ((1, 2), (5,)))),
        (Stages(custom=((1, 2), (0, 1))), 4, 2, 2, (((0,), (1, 2)), ((), (3,)))),
    ],
)
def test_stages(stages: Stages, layers: int, pp: int, vpp: int, chunks: object) -> None:
    """Megatron's own examples: even, uneven, with embedding and loss counted, custom, with a stage
    without layers.
    """
    assert chunks == stages.layers(layers, pp, vpp)


def test_schedules() -> None:
    """Four microbatches, two chunks, in groups of two; 1F1B warms up by the ranks behind."""
    table = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1))
    assert table == schedule_table(4, 2, 2)
    order = operations(3, pp=2, rank=0)
    assert "F0 F1 B0 F2 B1 B2" == " ".join(
        f"{'B' if one.backward else 'F'}{one.microbatch}" for one in order
    )


def test_recordings_are_merged() -> None:
    """Segments by position: the first call's row or the last one's."""
    calls = [
        Segment(routes=np.array([[[1]], [[2]]]), start=0, version=1),
        Segment(routes=np.array([[[8]], [[9]], [[3]]]), start=0, version=2),
    ]
    rows, versions = joined_segments(calls)
    assert ([1, 2, 3], [1, 1, 2]) == (rows.flatten().tolist(), versions)
    assert [8, 9, 3] == joined_segments(calls, latest=True)[0].flatten().tolist()


def _layout(**changes: object) -> Layout:
    return Layout(**{"num_layers": 2, "num_experts": 64, "top_k": 2, **changes})  # type: ignore[arg-type]


def test_a_whole_layout_is_composed_as_megatron_does() -> None:
    """With tp 2 and cp 2: a sequence of 5 tokens in 8 rows, zigzag, then the tensor slice; and the
    way back says where a row went.
    """
    layout = _layout(
        mesh=Mesh(tp=2, cp=2, sequence_parallel=True), alignment=Alignment(by=("tp", "2cp"))
    )
    held = {str(rank): layout.rows([5], rank).position.tolist() for rank in layout.mesh.row_ranks()}
    assert {
        "the first rank": [0, 1],
        "tp 1": [-1, -1],
        "cp 1": [2, 3],
        "cp 1, tp 1": [4, -1],
    } == held
    assert [(Rank(cp=1, tp=1), 0)] == layout.places([5], 0, 4)
    assert (0, 0, 1) == layout.stage_of(1)


def test_a_padded_batch_is_flattened_after_its_slices() -> None:
    """Two samples of 3 and 2 tokens, cp 2, in sequence-major order."""
    layout = _layout(packed=False, mesh=Mesh(cp=2), alignment=Alignment(by=("2cp",)))
    source = layout.rows([3, 2], Rank(cp=0))
    assert [(0, 0), (1, 0), (-1, -1), (-1, -1)] == list(
        zip(source.sample.tolist(), source.position.tolist(), strict=True)
    )
    other = layout.rows([3, 2], Rank(cp=1))
    assert [(0, 1), (1, 1), (0, 2), (-1, -1)] == list(
        zip(other.sample.tolist(), other.position.tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _layout(side="middle"),
            r"side='middle' is not valid; choose one of \['left', 'right', 'both'\]",
        ),
        (
            lambda: _layout(moe_layers=(1, 0)),
            "must be ascending, distinct layers below num_layers=2",
        ),
        (lambda: _layout(top_k=65), "top_k=65 must be at least 1 and at most num_experts=64"),
        (lambda: _layout(mesh=Mesh(pp=3)), "2 layers do not divide over 3 of 3 pipeline ranks"),
        (lambda: Mesh(vpp=2), "vpp=2 needs pp > 1"),
        (lambda: Mesh(cp=0), r"whole numbers >= 1, not \{'cp': 0\}"),
        (lambda: Mesh(sequence_parallel=True), "needs tp > 1"),
        (lambda: Alignment(by=("ep",)), r"sizes among \['tp', 'cp', '2cp', 'ulysses'\]"),
        (
            lambda: Stages(first=1, embedding=True).counts(4, 2),
            "cannot be combined with uneven stages",
        ),
        (
            lambda: Stages(custom=((1,), (1,))).counts(3, 2),
            "must have 2 x 1 counts that add up to 3 layers",
        ),
        (
            lambda: Stages(embedding=True).counts(2, 2),
            "3 layers do not divide over 2 of 2 pipeline ranks",
        ),
        (lambda: moe_layers(3, [1, 0]), "must have one 0 or 1 for each of 3 layers"),
        (
            lambda: zigzag_rows(np.array([0, 6]), 2, 0),
            r"Padded sequences of \[6\] rows are not multiples of 2 \* cp = 4",
        ),
        (lambda: contiguous_rows(5, 2, 0), "5 packed rows do not divide over 2 ranks"),
        (lambda: packed([5], np.array([0, 4])), r"Sequences of \[5\] tokens do not fit"),
        (
            lambda: completed(np.zeros((4, 1, 2), dtype=int), 3, Fill.ARANGE, 8),
            "4 rows for 3 tokens",
        ),
        (lambda: fill_rows(1, 1, 3, Fill.ARANGE, 2), "no row can hold so many distinct ids"),
        (
            lambda: joined_segments(
                [Segment(routes=np.zeros((1, 1, 1), dtype=int), start=2, version=1)]
            ),
            "a call's rows are missing",
        ),
        (
            lambda: scattered([(Source.whole(0, 1), np.zeros((1, 1), dtype=int))], [2]),
            r"No rank recorded the positions \{0: \[1\]\}",
        ),
        (
            lambda: scattered([(Source.whole(0, 1), np.full((1, 1), n)) for n in (1, 2)], [1]),
            "Two ranks disagree about rows of sample 0",
        ),
        (lambda: operations(3, pp=2, vpp=2), "not a multiple of pp=2, which interleaving needs"),
        (
            lambda: Coding(samples=9, positions=99, columns=9, experts=64),
            "cannot distinguish 9 samples",
        ),
        (
            lambda: Layout.from_dict({"num_layers": 1}),
            "A layout needs num_layers, num_experts and top_k",
        ),
        (
            lambda: _layout().targets([np.zeros((2, 3, 2), dtype=int)]),
            r"has the shape \(2, 3, 2\), but the layout has 2 columns",
        ),
        (
            lambda: _layout().targets([np.zeros((3, 2, 2), dtype=int)], lengths=[2]),
            "3 rows for 2 tokens",
        ),
        (lambda: _layout().merge({}, [2]), "Nothing was recorded for layer 0"),
        (lambda: _layout(moe_layers=(1,)).stage_of(0), "Layer 0 has no router"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_in_words(make: object, message: str) -> None:
    """Sizes that do not divide, rows that do not fit, ids beyond their type: one error of our own,
    that says what is wrong.
    """
    assert callable(make)
    with pytest.raises(LayoutError, match=message):
        make()


def test_an_empty_microbatch_has_no_rows() -> None:
    """No samples: no rows, and targets without rows for every router."""
    layout = _layout(
        mesh=Mesh(tp=2, cp=3, sequence_parallel=True), alignment=Alignment(by=("tp", "2cp"))
    )
    assert 0 == len(layout.rows([]))
    assert {0: (0, 2), 1: (0, 2)} == {
        layer: rows.shape for layer, rows in layout.targets([]).items()
    }


def test_a_layout_is_plain_data() -> None:
    """To a dictionary and back; strings name enum members."""
    layout = _layout(
        mesh=Mesh(pp=2, vpp=3),
        num_layers=6,
        stages=Stages(custom=((1, 1, 1), (1, 1, 1))),
        context="contiguous",
    )
    assert layout == Layout.from_dict(layout.to_dict())
    assert layout.context is Context.CONTIGUOUS
