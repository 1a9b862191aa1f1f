"""Checks of the calls themselves: refusals, results of another kind, changed inputs."""

from __future__ import annotations

from rollproof.core.error_text import error_kind
from rollproof.invariants._shared.phrases import listing
from rollproof.invariants.correction.corrected_batch import CorrectedBatch, correction_check
from rollproof.judging.checks import Collector

__all__ = ["correction_accepts", "correction_input", "correction_returns"]


@correction_check(
    "correction.accepts",
    promise="Every batch that the contract allows is corrected: none is refused.",
    exercised_by="batches",
    settled=False,
)
def correction_accepts(batch: CorrectedBatch, out: Collector) -> None:
    """Look for refusals."""
    out.exercised("batches")
    event = batch.event
    if event.refused is not None:
        out.finding(
            "a sound batch is refused",
            expected=f"a correction of {event.purpose}, which the contract allows",
            observed=event.refused,
            where=batch.place(),
            hint=(
                "If the refusal is meant, the contract can say so: empty_rows, empty_batch,"
                " missing."
            ),
            kind=f"refused: {error_kind(event.refused)}",
        )


@correction_check(
    "correction.returns",
    promise="A correction returns what the contract promises, in the shape of its batch.",
    exercised_by="results",
    settled=False,
)
def correction_returns(batch: CorrectedBatch, out: Collector) -> None:
    """Look for results of another kind."""
    event = batch.event
    # correction.accepts reports it: one cause, one finding
    if event.refused is not None:
        return
    out.exercised("results")
    if event.misfit is not None:
        out.finding(
            "the result is of another kind",
            expected="a Correction: weights, mask, loss and metrics as the contract declares",
            observed=event.misfit,
            where=batch.place(),
            hint=(
                "Weights are (sequences, tokens), (sequences, 1) or (sequences,); a mask likewise;"
                " a loss and a metric are single numbers."
            ),
        )


@correction_check(
    "correction.input",
    promise="A correction leaves its inputs as they are.",
    exercised_by="batches",
    settled=False,
)
def correction_input(batch: CorrectedBatch, out: Collector) -> None:
    """Look for inputs that were changed in place."""
    out.exercised("batches")
    changed = batch.event.changed
    if changed:
        out.finding(
            "an input was changed in place",
            expected="the batch as it was",
            observed=f"{listing(changed)} changed",
            where=batch.place(),
            hint="Another consumer of the same tensors (a second epoch, a metric) sees the change.",
        )
