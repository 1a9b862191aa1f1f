"""Layouts, 500 examples each: what goes out comes back, nothing is lost, nothing is there twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollproof.core.contract import LayerAxis
from rollproof.layouts import (
    Alignment,
    Coding,
    Fill,
    Layout,
    Mesh,
    Order,
    Rank,
    Side,
    Stages,
    moe_layers,
)
from rollproof.layouts.layout_cases import layout_calls
from rollproof.layouts.merged_rows import Segment, joined_segments
from rollproof.layouts.padding import completed, cumulative_lengths, packed, padded, unpadded
from rollproof.layouts.pipeline import (
    columns_of,
    expected_targets,
    operations,
)
from rollproof.layouts.row_slices import Context, context_rows, flat_rows
from rollproof.layouts.sizes import draw_stages

examples = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=4)
SIZES = st.permutations([1, 2, 3, 4, 5])
"""Parallel sizes that stand side by side are pairwise distinct."""
_PLAIN = Layout(num_layers=1, num_experts=64, top_k=2)


@examples
@given(st.integers(0, 2**20), st.sampled_from([0, 64, 97, 257]), st.integers(2, 8))
def test_a_coded_cell_is_decoded(cell: int, experts: int, top_k: int) -> None:
    """Cells are written as distinct experts, or a number, and read back; fillers are no cell."""
    coding = Coding(samples=3, positions=40, columns=11, experts=experts, top_k=top_k)
    cells = np.array([cell % (3 * 40 * 11)])
    row = coding.encode(cells)
    assert cells.tolist() == coding.decode(row).tolist()
    assert len(set(row[0].tolist())) == row.shape[1]
    fillers = (np.full(coding.width, 0), np.arange(coding.width), np.full(coding.width, -1))
    assert [-1] * 3 == [int(coding.decode(filler[None])[0]) for filler in fillers]


@examples
@given(st.integers(1, 30), st.integers(0, 30), st.sampled_from(list(Fill)))
def test_final_rows(tokens: int, missing: int, fill: Fill) -> None:
    """Captured rows stay where they are, the others are marked."""
    payload = Coding(samples=1, positions=tokens, columns=2, experts=64).payload(
        0, max(0, tokens - missing)
    )
    rows, captured = completed(payload, tokens, fill, 64)
    assert tokens == len(rows)
    assert np.array_equal(payload, rows[: len(payload)])
    assert len(payload) == captured.sum()


@examples
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.sampled_from(list(Side)),
    st.integers(1, 6),
)
def test_padding_round_trip(lengths: list[tuple[int, int]], side: Side, multiple: int) -> None:
    """Padded on any side and unpadded by the mask: the same rows; the width is a multiple."""
    prompts, responses = zip(*lengths, strict=True)
    batch = padded(prompts, responses, side, multiple)
    payloads = [np.arange(sum(pair))[:, None] + 100 * i for i, pair in enumerate(lengths)]
    back = unpadded(batch.take(payloads), batch.filled.astype(np.int64))
    assert all(np.array_equal(one, other) for one, other in zip(payloads, back, strict=True))
    assert 0 == batch.shape[1] % multiple


@examples
@given(LENGTHS, SIZES, st.integers(1, 20), st.integers(1, 64))
def test_packing_and_alignment(
    lengths: list[int], sizes: list[int], constant: int, total: int
) -> None:
    """Every sequence begins at a multiple, stands there in order, and the sum divides by all that
    is asked for.
    """
    alignment = Alignment(by=("tp", "2cp"), constant=constant, total=total)
    mesh = Mesh(tp=sizes[0], cp=sizes[1])
    cumulative = cumulative_lengths(
        lengths, alignment.multiple(mesh), alignment.total_multiple(mesh)
    )
    source = packed(lengths, cumulative)
    assert all(start % alignment.multiple(mesh) == 0 for start in cumulative[:-1])
    assert 0 == cumulative[-1] % total == cumulative[-1] % alignment.sizes(mesh)
    assert [(i, p) for i, n in enumerate(lengths) for p in range(n)] == list(
        zip(
            source.sample[source.filled].tolist(),
            source.position[source.filled].tolist(),
            strict=True,
        )
    )


@examples
@given(LENGTHS, SIZES, st.sampled_from(list(Context)))
def test_context_parallel_ranks_hold_every_row_once(
    lengths: list[int], sizes: list[int], kind: Context
) -> None:
    """The union over ranks is a permutation, pieces are equally long, and a rank under zigzag holds
    chunks r and 2 * cp - 1 - r.
    """
    cp = sizes[0]
    cumulative = cumulative_lengths(lengths, 2 * cp)
    pieces = [context_rows(kind, cumulative, cp, rank) for rank in range(cp)]
    assert list(range(int(cumulative[-1]))) == sorted(np.concatenate(pieces).tolist())
    assert 1 == len({len(piece) for piece in pieces})
    if kind is Context.CONTIGUOUS:
        assert list(range(int(cumulative[-1]))) == np.concatenate(pieces).tolist()
    if kind is Context.ZIGZAG and cp > 1:
        chunk = int(cumulative[1]) // (2 * cp)
        assert [n // chunk for n in pieces[1][: 2 * chunk].tolist()] == [1] * chunk + [
            2 * cp - 2
        ] * chunk


@examples
@given(st.integers(1, 6), st.integers(1, 9))
def test_flat_orders(batch: int, width: int) -> None:
    """Row ``s * batch + b`` in Megatron, ``b * width + s`` in HF."""
    order = flat_rows(Order.SEQUENCE_MAJOR, batch, width)
    assert all(order[s * batch + b] == b * width + s for b in range(batch) for s in range(width))
    assert list(range(batch * width)) == flat_rows(Order.BATCH_MAJOR, batch, width).tolist()


@examples
@given(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 5))
def test_columns(pattern: list[int], dense: int) -> None:
    """Every MoE layer has a column of its own; on the axis of all layers its own number."""
    moe = moe_layers(len(pattern), pattern, dense)
    assert [layer for layer, one in enumerate(pattern) if one and layer >= dense] == list(moe)
    assert {layer: layer for layer in moe} == columns_of(moe, LayerAxis.ALL)
    assert list(range(len(moe))) == list(columns_of(moe, LayerAxis.MOE).values())


@examples
@given(st.integers(0, 2**32))
def test_stages_cover_all_layers_once(seed: int) -> None:
    """Whatever the division, each layer is built by one chunk, chunks count up through ranks, and
    ``stage_of`` says which it is.
    """
    layout = draw_stages(_PLAIN, np.random.default_rng(seed))
    chunks = layout.chunks()
    order = [
        layer
        for chunk in range(layout.mesh.vpp)
        for pp in range(layout.mesh.pp)
        for layer in chunks[pp][chunk]
    ]
    assert list(range(layout.num_layers)) == order
    for layer in layout.moe:
        pp, chunk, ordinal = layout.stage_of(layer)
        assert layer == layout.routers(pp, chunk)[ordinal]


@examples
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_schedules(pp: int, vpp: int, times: int, group: int, recompute: bool) -> None:
    """Every pass runs once, backward after forward, and each takes the target of its own."""
    vpp = vpp if pp > 1 else 1
    microbatches = times * pp
    for rank in range(pp):
        order = operations(microbatches, pp=pp, rank=rank, vpp=vpp, group=group)
        wanted = [(m, c) for c in range(vpp) for m in range(microbatches)]
        assert wanted == sorted(
            ((o.microbatch, o.chunk) for o in order if not o.backward),
            key=lambda pair: (pair[1], pair[0]),
        )
        seen: Counter[tuple[int, int]] = Counter()
        for one in order:
            assert one.backward == bool(seen[one.microbatch, one.chunk])
            seen[one.microbatch, one.chunk] += 1
        targets = Counter(expected_targets(order, recompute=recompute))
        assert dict.fromkeys(seen, 1 + recompute) == targets


@examples
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_segments(steps: list[int], delta: bool) -> None:
    """Calls that return all rows so far, or only new ones: each position once, by the call that
    came first.
    """
    stops = np.cumsum(steps).tolist()
    starts = [0, *stops[:-1]]
    segments = [
        Segment(
            routes=np.full((stop - (start if delta else 0), 1, 1), number),
            start=start if delta else 0,
            version=number,
        )
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]
    wanted = [number for number, step in enumerate(steps) for _ in range(step)]
    rows, versions = joined_segments(segments)
    assert (wanted, wanted) == (rows.flatten().tolist(), versions)


@examples
@given(
    LENGTHS,
    st.permutations([1, 2, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(Context)),
    st.sampled_from(list(Order)),
)
def test_a_whole_layout_places_every_row_and_merges_back(
    lengths: list[int], sizes: list[int], sliced: bool, pack: bool, context: Context, order: Order
) -> None:
    """Packed or padded, any division: each row is on one rank (or on every tensor-parallel one),
    and merging gives the payload.
    """
    tp, cp, pp = sizes[:3]
    layout = Layout(
        num_layers=pp + 1,
        num_experts=64,
        top_k=2,
        moe_layers=tuple(range(1, pp + 1)),
        mesh=Mesh(tp=tp, cp=cp, pp=pp, sequence_parallel=sliced and tp > 1),
        stages=Stages(first=2) if pp > 1 else Stages(),
        packed=pack,
        context=context,
        order=order,
        alignment=Alignment(by=("tp", "2cp")),
    )
    coding = Coding(samples=4, positions=20, columns=pp + 1, experts=64)
    payloads = [coding.payload(i, length) for i, length in enumerate(lengths)]
    copies = 1 if layout.mesh.sequence_parallel else tp
    assert copies == len(layout.places(lengths, len(lengths) - 1, lengths[-1] - 1))
    recorded = {(rank, 0): layout.targets(payloads, rank) for rank in layout.mesh.ranks()}
    for payload, merged in zip(payloads, layout.merge(recorded, lengths), strict=True):
        assert np.array_equal(payload[:, 1:], merged[:, 1:])


def test_calls_are_repeatable() -> None:
    """One seed gives one set of calls, another seed another."""
    layout = Layout(num_layers=2, num_experts=64, top_k=2, alignment=Alignment(by=("tp", "2cp")))
    first, again, other = (
        list(layout_calls("context", layout, seed=seed, draws=5)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert Rank() in {call.rank for call in first}
