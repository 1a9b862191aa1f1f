"""Views: one request of a trace, put together for a check to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from rollproof.core.contract import Contract, Provenance
from rollproof.core.events.rollout import (
    Admit,
    Call,
    Fault,
    Observation,
    Reply,
    Result,
    Submit,
    Weights,
)
from rollproof.core.oracle import Oracle
from rollproof.core.records import Request, Rollout, Scalar, Version
from rollproof.core.trace import Header
from rollproof.judging.stitching import Stitched, stitch

__all__ = ["Attempt", "History", "RequestView"]


@dataclass(slots=True)
class Attempt:
    """One engine call of a request. ``number`` counts the request's calls from 0; ``admit`` is the
    first admission.

    ``kept`` is what the stack kept of a stream that broke off
    (``rollproof.judging.partial_replies``).
    """

    number: int
    call: Call
    admit: Admit | None = None
    replies: list[Reply] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    kept: Reply | None = None

    @property
    def consumed(self) -> Reply | None:
        """The reply that the stack received first; ``None`` where none was delivered (outcome
        unknown to it).
        """
        if self.kept is not None:
            return self.kept
        for reply in self.replies:
            if reply.delivered and not self.broke:
                return reply
        return None

    @property
    def broke(self) -> bool:
        """Whether a reply that was sent may have come in part, or not at all."""
        return any(fault.what == "broken-stream" for fault in self.faults)


@dataclass(slots=True)
class History:
    """Weight updates so far, per server and in order, and what was published."""

    updates: list[Weights] = field(default_factory=list)
    _read: int = 0
    _labels: dict[Version, list[Version]] = field(default_factory=dict)
    _carried: dict[Version, dict[Version, None]] = field(default_factory=dict)
    _serving: dict[str, tuple[Version, Version]] = field(default_factory=dict)
    _named: dict[tuple[str, Version], int] = field(default_factory=dict)
    _unlabelled: set[Version] = field(default_factory=set)
    _order: dict[Version, int] = field(default_factory=dict)

    @property
    def labels(self) -> frozenset[Version]:
        """Every label ever published."""
        return frozenset(self._known()._order)

    def label_of(self, version: Version) -> Version:
        """The label under which weights ``version`` were last published; ``None`` where they never
        were.
        """
        labels = self.labels_of(version)
        return labels[-1] if labels else None

    def labels_of(self, version: Version) -> Sequence[Version]:
        """Every label under which weights ``version`` were published, the latest last; more than
        one after a retag.

        A label that a server went on showing when it had loaded them counts only where they never
        got one of their own.
        """
        known = self._known()
        return known._labels.get(version) or tuple(known._carried.get(version, ()))

    def carried_of(self, version: Version) -> frozenset[Version]:
        """Labels of other weights that servers still showed for weights ``version``, before these
        got a label of their own.

        vLLM's update names no version: weights are loaded first, and their label is published by a
        request of its own.
        """
        known = self._known()
        return frozenset(known._carried.get(version, ())).difference(self.labels_of(version))

    def named_at(self, server_id: str, version: Version) -> int | None:
        """Index of the event from which on a server showed a label of their own for weights
        ``version``; ``None`` where there is none.
        """
        return self._known()._named.get((server_id, version))

    def rank_of(self, label: Version) -> int | None:
        """How many labels were published before ``label`` was for the first time; ``None`` where it
        never was.
        """
        return self._known()._order.get(label)

    def unlabelled(self) -> frozenset[Version]:
        """Versions that were loaded without a label of their own (an update with ``None``)."""
        return frozenset(self._known()._unlabelled)

    def _known(self) -> History:
        """Take in the updates that came since the last look."""
        for update in self.updates[self._read :] if self._read < len(self.updates) else ():
            before = self._serving.get(update.server_id)
            self._serving[update.server_id] = (update.version, update.label)
            if update.label is None:
                if update.loaded:
                    self._unlabelled.add(update.version)
                continue
            self._order.setdefault(update.label, len(self._order))
            if (
                update.loaded
                and before is not None
                and before[0] != update.version
                and before[1] == update.label
            ):
                self._carried.setdefault(update.version, {})[update.label] = None
                continue
            self._named.setdefault((update.server_id, update.version), update.index)
            labels = self._labels.setdefault(update.version, [])
            if update.label in labels:
                labels.remove(update.label)
            labels.append(update.label)
        self._read = len(self.updates)
        return self


class RequestView:
    """One ended request: what was asked, which calls it made, what came back, what was handed over.

    ``neighbours`` are a bounded number of other requests of the same run, to find out whose values
    a stray one is. ``stitched`` is the reference stitch; ``oracle`` is there where the trace is
    coded. Views are read-only to checks, but for ``memo``, where the checks of a family keep under
    its name what they share (nothing that refers to the view). ``header`` is the trace's, ``None``
    where a view was made by hand. ``untold`` says that calls may be its own which the recorder
    could not attribute.
    """

    def __init__(
        self,
        submit: Submit,
        contract: Contract,
        history: History,
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
        self.memo: dict[str, Any] = {}
        self.untold: bool = False

    @property
    def request(self) -> Request:
        """What the caller asked for."""
        return self.submit.request

    @property
    def result(self) -> Result | None:
        """How the request ended first; ``None`` where it never did."""
        return self.results[0] if self.results else None

    @property
    def rollout(self) -> Rollout | None:
        """The sample that was handed over; ``None`` where there is none."""
        return self.result.rollout if self.result else None

    def settle(self) -> None:
        """Forget what was worked out from the view before its request ended (as a neighbour of
        another).
        """
        for name in ("stitched", "segments", "total_ids"):
            self.__dict__.pop(name, None)
        self.memo.clear()

    @cached_property
    def stitched(self) -> Stitched:
        """The rollout that the delivered replies make, under the contract's provenance."""
        return self.stitched_as(self.contract.provenance or Provenance.AS_SAMPLED)

    def stitched_as(self, provenance: Provenance) -> Stitched:
        """As ``stitched``, under another provenance: to say which one a stack follows instead of
        the declared one.
        """
        # a case says which turns there are; elsewhere only the calls tell
        open_ended = self.header is None or self.header.case is None or bool(self.request.turns)
        return stitch(
            self.request.prompt_ids,
            self.attempts,
            self.observations,
            provenance,
            unrecorded_turns=open_ended,
        )

    @cached_property
    def segments(self) -> list[Attempt]:
        """The attempts whose replies were received, in order of delivery."""
        got = [attempt for attempt in self.attempts if attempt.consumed is not None]
        return sorted(got, key=lambda attempt: attempt.consumed.index if attempt.consumed else 0)

    @property
    def hedged(self) -> bool:
        """Whether two calls of the same prompt overlapped, both unharmed and both answered: which
        answer was used cannot be told.
        """
        sound = [
            attempt
            for attempt in self.attempts
            if attempt.consumed is not None and not attempt.faults
        ]
        for earlier, later in pairwise(sound):
            answered = earlier.consumed
            overlap = (
                answered is not None and earlier.call.index < later.call.index < answered.index
            )
            if overlap and earlier.call.prompt_ids == later.call.prompt_ids:
                return True
        return False

    @property
    def resumed(self) -> bool:
        """Whether more than one reply was received."""
        return len(self.segments) > 1

    @cached_property
    def total_ids(self) -> tuple[int, ...]:
        """Prompt and response of the delivered sample."""
        rollout = self.rollout
        return self.request.prompt_ids + (rollout.response_ids if rollout else ())

    def where(self, **more: Scalar) -> Mapping[str, Scalar]:
        """A finding's place: this request, and of ``more`` what is known."""
        return {
            "request": self.request.request_id,
            **{name: value for name, value in more.items() if value is not None},
        }

    def segment_of(self, position: int) -> int | None:
        """Which received segment sampled the token at absolute ``position`` (counting from 0);
        ``None`` for prompt tokens.
        """
        index = position - len(self.request.prompt_ids)
        tokens = self.stitched.tokens
        if not 0 <= index < len(tokens) or tokens[index].attempt < 0:
            return None
        order = [attempt.number for attempt in self.segments]
        return order.index(tokens[index].attempt)
