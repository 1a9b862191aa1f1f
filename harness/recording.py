"""Recording: a user's existing test becomes the input of the checks.

Works around sync and async code, on any event loop, in any number of threads: it stamps wall time and never owns a loop.
What the test does not tell (true versions, admissions) stays absent, and the checks that need it stay unknown.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollproof.canary import plants, try_canary
from rollproof.checks import Registry, Verdict, default_registry
from rollproof.console import check_lines, summary_text, text_of
from rollproof.contract import Contract
from rollproof.errors import ConformanceError, ExpectationError, SubjectError, UsageError
from rollproof.judge import judge
from rollproof.records import EngineOutput, Request, Rollout, Scalar, Version
from rollproof.report import Report
from rollproof.scenarios import Scenarios
from rollproof.telling import told
from rollproof.trace import (
    Abort,
    Call,
    Event,
    Header,
    Observation,
    Pause,
    PauseMode,
    Recorder,
    Reply,
    Result,
    Resume,
    Submit,
    Trace,
    Weights,
)

__all__ = ["EngineCall", "Recording", "record"]

_CURRENT: ContextVar[str | None] = ContextVar("rollproof_recorded_request", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCall:
    """What a call of the user's engine asks for.

    ``request_id`` may be left out: the innermost recorded rollout is meant, else the open request whose prompt is the
    longest prefix of ``prompt_ids``.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int | None
    request_id: str | None = None
    server_id: str = "s0"
    sampling: Mapping[str, Scalar] | None = None
    media: str | None = None
    want_routes: bool = True
    want_logprobs: bool = True
    routes_start: int = 0


def record(
    contract: Contract,
    *,
    name: str = "recorded",
    engine: Contract | None = None,
    only: Iterable[str] = (),
    expected: Mapping[str, str] | None = None,
    save: str | Path | None = None,
    on_report: Callable[[Mapping[str, Any]], None] | None = None,
) -> Recording:
    """Record what happens in a ``with`` block, judge it at the end, and raise ``ConformanceError`` with what was found.

    ``contract`` is what the stack promises, ``engine`` what the engines below it do (where known). ``only`` selects checks,
    ``expected`` maps ids of checks known to fail to their reasons, ``save`` keeps the trace as a file for ``rollproof check``,
    ``on_report`` is handed the JSON report::

        with rollproof.record(contract) as trace:
            server.generate = trace.engine(server.generate, to_call=..., to_output=...)
            run = trace.rollout(client.generate, to_request=..., to_record=...)
            await run(prompt_ids)

    An exception of the block itself passes unchanged; what was recorded until then is saved, not judged.
    """
    return Recording(contract, name=name, engine=engine, only=only, expected=expected, save=save, on_report=on_report)


