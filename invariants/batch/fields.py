"""Checks on the fields of a batch: the conversion carries every per-token field, together and to
its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Logprobs
from rollproof.core.events.training import Batch
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import count, ranges, share
from rollproof.invariants.batch.batch_rows import Conversion, Placed, Places, batch_check
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "batch_accepts",
    "batch_complete",
    "batch_input",
    "batch_logprobs",
    "batch_loss_mask",
    "batch_padding",
    "batch_tokens",
]

_SHORT = 16
"""Tokens of prompt and response for which every conversion has room."""
_ROUNDED = 1e-2
"""Relative error of a logprob in bfloat16, which keeps two to three digits."""
_NEEDS = "Batch events (a BatchSubject, judged by rollproof.verification.batches)"


class BatchAccepts(EventCheck):
    """Reports well-formed batches that were refused."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._mixed_refused = False
        self._mixed_taken = False
        self._partly_routed: list[Batch] = []

    def on_batch(self, event: Batch, out: Collector) -> None:
        """Judge one batch, or learn from it what becomes of mixed ones."""
        batch = Conversion(event, self.context.contract)
        # Malformed and mixed batches may be refused: batch.refuses and batch.mixed judge them.
        if event.defect:
            return
        if batch.mixed:
            self._mixed_refused = self._mixed_refused or event.refused is not None
            self._mixed_taken = self._mixed_taken or event.refused is None
            return
        if event.refused is None:
            out.exercised("well-formed batches")
        elif any(sample.total > _SHORT for sample in event.samples):
            return
        elif len({sample.routes is None for sample in event.samples}) == 2:
            self._partly_routed.append(event)
        else:
            self._report(event, out)

    def finish(self, out: Collector) -> None:
        """Judge the batches in which only a sample without response tokens has no routes. A
        conversion that refuses every mixed batch, as it may, refuses them for the same reason.
        """
        if self._mixed_refused and not self._mixed_taken:
            return
        for event in self._partly_routed:
            self._report(event, out)

    def _report(self, event: Batch, out: Collector) -> None:
        assert event.refused is not None
        out.exercised("well-formed batches")
        lengths = ", ".join(
            f"{len(sample.prompt_ids)}+{len(sample.response_ids)}" for sample in event.samples
        )
        out.finding(
            "a well-formed batch was refused",
            # The type of the error tells one fault from another.
            kind=f"a well-formed batch was refused: {event.refused.partition(':')[0]}",
            expected=f"rows for {count(len(event.samples), 'sample')} of {lengths} tokens",
            observed=event.refused,
            where=Conversion(event, self.context.contract).place(),
            hint=(
                "A conversion must accept everything that rollouts deliver: samples without"
                " response tokens (verl #6675), read-only arrays (verl #5519), one sample or"
                " many."
            ),
        )


batch_accepts: Check = trace_check(
    "batch.accepts",
    promise=(
        "Well-formed samples are converted, whatever their lengths. One of more than 16 tokens may"
        " be refused, but not cut: a stack may have a width of its own."
    ),
    needs=_NEEDS,
    exercised_by="well-formed batches",
    about="batches",
)(BatchAccepts)


@batch_check(
    "batch.complete",
    promise="Every sample with response tokens becomes exactly one row, under its own id.",
    needs=_NEEDS,
    exercised_by="samples converted",
)
def batch_complete(batch: Conversion, out: Collector) -> None:
    """Count the rows of each sample."""
    event = batch.event
    if event.refused is not None:
        out.absent("every batch was refused")
        return
    row_ids = [row.request_id for row in event.rows]
    sample_ids = {sample.request_id for sample in event.samples}
    for sample in event.samples:
        if sample.request_id == event.defective:
            continue
        out.exercised("samples converted")
        times = row_ids.count(sample.request_id)
        # A sample without response tokens may be dropped: it trains nothing (verl #6675).
        if times > 1 or (times == 0 and sample.response_ids):
            out.finding(
                "a sample was lost" if not times else "a sample became several rows",
                expected=f"one row for each of {count(len(sample_ids), 'sample')}",
                observed=(
                    f"{count(times, 'row')} for {sample.request_id}; the batch holds {row_ids[:8]}"
                ),
                where=batch.place(sample),
                hint=(
                    "Filters and splits must drop or copy complete samples and report it: a"
                    " lost one shifts every parallel list."
                ),
            )
    unknown_ids = [name for name in row_ids if name not in sample_ids]
    if unknown_ids:
        out.finding(
            "rows of no sample",
            expected=f"rows of {sorted(sample_ids)[:8]}",
            observed=f"rows of {unknown_ids[:8]}",
            where=batch.place(),
            hint=(
                "Rows that pad a batch must not look like samples: leave them out of the"
                " result, or mask them completely."
            ),
        )


