"""The layout functions that a framework may have: what each takes and what it returns.

A subject (``LayoutSubject``) has a method for each of them that it wants judged, under the same
name, called as ``method(layout, **arguments)``. Rows are ``(rows, columns, k)`` arrays of coded
ids: columns are those of the case's layout, k is its ``top_k``, or 1 in a side tensor of int64,
which a subject with ``numbers = False`` does not get. numpy arrays go in, and arrays or CPU tensors
come back. The table is the whole interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollproof.core.records import IntArray
from rollproof.errors import SubjectError, UsageError
from rollproof.layouts.layout import Layout
from rollproof.layouts.layout_calls import Call
from rollproof.layouts.merged_rows import Segment
from rollproof.layouts.mesh import Rank
from rollproof.layouts.padding import packed
from rollproof.layouts.pipeline import operations, schedule_table
from rollproof.layouts.returned import (
    Returned,
    as_layers,
    as_lists,
    as_numbers,
    as_pairs,
    as_parts,
    as_rows,
    as_samples,
    as_stored,
)

__all__ = [
    "FUNCTIONS",
    "Function",
    "LayoutSubject",
    "chunk_recordings",
    "functions_of",
    "layout_function",
    "stage_recordings",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A layout function.

    Attributes:
        name: name of the method of a subject.
        does: what it takes and returns.
        arguments: makes the keyword arguments of a call.
        returned: turns the returned value into arrays, or raises ``Misfit``.
    """

    name: str
    does: str
    arguments: Callable[[Call], dict[str, Any]]
    returned: Returned


def chunk_recordings(call: Call) -> list[IntArray]:
    """Return what pipeline rank ``call.rank.pp`` recorded, in schedule order: one ``(rows, MoE
    layers of the chunk, k)`` per pass.
    """
    layout, payloads = call.layout, call.payloads()
    table = schedule_table(call.microbatches, layout.mesh.vpp, layout.group or layout.mesh.pp)
    columns = [
        [layout.column[layer] for layer in layout.routers(call.rank.pp, chunk)]
        for chunk in range(layout.mesh.vpp)
    ]
    return [payloads[microbatch][:, columns[chunk]] for microbatch, chunk in table]


def stage_recordings(call: Call) -> list[IntArray]:
    """Return what each pipeline rank recorded of one microbatch: ``(rows, MoE layers of the rank,
    k)``, chunk after chunk.
    """
    layout, payload = call.layout, call.payloads()[0]
    chunks = range(layout.mesh.vpp)
    ranks = [
        [layout.column[layer] for chunk in chunks for layer in layout.routers(pp, chunk)]
        for pp in range(layout.mesh.pp)
    ]
    return [payload[:, columns] for columns in ranks]


def _batch(call: Call) -> tuple[IntArray, IntArray]:
    source = call.layout.batch(call.prompts, call.responses)
    return source.take(call.payloads()), source.filled.astype(np.int64)


def _packed(call: Call) -> IntArray:
    return packed(call.lengths, call.layout.cumulative(call.lengths)).take(call.payloads())


def _samples(call: Call) -> list[tuple[IntArray, IntArray]]:
    return list(zip(call.tokens(), call.payloads(), strict=True))


def _recorded(call: Call) -> dict[tuple[Any, int], dict[int, IntArray]]:
    layout, payloads = call.layout, call.payloads()
    out = {}
    for rank in (rank for pp in range(layout.mesh.pp) for rank in layout.mesh.row_ranks(pp=pp)):
        source = layout.rows(call.lengths, rank)
        for chunk in range(layout.mesh.vpp):
            rows = source.take(payloads)
            out[rank, chunk] = {
                layer: rows[:, layout.column[layer]] for layer in layout.routers(rank.pp, chunk)
            }
    return out


def _values(call: Call) -> dict[str, Any]:
    # not its own inverse: permuting where the inverse is needed must show
    order = [*range(1, len(call.lengths)), 0]
    indexes = [part.tolist() for part in np.array_split(order, call.parts)]
    payloads = call.payloads()
    return {"values": [[payloads[i] for i in part] for part in indexes], "indexes": indexes}


