"""How the fake vLLM server writes the chunks of a streamed reply.

Keys that were not set are left out, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rollproof.core.records import EngineOutput
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.vllm import vllm_calls as replies
from rollproof.fakes.http.vllm.vllm_calls import VllmRequest

__all__ = ["ChatPart", "CompletionPart", "Part", "TokensPart"]


class Part:
    """A chunk of a stream; ``kind`` is its ``object``."""

    kind: ClassVar[str] = ""

    def __init__(self, backend: EngineBackend, call: VllmRequest) -> None:
        self.backend: EngineBackend = backend
        self.call: VllmRequest = call
        self._opened: set[int] = set()
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk(
        self, index: int, tokens: Any, logprobs: list[float], output: EngineOutput | None
    ) -> dict[str, Any]:
        chunk = {
            **replies.envelope(self.call, self.kind),
            "choices": [self.choice(index, tokens, logprobs, output)],
        }
        if output is not None and not self.call.options.get("include_usage"):
            chunk["system_fingerprint"] = replies.FINGERPRINT
        return chunk

    def choice(
        self, index: int, tokens: Any, logprobs: list[float], output: EngineOutput | None
    ) -> dict[str, Any]:
        """Return the ``choices`` entry of a chunk, in the form of the endpoint."""
        raise NotImplementedError(f"{type(self).__name__} must implement choice")

    def usage(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        head = replies.envelope(self.call, self.kind)
        return {
            **head,
            "choices": [],
            "usage": _without_nulls(counts),
            "system_fingerprint": replies.FINGERPRINT,
        }


class CompletionPart(Part):
    """A chunk of ``/v1/completions``."""

    kind: ClassVar[str] = "text_completion"

    def choice(
        self, index: int, tokens: Any, logprobs: list[float], output: EngineOutput | None
    ) -> dict[str, Any]:
        call, first = self.call, index not in self._opened
        self._opened.add(index)
        prompt = (
            call.specs()[index].prompt if first and (call.return_token_ids or call.echo) else None
        )
        shown = [] if call.only_echo else list(tokens)
        flat = None
        if call.top_logprobs is not None:
            offset = self._offsets.get(index, 0)
            before = prompt if call.echo and prompt is not None else ()
            flat = replies.echoed_logprobs(
                call, before, shown, logprobs[: len(shown)], self.backend, offset
            )
            self._offsets[index] = offset + sum(map(len, flat["tokens"]))
        # if ids are returned, too, the prompt is not repeated as text
        words = [*(prompt or ()), *shown] if call.echo and not call.return_token_ids else shown
        text = self.backend.shown_text(words, ids=call.return_token_ids)
        text += " " if text and output is None else ""
        choice = {"index": index, "text": text, "logprobs": flat}
        choice |= {
            "finish_reason": None if output is None else replies.finish_of(output),
            "stop_reason": None,
        }
        choice |= {
            "prompt_token_ids": None if prompt is None else list(prompt),
            "token_ids": list(tokens) if call.return_token_ids else None,
        }
        return choice


class ChatPart(Part):
    """A chunk of ``/v1/chat/completions``."""

    kind: ClassVar[str] = "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        prompt = {
            "prompt_token_ids": list(self.call.prompts[0]) if self.call.return_token_ids else None,
            "prompt_text": None,
        }
        return [{**replies.envelope(self.call, self.kind), "choices": [choice], **prompt}]

    def choice(
        self, index: int, tokens: Any, logprobs: list[float], output: EngineOutput | None
    ) -> dict[str, Any]:
        call = self.call
        content = (
            None if call.top_logprobs is None else replies.chat_logprobs(call, tokens, logprobs)
        )
        text = self.backend.shown_text(tokens, ids=call.return_token_ids)
        text += " " if text and output is None else ""
        reason = None if output is None else replies.finish_of(output)
        choice = {
            "index": index,
            "delta": {"content": text},
            "logprobs": content,
            "finish_reason": reason,
        }
        if output is not None:
            choice["stop_reason"] = None
        return {**choice, "token_ids": list(tokens) if call.return_token_ids else None}


class TokensPart(Part):
    """A chunk of ``/inference/v1/generate``."""

    def chunk(
        self, index: int, tokens: Any, logprobs: list[float], output: EngineOutput | None
    ) -> dict[str, Any]:
        head: dict[str, Any] = {"request_id": self.call.id, "usage": None}
        if self.call.return_token_ids and index not in self._opened:
            head["prompt_token_ids"] = list(self.call.prompts[0])
        self._opened.add(index)
        return {
            **head,
            "output_mode": "tokens",
            "choices": [self.choice(index, tokens, logprobs, output)],
        }

    def choice(
        self, index: int, tokens: Any, logprobs: list[float], output: EngineOutput | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "finish_reason": replies.finish_of(output) if output is not None else None,
            "stop_reason": None,
            "token_ids": list(tokens),
            "routed_experts": (
                replies.routes_of(output, self.backend) if output is not None else None
            ),
            "sampling_mask": None,
            "weight_versions": (
                replies.spans_of(output, self.backend) if output is not None else None
            ),
            "logprobs": None
            if self.call.top_logprobs is None
            else replies.token_logprobs(tokens, logprobs),
        }

    def usage(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "request_id": self.call.id,
            "usage": _without_nulls(counts),
            "output_mode": "tokens",
            "choices": [],
        }


def _without_nulls(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if value is not None}
