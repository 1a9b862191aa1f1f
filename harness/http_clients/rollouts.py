"""``rollout``: what a function returns is the sample that its calls made.

A call belongs to the rollout in whose context (``contextvars``) it is made, so also to that of a
task or of ``asyncio.to_thread`` that the rollout starts. Threads of an executor have no context;
the server then goes by the tokens of the call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, TypeVar, overload

from rollproof.core.error_text import describe_error_with_place, show
from rollproof.core.events.rollout import Result, Submit
from rollproof.core.record_validation import validate_request, validate_rollout
from rollproof.core.records import Request, Rollout
from rollproof.core.report_headers import INTERNAL, ROLLOUT_HEADER
from rollproof.errors import SubjectError, UsageError
from rollproof.http_clients.server_addresses import URL, address_of, known_servers
from rollproof.store.json_format import wire_of

__all__ = ["headers", "internal", "rollout"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SECONDS = 30.0
"""How long a server may take to accept a report."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine: a proxy that the environment names cannot reach them."""
_FIELDS = tuple(field.name for field in fields(Rollout))
_REQUIRED = ("prompt_ids", "response_ids")


@dataclass(slots=True)
class _Running:
    """A rollout that runs.

    Attributes:
        name: what its calls are tagged with.
        server: the address to report to: that of its first call.
        elsewhere: an address that it called, and that is none of the servers.
    """

    name: str
    server: str | None = None
    elsewhere: str | None = None


_CURRENT: ContextVar[_Running | None] = ContextVar("rollproof_http_rollout", default=None)
"""The rollout in whose context code runs."""
_INSIDE: ContextVar[bool] = ContextVar("rollproof_http_internal", default=False)


def headers(url: str) -> Mapping[str, str]:
    """Return the headers to add to a call of ``url``: none outside of a rollout, and none if it is
    no fake server. For clients that no hook of this package fits.
    """
    running = _CURRENT.get()
    address = address_of(url)
    server = next((known for known in known_servers() if address_of(known) == address), None)
    if server is None:
        if running is not None:
            running.elsewhere = running.elsewhere or f"{address[0]}:{address[1]}"
        return {}
    # before the rollout is looked at: a judge that a rollout calls makes no part of its sample
    if _INSIDE.get():
        return {ROLLOUT_HEADER: INTERNAL}
    if running is None:
        return {}
    running.server = running.server or server
    return {ROLLOUT_HEADER: running.name}


