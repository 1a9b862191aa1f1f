"""The limits that a stack is configured with, next to the budget that a caller states.

A limit that is declared is met: cases are made one token, or one turn, below it, at it and above
it, and the checks read it where a sample ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from rollproof.core.error_text import show
from rollproof.errors import ContractError

__all__ = ["AnswerCut", "RolloutLimits"]


class AnswerCut(StrEnum):
    """Which part of an answer of the environment is kept if it exceeds its limit.

    verl's ``tool_response_truncate_side`` has the same three.
    """

    START = "start"
    END = "end"
    BOTH = "both"
    """Both ends: the first half, rounded down, and the last tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLimits:
    """Limits of a stack's rollouts, in tokens unless they say otherwise; ``None``: no such limit.

    Declare what the stack itself is configured with, and nothing else: a sample that ends by
    ``length`` below the caller's budget needs a limit here that it reached. Raises
    ``ContractError`` for a limit that is not a whole number of at least 1 (``length`` and
    ``context``: 2), or that no rollout can reach: a stack's "unlimited" is ``None``.

    Attributes:
        response: Tokens of a response, those of the environment included.
        length: Prompt and response together (``max_length``, ``max_seq_len``).
        context: Prompt and response of one engine call: the engine ends a call there, and refuses
            a prompt of that length (``max_model_len``).
        turns: Turns of the model in one rollout, a number of turns.
        turn_tokens: Tokens that the model samples in one turn.
        answers_cut_turns: Whether the environment also answers a turn that was cut at
            ``turn_tokens``; otherwise such a turn is the last one.
        answer: Tokens of one answer of the environment; a longer one is cut.
        answer_keeps: The part of a longer answer that is kept.
    """

    response: int | None = None
    length: int | None = None
    context: int | None = None
    turns: int | None = None
    turn_tokens: int | None = None
    answers_cut_turns: bool = False
    answer: int | None = None
    answer_keeps: AnswerCut = AnswerCut.START

    def __post_init__(self) -> None:
        problems = []
        for name in _SIZES:
            value, least = getattr(self, name), 2 if name in ("length", "context") else 1
            if value is None:
                continue
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
                problems.append(f"{name}={show(value)} must be a whole number of at least {least}.")
            elif value > _MOST:
                problems.append(
                    f"{name}={show(value)} is more than any rollout reaches; the most is {_MOST:,}."
                    f" Leave {name} out if the stack has no such limit."
                )
        # a caller without a type checker may have passed anything
        answers: object = self.answers_cut_turns
        if not isinstance(answers, bool):
            problems.append(f"answers_cut_turns={show(answers)} must be a bool.")
        elif answers and self.turn_tokens is None:
            problems.append("answers_cut_turns=True needs turn_tokens, where turns are cut.")
        try:
            object.__setattr__(self, "answer_keeps", AnswerCut(self.answer_keeps))
        except ValueError:
            problems.append(
                f"answer_keeps={show(self.answer_keeps)} is not valid; choose one of"
                f" {[str(member) for member in AnswerCut]}."
            )
        if problems:
            raise ContractError("The limits cannot be used:\n  - " + "\n  - ".join(problems))

    @property
    def total(self) -> int | None:
        """The tighter of ``length`` and ``context``; ``None`` when neither is set."""
        bounds = [bound for bound in (self.length, self.context) if bound is not None]
        return min(bounds) if bounds else None

    @property
    def room(self) -> int | None:
        """The longest response, after a prompt of one token; ``None`` without a limit."""
        total = None if self.total is None else self.total - 1
        return min((bound for bound in (self.response, total) if bound is not None), default=None)

    @property
    def allow_answers(self) -> bool:
        """Whether a turn, an answer and a token of the next turn have room."""
        return self.turns != 1 and (self.room is None or self.room >= 3)

    @property
    def allow_fragments(self) -> bool:
        """Whether a turn may have two tokens, so that an abort can leave a part of it."""
        return self.turn_tokens != 1 and (self.room is None or self.room >= 2)

    def cut_answer(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """Return what is left of an answer of the environment."""
        if self.answer is None or len(answer) <= self.answer:
            return answer
        head = {AnswerCut.START: self.answer, AnswerCut.END: 0}.get(
            self.answer_keeps, self.answer // 2
        )
        return answer[:head] + answer[len(answer) - (self.answer - head) :]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown keys, and for what is no
        mapping.
        """
        if not isinstance(data, Mapping):
            raise ContractError(f"Limits must be a mapping of their fields, not {show(data)}.")
        valid = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in set(data) - set(valid))
        if unknown:
            raise ContractError(f"Unknown limits {unknown}; the limits are {valid}.")
        return cls(**data)


_SIZES = ("response", "length", "context", "turns", "turn_tokens", "answer")
_MOST = (1 << 31) - 1
