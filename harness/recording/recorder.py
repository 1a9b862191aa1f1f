"""Recording: a user's existing test becomes the input of the checks.

Works around sync and async code, on any event loop, in any number of threads: it stamps wall time
and never owns a loop. What the test does not tell (true versions, admissions) stays absent, and the
checks that need it stay unknown.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollproof.core.call_ownership import Owners
from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import describe_error, describe_error_with_place, show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Fault,
    Observation,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.core.files import check_target
from rollproof.core.json_codec import misfit_of
from rollproof.core.record_validation import validate_output, validate_request, validate_rollout
from rollproof.core.records import EngineOutput, Request, Rollout, Scalar, Version, as_tokens
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.errors import (
    ConformanceError,
    ExpectationError,
    RollproofError,
    SubjectError,
    TraceError,
    UsageError,
)
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.judging.registry import Registry
from rollproof.judging.report import Report
from rollproof.judging.situations import SituationCounter
from rollproof.recording.wrapping import Watched, check_wrapping, wrapped
from rollproof.reporting.text import check_lines, summary_text, text_of
from rollproof.verification.argument_checks import as_expected, as_names, as_path
from rollproof.verification.canary import SAMPLE_PLANTS, try_canary
from rollproof.verification.options import ROLLOUTS
from rollproof.verification.traces import judge

__all__ = ["EngineCall", "Recording", "record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCall:
    """What a call of the user's engine asks for.

    ``request_id`` may be left out: the rollout in whose context the call is made is meant, else the
    open request that sends these ``prompt_ids`` next, or whose prompt is the longest prefix of
    them. Where that leaves several (equal prompts, and calls from threads of an executor), none of
    them is judged: give the id.
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
    """Record what happens in a ``with`` block, judge it at the end, and raise ``ConformanceError``
    with what was found.

    ``contract`` is what the stack promises, ``engine`` what the engines below it do (where known).
    ``only`` selects checks, ``expected`` maps ids of checks known to fail to their reasons,
    ``save`` keeps the trace as a file for ``rollproof check``, ``on_report`` is handed the JSON
    report::

        with rollproof.record(contract) as trace:
            server.generate = trace.engine(server.generate, to_call=..., to_output=...)
            run = trace.rollout(client.generate, to_request=..., to_record=...)
            await run(prompt_ids)

    An exception of the block itself passes unchanged; what was recorded until then is saved, not
    judged. Raises ``UsageError`` where ``save`` cannot be written to, before the block, and at its
    end for requests that were submitted and never ended.
    """
    return Recording(
        contract,
        name=name,
        engine=engine,
        only=only,
        expected=expected,
        save=save,
        on_report=on_report,
    )