@batch_check(
    "batch.tokens",
    promise="The attended places of a row hold the sample's prompt and response, in order.",
    needs=_NEEDS,
    exercised_by="rows compared",
)
def batch_tokens(batch: Conversion, out: Collector) -> None:
    """Compare the attended tokens of each row with the sample's."""
    if not batch.placed:
        out.absent("no well-formed sample was converted")
    for placed in batch.placed:
        out.exercised("rows compared")
        if placed.sound:
            continue
        if len(placed.unattended):
            _report_unattended(batch, out, placed)
            continue
        row_tokens = placed.row.token_ids[placed.places].tolist()
        owner = next(
            (
                other
                for other in batch.event.samples
                if list(other.prompt_ids + other.response_ids) == row_tokens
            ),
            None,
        )
        # Rows exchanged between samples are named, since both samples are then wrong.
        if owner is not None:
            observed = f"the tokens of {owner.request_id}"
        elif row_tokens == list(placed.tokens[: len(row_tokens)]):
            observed = f"the first {len(row_tokens)} of {count(len(placed.tokens), 'token')}"
        else:
            first = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(row_tokens, placed.tokens, strict=False))
                    if a != b
                ),
                min(len(row_tokens), len(placed.tokens)),
            )
            observed = (
                f"{count(len(row_tokens), 'token')}, other ones from number {first} on:"
                f" {row_tokens[first : first + 4]}"
            )
        out.finding(
            "a row holds other tokens than its sample",
            expected=(
                f"the {count(len(placed.tokens), 'token')} of {placed.sample.request_id} where"
                " attention is 1"
            ),
            observed=observed,
            where=batch.place(placed.sample),
            hint=(
                "The sample was cut to a width without a word: refuse it, or count it where it can"
                " be seen."
                if row_tokens and row_tokens == list(placed.tokens[: len(row_tokens)])
                else "Padding side, attention mask and tokens must agree; rows must not be"
                " exchanged between samples."
            ),
        )


def _report_unattended(batch: Conversion, out: Collector, placed: Placed) -> None:
    """Report tokens of a sample that its row holds, and attention leaves out."""
    ids = placed.row.token_ids[placed.unattended]
    pad = batch.contract.pad_id or 0
    by_value = bool((ids == pad).all())
    out.finding(
        "attention leaves out tokens of the sample",
        expected=(
            f"attention 1 at the {count(len(placed.tokens), 'token')} of {placed.sample.request_id}"
        ),
        observed=(
            f"attention 0 at {share(len(ids), len(placed.tokens), 'token')}:"
            f" {f'the padding token {pad}' if by_value else ids[:6].tolist()}"
        ),
        where=batch.place(placed.sample, position=int(placed.unattended[0])),
        hint=(
            "Make the attention mask from lengths, not from a comparison with the padding token:"
            " models without one of their own pad with the end of sequence."
            if by_value
            else "Padding side and lengths must be the same for tokens and attention mask."
        ),
    )


