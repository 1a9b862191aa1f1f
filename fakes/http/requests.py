"""Requests: bodies read and checked; what is wrong with one becomes the 4xx that a server of this kind answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["BadRequest", "body_of", "field", "token_ids"]


class BadRequest(Exception):
    """The client is at fault: ``status`` is what the server answers, the text what it says."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


async def body_of(request: Request, most: int, *, empty: bool = True) -> dict[str, Any]:
    """The JSON object of a request of at most ``most`` bytes; an empty body is an empty object where ``empty`` allows it."""
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > most:
        raise BadRequest(f"The body has {length} bytes; at most {most} are taken.", 413)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise BadRequest(f"The body has more than {most} bytes.", 413)
        parts.append(part)
    text = b"".join(parts)
    if not text.strip():
        if empty:
            return {}
        raise BadRequest("The body is empty.", 422)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is no JSON: {error}.", 422) from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", 422)
    return body


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """The value of ``name``, of one of ``kind`` (a bool is no number); ``default`` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise BadRequest(f"{name} must be {' or '.join(one.__name__ for one in kinds)}, not {type(value).__name__}.", 422)
    return value


def token_ids(value: Any, name: str, vocab: int) -> tuple[int, ...]:
    """Token ids of a request, each of the vocabulary."""
    if not isinstance(value, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise BadRequest(f"{name} must be a list of token ids.", 422)
    if any(not 0 <= token < vocab for token in value):
        raise BadRequest(f"{name} holds ids outside of the vocabulary of {vocab}.")
    return tuple(value)
