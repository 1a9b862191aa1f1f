"""A dialogue without a language: a tokenizer that spells token ids, a tool that answers with ids, and a parser that calls it.

verl's agent loops go from text to ids and back at every turn. Here text is the ids in decimal, so that the sequence that
the loop sends is exactly the one that the case asked for, and a template adds nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["TOOL_NAME", "IdTokenizer", "IdTool", "parser_of", "spell"]

TOOL_NAME = "environment"
PAD_ID = 151_643
"""A pad id as Qwen has it: far from 0, so that a mask which is filled with it does not look like a mask."""


def spell(ids: Sequence[int]) -> str:
    """The text of ``ids``."""
    return " ".join(str(i) for i in ids)


class IdTokenizer:
    """What verl asks of a Hugging Face tokenizer, over texts made by ``spell``. ``turns`` are the answers still to be given."""

    pad_token_id = PAD_ID

    def __init__(self, turns: Sequence[tuple[int, ...]] = (), eos_token_id: int = 0) -> None:
        self.turns: list[tuple[int, ...]] = [tuple(turn) for turn in turns]
        self.eos_token_id = eos_token_id
        self.padding_side = "right"

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_options: Any) -> list[int]:
        """The ids of all messages in order; roles, tools and the generation prompt add no tokens."""
        return [int(word) for message in messages for word in str(message.get("content") or "").split() if word.isdigit()]

    def encode(self, text: str, **_options: Any) -> list[int]:
        """The ids that ``text`` spells."""
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, ids: Sequence[int], **_options: Any) -> str:
        """The text of ``ids``."""
        return spell(ids)

    def pad(self, encoded: Mapping[str, list[int]], *, max_length: int, return_attention_mask: bool, **_options: Any) -> dict[str, Any]:
        """Tensors ``(1, max_length)``, padded on ``padding_side``; longer sequences stay longer, as in transformers."""
        import torch

        ids = list(encoded["input_ids"])
        fill = max_length - len(ids)
        sides = {"left": (fill, 0), "right": (0, fill)}
        before, after = sides[self.padding_side]
        padded = {"input_ids": torch.tensor([[PAD_ID] * before + ids + [PAD_ID] * after], dtype=torch.long)}
        if return_attention_mask:
            padded["attention_mask"] = torch.tensor([[0] * before + [1] * len(ids) + [0] * after], dtype=torch.long)
        return padded


class IdTool:
    """The environment as a tool of verl's: each call gives the next of the request's turns."""

    name = TOOL_NAME

    def __init__(self, tokenizer: IdTokenizer, response: Any) -> None:
        self._tokenizer = tokenizer
        self._response = response
        self.tool_schema: SimpleNamespace = SimpleNamespace(
            model_dump=lambda **_options: {"type": "function", "function": {"name": TOOL_NAME}}
        )

    async def create(self, create_kwargs: Mapping[str, Any] | None = None) -> tuple[str, None]:
        """An instance of the tool; it has no state."""
        return TOOL_NAME, None

    async def execute(self, instance_id: str, arguments: Mapping[str, Any], **_context: Any) -> tuple[Any, float, dict[str, Any]]:
        """The next answer of the environment."""
        return self._response(text=spell(self._tokenizer.turns.pop(0))), 0.0, {}

    async def release(self, instance_id: str) -> None:
        """Nothing to free."""


def parser_of(base: Any, function_call: Any, name: str) -> Any:
    """Register and return a ``ToolParser`` of verl's that calls the tool while answers are left.

    A turn that was cut off holds no whole tool call, so only one that ends by itself (on the tokenizer's ``eos_token_id``) has one.
    """

    class TurnParser(base):  # type: ignore[misc]  # the base is verl's, known at run time only
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
            ended = responses_ids[-1:] == [self.tokenizer.eos_token_id]
            calls = [function_call(name=TOOL_NAME, arguments="{}")] if ended and self.tokenizer.turns else []
            return self.tokenizer.decode(responses_ids), calls

    return base.register(name)(TurnParser)
