"""The calls on which a subject's layout functions are judged.

The small scope is exhausted first, smallest calls first, so that the first finding is a small one;
seeded random calls follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeAlias

import numpy as np

from rollproof.core.contract import Rows
from rollproof.layouts.layout import Layout
from rollproof.layouts.layout_calls import Call
from rollproof.layouts.mesh import Rank
from rollproof.layouts.padding import Alignment
from rollproof.layouts.payloads import Coding
from rollproof.layouts.sizes import (
    ALONE,
    LENGTHS,
    draw_lengths,
    draw_rows,
    draw_stages,
    small_rows,
    small_stages,
    with_model,
)

__all__ = ["FEW_COLUMNS", "LONG_SAMPLE", "coding_for", "layout_calls"]

FEW_COLUMNS = "two layers fewer than declared"
"""A defect of payloads. One layer fewer could be a payload of MoE layers after a dense layer."""

LONG_SAMPLE = "a sample longer than a microbatch"
"""A case of microbatches."""

_Maker: TypeAlias = "Callable[[Layout, np.random.Generator | None], Iterator[Call]]"
"""Calls for one function: all of the small scope without a generator, or those of one random draw
with it.
"""


def layout_calls(
    name: str, layout: Layout, *, seed: int = 0, draws: int = 40, numbers: bool = True
) -> Iterator[Call]:
    """Yield calls of the function ``name``: the small scope, then ``draws`` random ones.

    ``layout`` gives the conventions. Payloads are expert ids; with ``numbers`` every second one is
    a side tensor of int64.
    """
    # seeded by the name, too: the calls of a function do not depend on which others are judged
    random = np.random.default_rng([seed, *name.encode()])
    made = _MAKERS[name]
    for i, call in enumerate(made(layout, None)):
        yield _coded(call, numbers and i % 2 == 1)
    for i in range(draws):
        for call in made(layout, random):
            yield _coded(call, numbers and i % 2 == 1)


def coding_for(
    layout: Layout, samples: int, positions: int, *, numbers: bool, columns: int | None = None
) -> Coding:
    """Return a coding by expert ids, or by a side tensor.

    It is a side tensor with ``numbers``, and if the expert ids are too few to identify all cells.
    ``columns`` are the layout's by default.
    """
    columns = max(1, layout.columns) if columns is None else columns
    enough = layout.top_k > 1 and samples * positions * columns <= (layout.num_experts - 1) ** 2
    experts = 0 if numbers or not enough else layout.num_experts
    return Coding(
        samples=samples, positions=positions, columns=columns, experts=experts, top_k=layout.top_k
    )


_UNCODED = Coding(samples=1, positions=1, columns=1)


def _coded(call: Call, numbers: bool) -> Call:
    samples = max(len(call.lengths), 2 if call.segments else 1)
    positions = max(
        [*call.lengths, *call.held, *(start + rows for start, rows, _ in call.segments), 1]
    )
    columns = call.layout.columns - 2 if call.defect == FEW_COLUMNS else None
    return replace(
        call, coding=coding_for(call.layout, samples, positions, numbers=numbers, columns=columns)
    )


def _call(layout: Layout, **fields: object) -> Call:
    return Call(layout=layout, coding=_UNCODED, **fields)  # type: ignore[arg-type]


def _payload_rows(layout: Layout, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of each payload by convention; a captured prefix lacks a third."""
    less = {
        length: (
            -(-length // 3)
            if layout.held is Rows.CAPTURED_PREFIX
            else int(layout.held is Rows.FORWARDED)
        )
        for length in lengths
    }
    return tuple(length - less[length] for length in lengths)


def _in_rows(
    layout: Layout, random: np.random.Generator | None
) -> Iterator[tuple[Layout, tuple[int, ...]]]:
    if random is not None:
        yield draw_rows(layout, random), draw_lengths(random)
        return
    for lengths in LENGTHS:
        for sized in small_rows(layout):
            yield sized, lengths


def _single_samples(
    layout: Layout, random: np.random.Generator | None
) -> Iterator[tuple[Layout, int]]:
    lengths = range(1, 7) if random is None else [int(random.integers(1, 32))]
    for length in lengths:
        yield with_model(layout, 2, {}), length


def _complete(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized, length in _single_samples(layout, random):
        yield _call(sized, lengths=(length,), held=_payload_rows(sized, [length]))
        # a captured prefix may be any number of rows shorter, but never longer
        if random is None and length > 3:
            yield _call(
                sized, lengths=(length,), held=(length + 1,), defect="more rows than tokens"
            )
            # three less: with one less it would be the payload of another convention
            if layout.held is not Rows.CAPTURED_PREFIX:
                yield _call(
                    sized, lengths=(length,), held=(length - 3,), defect="fewer rows than tokens"
                )


def _pair(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized, length in _single_samples(layout, random):
        yield _call(sized, lengths=(length,), held=_payload_rows(sized, [length]))


def _padded(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    if random is not None:
        drawn = draw_lengths(random)
        yield _call(
            draw_rows(layout, random),
            lengths=drawn,
            prompts=tuple(int(random.integers(1, length + 1)) for length in drawn),
        )
        return
    batches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((4,), (1,)),
        ((5, 3), (2, 2)),
        ((3, 6, 2), (1, 4, 1)),
    )
    for sized in small_rows(layout):
        for lengths, prompts in batches:
            yield _call(sized, lengths=lengths, prompts=prompts)
        yield _call(sized, lengths=(4, 2), prompts=(2, 2), case="a response of length 0")


def _packed(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized, lengths in _in_rows(layout, random):
        yield _call(sized, lengths=lengths)


def _context(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized, lengths in _in_rows(layout, random):
        case = "a sequence shorter than 2 * cp" if min(lengths) < 2 * sized.mesh.cp else ""
        for cp in range(sized.mesh.cp):
            yield _call(sized, lengths=lengths, rank=Rank(cp=cp), case=case)


def _tensor(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    sizes = (
        product((2, 3, 4), (1, 2, 5))
        if random is None
        else [(int(random.integers(2, 7)), int(random.integers(1, 9)))]
    )
    for tp, rows in sizes:
        sized = with_model(
            layout, 2, {"tp": tp, "cp": 5 if layout.mesh.cp > 1 else 1, "sequence_parallel": True}
        )
        for rank in range(tp):
            yield _call(sized, lengths=(rows * tp,), rank=Rank(tp=rank))


def _ulysses(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    sizes = (
        product((2, 3, 4), (1, 2, 6, 7))
        if random is None
        else [(int(random.integers(2, 7)), int(random.integers(1, 32)))]
    )
    for size, rows in sizes:
        # without alignment, or there would be nothing left to pad
        sized = replace(with_model(layout, 2, {"ulysses": size}), alignment=Alignment())
        for rank in range(size):
            yield _call(sized, lengths=(rows,), rank=Rank(ulysses=rank))


def _flatten(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    sizes = (
        ((1, 4), (2, 3), (3, 2), (4, 1), (3, 5))
        if random is None
        else [(int(random.integers(1, 6)), int(random.integers(1, 12)))]
    )
    for batch, width in sizes:
        yield _call(with_model(layout, 2, {}), lengths=(width,) * batch)


def _in_stages(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized in small_stages(layout) if random is None else [draw_stages(layout, random)]:
        for pp, chunks in enumerate(sized.chunks()):
            for chunk in range(len(chunks)):
                case = "" if sized.routers(pp, chunk) else "a stage without MoE layers"
                yield _call(sized, lengths=(3,), rank=Rank(pp=pp), chunk=chunk, case=case)


def _gather(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized in small_stages(layout) if random is None else [draw_stages(layout, random)]:
        yield _call(sized, lengths=(3,))


def _schedule(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    sizes = (
        product((1, 2, 3), (1, 2), (1, 2, 3))
        if random is None
        else [tuple(int(n) for n in random.integers((1, 1, 1), (6, 4, 5)))]
    )
    for pp, vpp, times in sizes:
        if vpp > 1 and pp == 1:
            continue  # chunks alternate between pipeline ranks
        yield _call(with_model(layout, pp * vpp, {"pp": pp, "vpp": vpp}), microbatches=times * pp)


def _serve(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for call in _schedule(layout, random):
        # without recompute nothing takes the targets that Megatron and verl queue for the backward
        # pass, so the step must empty the queues
        for pp, recompute in product(range(call.layout.mesh.pp), (False, True)):
            yield replace(call, rank=Rank(pp=pp), recompute=recompute)


def _reorder(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for sized in small_stages(layout) if random is None else [draw_stages(layout, random)]:
        count = 2 * sized.mesh.pp
        for pp in range(sized.mesh.pp):
            yield _call(sized, lengths=(3,) * count, microbatches=count, rank=Rank(pp=pp))


def _all_axes(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    """Yield calls with rows and stages divided at once, by sizes that differ from each other."""
    if random is None:
        # with equal sizes an axis could be taken for another unnoticed (miles#496)
        meshes: tuple[dict[str, int], ...] = (
            {},
            {"tp": 2, "cp": 3},
            {"tp": 3, "cp": 2, "pp": 4},
            {"tp": 2, "pp": 3, "vpp": 2},
            {"cp": 2, "pp": 3},
        )
        few: tuple[tuple[int, ...], ...] = ((5,), (7, 3))
        drawn = [(mesh, lengths) for mesh in meshes for lengths in few]
    elif random.random() < ALONE:
        drawn = [({}, draw_lengths(random, 12))]
    else:
        tp, cp, pp = (int(size) for size in random.choice([1, 2, 3, 4, 5], 3, replace=False))
        drawn = [({"tp": tp, "cp": cp, "pp": pp}, draw_lengths(random, 12))]
    for mesh, lengths in drawn:
        layers = 2 * mesh.get("pp", 1) * mesh.get("vpp", 1)
        sp = layout.mesh.sequence_parallel and mesh.get("tp", 1) > 1
        sized = with_model(layout, layers, {**mesh, "sequence_parallel": sp})
        yield _call(
            replace(sized, moe_layers=tuple(range(1, layers)) if layers > 2 else None),
            lengths=lengths,
        )


def _targets(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for call in _all_axes(layout, random):
        held = _payload_rows(call.layout, call.lengths)
        ranks = list(call.layout.mesh.row_ranks())
        for i, pp in enumerate(range(call.layout.mesh.pp)):
            for rank in ranks if i == 0 else ranks[-1:]:
                yield replace(
                    call, rank=replace(rank, pp=pp), chunk=call.layout.mesh.vpp - 1, held=held
                )
        # only the last stage notices, which needs the last column
        if random is None and call.layout.num_layers >= 4:
            last = replace(ranks[0], pp=call.layout.mesh.pp - 1)
            yield replace(
                call, rank=last, chunk=call.layout.mesh.vpp - 1, held=held, defect=FEW_COLUMNS
            )


def _microbatches(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    sized = with_model(layout, 1, {})
    drawn = (
        [(1,), (4, 4), (3, 9, 1, 2), (8, 1, 7, 2, 6)] if random is None else [draw_lengths(random)]
    )
    for lengths in drawn:
        yield _call(sized, lengths=lengths, most=max(lengths) + 3)
    if random is None:
        for lengths in ((9,), (2, 9, 3), (7, 2, 8, 1)):
            yield _call(sized, lengths=lengths, most=5, case=LONG_SAMPLE)


def _parts(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    sized = with_model(layout, 2, {})
    drawn = (
        [(2, (3, 5)), (2, (7, 1, 4, 2)), (3, (2, 9, 4, 1, 6, 3)), (2, (4, 7, 2)), (3, (5, 1, 8, 3))]
        if random is None
        else [
            (
                parts := int(random.integers(2, 5)),
                tuple(int(n) for n in random.integers(1, 20, random.integers(parts, 4 * parts))),
            )
        ]
    )
    for parts, lengths in drawn:
        yield _call(
            sized, lengths=lengths, parts=parts, kept=tuple(range(len(lengths) - 1, -1, -2))
        )


def _keep(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    # a filter or a permutation that reaches one list of fields and not the other detaches routes
    # (SkyRL#1908, verl#6089)
    for call in _parts(layout, random):
        count = len(call.lengths)
        chosen = (
            [call.kept, tuple(range(1, count))]
            if random is None
            else [tuple(int(i) for i in random.permutation(count)[: 1 + count // 2])]
        )
        for kept in chosen:
            yield replace(call, kept=kept)


def _compact(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    if random is None:
        # uint8 holds the ids of 256 experts (verl#5240, verl#7407, prime-rl#3051)
        # and the type may be chosen for the subject's own number, such as int8 for 128
        for experts in sorted({8, 255, 256, 257, 384, 512, layout.num_experts}):
            if experts >= layout.top_k:
                yield _call(
                    replace(with_model(layout, 1, {}), num_experts=experts),
                    case=f"{experts} experts",
                )


def _fill(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    for rows in (
        (1, 5, layout.num_experts)
        if random is None
        else [int(random.integers(1, 2 * layout.num_experts))]
    ):
        yield _call(with_model(layout, 2, {}), lengths=(rows,))


def _join(layout: Layout, random: np.random.Generator | None) -> Iterator[Call]:
    """Yield samples of two calls and more, each of which returns all rows so far."""
    sized = with_model(layout, 2, {})
    ends = (
        [(3, 6), (2, 5), (4, 5, 9)]
        if random is None
        else [tuple(np.cumsum(random.integers(1, 6, random.integers(2, 5))).tolist())]
    )
    for stops in ends:
        # as vLLM and SGLang answer a resume; concatenated, rows are there twice (verl#6029)
        segments = tuple((0, stop, number + 1) for number, stop in enumerate(stops))
        yield _call(sized, segments=segments, case="every call returns all rows")


_MAKERS: Mapping[str, _Maker] = {
    "complete": _complete,
    "pair": _pair,
    "pad": _padded,
    "unpad": _padded,
    "pack": _packed,
    "unpack": _packed,
    "context": _context,
    "context_merge": _packed,
    "tensor_slice": _tensor,
    "ulysses": _ulysses,
    "flatten": _flatten,
    "select": _in_stages,
    "stage_layers": _in_stages,
    "routers": _in_stages,
    "serve": _serve,
    "reorder": _reorder,
    "gather_stages": _gather,
    "merge": _all_axes,
    "microbatches": _microbatches,
    "restore": _parts,
    "divide": _parts,
    "keep": _keep,
    "compact": _compact,
    "fill": _fill,
    "join": _join,
    "targets": _targets,
}
