"""Batch: a conversion of finished samples into training rows carries every per-token field,
together and to its place.

What the routes became is in ``batch_routes``.
"""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.batch.batch_rows import Conversion, Placed, batch_check
from rollproof.judging.checks import Collector

__all__ = [
    "batch_accepts",
    "batch_complete",
    "batch_input",
    "batch_logprobs",
    "batch_loss_mask",
    "batch_padding",
    "batch_tokens",
]

_NEEDS = "Batch events (a BatchSubject, judged by rollproof.verification.batches)"


@batch_check(
    "batch.accepts",
    promise="Well-formed samples are converted, whatever their lengths.",
    needs=_NEEDS,
    exercised_by="well-formed batches",
)
def batch_accepts(batch: Conversion, out: Collector) -> None:
    event = batch.event
    if event.defect or batch.mixed:
        return
    out.exercised("well-formed batches")
    if event.refused is not None:
        lengths = ", ".join(f"{len(s.prompt_ids)}+{len(s.response_ids)}" for s in event.samples)
        out.finding(
            "a well-formed batch was refused",
            expected=f"rows for {count(len(event.samples), 'sample')} of {lengths} tokens",
            observed=event.refused,
            where=batch.place(),
            hint=(
                "A conversion must be total over what rollouts hand over: samples without response"
                " tokens (verl #6675), read-only arrays (verl #5519), one sample or many."
            ),
        )


@batch_check(
    "batch.complete",
    promise="Every sample with response tokens becomes exactly one row, under its own id.",
    needs=_NEEDS,
    exercised_by="samples converted",
)
def batch_complete(batch: Conversion, out: Collector) -> None:
    event = batch.event
    if event.refused is not None:
        out.absent("every batch was refused")
        return
    came = [row.request_id for row in event.rows]
    wanted = {sample.request_id for sample in event.samples}
    for sample in event.samples:
        if sample.request_id == event.defective:
            continue
        out.exercised("samples converted")
        times = came.count(sample.request_id)
        if times > 1 or (times == 0 and sample.response_ids):
            out.finding(
                "a sample was lost" if not times else "a sample became several rows",
                expected=f"one row for each of {count(len(wanted), 'sample')}",
                observed=(
                    f"{count(times, 'row')} for {sample.request_id}; the batch holds {came[:8]}"
                ),
                where=batch.place(sample),
                hint=(
                    "Filters and splits must drop or copy a sample whole, and say so: a lost one"
                    " shifts every list that is kept beside."
                ),
            )
    strays = [name for name in came if name not in wanted]
    if strays:
        out.finding(
            "rows of no sample",
            expected=f"rows of {sorted(wanted)[:8]}",
            observed=f"rows of {strays[:8]}",
            where=batch.place(),
            hint=(
                "Rows that fill a batch up must not pass for samples: leave them out of what is"
                " handed back, or mask them wholly."
            ),
        )


@batch_check(
    "batch.tokens",
    promise="The attended places of a row hold the sample's prompt and response, in order.",
    needs=_NEEDS,
    exercised_by="rows compared",
)
def batch_tokens(batch: Conversion, out: Collector) -> None:
    if not batch.placed:
        out.absent("no well-formed sample was converted")
    for one in batch.placed:
        out.exercised("rows compared")
        if one.sound:
            continue
        got = one.row.token_ids[one.places].tolist()
        whose = next(
            (
                other
                for other in batch.event.samples
                if list(other.prompt_ids + other.response_ids) == got
            ),
            None,
        )
        if whose is not None:
            observed = f"the tokens of {whose.request_id}"
        elif got == list(one.tokens[: len(got)]):
            observed = f"the first {len(got)} of {count(len(one.tokens), 'token')}"
        else:
            first = next(
                (i for i, (a, b) in enumerate(zip(got, one.tokens, strict=False)) if a != b),
                min(len(got), len(one.tokens)),
            )
            observed = (
                f"{count(len(got), 'token')}, other ones from number {first} on:"
                f" {got[first : first + 4]}"
            )
        out.finding(
            "a row holds other tokens than its sample",
            expected=(
                f"the {count(len(one.tokens), 'token')} of {one.sample.request_id} where attention"
                " is 1"
            ),
            observed=observed,
            where=batch.place(one.sample),
            hint=(
                "Padding side, attention mask and tokens must come from one place; rows must not be"
                " exchanged between samples."
            ),
        )