@contextmanager
def internal() -> Iterator[None]:
    """Let the calls inside belong to no sample: a judge model, a warm-up, a health check."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


@overload
def rollout(
    function: _Function,
    /,
    *,
    to_request: Callable[..., Request] | None = ...,
    to_record: Callable[[Any], Any] | None = ...,
) -> _Function: ...
@overload
def rollout(
    *,
    to_request: Callable[..., Request] | None = ...,
    to_record: Callable[[Any], Any] | None = ...,
) -> Callable[[_Function], _Function]: ...


def rollout(
    function: Any = None,
    /,
    *,
    to_request: Callable[..., Request] | None = None,
    to_record: Callable[[Any], Any] | None = None,
) -> Any:
    """Make each call of a function, sync or async, one request; what it returns is the sample.

    The sample is a ``rollproof.Rollout``, or a mapping with its fields: ``prompt_ids``,
    ``response_ids``, ``finish_reason``, ``logprobs`` and what else the contract promises; its
    ``request_id`` is set for it. ``None`` is a sample that was dropped, an exception the end of the
    request; a rollout that its caller cancels is not judged. Without ``ROLLPROOF_URL`` the function
    runs as it is.

    Args:
        function: the function; without it the decorator takes the other arguments.
        to_request: returns the request, of the arguments of a call. Without it the first call to
            an engine shows the prompt, and budgets are not judged.
        to_record: returns the sample, of what the function returned.

    Raises:
        UsageError: ``function`` is a generator or no function. At a call: the server refuses the
            sample, or the rollout has made no call to it; the text says what to do.
        SubjectError: what the function returned is no sample.
    """

    def decorate(wrapped: Any) -> Any:
        _check_function(wrapped)
        begin = functools.partial(_Reported, to_request, to_record)

        @functools.wraps(wrapped)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            if not known_servers():
                return await wrapped(*args, **kwargs)
            async with begin(args, kwargs).around_async() as reported:
                reported.native = await wrapped(*args, **kwargs)
            return reported.native

        @functools.wraps(wrapped)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not known_servers():
                return wrapped(*args, **kwargs)
            with begin(args, kwargs).around() as reported:
                reported.native = wrapped(*args, **kwargs)
            return reported.native

        return call_async if _is_async(wrapped) else call

    return decorate if function is None else decorate(function)


class _Reported:
    """One call of a decorated function; ``native`` is what it returned."""

    def __init__(
        self,
        to_request: Callable[..., Request] | None,
        to_record: Callable[[Any], Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.native: Any = None
        # no counter: workers in several processes report to one server
        self._running = _Running(uuid.uuid4().hex)
        self._to_record = to_record
        self._request = (
            None
            if to_request is None
            else validate_request(to_request(*args, **kwargs), "to_request")
        )

    @contextmanager
    def around(self) -> Iterator[_Reported]:
        """Report the request before the block, and its end after it.

        A cancellation or an interruption is the caller's, and no end that the stack has chosen: the
        request is left open.
        """
        self._submit()
        try:
            with self._in_context():
                yield self
        except Exception as error:
            self._fail(error)
            raise
        self._deliver()

    @asynccontextmanager
    async def around_async(self) -> AsyncIterator[_Reported]:
        """Do the same without blocking the loop, in which the server may run."""
        await asyncio.to_thread(self._submit)
        try:
            with self._in_context():
                yield self
        except Exception as error:
            await asyncio.to_thread(self._fail, error)
            raise
        await asyncio.to_thread(self._deliver)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        current, inside = _CURRENT.set(self._running), _INSIDE.set(False)
        try:
            yield
        finally:
            _INSIDE.reset(inside)
            _CURRENT.reset(current)

    def _submit(self) -> None:
        if self._request is not None:
            self._running.server = known_servers()[0]
            self._report("submit", wire_of(Submit(request=self._request)))

    def _deliver(self) -> None:
        if self.native is None:
            self._end(Result(request_id=self._running.name))
            return
        sample = _sample_of(
            self.native if self._to_record is None else self._to_record(self.native),
            self._running.name,
            "rollout()" if self._to_record is None else "to_record",
        )
        if self._running.server is None:
            raise UsageError(_uncalled(self._running))
        self._report("result", wire_of(Result(request_id=sample.request_id, rollout=sample)))

    def _fail(self, error: Exception) -> None:
        text = describe_error_with_place(error)
        try:
            self._end(Result(request_id=self._running.name, error=text))
        # the error of the user's code is what matters, and must not be replaced by this one
        except UsageError as refusal:
            error.add_note(f"rollproof: {refusal}")

    def _end(self, event: Result) -> None:
        """Report the end of a request without a sample, if the server knows the request."""
        if self._running.server is not None:
            self._report("result", wire_of(event), unknown_ok=True)

    def _report(self, kind: str, event: Mapping[str, Any], *, unknown_ok: bool = False) -> None:
        url = self._running.server
        body = {name: value for name, value in event.items() if name not in _STAMPS}
        request = urllib.request.Request(  # noqa: S310 - the address of a fake server
            f"{url}/rollproof/{kind}",
            json.dumps(body).encode(),
            {"content-type": "application/json", ROLLOUT_HEADER: self._running.name},
            method="POST",
        )
        try:
            with _OPENER.open(request, timeout=_SECONDS) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            with error:
                text = _refusal_text(error.read())
            if not unknown_ok:
                raise UsageError(f"The {kind} of a rollout is refused: {text}") from None
        except OSError as error:
            raise UsageError(
                f"The fake server at {url} cannot be reached to report the {kind} of a rollout:"
                f" {error}. It has ended, or {URL} names another."
            ) from error


_STAMPS = frozenset({"kind", "index", "time"})
"""Fields of an event that the server writes."""


def _is_async(function: Any) -> bool:
    method = getattr(function, "__call__", None)  # noqa: B004 - of an object that can be called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _check_function(function: Any) -> None:
    if not callable(function) or inspect.isclass(function):
        raise UsageError(
            f"rollout() takes the function that makes one sample, not {show(function)}."
        )
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(
            f"rollout() cannot take {getattr(function, '__qualname__', function)!r}: it is a"
            " generator, whose tokens come after its call has returned. Take the function that"
            " collects them into one sample."
        )


def _sample_of(native: Any, request_id: str, where: str) -> Rollout:
    """Return a sample as a record. Raises ``SubjectError``."""
    if isinstance(native, Rollout):
        return validate_rollout(native, where)
    values = dict(native) if isinstance(native, Mapping) else {}
    missing = [name for name in _REQUIRED if name not in values]
    # a field under another name must not be taken for one that the stack has lost
    unknown = sorted(str(name) for name in values if name not in _FIELDS)
    if missing or unknown:
        have = f"without {' and '.join(missing)}" if missing else f"with {', '.join(unknown)}"
        raise SubjectError(
            f"The sample that {where} got is {_described(native)} {have}. A sample is a mapping"
            f" with fields of rollproof.Rollout: {', '.join(_FIELDS[1:])}. Say how yours is read:"
            " @rollout(to_record=lambda sample: {'prompt_ids': ..., 'response_ids': ..., ...})."
        )
    values.setdefault("finish_reason", None)
    return validate_rollout(Rollout(**{**values, "request_id": request_id}), where)


def _described(value: Any) -> str:
    name = type(value).__name__
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{size}"


def _uncalled(running: _Running) -> str:
    servers = ", ".join(known_servers())
    went = (
        f" It called {running.elsewhere}, which is another host."
        if running.elsewhere is not None
        else ""
    )
    return (
        f"A rollout returned a sample, and made no call to the fake servers ({servers})."
        f"{went} Give your client the address in {URL}, and a hook of rollproof.http_clients. A"
        " thread of an executor does not know its rollout: use asyncio.to_thread, or"
        " contextvars.copy_context."
    )


def _refusal_text(body: bytes) -> str:
    """Return the message in the body of a refusal, in whichever server's form it is."""
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    for _ in range(2):
        if isinstance(data, dict):
            data = data.get("message") or data.get("error") or data.get("detail")
    return data if isinstance(data, str) else body.decode(errors="replace")
