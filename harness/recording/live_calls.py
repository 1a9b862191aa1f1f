"""Wrappers around what a production loop calls: they report, and never fail the loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from rollproof.recording.wrapping import WatchedCall

__all__ = ["RecordedActor", "watch_live"]

Begin = Callable[..., WatchedCall]


def watch_live(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    """Return ``function`` with a wrapper that calls ``begin`` before each call.

    What is returned may be a value, an awaitable, or a generator, sync or async: of a generator
    the last item is reported, as an engine's holds all tokens so far.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watched = begin(*args, **kwargs)
        with watched.running():
            native = function(*args, **kwargs)
        return _watched_result(watched, native)

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        watched = begin(*args, **kwargs)
        with watched.running():
            native = await function(*args, **kwargs)
        watched.take(native)
        return native

    return call_async if inspect.iscoroutinefunction(function) else call


def _watched_result(watched: WatchedCall, native: Any) -> Any:
    if inspect.isasyncgen(native):
        return _watched_async_items(watched, native)
    if inspect.isgenerator(native):
        return _watched_items(watched, native)
    # it must stay a future: its caller may cancel it, or wait for it together with others
    if isinstance(native, asyncio.Future):
        native.add_done_callback(functools.partial(_report_future, watched))
        return native
    future = getattr(native, "future", None)
    if callable(future):
        # a Ray ObjectRef, which its caller may pass to ray.get: it stays as it is
        done: Any = future()
        done.add_done_callback(functools.partial(_report_future, watched))
        return native
    if inspect.isawaitable(native):
        return _awaited(watched, native)
    watched.take(native)
    return native


async def _awaited(watched: WatchedCall, awaitable: Awaitable[Any]) -> Any:
    with watched.running():
        native = await awaitable
    watched.take(native)
    return native


async def _watched_async_items(watched: WatchedCall, items: Any) -> AsyncIterator[Any]:
    item, came = None, False
    try:
        async for item in items:
            came = True
            yield item
    # a closed generator raises GeneratorExit here, and a cancelled task CancelledError
    except BaseException as error:
        watched.fail(error)
        raise
    finally:
        # whoever stops early closes the wrapper; an engine aborts when its own one is closed
        await items.aclose()
    if came:
        watched.take(item)
    else:
        watched.fail(RuntimeError("the stream had no item"))


def _watched_items(watched: WatchedCall, items: Any) -> Iterator[Any]:
    item, came = None, False
    try:
        for item in items:
            came = True
            yield item
    except BaseException as error:
        watched.fail(error)
        raise
    finally:
        items.close()
    if came:
        watched.take(item)
    else:
        watched.fail(RuntimeError("the stream had no item"))


def _report_future(watched: WatchedCall, future: Any) -> None:
    if future.cancelled():
        watched.fail(asyncio.CancelledError("it was cancelled"))
        return
    error = future.exception()
    if error is not None:
        watched.fail(error)
    else:
        watched.take(future.result())


class RecordedActor:
    """A Ray actor handle, one method of which is recorded: ``handle.METHOD.remote(...)``.

    Everything else of the handle is what it was. Ray itself is not needed.
    """

    def __init__(self, handle: Any, method: str, begin: Begin) -> None:
        self._handle = handle
        recorded = getattr(handle, method)
        setattr(self, method, _RecordedMethod(recorded, watch_live(recorded.remote, begin)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class _RecordedMethod:
    def __init__(self, method: Any, remote: Callable[..., Any]) -> None:
        self._method = method
        self.remote = remote

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)
