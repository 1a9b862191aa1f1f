"""Events of a trainer's data: samples that became a batch, and scores under later weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollproof.core.events.base import Event
from rollproof.core.records import BatchRow, LogprobArray, Rollout, Version

__all__ = ["Batch", "Score"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score(Event):
    """Logprobs ``(response,)`` of a request's response under weights ``version``, by ``scorer``.

    rollproof records none itself: a trainer that writes its own traces does, and
    ``rollproof gap --trainer score:NAME`` reads them.
    """

    kind: ClassVar[str] = "score"
    request_id: str
    version: Version
    scorer: str
    logprobs: LogprobArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch(Event):
    """Finished samples were converted to rows of a training batch.

    Attributes:
        name: The purpose for which the samples were chosen.
        samples: The input, in order.
        rows: The output.
        refused: The error (class and text) if the conversion raised.
        defect: The fault of the sample ``defective``; both are ``""`` if all are well-formed.
        defective: The request id of the malformed sample.
        changed: Names of what the conversion changed in its input.
    """

    kind: ClassVar[str] = "batch"
    name: str
    samples: tuple[Rollout, ...]
    rows: tuple[BatchRow, ...] = ()
    refused: str | None = None
    defect: str = ""
    defective: str = ""
    changed: tuple[str, ...] = ()
