"""Layout of samples: microbatches, data-parallel ranks, filters and compact ids: what is moved or
stored stays what it was.
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
    promise="Every sample is in exactly one microbatch, and none has more tokens than allowed.",
    exercised_by="samples divided",
)
def layout_microbatches(one: LayoutCall, out: Collector) -> None:
    parts, lengths = [part.reshape(-1).tolist() for part in one.event.out], one.call.lengths
    out.exercised("samples divided", len(lengths))
    named = sorted(i for part in parts for i in part)
    if named != list(range(len(lengths))):
        out.finding(
            "a sample is in no microbatch, or in two",
            expected=f"each of {count(len(lengths), 'sample')} once",
            observed=str(parts),
            where=one.place(),
            hint=(
                "A division is a permutation: what it loses or doubles trains on other samples'"
                " routes."
            ),
        )
        return
    for part in parts:
        tokens = sum(lengths[i] for i in part)
        if tokens > one.call.most:
            out.finding(
                "a microbatch has more tokens than allowed",
                expected=f"at most {one.call.most}",
                observed=f"{tokens} in samples {part}",
                where=one.place(),
                hint="The bound is what the rank's memory holds.",
            )
            return


@layout_check(
    "layout.restore",
    functions=("restore",),
    promise="Values of microbatches go back to the order of the samples.",
    exercised_by="rows compared",
)
def layout_restore(one: LayoutCall, out: Collector) -> None:
    compare_parts(
        one,
        out,
        "rows compared",
        [Source.whole(i, length) for i, length in enumerate(one.call.lengths)],
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
        "Splitting, balancing and filtering move a sample's tokens and routes together, and keep"
        " every sample that is to be kept."
    ),
    exercised_by="samples followed",
)
def layout_samples(one: LayoutCall, out: Collector) -> None:
    call, arrays = one.call, one.event.out[1:]
    tokens, payloads = call.tokens(), call.payloads()
    owners = []
    for number in range(len(arrays) // 2):
        ids, routes = arrays[2 * number], arrays[2 * number + 1]
        owner = next(
            (
                i
                for i, one_tokens in enumerate(tokens)
                if np.array_equal(one_tokens, ids.reshape(-1))
            ),
            None,
        )
        owners.append(owner)
        if owner is None:
            out.finding(
                "tokens of no sample",
                expected=f"the tokens of one of {count(len(tokens), 'sample')}",
                observed=f"{ids.reshape(-1)[:6].tolist()}",
                where=one.place(index=number),
                hint="Splits and filters move samples whole.",
            )
            return
        out.exercised("samples followed")
        if routes.shape != payloads[owner].shape or not np.array_equal(routes, payloads[owner]):
            other = next(
                (i for i, payload in enumerate(payloads) if np.array_equal(payload, routes)), None
            )
            out.finding(
                "a sample is given another's routes",
                expected=(
                    f"beside the tokens of sample {owner}, its own"
                    f" {count(len(payloads[owner]), 'row')}"
                ),
                observed=(
                    f"the routes of sample {other}"
                    if other is not None
                    else f"routes {routes.shape} of no sample"
                ),
                where=one.place(index=number),
                hint=(
                    "A permutation or a filter must reach every per-sample field (SkyRL#1908,"
                    " AReno#524)."
                ),
            )
            return
    _complete(one, out, owners)


def _uneven(one: LayoutCall) -> bool:
    """Whether samples are to be divided over ranks that they are no multiple of: a framework may
    want a multiple.
    """
    return one.event.function == "divide" and len(one.call.lengths) % one.call.parts != 0


def _complete(one: LayoutCall, out: Collector, owners: list[int | None]) -> None:
    """Every sample is there that should be, once; a filter also keeps the order that it is given.

    Where samples do not divide, ranks of equal size may repeat some, or drop fewer than one for
    each rank.
    """
    keeps = one.event.function == "keep"
    wanted = list(one.call.kept) if keeps else list(range(len(one.call.lengths)))
    got = owners if keeps else sorted(owner for owner in owners if owner is not None)
    if got == wanted:
        return
    sizes = set(one.event.out[0].reshape(-1).tolist())
    if _uneven(one) and len(sizes) == 1:
        size, parts = sizes.pop(), one.call.parts
        repeated = size == -(-len(wanted) // parts) and set(got) == set(wanted)
        dropped = size == len(wanted) // parts and len(set(got)) == len(got)
        if repeated or dropped:
            return
    out.finding(
        "samples are lost, doubled or in another order",
        expected=f"samples {wanted}",
        observed=f"samples {got}",
        where=one.place(),
        hint="A list beside the samples (advantages, uids) is matched by position.",
    )


@layout_check(
    "layout.expert-ids",
    functions=("compact",),
    promise="Ids come out of their compact type as they went in, for every number of experts.",
    exercised_by="ids compared",
)
def layout_expert_ids(one: LayoutCall, out: Collector) -> None:
    wanted = FUNCTIONS["compact"].arguments(one.call)["ids"].reshape(-1)
    stored = one.event.out[0]
    got = stored.reshape(-1).astype(np.int64)
    out.exercised("ids compared", len(wanted))
    if len(got) != len(wanted):
        out.finding(
            "other ids than were stored",
            expected=count(len(wanted), "id"),
            observed=f"an array of {stored.dtype} {stored.shape}",
            where=one.place(),
            hint="A view of bytes is undone by the type that was viewed.",
        )
        return
    wrong = np.flatnonzero(got != wanted)
    if len(wrong):
        first = int(wrong[0])
        out.finding(
            "expert ids wrap in their compact type",
            expected=f"id {wanted[first]} of {one.layout.num_experts} experts",
            observed=(
                f"{got[first]} in {stored.dtype}; so for {share(len(wrong), len(wanted), 'id')}"
            ),
            where=one.place(),
            hint=(
                "uint8 holds the ids of 256 experts and no more (verl#7407, prime-rl#3051): choose"
                " the type by the number of experts."
            ),
        )


@outcome_check(
    "layout.accepts",
    promise="Sound input is laid out, whatever its lengths and sizes.",
    exercised_by="sound calls",
)
def layout_accepts(one: LayoutCall, out: Collector) -> None:
    if one.call.defect or (_uneven(one) and one.event.refused is not None):
        return
    out.exercised("sound calls")
    if one.event.refused is not None:
        out.finding(
            "sound input was refused",
            expected=f"{one.event.function} of {one.call.case or 'sound input'}",
            observed=one.event.refused,
            where=one.place(),
            hint=(
                "One token, a sequence shorter than 2 * cp, an empty response, a stage without MoE"
                " layers are sound. What a framework does not support, its adapter says in"
                " `supports`, or by raising NotImplementedError in the call."
            ),
        )


@outcome_check(
    "layout.returns",
    promise="A function returns arrays of the declared kind and rank.",
    exercised_by="returned values",
)
def layout_returns(one: LayoutCall, out: Collector) -> None:
    if one.event.refused is not None:
        out.absent("every call raised (layout.accepts)")
        return
    out.exercised("returned values")
    if one.event.misfit is not None:
        out.finding(
            "a function returned something else",
            expected=(
                FUNCTIONS[one.event.function].does
                if one.event.function in FUNCTIONS
                else "a function that exists"
            ),
            observed=one.event.misfit,
            where=one.place(),
            hint="The adapter turns what the framework's function returns into these arrays.",
        )


@outcome_check(
    "layout.input",
    promise="A function leaves the arrays alone that it is handed.",
    exercised_by="calls watched",
)
def layout_input(one: LayoutCall, out: Collector) -> None:
    out.exercised("calls watched")
    if one.event.changed:
        out.finding(
            "a function changed its input",
            expected="the arguments as they were",
            observed=f"changed: {', '.join(one.event.changed)}",
            where=one.place(),
            hint=(
                "A payload is used again for other ranks, microbatches and passes: copy before"
                " writing."
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
def layout_refuses(one: LayoutCall, out: Collector) -> None:
    if not one.call.defect:
        out.inapplicable(
            "the subject has no function that malformed input is made for (complete, targets)"
        )
        return
    out.exercised("malformed calls")
    if one.event.refused is not None or one.event.misfit is not None:
        return
    if one.event.function == "targets":
        columns, wanted = one.call.coding.columns, one.layout.columns
        fault, expected = (
            f"targets for layers {one.event.out[0].tolist()} of {columns} columns",
            f"an error for {columns} columns of {wanted}",
        )
    else:
        fault, expected = (
            _accepted(one),
            (
                f"an error for {one.call.held[0]} rows and {one.call.lengths[0]} tokens, or a mask"
                " for the router"
            ),
        )
    if fault:
        out.finding(
            f"{one.call.defect}: accepted",
            expected=expected,
            observed=fault,
            where=one.place(),
            hint=(
                "What does not fit is another sample's or model's, or was lost on the way: refuse"
                " it where it can still be named."
            ),
        )


def _accepted(one: LayoutCall) -> str:
    """What became of rows that do not fit; ``""`` where it is harmless."""
    held, tokens = one.call.held[0], one.call.lengths[0]
    rows = one.event.out[0]
    if held > tokens:
        return (
            f"{held} rows were cut to {tokens}"
            if len(rows) == tokens
            else f"{len(rows)} rows for {tokens} tokens"
        )
    if len(rows) != tokens:
        return f"{len(rows)} rows for {tokens} tokens"
    mask = one.event.out[1] if len(one.event.out) > 1 else None
    if (mask is not None and len(mask) == tokens and not mask[held:].any()) or (
        rows[held:] == -1
    ).all():
        return ""
    return (
        f"positions {held} to {tokens - 1} were filled with {rows[held].reshape(-1)[:4].tolist()},"
        " and are replayed"
    )