@batch_check(
    "batch.padding",
    promise="Padding is attended nowhere and counts in no loss.",
    needs=_NEEDS + "; rows with a loss mask",
    exercised_by=("padded places", "rows without padding"),
)
def batch_padding(batch: Conversion, out: Collector) -> None:
    for one in batch.placed:
        mask = one.row.loss_mask
        padded = np.flatnonzero(one.row.attention == 0)
        if mask is None or one.misfit("loss_mask") is not None:
            out.absent("no row has a loss mask of its length")
            continue
        if not len(padded):
            out.exercised("rows without padding")
            continue
        out.exercised("padded places", len(padded))
        bad = padded[mask[padded] != 0]
        if len(bad):
            out.finding(
                "padding counts in the loss",
                expected="loss mask 0 where attention is 0",
                observed=(
                    f"loss mask 1 at {count(len(bad), 'padded place')} ({ranges(bad.tolist())})"
                ),
                where=batch.place(one.sample, position=int(bad[0])),
                hint=(
                    "The loss mask must be padded with 0 on the side on which the tokens are"
                    " padded."
                ),
            )


@batch_check(
    "batch.loss-mask",
    promise="The loss counts at the sample's own trained tokens, and nowhere else.",
    needs=_NEEDS + "; rows with a loss mask",
    exercised_by="tokens compared",
)
def batch_loss_mask(batch: Conversion, out: Collector) -> None:
    for one in batch.sound:
        if one.row.loss_mask is None:
            out.absent("the batch carries no loss mask")
            continue
        out.exercised("tokens compared", len(one.places))
        if _misfit(batch, out, one, "loss_mask"):
            continue
        mask = one.row.loss_mask != 0
        wanted = np.zeros(len(one.tokens), dtype=bool)
        wanted[len(one.sample.prompt_ids) :] = one.trained
        got = mask[one.places]
        surplus = np.flatnonzero(got & ~wanted)
        lost = np.flatnonzero(wanted & ~got & ~_excusable(one))
        if one.sample.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            lost = lost[:0]
        if len(surplus) or len(lost):
            bad, what = (surplus, "counts at") if len(surplus) else (lost, "leaves out")
            kind = "prompt or environment tokens" if len(surplus) else "trained tokens"
            out.finding(
                f"the loss {what} {kind}",
                expected=(
                    f"loss mask 1 at the {count(int(wanted.sum()), 'trained token')} of"
                    f" {one.sample.request_id}, 0 elsewhere"
                ),
                observed=f"it {what} {count(len(bad), 'token')} (position {ranges(bad.tolist())})",
                where=batch.place(one.sample, position=int(bad[0])),
                hint=(
                    "The response mask is not the attention mask: tool and user tokens are attended"
                    " and not trained (verl #2543). Both must be shifted and padded alike."
                ),
            )


def _misfit(batch: Conversion, out: Collector, one: Placed, field: str) -> bool:
    """Report a per-place field of another length than the row."""
    length = one.misfit(field)
    if length is not None:
        out.finding(
            f"a {field} of another length than its row",
            expected=f"{count(len(one.row.token_ids), 'place')}",
            observed=f"{length}",
            where=batch.place(one.sample),
            hint="Per-token fields are padded, cut and stacked together or not at all.",
        )
    return length is not None


