"""Application: what every face does alike with a request: routes, bodies read and checked, refusals as the statuses of their kind."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollproof.fakes.failures import BadCall, ReplyLost, ServerDied

__all__ = ["BadRequest", "Cut", "Handler", "application", "body_of", "field", "text_of", "token_ids", "words_of"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class BadRequest(Exception):
    """The client is at fault: ``status`` is what the server answers, the text what it says.

    ``malformed`` says that the body has not the form of a request at all: servers word that otherwise than a wrong value.
    """

    def __init__(self, text: str, status: int = 400, *, malformed: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.malformed = malformed


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
        raise BadRequest("The body is empty.", malformed=True)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is no JSON: {error}.", malformed=True) from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", malformed=True)
    return body


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """The value of ``name``, of one of ``kind`` (a bool is no number); ``default`` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise BadRequest(f"{name} must be {' or '.join(one.__name__ for one in kinds)}, not {type(value).__name__}.", malformed=True)
    return value


def token_ids(value: Any, name: str, vocab: int) -> tuple[int, ...]:
    """Token ids of a request, each of the vocabulary."""
    if not isinstance(value, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise BadRequest(f"{name} must be a list of token ids.", malformed=True)
    if any(not 0 <= token < vocab for token in value):
        raise BadRequest(f"{name} holds ids outside of the vocabulary of {vocab}.")
    return tuple(value)


Wrong: TypeAlias = Callable[[BadRequest], Mapping[str, Any]]
"""How a server words a refusal: the JSON object that it sends."""


def application(posts: Mapping[str, Handler], gets: Mapping[str, Handler], either: Mapping[str, Handler], *, wrong: Wrong) -> Starlette:
    """An application with these endpoints by method; whatever is wrong with a request is answered in the words of ``wrong``."""
    kinds = ((posts, ["POST"]), (gets, ["GET"]), (either, ["GET", "POST"]))
    routes = [Route(path, _answered(handler, wrong), methods=methods) for some, methods in kinds for path, handler in some.items()]

    async def not_found(_request: Request, _error: Exception) -> Response:
        return JSONResponse({"detail": "Not Found"}, 404)

    async def not_allowed(_request: Request, _error: Exception) -> Response:
        return JSONResponse({"detail": "Method Not Allowed"}, 405)

    return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_allowed})


def _answered(handler: Handler, wrong: Wrong) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except BadRequest as error:
            return JSONResponse(wrong(error), error.status)
        except BadCall as error:
            return JSONResponse(wrong(BadRequest(str(error))), 400)
        except (ServerDied, ReplyLost):
            return Cut()

    return answer


class Cut(Response):
    """No answer: the connection breaks. A server that cannot break it (uvicorn on a socket) answers 503."""

    message: Mapping[str, str] = {"type": "rollproof.cut"}

    def __init__(self) -> None:
        super().__init__(status_code=503)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "rollproof.cut" in scope.get("extensions", {}):
            await send(self.message)
        else:
            await super().__call__(scope, receive, send)


def text_of(tokens: Sequence[int]) -> str:
    """The fake's words for tokens: ``w5 w6``."""
    return " ".join(f"w{token}" for token in tokens)


def words_of(text: str, vocab: int) -> tuple[int, ...]:
    """Token ids of words ``w5``; any other word is a token made of its bytes."""
    ids = []
    for word in text.split():
        number = word.removeprefix("w")
        ids.append(int(number) % vocab if number.isdigit() else int(np.frombuffer(word.encode().ljust(8, b"\0")[:8], "<u8")[0] % vocab))
    return tuple(ids)