@batch_check(
    "batch.padding",
    promise="Padding is not attended and does not count in the loss.",
    needs=_NEEDS + "; rows with a loss mask",
    exercised_by=("padded places", "rows without padding"),
)
def batch_padding(batch: Conversion, out: Collector) -> None:
    """Check the loss mask at padded places."""
    for placed in batch.placed:
        mask = placed.row.loss_mask
        padded = np.flatnonzero(placed.row.attention == 0)
        if mask is None or placed.misfit("loss_mask") is not None:
            out.absent("no row has a loss mask of its length")
            continue
        if not len(padded):
            out.exercised("rows without padding")
            continue
        out.exercised("padded places", len(padded))
        # tokens of the sample that attention leaves out are no padding: batch.tokens
        padded = np.setdiff1d(padded, placed.unattended)
        wrong = padded[mask[padded] != 0]
        if len(wrong):
            out.finding(
                "padding counts in the loss",
                expected="loss mask 0 where attention is 0",
                observed=(
                    f"loss mask 1 at {count(len(wrong), 'padded place')} ({ranges(wrong.tolist())})"
                ),
                where=batch.place(placed.sample, position=int(wrong[0])),
                hint=(
                    "The loss mask must be padded with 0 on the side on which the tokens are"
                    " padded."
                ),
            )


@batch_check(
    "batch.loss-mask",
    promise="The loss counts the sample's trained tokens and no others.",
    needs=_NEEDS + "; rows with a loss mask",
    exercised_by="tokens compared",
)
def batch_loss_mask(batch: Conversion, out: Collector) -> None:
    """Compare the loss mask with the tokens that the sample trains."""
    for placed in batch.sound:
        if placed.row.loss_mask is None:
            out.absent("the batch carries no loss mask")
            continue
        out.exercised("tokens compared", len(placed.places))
        if _misfit(batch, out, placed, "loss_mask"):
            continue
        mask = placed.row.loss_mask != 0
        expected = np.zeros(len(placed.tokens), dtype=bool)
        expected[len(placed.sample.prompt_ids) :] = placed.trained
        actual = mask[placed.places]
        # Surplus trains on tokens that the policy did not sample, which is worse than a lost token.
        surplus = np.flatnonzero(actual & ~expected)
        left_out = np.flatnonzero(expected & ~actual & ~_may_be_masked(placed))
        if placed.sample.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            # Aborted samples may be masked out entirely.
            left_out = left_out[:0]
        if len(surplus) or len(left_out):
            tokens, action = (surplus, "counts at") if len(surplus) else (left_out, "leaves out")
            kind = "prompt or environment tokens" if len(surplus) else "trained tokens"
            out.finding(
                f"the loss {action} {kind}",
                expected=(
                    f"loss mask 1 at the {count(int(expected.sum()), 'trained token')} of"
                    f" {placed.sample.request_id}, 0 elsewhere"
                ),
                observed=(
                    f"it {action} {count(len(tokens), 'token')} (position"
                    f" {ranges(tokens.tolist())})"
                ),
                where=batch.place(placed.sample, position=int(tokens[0])),
                hint=(
                    f"Each of them is the padding token {batch.contract.pad_id or 0}: make the loss"
                    " mask from lengths, not from a comparison with it, or a model whose padding"
                    " token is its end of sequence is never trained to stop."
                    if _is_padding_token(batch, placed, tokens) and not len(surplus)
                    else "The response mask is not the attention mask: tool and user tokens are"
                    " attended and not trained (verl #2543). Shift and pad both in the same"
                    " way."
                ),
            )


def _is_padding_token(batch: Conversion, placed: Placed, positions: Places) -> bool:
    """Whether the sample's tokens at ``positions`` are the padding token, and no others are."""
    pad = batch.contract.pad_id or 0
    response = placed.tokens[len(placed.sample.prompt_ids) :]
    return response.count(pad) == len(positions) and all(
        placed.tokens[position] == pad for position in positions
    )


def _misfit(batch: Conversion, out: Collector, placed: Placed, field: str) -> bool:
    """Report a per-place field with another length than the row."""
    length = placed.misfit(field)
    if length is not None:
        out.finding(
            f"a {field} of another length than its row",
            expected=f"{count(len(placed.row.token_ids), 'place')}",
            observed=f"{length}",
            where=batch.place(placed.sample),
            hint="Pad, cut and stack all per-token fields together.",
        )
    return length is not None


