"""Checks on samples: microbatches, data-parallel ranks, filters and compact ids move or store them
unchanged.
"""

from __future__ import annotations

import numpy as np

from rollproof.invariants._shared.phrases import count, share
from rollproof.invariants.layout.call_check import (
    LayoutCall,
    compare_parts,
    layout_check,
    outcome_check,
)
from rollproof.judging.checks import Collector
from rollproof.layouts.functions import FUNCTIONS
from rollproof.layouts.layout_cases import LONG_SAMPLE
from rollproof.layouts.sources import Source

__all__ = [
    "layout_accepts",
    "layout_expert_ids",
    "layout_input",
    "layout_microbatches",
    "layout_refuses",
    "layout_restore",
    "layout_returns",
    "layout_samples",
]


@layout_check(
    "layout.microbatches",
    functions=("microbatches",),
    promise=(
        "Every sample is in exactly one microbatch, and none has more tokens than allowed. A sample"
        " with more is refused, or alone in its microbatch."
    ),
    exercised_by="samples divided",
)
def layout_microbatches(record: LayoutCall, out: Collector) -> None:
    """Check that the microbatches are a permutation within the token limit."""
    parts, lengths = [part.ravel().tolist() for part in record.event.out], record.call.lengths
    out.exercised("samples divided", len(lengths))
    indexes = sorted(i for part in parts for i in part)
    if indexes != list(range(len(lengths))):
        out.finding(
            "a sample is in no microbatch, or in two",
            expected=f"each of {count(len(lengths), 'sample')} once",
            observed=str(parts),
            where=record.place(),
            hint=(
                "A division must be a permutation: if it loses or doubles a sample, others"
                " train on the wrong routes."
            ),
        )
        return
    for part in parts:
        tokens = sum(lengths[i] for i in part)
        if tokens > record.call.most and len(part) > 1:
            out.finding(
                "a microbatch has more tokens than allowed",
                expected=f"at most {record.call.most}, or a single sample",
                observed=f"{tokens} in samples {part}",
                where=record.place(),
                hint="The limit is what fits into the rank's memory.",
            )
            return


@layout_check(
    "layout.restore",
    functions=("restore",),
    promise="Values of microbatches go back to the order of the samples.",
    exercised_by="rows compared",
)
def layout_restore(record: LayoutCall, out: Collector) -> None:
    """Compare the restored order with that of the samples."""
    compare_parts(
        record,
        out,
        "rows compared",
        [Source.whole(i, length) for i, length in enumerate(record.call.lengths)],
        title="values come back in another order than the samples",
        hint=(
            "Undo the division by its inverse permutation, not by applying it again (verl"
            " restore_dynamic_batch)."
        ),
    )


