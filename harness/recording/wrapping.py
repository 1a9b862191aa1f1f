"""Wrappers around functions of a user that report each call, sync or async."""

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

__all__ = ["WatchedCall", "check_wrapping", "watch_calls"]

_STREAMING = (
    "Wrap the function that collects its items into one answer, or report what happens with"
    " trace.submit(...) and trace.result(...)."
)


def check_wrapping(method: str, function: Any, **callbacks: Any) -> None:
    """Raise ``UsageError`` for a generator, and for what is not callable."""
    # The tokens of a generator come after its call has returned, when the wrapper has ended.
    for name, value in {"function": function, **callbacks}.items():
        if not callable(value):
            raise UsageError(f"{method} takes a function as `{name}`, not {show(value)}.")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(
            f"{method} cannot record {getattr(function, '__qualname__', function)!r}: it is a"
            f" generator. {_STREAMING}"
        )


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """One call of a wrapped function.

    ``take`` gets its result, ``fail`` its exception. ``request_id`` is the request of a rollout.
    """

    take: Callable[[Any], None]
    fail: Callable[[BaseException], None]
    request_id: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attribute engine calls of the block to the request, and report its failure."""
        token = (
            CURRENT.set(Running(self.request_id, here())) if self.request_id is not None else None
        )
        try:
            yield
        except BaseException as error:  # also a cancellation, which is an outcome too
            self.fail(error)
            raise
        finally:
            if token is not None:
                CURRENT.reset(token)


def watch_calls(
    function: Callable[..., Any], begin: Callable[..., WatchedCall]
) -> Callable[..., Any]:
    """Return ``function`` with a wrapper that calls ``begin`` before each call."""

    async def finished(watched: WatchedCall, awaitable: Awaitable[Any]) -> Any:
        with watched.running():
            native = await awaitable
        # outside of the block: what a callback raises is no failure of the call
        watched.take(native)
        return native

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await finished(begin(*args, **kwargs), function(*args, **kwargs))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watched = begin(*args, **kwargs)
        with watched.running():
            native = function(*args, **kwargs)
        if inspect.isawaitable(native):
            # a sync function that returns an awaitable, such as Ray's `handle.method.remote`
            return finished(watched, native)
        if inspect.isasyncgen(native) or inspect.isgenerator(native):
            error = UsageError(f"A recorded call returned a generator. {_STREAMING}")
            watched.fail(error)
            raise error
        watched.take(native)
        return native

    return call_async if inspect.iscoroutinefunction(function) else call