def _segments(call: Call) -> dict[str, Any]:
    total = max((start + rows for start, rows, _ in call.segments), default=0)
    payload = call.coding.payload(0, total)
    # the rows of the same positions under the weights of a later call
    later = call.coding.payload(1, total)
    return {
        "segments": [
            Segment(
                routes=np.concatenate([later[start:fresh], payload[fresh : start + rows]]),
                start=start,
                version=version,
            )
            for start, rows, version, fresh in _with_fresh(call.segments)
        ]
    }


def _with_fresh(segments: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int, int]]:
    """Return each segment with the first position that no earlier segment has."""
    out, end = [], 0
    for start, rows, version in segments:
        out.append((start, rows, version, min(max(end, start), start + rows)))
        end = max(end, start + rows)
    return out


def _wide(call: Call) -> IntArray:
    """Return the 512 largest expert ids, ``(ids, 1, 1)``."""
    # the largest ids overflow first: uint8 holds those of 256 experts (verl#5240, verl#7407,
    # prime-rl#3051)
    experts = call.layout.num_experts
    return np.arange(max(0, experts - 512), experts, dtype=np.int64)[:, None, None]


def _pieces(call: Call) -> list[IntArray]:
    # context parallelism alone: tensor-parallel slices have a function of their own
    layout = replace(call.layout, mesh=replace(call.layout.mesh, sequence_parallel=False))
    return [
        layout.rows(call.lengths, Rank(cp=cp)).take(call.payloads()) for cp in range(layout.mesh.cp)
    ]


