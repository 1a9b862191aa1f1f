"""A small stack with an engine, as an existing test of a user has it, and its recording."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.events.base import Event
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.recording.recorder import EngineCall, Recording
from tests.support.trace_builder import coded_rows, contract

__all__ = [
    "CONTRACT",
    "PROMPT",
    "Client",
    "Engine",
    "kinds",
    "to_call",
    "to_output",
    "to_record",
    "to_request",
    "wired",
]

PROMPT = (1, 2, 3)
CONTRACT = contract(versions="none", finish_reason=True)


class Engine:
    """Answers two tokens and an abort at first, then the rest: what a stack under an existing test
    talks to.
    """

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompt: list[int], budget: int) -> dict[str, Any]:
        self.calls += 1
        ids = [10 + len(prompt) + i for i in range(2 if self.calls % 2 else budget)]
        rows = coded_rows(0, len(prompt) + len(ids) - 1, 0)
        reason = "abort" if self.calls % 2 else "length"
        return {
            "ids": ids,
            "logprobs": [-0.5 - 0.01 * i for i in range(len(ids))],
            "rows": rows,
            "reason": reason,
        }


class Client:
    """A resume loop as users write it; ``repeat_rows`` is the field's most frequent fault."""

    def __init__(self, engine: Engine, *, repeat_rows: bool = False) -> None:
        self.generate = engine.generate
        self.repeat_rows = repeat_rows

    def rollout(self, prompt: list[int]) -> dict[str, Any]:
        ids: list[int] = []
        logprobs: list[float] = []
        rows: Any = None
        reason = "abort"
        while reason == "abort":
            answer = self.generate([*prompt, *ids], 4 - len(ids))
            new = answer["rows"]
            rows = (
                new
                if rows is None
                else np.concatenate([rows, new if self.repeat_rows else new[len(rows) :]])
            )
            ids += answer["ids"]
            logprobs += answer["logprobs"]
            reason = answer["reason"]
        return {"ids": ids, "logprobs": logprobs, "rows": rows, "reason": reason}


def to_request(prompt: list[int]) -> Request:
    return Request(request_id=f"r{prompt[0]}", prompt_ids=tuple(prompt), max_tokens=4)


def to_call(prompt: list[int], budget: int) -> EngineCall:
    return EngineCall(prompt_ids=tuple(prompt), max_tokens=budget)


def to_output(answer: dict[str, Any]) -> EngineOutput:
    return EngineOutput(
        token_ids=tuple(answer["ids"]),
        logprobs=np.array(answer["logprobs"]),
        routes=answer["rows"],
        finish_reason=FinishReason(answer["reason"]),
    )


def to_record(prompt: list[int]) -> Any:
    def record(native: dict[str, Any]) -> Rollout:
        return Rollout(
            request_id=f"r{prompt[0]}",
            prompt_ids=tuple(prompt),
            response_ids=tuple(native["ids"]),
            finish_reason=FinishReason(native["reason"]),
            logprobs=np.array(native["logprobs"]),
            routes=native["rows"],
        )

    return record


def wired(trace: Recording, client: Client, prompt: list[int]) -> Any:
    """The client's rollout function, recorded."""
    client.generate = trace.engine(client.generate, to_call=to_call, to_output=to_output)
    return trace.rollout(client.rollout, to_request=to_request, to_record=to_record(prompt))


def kinds(events: tuple[Event, ...]) -> list[str]:
    return [event.kind for event in events]