@layout_check(
    "layout.samples",
    functions=("divide", "keep"),
    promise=(
        "Splitting, balancing and filtering move a sample's tokens and routes together, and"
        " drop no sample that should stay."
    ),
    exercised_by="samples followed",
)
def layout_samples(record: LayoutCall, out: Collector) -> None:
    """Follow tokens and routes of every sample through a split or filter."""
    call, arrays = record.call, record.event.out[1:]
    tokens, payloads = call.tokens(), call.payloads()
    owners = []
    for number in range(len(arrays) // 2):
        ids, routes = arrays[2 * number], arrays[2 * number + 1]
        owner = next(
            (
                i
                for i, sample_tokens in enumerate(tokens)
                if np.array_equal(sample_tokens, ids.ravel())
            ),
            None,
        )
        owners.append(owner)
        if owner is None:
            out.finding(
                "tokens of no sample",
                expected=f"the tokens of one of {count(len(tokens), 'sample')}",
                observed=f"{ids.ravel()[:6].tolist()}",
                where=record.place(index=number),
                hint="Splits and filters must move complete samples.",
            )
            return
        out.exercised("samples followed")
        if routes.shape != payloads[owner].shape or not np.array_equal(routes, payloads[owner]):
            other = next(
                (i for i, payload in enumerate(payloads) if np.array_equal(payload, routes)), None
            )
            out.finding(
                "a sample gets the routes of another one",
                expected=(
                    f"with the tokens of sample {owner}, its own"
                    f" {count(len(payloads[owner]), 'row')}"
                ),
                observed=(
                    f"the routes of sample {other}"
                    if other is not None
                    else f"routes {routes.shape} of no sample"
                ),
                where=record.place(index=number),
                hint=(
                    "A permutation or a filter must reach every per-sample field (SkyRL#1908,"
                    " AReno#524)."
                ),
            )
            return
    _check_completeness(record, out, owners)


def _is_uneven(record: LayoutCall) -> bool:
    """Return whether samples are to be divided over ranks that they are not a multiple of: a
    framework may need a multiple.
    """
    return record.event.function == "divide" and len(record.call.lengths) % record.call.parts != 0


def _may_be_refused(record: LayoutCall) -> bool:
    """Return whether a framework may require what this sound input lacks."""
    return _is_uneven(record) or record.call.case == LONG_SAMPLE


def _check_completeness(record: LayoutCall, out: Collector, owners: list[int | None]) -> None:
    """Check that every sample is there once; a filter also keeps the order of its indexes.

    If samples do not divide evenly, ranks of equal size may repeat some, or drop fewer than one for
    each rank.
    """
    filtering = record.event.function == "keep"
    expected = list(record.call.kept) if filtering else list(range(len(record.call.lengths)))
    actual = owners if filtering else sorted(owner for owner in owners if owner is not None)
    if actual == expected:
        return
    sizes = set(record.event.out[0].ravel().tolist())
    # Ranks of equal size cannot divide these samples evenly: repeating or dropping a few is a
    # choice.
    if _is_uneven(record) and len(sizes) == 1:
        size, parts = sizes.pop(), record.call.parts
        repeated = size == -(-len(expected) // parts) and set(actual) == set(expected)
        dropped = size == len(expected) // parts and len(set(actual)) == len(actual)
        if repeated or dropped:
            return
    out.finding(
        "samples are lost, doubled or in another order",
        expected=f"samples {expected}",
        observed=f"samples {actual}",
        where=record.place(),
        hint="Parallel lists (advantages, uids) are matched by position.",
    )


@layout_check(
    "layout.expert-ids",
    functions=("compact",),
    promise="Ids are the same after a compact type, for every number of experts.",
    exercised_by="ids compared",
)
def layout_expert_ids(record: LayoutCall, out: Collector) -> None:
    """Compare ids before and after a compact type."""
    expected = FUNCTIONS["compact"].arguments(record.call)["ids"].ravel()
    stored = record.event.out[0]
    actual = stored.ravel().astype(np.int64)
    out.exercised("ids compared", len(expected))
    if len(actual) != len(expected):
        out.finding(
            "decoded ids differ from the stored ones",
            expected=count(len(expected), "id"),
            observed=f"an array of {stored.dtype} {stored.shape}",
            where=record.place(),
            hint="View the bytes again as the type that was stored.",
        )
        return
    # uint8 wraps at 256 experts (verl#7407, prime-rl#3051).
    wrong = np.flatnonzero(actual != expected)
    if len(wrong):
        first = int(wrong[0])
        out.finding(
            "expert ids wrap in their compact type",
            expected=f"id {expected[first]} of {record.layout.num_experts} experts",
            observed=(
                f"{actual[first]} in {stored.dtype}; so for"
                f" {share(len(wrong), len(expected), 'id')}"
            ),
            where=record.place(),
            hint=(
                f"{stored.dtype} holds ids up to {np.iinfo(stored.dtype).max} (verl#7407,"
                " prime-rl#3051): choose the type by the number of experts."
                if stored.dtype.kind in "iu"
                else f"Ids are whole numbers: store them in an integer type, not in {stored.dtype}."
            ),
        )


@outcome_check(
    "layout.accepts",
    promise="Sound input is accepted, whatever its lengths and sizes.",
    exercised_by="sound calls",
)
def layout_accepts(record: LayoutCall, out: Collector) -> None:
    """Report sound input that was refused."""
    if record.call.defect or (_may_be_refused(record) and record.event.refused is not None):
        return
    out.exercised("sound calls")
    if record.event.refused is not None:
        out.finding(
            "sound input was refused",
            expected=f"{record.event.function} of {record.call.case or 'sound input'}",
            observed=record.event.refused,
            where=record.place(),
            hint=(
                "One token, a sequence shorter than 2 * cp, an empty response, a stage"
                " without MoE layers are sound. If a framework does not support a case, its"
                " adapter says so in `supports`, or raises NotImplementedError in the call."
            ),
        )


@outcome_check(
    "layout.returns",
    promise="A function returns arrays of the declared kind and rank.",
    exercised_by="returned values",
)
def layout_returns(record: LayoutCall, out: Collector) -> None:
    """Report results of another kind or rank."""
    if record.event.refused is not None:
        out.absent("every call raised (layout.accepts)")
        return
    out.exercised("returned values")
    if record.event.misfit is not None:
        out.finding(
            "a function returned something else",
            expected=(
                FUNCTIONS[record.event.function].does
                if record.event.function in FUNCTIONS
                else "a function that exists"
            ),
            observed=record.event.misfit,
            where=record.place(),
            hint=(
                "The adapter must convert what the framework's function returns into these arrays."
            ),
        )


@outcome_check(
    "layout.input",
    promise="A function does not change the arrays that it gets.",
    exercised_by="calls watched",
)
def layout_input(record: LayoutCall, out: Collector) -> None:
    """Report arguments that a function changed."""
    out.exercised("calls watched")
    if record.event.changed:
        out.finding(
            "a function changed its input",
            expected="the arguments as they were",
            observed=f"changed: {', '.join(record.event.changed)}",
            where=record.place(),
            hint=(
                "A payload is used again for other ranks, microbatches and passes: copy it"
                " before you write."
            ),
        )


@outcome_check(
    "layout.refuses",
    promise=(
        "Rows that do not fit their tokens, and payloads of too few layers, are refused or left to"
        " the router, never made to fit."
    ),
    exercised_by="malformed calls",
)
def layout_refuses(record: LayoutCall, out: Collector) -> None:
    """Check what becomes of rows that do not fit."""
    if not record.call.defect:
        out.inapplicable(
            "the subject has no function for which malformed input exists (complete, targets)"
        )
        return
    out.exercised("malformed calls")
    if record.event.refused is not None or record.event.misfit is not None:
        return
    if record.event.function == "targets":
        columns, declared = record.call.coding.columns, record.layout.columns
        fault, expected = (
            f"targets for layers {record.event.out[0].tolist()} of {columns} columns",
            f"an error for {columns} columns of {declared}",
        )
    else:
        fault, expected = (
            _accepted(record),
            (
                f"an error for {record.call.held[0]} rows and {record.call.lengths[0]} tokens,"
                " or a mask for the router"
            ),
        )
    if fault:
        out.finding(
            f"{record.call.defect}: accepted",
            expected=expected,
            observed=fault,
            where=record.place(),
            hint=(
                "Rows that do not fit belong to another sample or model, or some were lost:"
                " refuse them while the sample can still be named."
            ),
        )


def _accepted(record: LayoutCall) -> str:
    """Return what became of rows that do not fit; empty if it is harmless."""
    captured_count, tokens = record.call.held[0], record.call.lengths[0]
    rows = record.event.out[0]
    if captured_count > tokens:
        return (
            f"{captured_count} rows were cut to {tokens}"
            if len(rows) == tokens
            else f"{len(rows)} rows for {tokens} tokens"
        )
    if len(rows) != tokens:
        return f"{len(rows)} rows for {tokens} tokens"
    mask = record.event.out[1] if len(record.event.out) > 1 else None
    if (mask is not None and len(mask) == tokens and not mask[captured_count:].any()) or (
        rows[captured_count:] == -1
    ).all():
        return ""
    return (
        f"positions {captured_count} to {tokens - 1} were filled with"
        f" {rows[captured_count].ravel()[:4].tolist()}, and are replayed"
    )