_TABLE = (
    Function(
        name="complete",
        does=(
            "routes (rows, columns, k) of one sample, and its number of tokens -> rows (tokens,"
            " columns, k); or those with a mask (tokens,) that is 0 where the router is free to"
            " choose"
        ),
        arguments=lambda call: {"routes": call.payloads()[0], "tokens": call.lengths[0]},
        returned=as_rows,
    ),
    Function(
        name="pair",
        does=(
            "tokens (n,) and routes (rows, columns, k) of one sample -> what the model is fed (m,),"
            " and the row (m, columns, k) for each"
        ),
        arguments=lambda call: {"tokens": call.tokens()[0], "routes": call.payloads()[0]},
        returned=as_parts,
    ),
    Function(
        name="pad",
        does=(
            "samples, one (tokens, columns, k) each, and prompt lengths -> a batch (samples, width,"
            " columns, k), or that with the attention mask (samples, width)"
        ),
        arguments=lambda call: {"samples": call.payloads(), "prompts": list(call.prompts)},
        returned=as_rows,
    ),
    Function(
        name="unpad",
        does=(
            "a batch (samples, width, columns, k) and an attention mask (samples, width) ->"
            " samples, one (tokens, columns, k) each"
        ),
        arguments=lambda call: dict(zip(("batch", "attention"), _batch(call), strict=True)),
        returned=as_parts,
    ),
    Function(
        name="pack",
        does=(
            "samples -> packed rows (rows, columns, k) before any slice, or those with cumulative"
            " padded lengths (samples + 1,)"
        ),
        arguments=lambda call: {"samples": call.payloads()},
        returned=as_rows,
    ),
    Function(
        name="unpack",
        does="packed rows (rows, columns, k) and the lengths of the samples -> samples",
        arguments=lambda call: {"rows": _packed(call), "lengths": list(call.lengths)},
        returned=as_parts,
    ),
    Function(
        name="context",
        does=(
            "samples and a rank -> the rows that its context-parallel rank holds, before a"
            " tensor-parallel slice"
        ),
        arguments=lambda call: {"samples": call.payloads(), "rank": call.rank},
        returned=as_rows,
    ),
    Function(
        name="context_merge",
        does=(
            "the rows of each context-parallel rank, in rank order, and the lengths of the samples"
            " -> samples"
        ),
        arguments=lambda call: {"pieces": _pieces(call), "lengths": list(call.lengths)},
        returned=as_parts,
    ),
    Function(
        name="tensor_slice",
        does=(
            "rows and a rank -> the rows that its tensor-parallel rank sees under sequence"
            " parallelism"
        ),
        arguments=lambda call: {"rows": call.payloads()[0], "rank": call.rank},
        returned=as_rows,
    ),
    Function(
        name="ulysses",
        does="rows and a rank -> its piece of the rows, padded to a multiple of the Ulysses size",
        arguments=lambda call: {"rows": call.payloads()[0], "rank": call.rank},
        returned=as_rows,
    ),
    Function(
        name="flatten",
        does="a batch (samples, width, columns, k) -> router rows (samples * width, columns, k)",
        arguments=lambda call: {"batch": np.stack(call.payloads())},
        returned=as_rows,
    ),
    Function(
        name="select",
        does=(
            "rows (rows, columns, k), a rank and a chunk -> {layer: (rows, k)}, or {layer: column},"
            " for each router of that chunk"
        ),
        arguments=lambda call: {"rows": call.payloads()[0], "rank": call.rank, "chunk": call.chunk},
        returned=as_layers,
    ),
    Function(
        name="stage_layers",
        does="a rank and a chunk -> the layers that it builds, dense ones too, in order",
        arguments=lambda call: {"rank": call.rank, "chunk": call.chunk},
        returned=as_numbers,
    ),
    Function(
        name="routers",
        does=(
            "a rank and a chunk -> the layers of its routers in the order in which they are built;"
            " or, as an int, how many there are"
        ),
        arguments=lambda call: {"rank": call.rank, "chunk": call.chunk},
        returned=as_numbers,
    ),
    Function(
        name="serve",
        does=(
            "the operations (schedules.Operation) of a pipeline rank, and whether its backward"
            " passes recompute -> the (microbatch, chunk) whose target each router call used, in"
            " order; or a pair of that list and the number of targets that are left"
        ),
        arguments=lambda call: {
            "operations": operations(
                call.microbatches,
                pp=call.layout.mesh.pp,
                rank=call.rank.pp,
                vpp=call.layout.mesh.vpp,
                group=call.layout.group,
            ),
            "recompute": call.recompute,
        },
        returned=as_pairs,
    ),
    Function(
        name="reorder",
        does=(
            "recordings (rows, layers of the chunk, k) of a pipeline rank in schedule order, and"
            " the number of microbatches -> one (rows, layers of the rank, k) per microbatch, chunk"
            " after chunk"
        ),
        arguments=lambda call: {
            "recorded": chunk_recordings(call),
            "microbatches": call.microbatches,
            "rank": call.rank,
        },
        returned=as_parts,
    ),
    Function(
        name="gather_stages",
        does=(
            "recordings (rows, MoE layers of the rank, k) of each pipeline rank -> (rows, MoE"
            " layers, k) in the order of layers"
        ),
        arguments=lambda call: {"stages": stage_recordings(call)},
        returned=as_rows,
    ),
    Function(
        name="merge",
        does=(
            "{(rank, chunk): {layer: (rows, k)}} of all ranks of one replica, and the lengths ->"
            " samples, with 0 in dense columns"
        ),
        arguments=lambda call: {"recorded": _recorded(call), "lengths": list(call.lengths)},
        returned=as_parts,
    ),
    Function(
        name="microbatches",
        does=(
            "lengths of samples and the most tokens of a microbatch -> the samples of each"
            " microbatch, as lists of indexes; a sample with more tokens is refused, or alone"
        ),
        arguments=lambda call: {"lengths": list(call.lengths), "most": call.most},
        returned=as_lists,
    ),
    Function(
        name="restore",
        does=(
            "values of microbatches and the indexes of their samples, both lists of lists -> the"
            " values in the order of the samples"
        ),
        arguments=_values,
        returned=as_parts,
    ),
    Function(
        name="divide",
        does=(
            "samples as pairs (tokens, routes), and a number of data-parallel ranks -> the pairs of"
            " each rank, as lists; samples that are no multiple may be refused, or made one by"
            " repeating some or dropping the rest"
        ),
        arguments=lambda call: {"samples": _samples(call), "parts": call.parts},
        returned=as_samples,
    ),
    Function(
        name="keep",
        does=(
            "samples as pairs (tokens, routes), and the indexes of those to keep -> those pairs, in"
            " that order"
        ),
        arguments=lambda call: {"samples": _samples(call), "kept": list(call.kept)},
        returned=as_samples,
    ),
    Function(
        name="compact",
        does="ids (n, 1, 1) int64 -> the same ids in the type that they are stored or sent in",
        arguments=lambda call: {"ids": _wide(call)},
        returned=as_stored,
    ),
    Function(
        name="fill",
        does="a number of rows -> so many padding rows (rows, columns, k)",
        arguments=lambda call: {"rows": call.lengths[0]},
        returned=as_rows,
    ),
    Function(
        name="join",
        does=(
            "the calls of a resumed sample (merged_rows.Segment) -> the sample's rows; or those"
            " with the version of each row"
        ),
        arguments=_segments,
        returned=as_rows,
    ),
    Function(
        name="targets",
        does=(
            "payloads (rows, columns, k) of one microbatch, the samples' lengths, a rank and a"
            " chunk -> {layer: (rows, k)}: what each router must select"
        ),
        arguments=lambda call: {
            "payloads": call.payloads(),
            "lengths": list(call.lengths),
            "rank": call.rank,
            "chunk": call.chunk,
        },
        returned=as_layers,
    ),
)
FUNCTIONS: Mapping[str, Function] = {function.name: function for function in _TABLE}
"""By name, in the order of the transformations."""


