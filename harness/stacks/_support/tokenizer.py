"""A tokenizer without a language: text is token ids in decimal.

Rollout code goes from text to ids and back at every turn. With such texts a stack sends exactly the
sequence of the case, and a template adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["PAD_ID", "IdTokenizer", "spell"]

PAD_ID = 151_643
"""A pad id as Qwen has it: far from 0, so that a mask which is filled with it does not look like a
mask.
"""


def spell(ids: Sequence[int]) -> str:
    """The text of ``ids``."""
    return " ".join(str(i) for i in ids)


class IdTokenizer:
    """The methods of a Hugging Face tokenizer that stacks call, over texts made by ``spell``.
    ``turns`` are the turns that the environment will still give.
    """

    pad_token_id = PAD_ID
    chat_template = None

    def __init__(self, turns: Sequence[tuple[int, ...]] = (), eos_token_id: int = 0) -> None:
        self.turns: list[tuple[int, ...]] = [tuple(turn) for turn in turns]
        self.eos_token_id = eos_token_id
        # a text that no ids spell: stacks cut it off the end of a turn
        self.eos_token: str = "<eos>"
        self.padding_side = "right"

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **_options: Any
    ) -> list[int]:
        """The ids of all messages in order; roles, tools and the generation prompt add no
        tokens.
        """
        return [
            int(word)
            for message in messages
            for word in str(message.get("content") or "").split()
            if word.isdigit()
        ]

    def encode(self, text: str, **_options: Any) -> list[int]:
        """The ids that ``text`` spells."""
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, ids: Sequence[int], **_options: Any) -> str:
        """The text of ``ids``."""
        return spell([int(i) for i in ids])

    def batch_decode(self, rows: Sequence[Sequence[int]], **_options: Any) -> list[str]:
        """The text of each row."""
        return [self.decode(row) for row in rows]

    def pad(
        self,
        encoded: Mapping[str, list[int]],
        *,
        max_length: int,
        return_attention_mask: bool,
        return_tensors: str | None = None,
        **_options: Any,
    ) -> dict[str, Any]:
        """One sequence, padded on ``padding_side`` to ``max_length``; longer ones stay longer.

        As in transformers, the result is a list, or with ``return_tensors="pt"`` a tensor
        ``(max_length,)``, and a sequence of no tokens comes back as the empty list that it is,
        whatever was asked for (verl#6675).
        """
        ids = list(encoded["input_ids"])
        padded: dict[str, Any] = {"input_ids": ids}
        if return_attention_mask:
            padded["attention_mask"] = [1] * len(ids)
        if not ids:
            return padded
        fill = max_length - len(ids)
        before, after = {"left": (fill, 0), "right": (0, fill)}[self.padding_side]
        for name, value in (("input_ids", PAD_ID), ("attention_mask", 0)):
            if name in padded:
                padded[name] = [value] * before + padded[name] + [value] * after
        if return_tensors is None:
            return padded
        # imported here: most stacks never pad
        import torch

        return {name: torch.tensor(row, dtype=torch.long) for name, row in padded.items()}
