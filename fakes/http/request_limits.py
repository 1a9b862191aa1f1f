"""How much one request may ask of a fake server: what is beyond would hold up every other client.

A real server computes such a request in pieces, on cards of its own; a fake one reads it, and
writes its answer, in the loop that serves all clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollproof.fakes.http.request_body import BadRequest

__all__ = ["check_batch", "check_prompts", "check_texts", "check_tokens"]

_MAX_CALLS = 8192
_MAX_TOKENS = 1 << 22
_MAX_SCORED = 1 << 17
"""Tokens of prompts with logprobs: each takes twenty times as long as one without."""
_MAX_TEXT = 4 << 20


def check_texts(texts: Iterable[Any]) -> None:
    """Raise ``BadRequest`` if the texts among the values are too long together."""
    length = sum(len(text) for text in texts if isinstance(text, str))
    if length > _MAX_TEXT:
        raise _too_much("characters of text", length, _MAX_TEXT)


def check_tokens(tokens: object) -> None:
    """Raise ``BadRequest`` if a list of tokens is too long."""
    if isinstance(tokens, list) and len(tokens) > _MAX_TOKENS:
        raise _too_much("tokens", len(tokens), _MAX_TOKENS)


def check_prompts(prompts: Sequence[Any]) -> None:
    """Raise ``BadRequest`` if there are too many prompts: before a look at any of them, which takes
    most of the time.
    """
    if len(prompts) > _MAX_CALLS:
        raise _too_much("samples", len(prompts), _MAX_CALLS)


def check_batch(prompts: Sequence[Sequence[int]], samples: int, *, scored: bool) -> None:
    """Raise ``BadRequest`` if a request has too many calls, or too long prompts together.

    Args:
        prompts: token ids.
        samples: calls of each prompt.
        scored: the answer has logprobs of the prompts.
    """
    calls = len(prompts) * samples
    if calls > _MAX_CALLS:
        raise _too_much("samples", calls, _MAX_CALLS)
    tokens = sum(map(len, prompts))
    limit = _MAX_SCORED if scored else _MAX_TOKENS
    if tokens > limit:
        what = "tokens of prompts with logprobs" if scored else "tokens of prompts"
        raise _too_much(what, tokens, limit)


def _too_much(what: str, number: int, limit: int) -> BadRequest:
    return BadRequest(
        f"rollproof's fake server takes at most {limit:,} {what} in one request, not {number:,}:"
        " send several requests."
    )