@runtime_checkable
class LayoutSubject(Protocol):
    """The layout functions of a framework.

    ``layout`` declares its conventions: padding side, order, division over context-parallel ranks,
    alignment, layer axis, fillers. Cases vary its sizes. Every function of
    ``rollproof.layouts.functions`` that the subject has as a method is judged, called as
    ``method(layout, **arguments)`` with the layout of the case.

    Optional: ``supports(function, layout) -> str | None`` returns the reason why the framework does
    not offer that; such cases are skipped, as is a call that raises ``NotImplementedError``.
    ``numbers = False`` says that a payload must consist of valid expert ids.
    """

    layout: Layout


def functions_of(subject: Any, label: str) -> tuple[str, ...]:
    """Return the names of the functions that a subject has.

    Raises ``SubjectError`` if it has none, or declares no layout.
    """
    names = tuple(name for name in FUNCTIONS if callable(getattr(subject, name, None)))
    if not isinstance(getattr(subject, "layout", None), Layout):
        raise SubjectError(
            f"{label} made a {type(subject).__name__} without a `layout` (a"
            " rollproof.layouts.Layout): it declares the conventions that the functions are"
            " judged by."
        )
    if not names:
        raise SubjectError(
            f"{label} made a {type(subject).__name__} with none of the layout functions"
            f" {list(FUNCTIONS)}: nothing can be judged."
        )
    return names


def layout_function(
    name: str, function: Callable[..., Any], layout: Layout, **attributes: Any
) -> Callable[[], LayoutSubject]:
    """Return a factory of a subject with one function.

    Example: ``layout_function("context", my_slice, my_layout)``. ``attributes`` are those of a
    subject (``supports``, ``numbers``). Raises ``UsageError`` for an unknown name, and for a
    ``function`` that is not callable.
    """
    if name not in FUNCTIONS:
        raise UsageError(f"No layout function is named {name!r}; choose one of {list(FUNCTIONS)}.")
    if not callable(function):
        raise UsageError(
            f"layout_function({name!r}, ...) takes the function to be judged, not a"
            f" {type(function).__name__}."
        )
    plain = {
        key: staticmethod(value) if callable(value) else value for key, value in attributes.items()
    }
    made = {"layout": layout, name: staticmethod(function), **plain}
    subject: type[LayoutSubject] = type(getattr(function, "__name__", name), (), made)
    return subject
