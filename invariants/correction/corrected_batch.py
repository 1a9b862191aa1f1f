"""A batch that a subject corrected, with its exact result; and the decorator for checks of
corrections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any, ClassVar

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.correction_terms import (
    CorrectionTerms,
    Gradient,
    LossKind,
    Normalise,
    Pair,
)
from rollproof.core.events.corrections import Corrected, Purpose
from rollproof.core.records import FloatArray, Scalar
from rollproof.corrections.expected_correction import BoolArray, ExpectedCorrection, Inputs
from rollproof.corrections.rounding import ROUGH
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import share
from rollproof.judging.checks import Check, Collector, trace_check

__all__ = [
    "POLICIES",
    "CorrectedBatch",
    "compare_weights",
    "correction_check",
    "first_place",
    "follows_from_pair",
    "has_weights",
    "pair_names",
]

POLICIES = ("rollout", "old", "current")
"""The names of the logprobs of a batch."""

_MOST_SHARED = 8
"""Results that the checks of a trace share: each reads an event before the next event comes."""
_Judge = Callable[["CorrectedBatch", Collector], None]


@dataclass(frozen=True, eq=False)
class CorrectedBatch:
    """One event of a trace, with its exact result."""

    event: Corrected
    terms: CorrectionTerms

    @cached_property
    def expected(self) -> ExpectedCorrection:
        """The exact result."""
        return ExpectedCorrection(self.terms, Inputs.of(self.event))

    @property
    def settled(self) -> bool:
        """Whether the subject returned something of the right kind."""
        return self.event.refused is None and self.event.misfit is None

    @property
    def weights(self) -> FloatArray:
        """The weights that were returned; checks without weights are not applicable."""
        if self.event.weights is None:
            return np.full(self.event.mask.shape, np.nan)
        return self.event.weights

    @cached_property
    def unscaled(self) -> FloatArray:
        """The returned weights, of normalised ones without the common factor of each scope.

        A wrong factor is found by ``correction.normalisation`` and ``correction.groups``.
        """
        if self.terms.normalise is Normalise.NONE:
            return self.weights
        expected = self.expected
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            factor = expected.scope_means(expected.weights.value) / expected.scope_means(
                self.weights
            )
        # nothing can be said of weights without a mean
        factor = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0)
        return self.weights * factor[expected.scopes][:, None]

    @cached_property
    def decided(self) -> BoolArray:
        """Trained tokens whose weight is certain and finite in the type of the subject."""
        return self.expected.trained & ~self.expected.undecided & self.fits

    @cached_property
    def fits(self) -> BoolArray:
        """Tokens whose weight is finite in the type of the subject."""
        applied = self.expected.applied
        with np.errstate(invalid="ignore"):
            found: BoolArray = applied.value + applied.error < self.expected.limits.largest
        # an infinite weight makes the mean of all infinite
        if self.terms.normalise is not Normalise.NONE and not found.all():
            return np.zeros_like(found)
        return found

    @cached_property
    def other_pair(self) -> tuple[str, CorrectedBatch] | None:
        """The pair of logprobs, other than the declared one, of which these are the weights; and
        the batch as if that pair were declared.

        ``correction.direction`` reports it. What else it breaks is no fault of its own.
        """
        if self.event.weights is None or not self.settled:
            return None
        logs = {name: getattr(self.event, name) for name in POLICIES}
        # neither gradients nor a loss are compared, and some fit no pair without current logprobs
        terms = replace(
            self.terms, pair=Pair.OLD_ROLLOUT, gradient=Gradient.NONE, loss=LossKind.NONE
        )
        for first, second in permutations(POLICIES, 2):
            if (first, second) == pair_names(self.terms.pair):
                continue
            event = replace(self.event, old=logs[first], rollout=logs[second])
            other = CorrectedBatch(event, terms)
            if other.explains_weights():
                return f"{first} over {second}", other
        return None

    def explains_weights(self) -> bool:
        """Return whether the weights are exactly these, and not by bounds and rejection alone."""
        expected = self.expected
        bounded = expected.outside[0] | expected.outside[1] | expected.beyond_log_bound
        free = self.decided & ~bounded & ~expected.rejected & ~expected.at_bound
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(self.unscaled - expected.weights.value)
            # not within ROUGH, as elsewhere: a near pair would agree by chance
            return bool(free.any() and (off <= expected.weights.error)[self.decided].all())

    def place(self, at: tuple[int, int] | None = None, **more: Scalar) -> dict[str, Scalar]:
        """Return the place of a finding: the case, the sequence and the token."""
        found: dict[str, Scalar] = {"case": self.event.name}
        if at is not None:
            found["sequence"], found["token"] = at
        return {**found, **more}

    def inputs_at(self, at: tuple[int, int]) -> str:
        """Describe the logprobs of a token."""
        event = self.event
        return (
            f"rollout {event.rollout[at]:.6g}, old {event.old[at]:.6g}, current"
            f" {event.current[at]:.6g}"
        )


def first_place(chosen: BoolArray) -> tuple[int, int]:
    """Return the sequence and the token of the first of some places."""
    sequence, token = np.argwhere(chosen)[0]
    return int(sequence), int(token)


def compare_weights(
    batch: CorrectedBatch,
    out: Collector,
    counter: str,
    chosen: BoolArray,
    *,
    title: str,
    hint: str,
    explain: Callable[[tuple[int, int]], str] | None = None,
) -> None:
    """Compare the weights of chosen tokens with the exact ones, as ``correction.weights`` does.

    Differences below ``ROUGH`` are left to ``correction.precision``.

    Args:
        batch: The batch.
        out: Takes the finding.
        counter: Counts the compared weights.
        chosen: The tokens.
        title: The title of the finding.
        hint: The hint of the finding.
        explain: Says what the weight at a place is instead, if it knows.
    """
    expected = batch.expected.weights
    # what is not finite is reported by correction.finite
    chosen = chosen & batch.decided & np.isfinite(batch.unscaled)
    out.exercised(counter, int(chosen.sum()))
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(batch.unscaled - expected.value)
        wrong = chosen & (off > np.maximum(expected.error, ROUGH * expected.value))
    if not wrong.any():
        return
    at = first_place(wrong)
    more = "" if explain is None else explain(at)
    if batch.other_pair is not None:
        name = batch.other_pair[0]
        title, more = "the weights are of another pair of logprobs", f"; this is {name}"
        hint = follows_from_pair(name)
    slack = max(expected.error[at], ROUGH * expected.value[at])
    out.finding(
        title,
        expected=f"{expected.value[at]:.6g}, within {slack:.2g} ({batch.inputs_at(at)})",
        observed=(
            f"{batch.unscaled[at]:.6g}; wrong for"
            f" {share(int(wrong.sum()), int(chosen.sum()), 'trained token')}{more}"
        ),
        where=batch.place(at),
        hint=hint,
    )


def pair_names(pair: Pair) -> tuple[str, str]:
    """Return the names of the two policies of a pair."""
    # an interpolated policy has no logprobs of its own
    first, second = str(pair).split("/")
    return first, second


def follows_from_pair(name: str) -> str:
    """Return the hint of a finding that follows from weights of the pair ``name``."""
    return f"All weights of this batch are of {name}: see correction.direction, and repair that."


def has_weights(contract: Contract) -> str | None:
    """Return why a contract without weights rules a check out."""
    terms = contract.correction
    if terms is not None and not terms.weights:
        return "the contract declares weights=False"
    return None


class _PerBatch(EventCheck):
    """Calls ``judge`` with the batches of the situations that it names."""

    judge: ClassVar[_Judge]
    purposes: ClassVar[frozenset[Purpose]]
    settled: ClassVar[bool]

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._terms: CorrectionTerms | None = context.contract.correction
        self._shared: dict[int, CorrectedBatch] = context.shared.setdefault(CorrectedBatch, {})
        self._called = False

    def on_corrected(self, event: Corrected, out: Collector) -> None:
        """Judge one batch."""
        if self.purposes and event.purpose not in self.purposes:
            return
        self._called = True
        if self._terms is None:
            out.absent("the contract of the trace declares no correction terms")
            return
        batch = self._shared.get(event.index)
        if batch is None:
            batch = self._shared[event.index] = CorrectedBatch(event, self._terms)
            if len(self._shared) > _MOST_SHARED:
                del self._shared[next(iter(self._shared))]
        # correction.accepts and correction.returns report such batches
        if self.settled and not batch.settled:
            out.absent(
                "the subject raised, or returned something else (correction.accepts,"
                " correction.returns)"
            )
            return
        type(self).judge(batch, out)

    def finish(self, out: Collector) -> None:
        """Report that the contract has no such situation."""
        if not self._called:
            out.inapplicable("by the contract, no batch can show it")


def correction_check(
    id: str,
    *purposes: Purpose,
    promise: str,
    exercised_by: str | tuple[str, ...],
    applies: Callable[[Contract], str | None] | None = None,
    settled: bool = True,
) -> Callable[[_Judge], Check]:
    """Make a ``Check`` of a function ``(batch, out)`` that gets the batches of the named situations
    (none: of all).

    ``settled``: only those of which the subject returned something of the right kind.
    """

    def make(judge: _Judge) -> Check:
        fold = type(
            judge.__name__,
            (_PerBatch,),
            {
                "judge": staticmethod(judge),
                "purposes": frozenset(purposes),
                "settled": settled,
            },
        )
        make_trace_check = trace_check(
            id,
            promise=promise,
            needs="batches that a correction was given (rollproof.corrections)",
            exercised_by=exercised_by,
            applies=applies,
            about="corrections",
        )
        return make_trace_check(fold)

    return make