class Recording:
    """A run being recorded; ``recorded`` is the trace so far, ``report`` the outcome once the block has ended."""

    def __init__(
        self,
        contract: Contract,
        *,
        name: str = "recorded",
        engine: Contract | None = None,
        only: Iterable[str] = (),
        expected: Mapping[str, str] | None = None,
        save: str | Path | None = None,
        on_report: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        if not isinstance(contract, Contract):
            raise UsageError(f"record() takes the Contract that the stack promises, not {type(contract).__name__}.")
        registry = default_registry()
        self._registry = registry.select(only) if (only := tuple(only)) else registry
        self._expected = dict(expected or {})
        for check_id in self._expected:
            registry[check_id]  # raises for an id that does not exist
        self._header = Header(subject=name, contract=contract, engine=engine, profile="recorded")
        self._save = None if save is None else Path(save)
        self._on_report = on_report
        self._lock = threading.Lock()
        self._open: dict[str, Request] = {}
        self._submitted = 0
        self._calls = 0
        start = time.monotonic()
        self._recorder = Recorder(lambda: time.monotonic() - start)
        self._report: Report | None = None

    @property
    def recorded(self) -> Trace:
        """What was recorded so far."""
        return self._recorder.trace(self._header)

    @property
    def report(self) -> Report:
        """The verdicts. Raises ``UsageError`` before the block has ended."""
        if self._report is None:
            raise UsageError("The verdicts are there once the `with` block has ended.")
        return self._report

    def submit(self, request: Request) -> None:
        """A caller hands ``request`` to the stack."""
        with self._lock:
            if request.request_id in self._open:
                raise UsageError(f"Request {request.request_id!r} is already open: give each rollout an id of its own.")
            self._open[request.request_id] = request
            self._submitted += 1
        self._add(Submit(request=request))

    def result(self, rollout: Rollout | None = None, *, request_id: str | None = None, error: str | None = None) -> None:
        """A request has ended: with a sample, with an error, or dropped (neither given)."""
        ended = rollout.request_id if rollout is not None else request_id
        if ended is None:
            raise UsageError("result() needs a rollout, or the request_id of the request that ended without one.")
        with self._lock:
            if ended not in self._open and not self._submitted:
                raise UsageError(f"Request {ended!r} ends but was never submitted: call submit() first.")
            self._open.pop(ended, None)
        self._add(Result(request_id=ended, rollout=rollout, error=error))

    def rollout(
        self, function: Callable[..., Any], *, to_request: Callable[..., Request], to_record: Callable[[Any], Rollout]
    ) -> Callable[..., Any]:
        """Wrap the stack's own rollout function, sync or async, so that each call is recorded as one request.

        ``to_request`` is called with the arguments of the call, ``to_record`` with what it returned (not for ``None``, which
        says that the sample was dropped). An exception is recorded as the request's end and goes on to the caller.
        """

        def begin(*args: Any, **kwargs: Any) -> _Watched:
            request = to_request(*args, **kwargs)
            if not isinstance(request, Request):
                raise SubjectError(f"to_request must return a Request, not {type(request).__name__}.")
            self.submit(request)
            return _Watched(
                take=lambda native: self._ended(request, native, to_record),
                fail=lambda error: self.result(request_id=request.request_id, error=told(error)),
                request_id=request.request_id,
            )

        return _wrapped(function, begin)

    def engine(
        self, function: Callable[..., Any], *, to_call: Callable[..., EngineCall], to_output: Callable[[Any], EngineOutput]
    ) -> Callable[..., Any]:
        """Wrap the function by which the stack calls an engine, sync or async, so that calls and replies are recorded.

        ``to_call`` is called with the arguments of the call, ``to_output`` with what the engine returned. A call that raises or is
        cancelled stays without a reply: its outcome is unknown to the caller.
        """

        def begin(*args: Any, **kwargs: Any) -> _Watched:
            call_id = self._called(to_call(*args, **kwargs))

            def answered(native: Any) -> None:
                output = to_output(native)
                if not isinstance(output, EngineOutput):
                    raise SubjectError(f"to_output must return an EngineOutput, not {type(output).__name__}.")
                self._add(Reply(call_id=call_id, output=output))

            return _Watched(take=answered, fail=_ignore)

        return _wrapped(function, begin)

    def observation(self, request_id: str, token_ids: Iterable[int]) -> None:
        """The environment appends tokens to a request's sequence."""
        self._add(Observation(request_id=request_id, token_ids=tuple(token_ids)))

    def weights(self, version: Version, *, server: str = "s0", loaded: bool = True, identity: bool = False, flushed: bool = False) -> None:
        """A server's weights became ``version`` and were published under that label."""
        self._add(Weights(server_id=server, version=version, label=version, loaded=loaded, identity=identity, flushed=flushed))

    def pause(self, mode: PauseMode | str = PauseMode.ABORT, *, server: str = "s0", clear_cache: bool = False) -> None:
        """A server acknowledged a pause."""
        self._add(Pause(server_id=server, mode=PauseMode(mode), clear_cache=clear_cache))

    def resume(self, *, server: str = "s0") -> None:
        """A server was resumed."""
        self._add(Resume(server_id=server))

    def abort(self, wanted: str = "*", *, server: str = "s0") -> None:
        """Somebody asked a server to abort ``wanted`` (a request id, or ``"*"`` for all)."""
        self._add(Abort(server_id=server, wanted=wanted))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._save is not None:
            from rollproof.store import dump_trace

            dump_trace(self.recorded, self._save)
        if error is None:
            self._conclude()

    def _add(self, event: Event) -> None:
        with self._lock:
            self._recorder.record(event)

    def _ended(self, request: Request, native: Any, to_record: Callable[[Any], Rollout]) -> None:
        if native is None:
            self.result(request_id=request.request_id)
            return
        rollout = to_record(native)
        if not isinstance(rollout, Rollout):
            raise SubjectError(f"to_record must return a Rollout, not {type(rollout).__name__}.")
        if rollout.request_id != request.request_id:
            raise SubjectError(f"to_record returned the rollout of request {rollout.request_id!r} for request {request.request_id!r}.")
        self.result(rollout)

    def _called(self, call: EngineCall) -> int:
        if not isinstance(call, EngineCall):
            raise SubjectError(f"to_call must return an EngineCall (rollproof.recording), not {type(call).__name__}.")
        with self._lock:
            self._calls += 1
            call_id = self._calls
        self._add(
            Call(
                call_id=call_id,
                request_id=call.request_id or self._request_of(call),
                server_id=call.server_id,
                prompt_ids=tuple(call.prompt_ids),
                max_tokens=call.max_tokens,
                sampling=dict(call.sampling or {}),
                media=call.media,
                want_routes=call.want_routes,
                want_logprobs=call.want_logprobs,
                routes_start=call.routes_start,
            )
        )
        return call_id

    def _request_of(self, call: EngineCall) -> str:
        current = _CURRENT.get()
        if current in self._open:
            return str(current)
        with self._lock:
            fits = [r for r in self._open.values() if tuple(call.prompt_ids[: len(r.prompt_ids)]) == tuple(r.prompt_ids)]
        if not fits:
            raise UsageError(
                "An engine call cannot be attributed: no open request's prompt begins its prompt_ids. Record the request first (submit or"
                " rollout), or give `request_id` in the EngineCall."
            )
        return max(fits, key=lambda request: len(request.prompt_ids)).request_id

    def _conclude(self) -> None:
        if not self._submitted:
            raise UsageError("Nothing was recorded: wrap the rollout function with trace.rollout(...), or call trace.submit(...).")
        trace = self.recorded
        scenarios = Scenarios()
        for event in trace.events:
            scenarios.event(event)
        results = judge(trace, self._registry).results
        passed = Registry([result.check for result in results if result.verdict is Verdict.PASS])
        fit = any(plant.check_id in passed.ids for plant in plants()) or all(result.verdict is not Verdict.FAIL for result in results)
        self._report = Report(
            subject=self._header.subject,
            profile="recorded",
            seed=0,
            results=results,
            exercised=scenarios.counts,
            canary=try_canary([trace] if fit else [], passed),
            expected=self._expected,
            cases=1,
        )
        data = self._report.to_dict()
        if self._on_report is not None:
            self._on_report(data)
        stale = [result.id for result in results if result.id in self._expected and result.verdict is Verdict.PASS]
        if self._report.failed:
            failed = [line for check in data["checks"] if check["verdict"] == "fail" for line in check_lines(check)]
            raise ConformanceError(f"{self._header.subject}: {summary_text(data)}\n{text_of(failed)}")
        if stale:
            raise ExpectationError(f"Expected to fail, but passing: {', '.join(stale)}. Remove them from `expected`.")


def _ignore(error: BaseException) -> None:
    """Record nothing."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """One call of a wrapped function: what to do with its outcome, and the request that it is about (for rollouts)."""

    take: Callable[[Any], None]
    fail: Callable[[BaseException], None]
    request_id: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attribute engine calls made meanwhile, and tell a failure."""
        token = _CURRENT.set(self.request_id) if self.request_id is not None else None
        try:
            yield
        except BaseException as error:  # cancellation is an outcome too; it goes on to the caller
            self.fail(error)
            raise
        finally:
            if token is not None:
                _CURRENT.reset(token)


def _wrapped(function: Callable[..., Any], begin: Callable[..., _Watched]) -> Callable[..., Any]:
    """``function`` with its calls watched; sync, async, or sync and returning an awaitable (``handle.method.remote``)."""

    async def finished(watched: _Watched, awaitable: Awaitable[Any]) -> Any:
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
        watched.take(native)
        return native

    return later if inspect.iscoroutinefunction(function) else now
