"""Bodies: JSON that a stranger sent, read and checked field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

__all__ = [
    "BadRequest",
    "Uncaught",
    "dumped",
    "field",
    "json_object",
    "text_of",
    "token_ids",
    "words_of",
]


def dumped(value: Any) -> bytes:
    """Compact JSON, as the real servers send it: SkyRL looks for bytes in it. NaN becomes null, as
    with SGLang's encoder.
    """
    return orjson.dumps(value)


class BadRequest(Exception):
    """The client is at fault: ``status`` is what the server answers, the text what it says.

    ``malformed`` says that the body has not the form of a request at all: servers word that
    otherwise than a wrong value. ``param`` is the field that is at fault.
    """

    def __init__(
        self, text: str, status: int = 400, *, malformed: bool = False, param: str | None = None
    ) -> None:
        super().__init__(text)
        self.status: int = status
        self.malformed: bool = malformed
        self.param: str | None = param


class Uncaught(Exception):
    """The request makes the real server fail in a way that it does not catch: a bare 500."""


def json_object(text: bytes, *, empty: bool = True) -> dict[str, Any]:
    """The JSON object that ``text`` is; nothing is an empty object where ``empty`` allows it.
    Raises ``BadRequest``.
    """
    if not text.strip():
        if empty:
            return {}
        raise BadRequest("The body is empty.", malformed=True)
    try:
        body = orjson.loads(text)
    except ValueError as error:
        raise BadRequest(f"The body is no JSON: {error}.", malformed=True) from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", malformed=True)
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _is_deep(body):
        raise BadRequest(f"The body is nested more than {_DEEPEST} deep.", malformed=True)
    return body


_DEEPEST = 200
"""How deep a body may be nested: what is deeper cannot be shown, written into a trace or compared
within Python's own limit.
"""


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if type(part) is list or type(part) is dict
        ]
        if not level:
            return False
    return True


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """The value of ``name``, of one of ``kind`` (a bool is no number); ``default`` where it is
    absent or null.
    """
    value = body.get(name)
    if value is None:
        return default
    if type(value) is kind:
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(one.__name__ for one in kinds)
        raise BadRequest(
            f"{name} must be {wanted}, not {type(value).__name__}.", malformed=True, param=name
        )
    return value


_INTEGERS = frozenset({int})


def token_ids(value: Any, name: str, vocab: int) -> tuple[int, ...]:
    """Token ids of a request, each of the vocabulary."""
    if not isinstance(value, list) or not _INTEGERS.issuperset(map(type, value)):
        raise BadRequest(f"{name} must be a list of token ids.", malformed=True, param=name)
    if value and not (min(value) >= 0 and max(value) < vocab):
        raise BadRequest(f"{name} holds ids outside of the vocabulary of {vocab}.")
    return tuple(value)


class _Words(dict[int, str]):
    """The word of each token, made once: there are as many as the vocabulary has."""

    def __missing__(self, token: int) -> str:
        word = self[token] = f"w{token}"
        return word


_WORDS = _Words()


def text_of(tokens: Sequence[int]) -> str:
    """The fake's words for tokens: ``w5 w6``."""
    return " ".join(map(_WORDS.__getitem__, tokens))


def words_of(text: str, vocab: int) -> tuple[int, ...]:
    """Token ids of words ``w5``; any other word is a token made of its bytes."""
    ids = []
    for word in text.split():
        number = word.removeprefix("w")
        plain = number.isascii() and number.isdigit() and len(number) < 12
        ids.append(
            int(number) % vocab
            if plain
            else int(np.frombuffer(word.encode().ljust(8, b"\0")[:8], "<u8")[0] % vocab)
        )
    return tuple(ids)
