"""The token sequences at which a stack itself ends a turn, after the engine has answered.

Stop tokens and strings that a call passes on to its engine need no declaration: the engine's reply
ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from rollproof.core.engine_contract import LARGEST_TOKEN
from rollproof.core.error_text import show
from rollproof.errors import ContractError

__all__ = ["OwnStops"]

_LONGEST = 64
_MOST = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStops:
    """Token sequences at which a stack cuts what an engine sampled, and ends the turn.

    The first of them in a turn counts, wherever calls begin and end. What was sampled after it is
    dropped with its logprobs and routes, and the turn ends as by a natural end, ``stop``. Raises
    ``ContractError`` for what is no such sequence.

    Attributes:
        sequences: The sequences, in tokens; a stop token is a sequence of one, and may be given as
            its id. A string that can be spelt in several ways has a sequence for each of them.
        kept: Whether the sample holds the sequence at which it was cut; otherwise it ends before
            it.
    """

    sequences: tuple[tuple[int, ...], ...]
    kept: bool = True

    def __post_init__(self) -> None:
        problems = []
        given: object = self.sequences
        items = list(given) if isinstance(given, list | tuple) else []
        sequences = [tuple(item) if isinstance(item, list | tuple) else (item,) for item in items]
        if not sequences or len(sequences) > _MOST:
            problems.append(
                f"sequences={show(given)} must be a tuple of 1 to {_MOST} token ids or tuples of"
                " token ids."
            )
        problems += [
            f"sequences holds {show(sequence)}: it must be 1 to {_LONGEST} token ids from 0 to"
            f" {LARGEST_TOKEN:,}."
            for sequence in sequences
            if not 0 < len(sequence) <= _LONGEST or not all(map(_is_token, sequence))
        ]
        # both would end at one place, and only one can be what the stack dropped
        problems += [
            f"sequences holds {list(longer)}, which ends with {list(shorter)}: drop the longer one."
            for shorter in sequences
            for longer in sequences
            if len(longer) > len(shorter) > 0 and longer[-len(shorter) :] == shorter
        ]
        kept: object = self.kept
        if not isinstance(kept, bool):
            problems.append(f"kept={show(kept)} must be a bool.")
        if problems:
            raise ContractError("own_stops cannot be used:\n  - " + "\n  - ".join(problems))
        # two spellings of a string may be the same tokens: that is no mistake
        object.__setattr__(self, "sequences", tuple(dict.fromkeys(sequences)))

    def first_in(
        self, before: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return where the first sequence ends that ends in ``token_ids``, and the sequence.

        Args:
            before: What was sampled before in the same turn: a sequence may begin there.
            token_ids: The tokens of a reply.

        Returns:
            The number of tokens of the reply up to the end of the sequence, and the sequence;
            ``None`` if there is none.
        """
        longest = max(map(len, self.sequences))
        # one token less than the longest: what was complete before has ended the turn already
        tail = tuple(before[len(before) - min(len(before), longest - 1) :])
        tokens = (*tail, *token_ids)
        # by ends: a short sequence that is complete counts before a longer one that began first
        for end in range(len(tail) + 1, len(tokens) + 1):
            for sequence in self.sequences:
                if len(sequence) <= end and tokens[end - len(sequence) : end] == sequence:
                    return end - len(tail), sequence
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ``from_dict`` is its inverse."""
        return {"sequences": [list(sequence) for sequence in self.sequences], "kept": self.kept}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``ContractError`` on unknown or missing keys, and for
        what is no mapping.
        """
        if not isinstance(data, Mapping):
            raise ContractError(f"own_stops must be a mapping of its fields, not {show(data)}.")
        valid = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in set(data) - set(valid))
        if unknown or "sequences" not in data:
            raise ContractError(f"own_stops has {sorted(map(str, data))}; its fields are {valid}.")
        return cls(**data)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_TOKEN
