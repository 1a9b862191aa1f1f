"""Histories of one request's calls, made event by event, whose rows name their attempt and
position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollproof.core.contract import Provenance
from rollproof.core.events.rollout import Call, Observation, Reply
from rollproof.core.records import EngineOutput, FinishReason, Span
from rollproof.judging.attempt import Attempt
from rollproof.judging.stitching import Stitched, stitch

__all__ = ["PROMPT", "History", "resumed_history", "rows_of"]

PROMPT: tuple[int, ...] = (1, 2, 3)


@dataclass
class History:
    """A request's calls and observations, made event by event."""

    attempts: list[Attempt] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    at: int = 0

    def tick(self) -> int:
        """The next index."""
        self.at += 1
        return self.at

    def call(self, sent: tuple[int, ...], limit: int | None = None) -> Attempt:
        """The stack calls an engine."""
        number = len(self.attempts)
        call = Call(
            index=self.tick(),
            call_id=number,
            request_id="r",
            server_id="s",
            prompt_ids=sent,
            max_tokens=limit,
        )
        self.attempts.append(Attempt(number=number, call=call))
        return self.attempts[-1]

    def reply(
        self,
        attempt: Attempt,
        tokens: tuple[int, ...],
        reason: str = "abort",
        version: int = 0,
        **fields: Any,
    ) -> None:
        """The engine answers, with rows that name their attempt and position."""
        output: dict[str, Any] = {
            "token_ids": tokens,
            "logprobs": np.array(
                [-float(attempt.number) - (i + 1) / 64 for i in range(len(tokens))]
            ),
            "routes": rows_of(attempt.number, len(attempt.call.prompt_ids) + len(tokens) - 1),
            "finish_reason": FinishReason(reason),
            "version": version,
            **fields.pop("output", {}),
        }
        true = fields.pop("true_tokens", (Span(start=0, end=len(tokens), version=version),))
        attempt.replies.append(
            Reply(
                index=self.tick(),
                call_id=attempt.number,
                output=EngineOutput(**output),
                true_tokens=true,
                **fields,
            )
        )

    def observe(self, *tokens: int) -> None:
        """The environment speaks."""
        self.observations.append(Observation(index=self.tick(), request_id="r", token_ids=tokens))

    def stitch(self, provenance: Provenance = Provenance.AS_SAMPLED, **options: Any) -> Stitched:
        """The fold under test."""
        return stitch(PROMPT, self.attempts, self.observations, provenance, **options)


def rows_of(number: int, count: int) -> np.ndarray:
    """``(count, 1, 1)``: 1000 * attempt + position."""
    return (1000 * number + np.arange(count)).astype(np.int32).reshape(count, 1, 1)


def resumed_history(*parts: tuple[int, ...]) -> History:
    """A rollout resumed after each part."""
    history = History()
    tokens = PROMPT
    for part in parts:
        history.reply(history.call(tokens), part)
        tokens += part
    return history
