"""A tool for verl's agent loops that returns ids as text, and a parser that calls it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rollproof.stacks._support.tokenizer import IdTokenizer, spell

__all__ = ["TOOL_NAME", "IdTool", "parser_of"]

TOOL_NAME = "environment"


class IdTool:
    """The environment as a tool of verl's: each call returns the next of the request's turns."""

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

    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **_context: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """The next turn of the environment."""
        return self._response(text=spell(self._tokenizer.turns.pop(0))), 0.0, {}

    async def release(self, instance_id: str) -> None:
        """Free nothing."""


def parser_of(base: Any, function_call: Any, name: str) -> Any:
    """Register and return a ``ToolParser`` of verl's that calls the tool while turns are left.

    A turn that was cut off has no complete tool call, so only one that ends by itself (on the
    tokenizer's ``eos_token_id``) has one.
    """

    class TurnParser(base):  # type: ignore[misc]  # the base is verl's, known at run time only
        async def extract_tool_calls(
            self, responses_ids: list[int], tools: Any = None
        ) -> tuple[str, list[Any]]:
            # a turn that was cut off has no complete call
            ended = responses_ids[-1:] == [self.tokenizer.eos_token_id]
            calls = (
                [function_call(name=TOOL_NAME, arguments="{}")]
                if ended and self.tokenizer.turns
                else []
            )
            return self.tokenizer.decode(responses_ids), calls

    return base.register(name)(TurnParser)
