"""Wrapping: functions of a user's, sync, async or returning an awaitable, whose calls are watched."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollproof.core.call_ownership import CURRENT, Running, here
from rollproof.core.error_text import show
from rollproof.errors import UsageError

__all__ = ["Watched", "check_wrapping", "wrapped"]

_STREAMING = (
    "Wrap the function that gathers its items into one answer, or tell what happens with"
    " trace.submit(...) and trace.result(...)."
)


def check_wrapping(where: str, function: Any, **callbacks: Any) -> None:
    """Refuse what cannot be wrapped: a generator's tokens come after its call, where nobody watches
    any more.
    """
    for name, given in {"function": function, **callbacks}.items():
        if not callable(given):
            raise UsageError(f"{where} takes a function as `{name}`, not {show(given)}.")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(
            f"{where} cannot record {getattr(function, '__qualname__', function)!r}: it is a"
            f" generator. {_STREAMING}"
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """One call of a wrapped function: what to do with its outcome, and the request that it is about
    (for rollouts).
    """

    take: Callable[[Any], None]
    fail: Callable[[BaseException], None]
    request_id: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attribute engine calls made meanwhile, and tell a failure."""
        token = (
            CURRENT.set(Running(self.request_id, here())) if self.request_id is not None else None
        )
        try:
            yield
        except BaseException as error:  # cancellation is an outcome too; it goes on to the caller
            self.fail(error)
            raise
        finally:
            if token is not None:
                CURRENT.reset(token)


def wrapped(function: Callable[..., Any], begin: Callable[..., Watched]) -> Callable[..., Any]:
    """``function`` with its calls watched; sync, async, or sync and returning an awaitable
    (``handle.method.remote``).
    """

    async def finished(watched: Watched, awaitable: Awaitable[Any]) -> Any:
        with watched.running():
            native = await awaitable
        watched.take(native)
        return native

    @functools.wraps(function)
    async def later(*args: Any, **kwargs: Any) -> Any:
        return await finished(begin(*args, **kwargs), function(*args, **kwargs))

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        watched = begin(*args, **kwargs)
        with watched.running():
            native = function(*args, **kwargs)
        if inspect.isawaitable(native):
            return finished(watched, native)
        if inspect.isasyncgen(native) or inspect.isgenerator(native):
            stray = UsageError(f"A call that is recorded returned a generator. {_STREAMING}")
            watched.fail(stray)
            raise stray
        watched.take(native)
        return native

    return later if inspect.iscoroutinefunction(function) else now