class Recording:
    """A run being recorded; ``recorded`` is the trace so far, ``report`` the outcome once the block
    has ended.
    """

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
            raise UsageError(
                "record() takes the Contract that the stack promises, not"
                f" {type(contract).__name__}."
            )
        if engine is not None and not isinstance(engine, Contract):
            raise UsageError(
                f"record() takes the engines' Contract as `engine`, not {type(engine).__name__}."
            )
        if not isinstance(name, str):
            raise UsageError(f"record() takes text as `name`, not {type(name).__name__}.")
        registry = default_registry()
        chosen = as_names(only, "only")
        self._registry = (
            registry.select(chosen)
            if chosen
            else Registry([check for check in registry if check.judges(ROLLOUTS)])
        )
        self._expected = as_expected(expected)
        self._header = Header(subject=name, contract=contract, engine=engine, profile="recorded")
        self._save = None if save is None else as_path(save, "save")
        if self._save is not None:
            check_target(self._save)
        self._on_report = on_report
        self._lock = threading.Lock()
        self._owners = Owners()
        self._submitted: set[str] = set()
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
        request = validate_request(request, "The caller of submit()")
        with self._lock:
            if request.request_id in self._owners:
                raise UsageError(
                    f"Request {request.request_id!r} is already open: give each rollout an id of"
                    " its own."
                )
            self._owners.begin(request)
            self._submitted.add(request.request_id)
            self._recorder.record(Submit(request=request))

    def result(
        self,
        rollout: Rollout | None = None,
        *,
        request_id: str | None = None,
        error: str | None = None,
    ) -> None:
        """A request has ended: with a sample, with an error, or dropped (neither given)."""
        if rollout is not None:
            rollout = validate_rollout(rollout, "The caller of result()")
        ended = rollout.request_id if rollout is not None else request_id
        if ended is None:
            raise UsageError(
                "result() needs a rollout, or the request_id of the request that ended without one."
            )
        event = Result(request_id=ended, rollout=rollout, error=error)
        _refuse_misfit(event, "result()")
        with self._lock:
            if ended not in self._submitted:
                raise UsageError(
                    f"Request {ended!r} ends but was never submitted: call submit() first. Open are"
                    f" {list(self._owners.ids)[:9] or 'none'}."
                )
            self._owners.end(ended)
            self._recorder.record(event)

    def rollout(
        self,
        function: Callable[..., Any],
        *,
        to_request: Callable[..., Request],
        to_record: Callable[[Any], Rollout],
    ) -> Callable[..., Any]:
        """Wrap the stack's own rollout function, sync or async, so that each call is recorded as
        one request.

        ``to_request`` is called with the arguments of the call, ``to_record`` with what it returned
        (not for ``None``, which says that the sample was dropped). An exception is recorded as the
        request's end and goes on to the caller.
        """

        def begin(*args: Any, **kwargs: Any) -> Watched:
            request = validate_request(to_request(*args, **kwargs), "to_request")
            self.submit(request)
            return Watched(
                take=lambda native: self._ended(request, native, to_record),
                fail=lambda error: self.result(
                    request_id=request.request_id, error=describe_error_with_place(error)
                ),
                request_id=request.request_id,
            )

        check_wrapping("rollout()", function, to_request=to_request, to_record=to_record)
        return wrapped(function, begin)

    def engine(
        self,
        function: Callable[..., Any],
        *,
        to_call: Callable[..., EngineCall],
        to_output: Callable[[Any], EngineOutput],
    ) -> Callable[..., Any]:
        """Wrap the function by which the stack calls an engine, sync or async, so that calls and
        replies are recorded.

        ``to_call`` is called with the arguments of the call, ``to_output`` with what the engine
        returned. A call that raises or is cancelled stays without a reply: its outcome is unknown
        to the caller, and it excuses the error that its request may end with.
        """

        def begin(*args: Any, **kwargs: Any) -> Watched:
            call_id = self._called(to_call(*args, **kwargs))

            def answered(native: Any) -> None:
                output = validate_output(to_output(native), "to_output")
                with self._lock:
                    self._owners.answered(call_id, output.token_ids)
                    self._recorder.record(Reply(call_id=call_id, output=output))

            def failed(error: BaseException) -> None:
                with self._lock:
                    self._owners.answered(call_id)
                    self._recorder.record(
                        Fault(what="lost-reply", call_id=call_id, detail=describe_error(error))
                    )

            return Watched(take=answered, fail=failed)

        check_wrapping("engine()", function, to_call=to_call, to_output=to_output)
        return wrapped(function, begin)

    def observation(self, request_id: str, token_ids: Iterable[int]) -> None:
        """The environment appends tokens to a request's sequence."""
        ids = as_tokens(
            token_ids
            if isinstance(token_ids, list | tuple) or hasattr(token_ids, "tolist")
            else _listed(token_ids)
        )
        self._add(Observation(request_id=request_id, token_ids=ids), "observation()")
        with self._lock:
            self._owners.extend(request_id, ids)

    def weights(
        self,
        version: Version,
        *,
        server: str = "s0",
        loaded: bool = True,
        identity: bool = False,
        flushed: bool = False,
    ) -> None:
        """A server's weights became ``version`` and were published under that label."""
        event = Weights(
            server_id=server,
            version=version,
            label=version,
            loaded=loaded,
            identity=identity,
            flushed=flushed,
        )
        self._add(event, "weights()")

    def pause(
        self,
        mode: PauseMode | str = PauseMode.ABORT,
        *,
        server: str = "s0",
        clear_cache: bool = False,
    ) -> None:
        """A server acknowledged a pause."""
        if mode not in list(PauseMode):
            raise UsageError(
                f"pause() takes one of the modes {[str(each) for each in PauseMode]}, not"
                f" {show(mode)}."
            )
        self._add(Pause(server_id=server, mode=PauseMode(mode), clear_cache=clear_cache), "pause()")

    def resume(self, *, server: str = "s0") -> None:
        """A server was resumed."""
        self._add(Resume(server_id=server), "resume()")

    def abort(self, wanted: str = "*", *, server: str = "s0") -> None:
        """Somebody asked a server to abort ``wanted`` (a request id, or ``"*"`` for all)."""
        self._add(Abort(server_id=server, wanted=wanted), "abort()")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True  # pytest then shows the line of the test
        trouble = self._saved()
        if error is not None:
            if trouble is not None:
                error.add_note(f"rollproof: {trouble}")
            return
        try:
            self._conclude()
        except RollproofError as found:
            if trouble is not None:
                found.add_note(str(trouble))
            raise
        if trouble is not None:
            raise trouble

    def _saved(self) -> TraceError | None:
        """Write the trace where it was asked for; why that failed, which must not hide what the
        block or the checks say.
        """
        if self._save is None:
            return None
        from rollproof.store import dump_trace

        try:
            self._save.parent.mkdir(parents=True, exist_ok=True)
            dump_trace(self.recorded, self._save)
        except (TraceError, OSError) as error:
            try:
                kept = Path(tempfile.mkdtemp(prefix="rollproof-")) / self._save.name
                dump_trace(self.recorded, kept)
            except (TraceError, OSError):
                return TraceError(
                    f"The recorded trace could not be saved: {describe_error(error)}."
                )
            return TraceError(
                f"The recorded trace could not be saved in its place: {describe_error(error)}. It"
                f" was kept as {kept}."
            )
        return None

    def _add(self, event: Event, where: str) -> None:
        _refuse_misfit(event, where)
        with self._lock:
            self._recorder.record(event)

    def _ended(self, request: Request, native: Any, to_record: Callable[[Any], Rollout]) -> None:
        if native is None:
            self.result(request_id=request.request_id)
            return
        rollout = validate_rollout(to_record(native), "to_record")
        if rollout.request_id != request.request_id:
            raise SubjectError(
                f"to_record returned the rollout of request {rollout.request_id!r} for request"
                f" {request.request_id!r}."
            )
        self.result(rollout)

    def _called(self, call: EngineCall) -> int:
        if not isinstance(call, EngineCall):
            raise SubjectError(
                "to_call must return an EngineCall (rollproof.recording.recorder), not"
                f" {type(call).__name__}."
            )
        prompt_ids = as_tokens(call.prompt_ids, what="prompt_ids of to_call's EngineCall")
        with self._lock:
            owners = (
                (call.request_id,) if call.request_id is not None else self._owners.of(prompt_ids)
            )
            event = Call(
                call_id=self._calls + 1,
                request_id=owners[0] if len(owners) == 1 else "",
                server_id=call.server_id,
                prompt_ids=prompt_ids,
                max_tokens=call.max_tokens,
                sampling={} if call.sampling is None else call.sampling,
                media=call.media,
                want_routes=call.want_routes,
                want_logprobs=call.want_logprobs,
                routes_start=call.routes_start,
                candidates=owners if len(owners) > 1 else (),
            )
            misfit = misfit_of(event)
            if misfit is not None:
                raise SubjectError(f"to_call returned an unusable EngineCall: {misfit}.")
            self._calls += 1
            self._owners.asks(event.call_id, event.request_id)
            self._recorder.record(replace(event, sampling=dict(event.sampling)))
        return event.call_id

    def _conclude(self) -> None:
        __tracebackhide__ = True
        if not self._submitted:
            raise UsageError(
                "Nothing was recorded: wrap the rollout function with trace.rollout(...), or call"
                " trace.submit(...)."
            )
        trace = self.recorded
        scenarios = SituationCounter()
        for event in trace.events:
            scenarios.event(event)
        results = judge(trace, self._registry).results
        passed = Registry([result.check for result in results if result.verdict is Verdict.PASS])
        fit = any(plant.check_id in passed.ids for plant in SAMPLE_PLANTS) or all(
            result.verdict is not Verdict.FAIL for result in results
        )
        self._report = Report(
            subject=self._header.subject,
            profile="recorded",
            seed=0,
            results=results,
            exercised=scenarios.counts,
            canary=try_canary([trace] if fit else [], passed, SAMPLE_PLANTS),
            expected=self._expected,
            cases=1,
        )
        data = self._report.to_dict()
        if self._on_report is not None:
            self._on_report(data)
        stale = [
            result.id
            for result in results
            if result.id in self._expected and result.verdict is Verdict.PASS
        ]
        if self._report.failed:
            failed = [
                line
                for check in data["checks"]
                if check["verdict"] == "fail"
                for line in check_lines(check)
            ]
            raise ConformanceError(
                f"{self._header.subject}: {summary_text(data)}\n{text_of(failed)}"
            )
        if stale:
            raise ExpectationError(
                f"Expected to fail, but passing: {', '.join(stale)}. Remove them from `expected`."
            )
        if self._owners.ids:
            raise UsageError(
                f"Requests {list(self._owners.ids)[:9]} were submitted and never ended within the"
                " block, so nothing is known of them: wait for them in the block, or tell their"
                " end with trace.result(...)."
            )


def _listed(value: Any) -> Any:
    """What can be iterated as a list; anything else as it is, to be refused."""
    return (
        list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value
    )


def _refuse_misfit(event: Event, where: str) -> None:
    misfit = misfit_of(event)
    if misfit is not None:
        raise UsageError(f"{where} was called with a value that no trace can hold: {misfit}.")
