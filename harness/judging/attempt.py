"""One engine call of a request, with its replies and faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollproof.core.events.rollout import Admit, Call, Fault, Reply

__all__ = ["Attempt", "StopCut"]

_TO_COME = ("late-reply", "duplicate-reply")
"""Faults of a call after which its reply is still to come."""


@dataclass(frozen=True, slots=True)
class StopCut:
    """What a stack keeps of a reply that it cuts at a stop sequence of its own.

    reply: The reply up to the cut.
    sequence: The stop sequence.
    dropped: The tokens of the reply after the sequence.
    reaches_back: How many tokens of earlier replies are dropped, too, because the sequence begins
        there and is not kept.
    """

    reply: Reply
    sequence: tuple[int, ...]
    dropped: tuple[int, ...]
    reaches_back: int = 0


@dataclass(slots=True)
class Attempt:
    """One engine call of a request.

    number: The index of the call among those of the request, from 0.
    call: The call.
    admit: Its first admission.
    replies: Its replies.
    faults: The faults that happened to it.
    partial: What the stack kept of a stream that broke (``rollproof.judging.partial_replies``).
    cut: What the stack kept of its reply, if it cuts at a stop sequence of its own
        (``rollproof.judging.stop_cuts``).
    past_stop: Whether the call resumes a turn that held such a sequence already.
    stopped_by_stack: Whether the stack itself aborted this call, by its id.
    died: The index of the event at which its server died, or of the call if it was dead already.
    """

    number: int
    call: Call
    admit: Admit | None = None
    replies: list[Reply] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    partial: Reply | None = None
    cut: StopCut | None = None
    past_stop: bool = False
    stopped_by_stack: bool = False
    died: int | None = None

    @property
    def consumed(self) -> Reply | None:
        """The reply that the stack received first, or ``None`` if none was delivered."""
        return self.received if self.cut is None else self.cut.reply

    @property
    def received(self) -> Reply | None:
        """The same reply before the stack cut it at a stop sequence of its own."""
        if self.partial is not None:
            return self.partial
        for reply in self.replies:
            # A late or duplicated reply is in `replies` too; only the first delivered one can be
            # what the stack went on with.
            if reply.delivered and not self.broke:
                return reply
        return None

    @property
    def broke(self) -> bool:
        """Whether the stack may have received a reply in part or not at all."""
        return any(fault.what == "broken-stream" for fault in self.faults)

    @property
    def ends(self) -> list[int]:
        """The events at which the call ended."""
        ends = [reply.index for reply in self.replies]
        ends += [fault.index for fault in self.faults if fault.what not in _TO_COME]
        return ends if self.died is None else [*ends, self.died]