def _may_be_masked(placed: Placed) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return the tokens ``(tokens,)`` that may be masked although the sample trains them: those
    without a logprob.
    """
    excused = np.zeros(len(placed.tokens), dtype=bool)
    logprobs = placed.sample.logprobs
    excused[len(placed.sample.prompt_ids) :] = True if logprobs is None else np.isnan(logprobs)
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
    """Compare the logprobs of trained tokens with the sample's."""
    for placed in batch.sound:
        sample_values = placed.sample.logprobs
        if sample_values is None or not len(sample_values):
            continue
        if placed.row.logprobs is None:
            out.finding(
                "the logprobs of a sample are gone",
                expected=f"{count(len(sample_values), 'logprob')}",
                observed="none",
                where=batch.place(placed.sample),
                hint=(
                    "A field that one sample lacks must not be dropped for all of them: pad"
                    " it and mask it."
                ),
            )
            continue
        if _misfit(batch, out, placed, "logprobs"):
            continue
        actual = placed.row.logprobs[placed.response_places]
        counted = placed.counted
        out.exercised("logprobs compared", int(counted.sum()))
        # NaN marks a token whose logprob the engine did not return.
        missing = np.isnan(sample_values)
        invented = np.flatnonzero(missing & counted & ~np.isnan(actual))
        wrong = np.flatnonzero(
            ~missing & counted & ~np.isclose(actual, sample_values, rtol=2e-6, atol=1e-6)
        )
        if len(invented):
            _report_logprob(
                batch,
                out,
                placed,
                invented,
                "a missing logprob became a number",
                "NaN, or loss mask 0",
                float(actual[invented[0]]),
            )
        elif len(wrong):
            value = f"{sample_values[wrong[0]]:.6f}"
            rounded = np.isclose(actual, sample_values, rtol=_ROUNDED)[wrong].all()
            _report_logprob(
                batch,
                out,
                placed,
                wrong,
                "logprobs are rounded" if rounded else "logprobs are not at their tokens",
                value,
                float(actual[wrong[0]]),
            )


def _report_logprob(
    batch: Conversion,
    out: Collector,
    placed: Placed,
    wrong: np.ndarray[tuple[int], np.dtype[np.intp]],
    title: str,
    expected: str,
    actual: float,
) -> None:
    sample_values = placed.sample.logprobs
    assert sample_values is not None
    position = len(placed.sample.prompt_ids) + int(wrong[0])
    matching = np.flatnonzero(np.isclose(sample_values, actual, rtol=2e-6, atol=1e-6))
    cause = ""
    if np.isnan(sample_values[wrong[0]]):
        hint = (
            "0.0 is the logprob of a certain token, not of a missing value: keep NaN, or set the"
            " loss mask of the token to 0."
        )
    elif len(matching):
        cause = f", which is that of token {len(placed.sample.prompt_ids) + int(matching[0])}"
        hint = (
            "Pad logprobs on the side on which the response is padded; where a line holds labels,"
            " shift all fields or none."
        )
    elif np.isclose(sample_values[wrong[0]], actual, rtol=_ROUNDED):
        cause = ", rounded"
        hint = "Keep float32: bfloat16 and float16 round logprobs (slime #245)."
    else:
        hint = (
            "Carry the values as they are: clipping and defaults belong to the loss, if anywhere."
        )
    out.finding(
        title,
        expected=f"{expected} at position {position}",
        observed=f"{actual:.6f}{cause}; so at {count(len(wrong), 'token')} of {len(sample_values)}",
        where=batch.place(placed.sample, position=position),
        hint=hint,
    )


@batch_check(
    "batch.input",
    promise="The conversion does not change its samples.",
    needs=_NEEDS,
    exercised_by="batches",
)
def batch_input(batch: Conversion, out: Collector) -> None:
    """Report samples that the conversion changed."""
    out.exercised("batches")
    if batch.event.changed:
        out.finding(
            "the conversion wrote into the samples",
            expected="arrays as they were passed in",
            observed=f"changed: {', '.join(batch.event.changed[:6])}",
            where=batch.place(),
            hint=(
                "Samples are used again: in a replay buffer, in a second epoch, by a logger."
                " Copy them before you pad in place."
            ),
        )
