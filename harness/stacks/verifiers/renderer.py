"""A renderer without a language: the methods of verifiers' ``Renderer`` protocol, over texts made
by ``spell``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollproof.stacks._support.tokenizer import spell

if TYPE_CHECKING:
    from rollproof.stacks.verifiers.upstream import Verifiers

__all__ = ["IdRenderer"]


class IdRenderer:
    """Ids to text and back. Roles and the generation prompt add no tokens; a conversation is always
    bridged: nothing is rewritten.
    """

    is_prefix_stable = True
    supports_tools = False

    def __init__(self, verifiers: Verifiers) -> None:
        self._rendered = verifiers.rendered
        self._parsed = verifiers.parsed

    def render(self, messages: Sequence[Mapping[str, Any]], **_options: Any) -> Any:
        """The ids of all messages, each attributed to its own message."""
        return self._attributed([], messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Mapping[str, Any]],
        **_options: Any,
    ) -> Any:
        """The ids so far, attributed to no message, and those of the new messages."""
        return self._attributed([*previous_prompt_ids, *previous_completion_ids], new_messages)

    def parse_response(self, token_ids: Sequence[int], **_options: Any) -> Any:
        """The text of ``token_ids``; no tool is called."""
        return self._parsed(content=spell(token_ids))

    def get_stop_token_ids(self) -> list[int]:
        """None: the engine ends at its own end-of-sequence token."""
        return []

    def _attributed(self, before: list[int], messages: Sequence[Mapping[str, Any]]) -> Any:
        ids, owners = list(before), [-1] * len(before)
        for i, message in enumerate(messages):
            message_ids = [int(word) for word in str(message.get("content") or "").split()]
            ids += message_ids
            owners += [i] * len(message_ids)
        return self._rendered(
            token_ids=ids,
            message_indices=owners,
            is_content=[owner >= 0 for owner in owners],
            message_roles=[str(message["role"]) for message in messages],
        )
