"""One request of a trace, assembled for a check to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rollproof.core.contract import Contract, Provenance
from rollproof.core.events.rollout import (
    Observation,
    Result,
    Submit,
)
from rollproof.core.oracle import Oracle
from rollproof.core.records import Request, Rollout, Scalar
from rollproof.core.trace import Header
from rollproof.judging.attempt import Attempt
from rollproof.judging.route_slices import RowPiece
from rollproof.judging.stitching import Stitched, stitch
from rollproof.judging.weight_history import WeightHistory

__all__ = ["UNATTRIBUTED_CALLS", "RequestView"]

UNATTRIBUTED_CALLS = (
    "These engine calls cannot be attributed to a request; begin their `request_id` with its id."
)


class RequestView:
    """One ended request: its options, its engine calls, their replies, and the delivered sample.

    Checks only read a view, except for ``memo``.

    submit: The request.
    contract: The contract of the subject.
    engine: The contract of the engines, if there is one.
    header: The header of the trace, ``None`` if a view was made by hand.
    history: The weight updates so far.
    oracle: What the policy must return, if the trace is coded.
    attempts: The engine calls in order.
    observations: The tokens of the environment.
    results: How the request ended.
    neighbours: A bounded number of other requests of the run, to find the owner of misplaced
        values.
    memo: Values that the checks of a family share, by their name; nothing in it refers to the view.
    unattributed_calls: Whether calls may belong to the request that the recorder could not
        attribute.
    unrecorded: Why events of the request are missing from the trace; ``""`` if none is known to be.
    set_aside: Calls of the request that its sample was not made of: they lost a race
        (``rollproof.judging.races``). No check takes them for segments.
    context_rows: Route rows that calls set aside captured, and that the sample may hold: of calls
        that only prefilled, also internal ones (``rollproof.judging.prefill_calls``), and of
        earlier turns.
    earlier_turns: How many response tokens of earlier turns are the prompt of the sample, because
        each turn is a sample of its own (``rollproof.judging.turn_samples``).
    undecided_race: Whether calls of one prompt overlapped, and neither a later call nor the sample
        shows which of the replies was used.
    internal_calls: Calls that the stack declared to belong to no request and that begin with the
        prompt of this one, if it has no call of its own.
    parts: The views of its samples, if it may deliver several (``rollproof.judging.sample_views``).
    """

    def __init__(
        self,
        submit: Submit,
        contract: Contract,
        history: WeightHistory,
        oracle: Oracle | None,
        engine: Contract | None = None,
        header: Header | None = None,
    ) -> None:
        self.submit = submit
        self.contract = contract
        self.engine = engine
        self.header = header
        self.history = history
        self.oracle = oracle
        self.attempts: list[Attempt] = []
        self.observations: list[Observation] = []
        self.results: list[Result] = []
        self.neighbours: Sequence[RequestView] = ()
        # View-level caches avoid repeated stitching: thirty checks read the same request.
        self.memo: dict[str, Any] = {}
        self.unattributed_calls: bool = False
        self.unrecorded: str = ""
        self.set_aside: list[Attempt] = []
        self.context_rows: list[RowPiece] = []
        self.earlier_turns: int = 0
        self.undecided_race: bool = False
        self.internal_calls: Sequence[Attempt] = ()
        self.parts: list[RequestView] | None = None

    @property
    def request(self) -> Request:
        """The request as the caller submitted it."""
        return self.submit.request

    @property
    def result(self) -> Result | None:
        """How the request first ended, or ``None`` if it never did."""
        return self.results[0] if self.results else None

    @property
    def rollout(self) -> Rollout | None:
        """The delivered sample, or ``None``."""
        return self.result.rollout if self.result else None

    def settle(self) -> None:
        """Forget what was computed before the request ended, while it was a neighbour of others."""
        for name in ("stitched", "segments", "total_ids", "turns"):
            self.__dict__.pop(name, None)
        self.memo.clear()

    @cached_property
    def stitched(self) -> Stitched:
        """The rollout that the delivered replies make, under the contract's provenance."""
        return self.stitched_as(self.contract.provenance or Provenance.AS_SAMPLED)

    def stitched_as(self, provenance: Provenance) -> Stitched:
        """Return ``stitched`` under another provenance, to tell which one a stack follows."""
        # A case lists its turns; in other traces only the calls show them.
        open_ended = self.header is None or self.header.case is None or bool(self.request.turns)
        return stitch(
            self.request.prompt_ids,
            self.attempts,
            self.observations,
            provenance,
            unrecorded_turns=open_ended,
            turns=self.turns,
        )

    @cached_property
    def turns(self) -> Sequence[tuple[int, ...]]:
        """The answers of the environment, cut to the limits of the stack."""
        limits = self.contract.limits
        turns = self.request.turns
        return turns if limits is None else [limits.cut_answer(words) for words in turns]

    @cached_property
    def segments(self) -> list[Attempt]:
        """The attempts with a received reply, in order of delivery."""
        received = [attempt for attempt in self.attempts if attempt.consumed is not None]
        return sorted(
            received, key=lambda attempt: attempt.consumed.index if attempt.consumed else 0
        )

    def is_answer(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether tokens begin an answer of the environment, or are the beginning of one."""
        return any(
            words[: len(token_ids)] == token_ids[: len(words)] for words in self.turns if words
        )

    @property
    def every_call(self) -> list[Attempt]:
        """The attempts and the calls that were set aside, in order."""
        return sorted([*self.attempts, *self.set_aside], key=_call_index)

    @property
    def undecided_calls(self) -> bool:
        """Whether it is not known which calls made the sample."""
        return self.unattributed_calls or self.undecided_race

    @property
    def uncalled(self) -> bool:
        """Whether no engine answered a call of the request, in a run whose calls are all known.

        Then no engine sampled its sample (``stitch.sampled-by-engine``).
        """
        driven = self.header is not None and self.header.case is not None
        return driven and not any(attempt.replies for attempt in self.attempts)

    @property
    def resumed(self) -> bool:
        """Whether more than one reply was received."""
        return len(self.segments) > 1

    @cached_property
    def total_ids(self) -> tuple[int, ...]:
        """The prompt and the response of the delivered sample."""
        rollout = self.rollout
        return self.request.prompt_ids + (rollout.response_ids if rollout else ())

    def place(self, **more: Scalar) -> Mapping[str, Scalar]:
        """Return the place of a finding: this request, and those of ``more`` that are not
        ``None``.
        """
        return {
            "request": self.request.request_id,
            **{name: value for name, value in more.items() if value is not None},
        }

    def segment_of(self, position: int) -> int | None:
        """Return which received segment sampled the token at ``position``, ``None`` for prompt
        tokens.
        """
        index = position - len(self.request.prompt_ids)
        tokens = self.stitched.tokens
        if not 0 <= index < len(tokens) or tokens[index].attempt < 0:
            return None
        # Segments count in order of delivery, as a user sees them, not in order of sending.
        order = [attempt.number for attempt in self.segments]
        return order.index(tokens[index].attempt)


def _call_index(attempt: Attempt) -> int:
    return attempt.call.index
