"""Ray-style handles: ``handle.method.remote(...)`` on an in-process object, without Ray."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

__all__ = ["RayHandle"]


class RayHandle:
    """Stands in for the Ray handle of an actor that wraps ``obj``.

    ``handle.method.remote(*args, **kwargs)`` starts the call and returns a future, for async and
    for sync methods; an error of the method is raised when the future is awaited. Needs a running
    event loop.
    """

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __getattr__(self, name: str) -> _RemoteMethod:
        method = getattr(self._obj, name)
        if not callable(method):
            raise AttributeError(  # noqa: TRY004 - getattr expects an AttributeError
                f"{type(self._obj).__name__}.{name} is not a method: an actor handle has only"
                " methods."
            )
        return _RemoteMethod(method)

    def __repr__(self) -> str:
        return f"RayHandle({self._obj!r})"


class _RemoteMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Start the call and return its future."""
        loop = asyncio.get_running_loop()
        try:
            result = self._method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            failed: asyncio.Future[Any] = loop.create_future()
            failed.set_exception(error)
            # Ray does not warn a caller that never awaits the future, so asyncio must not either
            failed.exception()
            return failed
        if inspect.isawaitable(result):
            # scheduled now: an actor starts a method without waiting for an await of its result
            task = asyncio.ensure_future(result)
            task.add_done_callback(_retrieve_error)
            return task
        done: asyncio.Future[Any] = loop.create_future()
        done.set_result(result)
        return done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Methods of an actor handle are called with .remote(...).")


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
