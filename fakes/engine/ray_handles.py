"""Ray-style face: ``handle.method.remote(...)`` on an in-process object, without Ray."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

__all__ = ["RayHandle"]


class RayHandle:
    """Looks like the handle of an actor that wraps ``obj``.

    ``handle.method.remote(*args, **kwargs)`` starts the call at once and returns a future, for
    async and sync methods alike; what the method raises arrives when the future is awaited. Needs a
    running event loop.
    """

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __getattr__(self, name: str) -> _RemoteMethod:
        method = getattr(self._obj, name)
        if not callable(method):
            raise AttributeError(  # noqa: TRY004 - what getattr promises
                f"{type(self._obj).__name__}.{name} is not a method: an actor handle has nothing"
                " but methods."
            )
        return _RemoteMethod(method)

    def __repr__(self) -> str:
        return f"RayHandle({self._obj!r})"


class _RemoteMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Start the call."""
        loop = asyncio.get_running_loop()
        try:
            result = self._method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the future
            failed: asyncio.Future[Any] = loop.create_future()
            failed.set_exception(error)
            # a caller that fires and forgets is not warned about it, as with Ray
            failed.exception()
            return failed
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(result)
            task.add_done_callback(_seen)
            return task
        done: asyncio.Future[Any] = loop.create_future()
        done.set_result(result)
        return done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Methods of an actor handle are called with .remote(...).")


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
