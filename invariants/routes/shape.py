"""Checks on the form of routes: presence, number of rows, layers and top-k, integer type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Filler
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.delivery import missing_reason
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.origin import RowOrigin, group_of
from rollproof.invariants.routes.route_phrases import amount, has_routes
from rollproof.invariants.routes.row_counts import expected_count, explain_count, uncut_rows
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "routes_dtype",
    "routes_presence",
    "routes_rows",
    "routes_shape",
]

_ABSENCE = {
    "dropped": (
        "the engine returned them, and the stack dropped them",
        (
            "Carry routed_experts through every copy of the sample. Same cause: verl #5368"
            " (ToolAgentLoop dropped the field)."
        ),
    ),
    "not requested": (
        "the caller requested them, and the call did not",
        (
            "Pass the flag on to the engine (return_routed_experts). Same cause: slime #1909,"
            " miles #407."
        ),
    ),
    "silent": (
        (
            "the call requested them, the engine returned none, and the sample was delivered"
            " nevertheless"
        ),
        (
            "Raise an error if a reply lacks requested routes: a trainer without routes"
            " silently uses its own router (slime #1145)."
        ),
    ),
    "unrecorded": (
        "the trace holds no engine call, so it does not show where they were lost",
        (
            "Deliver what the contract declares, or declare rows='none'; record the engine"
            " calls to learn where the routes went."
        ),
    ),
}
"""Why routes are absent: what was observed, what to do."""


def _routes_of(view: RequestView, out: Collector) -> comparison.RouteEvidence | None:
    """Return the evidence of a sample with routes, or report that there is none."""
    if view.rollout is None:
        out.absent(missing_reason(view))
        return None
    evidence = comparison.of(view)
    if evidence.routes is None:
        out.absent("no sample carried routes")
        return None
    return evidence


@request_check(
    "routes.presence",
    promise=(
        "A sample whose caller requested routes carries them, or ends with an explicit error."
    ),
    needs="a request with want_routes and a delivered sample with response tokens",
    exercised_by="samples with requested routes",
    applies=has_routes,
)
def routes_presence(view: RequestView, out: Collector) -> None:
    """Report samples without the requested routes."""
    rollout = view.rollout
    if rollout is None or not rollout.response_ids or not view.request.want_routes:
        out.absent("no delivered sample with response tokens requested routes")
        return
    evidence = comparison.of(view)
    returned = any(
        attempt.consumed is not None and attempt.consumed.output.routes is not None
        for attempt in view.attempts
    )
    calls_without = [attempt.number for attempt in view.attempts if not attempt.call.want_routes]
    aborted = rollout.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
    last = next(
        (
            attempt.consumed.output
            for attempt in reversed(view.segments)
            if attempt.consumed is not None and attempt.consumed.output.token_ids
        ),
        None,
    )
    if evidence.routes is None and aborted and (last is None or last.routes is None):
        # The routes of earlier turns alone would be too few and be taken for all.
        out.absent(
            "the engine returned no routes with the last tokens of a sample that was"
            " delivered as aborted"
        )
        return
    if (
        evidence.routes is None
        and last is None
        and any(attempt.cut is not None for attempt in view.attempts)
    ):
        out.absent("the stack cut all that the engine sampled at stop sequences of its own")
        return
    out.exercised("samples with requested routes")
    # An empty array is routes too: of too few rows, which routes.rows reports, or if nothing was
    # captured from its position on, such as the rows of a response of one token.
    if evidence.routes is not None and (
        evidence.rows
        or 0 not in evidence.row_counts
        or all(piece.end <= evidence.start for piece in evidence.pieces)
    ):
        return
    cause = (
        "dropped"
        if returned
        else "not requested"
        if calls_without
        else "silent"
        if view.attempts
        else "unrecorded"
    )
    observed, hint = _ABSENCE[cause]
    out.finding(
        "a sample lacks its routes",
        expected="routes, or an error",
        observed=f"routes: none; {observed}",
        where=view.place(
            **(
                {"call": view.attempts[calls_without[0]].call.call_id}
                if cause == "not requested"
                else {}
            )
        ),
        hint=hint,
    )


@request_check(
    "routes.rows",
    promise=(
        "A sample carries as many route rows as its contract says, whatever the schedule of aborts,"
        " resumes and cuts."
    ),
    needs="a delivered sample with routes",
    exercised_by=("samples from one call", "resumed samples", "cut samples"),
    applies=has_routes,
)
def routes_rows(view: RequestView, out: Collector) -> None:
    """Compare the number of rows with the contract."""
    evidence = _routes_of(view, out)
    if evidence is None or evidence.routes is None:
        return
    sampled = len(view.request.prompt_ids) + len(view.stitched.response_ids)
    if (
        not evidence.cut
        and evidence.total != sampled
        and evidence.rows == uncut_rows(view, evidence)
    ):
        out.absent(
            "the rows belong to the tokens that the engines sampled, and the sample has others (the"
            " family stitch says which)"
        )
        return
    out.exercised(
        "cut samples"
        if evidence.cut
        else "resumed samples"
        if view.resumed
        else "samples from one call"
    )
    if evidence.rows in evidence.row_counts:
        return
    rollout = view.rollout
    assert rollout is not None
    cause_of_count = explain_count(view, evidence)
    prompt, response = len(rollout.prompt_ids), len(rollout.response_ids)
    out.finding(
        f"{count(evidence.rows, 'route row')} for a sample of {count(evidence.total, 'token')}",
        kind=(
            "too many route rows"
            if evidence.rows > max(evidence.row_counts)
            else "too few route rows"
        ),
        expected=(
            f"{expected_count(evidence)} for {count(prompt, 'prompt token')} and"
            f" {count(response, 'response token')}: the contract declares"
            f" rows='{view.contract.rows}'"
        ),
        observed=cause_of_count.observed,
        where=view.place(**cause_of_count.where),
        hint=cause_of_count.hint,
    )


@request_check(
    "routes.shape",
    promise="Routes are (rows, layers, top_k) with the layers and top-k of the model config.",
    needs="a delivered sample with routes",
    exercised_by="samples with routes",
    applies=has_routes,
)
def routes_shape(view: RequestView, out: Collector) -> None:
    """Compare layers and top-k with the contract."""
    evidence = _routes_of(view, out)
    if evidence is None or evidence.routes is None:
        return
    if evidence.routes.shape == (0, 0, 0):  # made of an empty list, which has no layers and no type
        out.absent("the routes are an empty list")
        return
    out.exercised("samples with routes")
    if evidence.shape_fits:
        return
    contract = view.contract
    layers, top_k = evidence.routes.shape[1:]
    moe = len(contract.routed_layers)
    hint = "Read layers and top_k from the model config, never from the size of a buffer."
    # miles and AReaL infer k by reshape(rows, -1), which hides a buffer of the wrong size.
    if top_k != contract.top_k:
        hint += (
            " A buffer k times too long passes as top-k * k when k is inferred (miles, AReaL:"
            " reshape(rows, -1))."
        )
    elif layers in (moe, contract.num_layers):
        axis = "MoE layers only" if layers == moe else "all layers"
        hint = (
            f"The axis counts {axis}, and the contract declares"
            f" layer_axis='{contract.layer_axis}': a consumer that maps by position replays the"
            " MoE layers after a dense one from the wrong columns (verl #5037)."
        )
    out.finding(
        "the routes have another shape",
        expected=(
            f"(rows, {contract.route_layers}, {contract.top_k}):"
            f" layer_axis='{contract.layer_axis}', top_k={contract.top_k}"
        ),
        observed=f"({evidence.rows}, {layers}, {top_k})",
        where=view.place(),
        hint=hint,
    )


@request_check(
    "routes.dtype",
    promise=(
        "The integer type of routes is the declared one, holds every expert id, and no id was"
        " wrapped by a narrower type."
    ),
    needs="a delivered sample with routes",
    exercised_by="samples with routes",
    applies=has_routes,
)
def routes_dtype(view: RequestView, out: Collector) -> None:
    """Check the integer type of the routes."""
    evidence = _routes_of(view, out)
    if evidence is None or evidence.routes is None:
        return
    if evidence.routes.shape == (0, 0, 0):  # made of an empty list, which has no layers and no type
        out.absent("the routes are an empty list")
        return
    out.exercised("samples with routes")
    contract, dtype = view.contract, evidence.routes.dtype
    largest = contract.expert_count - 1
    limit = int(np.iinfo(dtype).max)
    wrapped = group_of(view, RowOrigin.WRAPPED)
    if limit < largest or wrapped is not None:
        name = dtype.name if wrapped is None or limit < largest else wrapped.clue.source
        out.finding(
            f"{name} does not hold every expert id",
            expected=f"a type that holds ids up to {largest} ({contract.num_experts} experts)",
            observed=f"{name} holds at most {np.iinfo(name).max}"
            + ("" if wrapped is None else f"; ids wrapped in {amount(view, wrapped)}"),
            where=view.place(
                **({} if wrapped is None else {"position": int(wrapped.positions[0])})
            ),
            hint=(
                "Choose the type from num_experts, not from the data. Same cause: verl #5240, #7407"
                " (uint8, then int16), prime-rl #3051."
            ),
        )
    # A decoder reads raw bytes by the declared type: another one of the same width is silent
    # nonsense.
    elif dtype.name not in contract.dtypes:
        out.finding(
            f"the routes are {dtype.name}",
            expected=f"{' or '.join(contract.dtypes)}, as the contract declares",
            observed=dtype.name,
            where=view.place(),
            hint=(
                "Declare the type that is delivered: a decoder that assumes another one"
                " misreads every id."
            ),
        )
    elif (
        # -1 in an unsigned type is the largest id, which may be a real expert.
        contract.filler is Filler.MINUS_ONE
        and dtype.kind == "u"
        and evidence.uncaptured
        and evidence.hindrance is None
    ):
        out.finding(
            f"filler -1 does not exist in {dtype.name}",
            expected="a signed type if rows are filled with -1",
            observed=f"{dtype.name}: -1 reads as {limit}",
            where=view.place(position=evidence.uncaptured[0][0]),
            hint="Use a signed type, or another declared filler.",
        )