def _excusable(one: Placed) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tokens ``(tokens,)`` that may be masked although the sample trains them: those without a
    logprob.
    """
    excused = np.zeros(len(one.tokens), dtype=bool)
    logprobs = one.sample.logprobs
    excused[len(one.sample.prompt_ids) :] = True if logprobs is None else np.isnan(logprobs)
    return excused


def _has_logprobs(contract: Contract) -> str | None:
    return "the contract declares no logprobs" if contract.logprobs is Logprobs.NONE else None


@batch_check(
    "batch.logprobs",
    promise=(
        "Every trained token keeps its own logprob, unrounded; a missing one is masked or NaN,"
        " never a number."
    ),
    needs=_NEEDS + "; samples with logprobs",
    exercised_by="logprobs compared",
    applies=_has_logprobs,
)
def batch_logprobs(batch: Conversion, out: Collector) -> None:
    for one in batch.sound:
        given = one.sample.logprobs
        if given is None or not len(given):
            continue
        if one.row.logprobs is None:
            out.finding(
                "the logprobs of a sample are gone",
                expected=f"{count(len(given), 'logprob')}",
                observed="none",
                where=batch.place(one.sample),
                hint=(
                    "A field that one sample lacks must not be dropped for all: pad it and mask it."
                ),
            )
            continue
        if _misfit(batch, out, one, "logprobs"):
            continue
        got = one.row.logprobs[one.response_places]
        masked = one.row.loss_mask is not None and one.misfit("loss_mask") is None
        counts = (
            one.row.loss_mask[one.response_places] != 0
            if masked and one.row.loss_mask is not None
            else one.trained
        )
        out.exercised("logprobs compared", int(counts.sum()))
        missing = np.isnan(given)
        invented = np.flatnonzero(missing & counts & ~np.isnan(got))
        wrong = np.flatnonzero(~missing & counts & ~np.isclose(got, given, rtol=2e-6, atol=1e-6))
        if len(invented):
            _report_logprob(
                batch,
                out,
                one,
                invented,
                "a missing logprob became a number",
                "NaN, or loss mask 0",
                float(got[invented[0]]),
            )
        elif len(wrong):
            wanted = f"{given[wrong[0]]:.6f}"
            _report_logprob(
                batch,
                out,
                one,
                wrong,
                "logprobs do not stand at their tokens",
                wanted,
                float(got[wrong[0]]),
            )


def _report_logprob(
    batch: Conversion,
    out: Collector,
    one: Placed,
    bad: np.ndarray[tuple[int], np.dtype[np.intp]],
    title: str,
    expected: str,
    got: float,
) -> None:
    given = one.sample.logprobs
    assert given is not None
    position = len(one.sample.prompt_ids) + int(bad[0])
    near = np.flatnonzero(np.isclose(given, got, rtol=2e-6, atol=1e-6))
    if len(near):
        cause = f", which is that of token {len(one.sample.prompt_ids) + int(near[0])}"
    else:
        cause = ", rounded" if np.isclose(given[bad[0]], got, rtol=1e-2) else ""
    out.finding(
        title,
        expected=f"{expected} at position {position}",
        observed=f"{got:.6f}{cause}; so at {count(len(bad), 'token')} of {len(given)}",
        where=batch.place(one.sample, position=position),
        hint=(
            "0.0 is the logprob of certainty, not of absence. Cast to float32, not to bfloat16"
            " (slime #245), and pad logprobs where the response is padded."
        ),
    )


@batch_check(
    "batch.input",
    promise="The samples that were handed in are left as they were.",
    needs=_NEEDS,
    exercised_by="batches",
)
def batch_input(batch: Conversion, out: Collector) -> None:
    out.exercised("batches")
    if batch.event.changed:
        out.finding(
            "the conversion wrote into the samples",
            expected="arrays as they were handed in",
            observed=f"changed: {', '.join(batch.event.changed[:6])}",
            where=batch.place(),
            hint=(
                "A sample is used again: in a replay buffer, in a second epoch, by a logger. Copy"
                " before padding in place."
            ),
        )
