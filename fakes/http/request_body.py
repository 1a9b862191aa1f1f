"""JSON bodies of requests, read and checked field by field: a server is sent anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Scope

__all__ = [
    "BadRequest",
    "UncaughtError",
    "encode_json",
    "field",
    "header_of",
    "is_json",
    "json_body",
    "json_object",
    "text_of",
    "token_ids",
    "words_of",
]

_MAX_DEPTH = 200
"""How deep a body may be nested. What is deeper cannot be shown in an error, written into a trace
or compared within Python's limit of recursion.
"""


def encode_json(value: Any) -> bytes:
    """Return compact JSON as the real servers send it: SkyRL looks for bytes in it.

    NaN becomes null, as with SGLang's encoder.
    """
    return orjson.dumps(value)


class BadRequest(Exception):
    """The client is at fault.

    Attributes:
        status: the status of the answer.
        malformed: the body does not have the form of a request at all; servers word that
            differently from a wrong value.
        param: the field at fault.
    """

    def __init__(
        self, text: str, status: int = 400, *, malformed: bool = False, param: str | None = None
    ) -> None:
        super().__init__(text)
        self.status: int = status
        self.malformed: bool = malformed
        self.param: str | None = param


class UncaughtError(Exception):
    """The request makes the real server fail in a way that it does not catch: a bare 500."""


def json_body(request: Request, *, allow_empty: bool = True) -> dict[str, Any]:
    """Return the JSON object in the body of ``request``, which ``FakeServer`` has read; see
    ``json_object``.
    """
    return json_object(request.scope["state"]["body"], allow_empty=allow_empty)


def header_of(scope: Scope, name: str) -> str | None:
    """Return a header of a request by its name in lower case, as ASGI has it; ``None`` if it is
    absent.
    """
    key = name.encode()
    for header, value in scope["headers"]:
        if header == key:
            text: str = value.decode("latin-1")
            return text
    return None


def is_json(scope: Scope) -> bool:
    """Return whether a request says that its body is JSON.

    A web page can make a browser send other types without asking first whether it may.
    """
    media = (header_of(scope, "content-type") or "").partition(";")[0].strip().lower()
    return media == "application/json"


def json_object(text: bytes, *, allow_empty: bool = True) -> dict[str, Any]:
    """Return the JSON object that ``text`` is; an empty text is an empty object if
    ``allow_empty``.

    Raises:
        BadRequest: the text is no JSON object, or is nested too deep.
    """
    if not text.strip():
        if allow_empty:
            return {}
        raise BadRequest("The body is empty.", malformed=True)
    # not json.loads: it takes NaN, and ends in a RecursionError for b"[" * 5000
    try:
        body = orjson.loads(text)
    except ValueError as error:
        raise BadRequest(f"The body is no JSON: {error}.", malformed=True) from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", malformed=True)
    if text.count(b"[") + text.count(b"{") > _MAX_DEPTH and _is_too_deep(body):
        raise BadRequest(f"The body is nested more than {_MAX_DEPTH} deep.", malformed=True)
    return body


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if type(child) is list or type(child) is dict
        ]
        if not level:
            return False
    return True


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """Return the value of ``name``, or ``default`` if it is absent or null.

    Raises:
        BadRequest: the value is of another kind; a bool is no number.
    """
    value = body.get(name)
    if value is None:
        return default
    # the usual case first: a request has a dozen fields
    if type(value) is kind:
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise BadRequest(
            f"{name} must be {expected}, not {type(value).__name__}.", malformed=True, param=name
        )
    return value


def token_ids(value: Any, name: str, vocab: int) -> tuple[int, ...]:
    """Return the token ids in ``value``, the field ``name`` of a request.

    Raises:
        BadRequest: it is no list of ids of the vocabulary.
    """
    # `type`, not isinstance: True is an int, and no token
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise BadRequest(f"{name} must be a list of token ids.", malformed=True, param=name)
    if value and not (min(value) >= 0 and max(value) < vocab):
        raise BadRequest(f"{name} holds ids outside of the vocabulary of {vocab}.")
    return tuple(value)


def text_of(tokens: Sequence[int]) -> str:
    """Return the fake's words for tokens: ``w5 w6``."""
    return " ".join([f"w{token}" for token in tokens])


def words_of(text: str, vocab: int) -> tuple[int, ...]:
    """Return the token ids of words ``w5``; any other word is a token made of its bytes."""
    ids = []
    for word in text.split():
        number = word.removeprefix("w")
        if number.isascii() and number.isdigit() and len(number) < 12:
            token = int(number)
        else:
            token = int.from_bytes(word.encode()[:8], "little")
        ids.append(token % vocab)
    return tuple(ids)
