"""``record``: records what happens in a test that a user has already, and judges it.

It works around sync and async code, on any event loop and in any number of threads: events have
wall time, and it never owns a loop. What the test does not report (true versions, admissions) stays
absent, and the checks that need it stay unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollproof.core.call_ownership import Owners, named_request
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
from rollproof.core.events.weights import Checksums
from rollproof.core.files import check_target
from rollproof.core.json_codec import misfit_of
from rollproof.core.record_validation import validate_output, validate_request, validate_samples
from rollproof.core.records import EngineOutput, Request, Rollout, Scalar, Version, as_tokens
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.errors import (
    RollproofError,
    SubjectError,
    TraceError,
    UsageError,
)
from rollproof.judging.report import Report
from rollproof.recording.saving import save_trace
from rollproof.recording.verdicts import checks_of_rollouts, raise_for_verdicts, report_of
from rollproof.recording.wrapping import WatchedCall, check_wrapping, watch_calls
from rollproof.verification.argument_checks import as_expected, as_path

__all__ = ["EngineCall", "Recording", "record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCall:
    """The request of one call to an engine of the user.

    ``request_id`` is the id of a rollout's request, or a handle that begins with it and ``-``,
    ``_``, ``:``, ``/`` or ``.``. Without it the call belongs to the rollout in whose context it is
    made, else to the one request that its tokens fit; if several remain, none of them is judged.
    ``adapter`` is the name of the adapter that is to serve it, ``want_sampling_mask`` whether it
    requests sampling masks.
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
    adapter: str | None = None
    want_sampling_mask: bool = False

    def to_event(self, call_id: int, prompt_ids: tuple[int, ...], owners: tuple[str, ...]) -> Call:
        """Return the event of the call; ``owners`` are the requests that may have made it."""
        return Call(
            call_id=call_id,
            request_id=owners[0] if len(owners) == 1 else "",
            server_id=self.server_id,
            prompt_ids=prompt_ids,
            max_tokens=self.max_tokens,
            sampling={} if self.sampling is None else self.sampling,
            media=self.media,
            want_routes=self.want_routes,
            want_logprobs=self.want_logprobs,
            routes_start=self.routes_start,
            adapter=self.adapter,
            want_sampling_mask=self.want_sampling_mask,
            candidates=owners if len(owners) > 1 else (),
        )


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
    """Record what happens in a ``with`` block, and judge it at the end.

    Raises ``ConformanceError`` with the findings::

        with rollproof.record(contract) as trace:
            server.generate = trace.engine(server.generate, to_call=..., to_output=...)
            run = trace.rollout(client.generate, to_request=..., to_record=...)
            await run(prompt_ids)

    Args:
        contract: what the stack promises.
        name: the subject's name in the report.
        engine: what the engines promise, if it is known.
        only: ids or families of checks; default: all checks of rollouts.
        expected: ids of checks that are known to fail, with the reason.
        save: a file for the trace, which ``rollproof check`` reads.
        on_report: is called with the JSON report.

    An exception of the block itself passes unchanged; the trace is then saved, but not judged.
    Raises ``UsageError`` before the block if ``save`` cannot be written, and at its end for
    requests that were submitted and never ended.
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
    """A run that is being recorded."""

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
        self._registry = checks_of_rollouts(only)
        self._expected = as_expected(expected)
        self._header = Header(subject=name, contract=contract, engine=engine, profile="recorded")
        self._save = None if save is None else as_path(save, "save")
        if self._save is not None:
            check_target(self._save)
        self._on_report = on_report
        # Calls come from any thread; the order of events is the order in which they take the lock.
        self._lock = threading.Lock()
        self._owners = Owners()
        # ended ones stay: a request that ends twice is for the checks to find
        self._submitted: set[str] = set()
        self._calls = 0
        start = time.monotonic()
        self._recorder = Recorder(lambda: time.monotonic() - start)
        self._report: Report | None = None

    @property
    def recorded(self) -> Trace:
        """The trace so far."""
        return self._recorder.trace(self._header)

    @property
    def report(self) -> Report:
        """The verdicts. Raises ``UsageError`` before the block has ended."""
        if self._report is None:
            raise UsageError("There are no verdicts before the `with` block has ended.")
        return self._report

    def submit(self, request: Request) -> None:
        """Record that a caller submits ``request`` to the stack."""
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
        rollout: Rollout | Sequence[Rollout] | None = None,
        *,
        request_id: str | None = None,
        error: str | None = None,
    ) -> None:
        """Record the end of a request: a sample (a list of them if the contract says that there may
        be several), an error, or neither if it was dropped.
        """
        samples = self._samples_of(rollout, "The caller of result()")
        ended = samples[0].request_id if samples else request_id
        if ended is None:
            raise UsageError(
                "result() needs a rollout, or the request_id of the request that ended without one."
            )
        # Checked before the lock is taken, so that a wrong value leaves the recording as it was.
        event = Result(
            request_id=ended,
            rollout=samples[-1] if samples else None,
            earlier=samples[:-1],
            error=error,
        )
        _refuse_misfit(event, "result()")
        with self._lock:
            if ended not in self._submitted:
                raise UsageError(
                    f"Request {ended!r} ends but was never submitted: call submit() first. Open"
                    f" requests: {list(self._owners.ids)[:9] or 'none'}."
                )
            self._owners.end(ended)
            self._recorder.record(event)

    def rollout(
        self,
        function: Callable[..., Any],
        *,
        to_request: Callable[..., Request],
        to_record: Callable[[Any], Rollout | Sequence[Rollout]],
    ) -> Callable[..., Any]:
        """Wrap the stack's rollout function, sync or async; each call is recorded as one request.

        ``to_request`` gets the arguments of the call, ``to_record`` its result, unless that is
        ``None`` (the sample was dropped); it returns the sample, or a list of samples if the
        contract says that there may be several. An exception is recorded as the end of the
        request, and raised to the caller.
        """

        def begin(*args: Any, **kwargs: Any) -> WatchedCall:
            request = validate_request(to_request(*args, **kwargs), "to_request")
            self.submit(request)
            return WatchedCall(
                take=lambda native: self._record_end(request, native, to_record),
                fail=lambda error: self.result(
                    request_id=request.request_id, error=describe_error_with_place(error)
                ),
                request_id=request.request_id,
            )

        check_wrapping("rollout()", function, to_request=to_request, to_record=to_record)
        return watch_calls(function, begin)

    def engine(
        self,
        function: Callable[..., Any],
        *,
        to_call: Callable[..., EngineCall],
        to_output: Callable[[Any], EngineOutput],
    ) -> Callable[..., Any]:
        """Wrap the function with which the stack calls an engine; records calls and replies.

        ``to_call`` gets the arguments of the call, ``to_output`` what the engine returned. A call
        that raises or is cancelled has no reply: its outcome is unknown to the caller, and excuses
        an error of its request.
        """

        def begin(*args: Any, **kwargs: Any) -> WatchedCall:
            call_id = self._record_call(to_call(*args, **kwargs))

            def succeeded(native: Any) -> None:
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

            return WatchedCall(take=succeeded, fail=failed)

        check_wrapping("engine()", function, to_call=to_call, to_output=to_output)
        return watch_calls(function, begin)

    def observation(self, request_id: str, token_ids: Iterable[int]) -> None:
        """Record tokens that the environment appends to a request's sequence."""
        # A generator is read once, outside the lock.
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
        adapter: str | None = None,
        base: Version = None,
        delta_of: Version = None,
    ) -> None:
        """Record that a server has the weights ``version``, and shows that label; ``adapter``,
        ``base`` and ``delta_of`` as in ``Weights``.
        """
        event = Weights(
            server_id=server,
            version=version,
            label=version,
            loaded=loaded,
            identity=identity,
            flushed=flushed,
            adapter=adapter,
            base=base,
            delta_of=delta_of,
        )
        self._add(event, "weights()")

    def checksums(
        self,
        digests: Mapping[str, str],
        *,
        version: Version = None,
        server: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Record the checksum of each tensor, by its name, as the trainer told them, or ``server``.

        Without a ``version`` they are those of the weights that the server has.
        """
        if not isinstance(digests, Mapping) or not digests:
            raise UsageError(
                f"checksums() takes the checksum of each tensor by its name, not {show(digests)}."
            )
        wrong = next(
            (
                name
                for name, digest in digests.items()
                if not (isinstance(name, str) and isinstance(digest, str) and digest)
            ),
            None,
        )
        if wrong is not None:
            raise UsageError(
                f"checksums() takes texts: that of tensor {show(wrong)} is {show(digests[wrong])}."
            )
        if server is None and version is None:
            raise UsageError(
                "checksums() of a trainer needs the version of its weights: without it there is"
                " nothing to compare them with."
            )
        event = Checksums(version=version, digests=dict(digests), server_id=server, adapter=adapter)
        self._add(event, "checksums()")

    def pause(
        self,
        mode: PauseMode | str = PauseMode.ABORT,
        *,
        server: str = "s0",
        clear_cache: bool = False,
    ) -> None:
        """Record that a server acknowledged a pause."""
        if mode not in list(PauseMode):
            raise UsageError(
                f"pause() takes one of the modes {[str(known) for known in PauseMode]}, not"
                f" {show(mode)}."
            )
        self._add(Pause(server_id=server, mode=PauseMode(mode), clear_cache=clear_cache), "pause()")

    def resume(self, *, server: str = "s0") -> None:
        """Record that a server was resumed."""
        self._add(Resume(server_id=server), "resume()")

    def abort(self, wanted: str = "*", *, server: str = "s0") -> None:
        """Record a request to abort ``wanted``: a request id, or ``"*"`` for all."""
        self._add(Abort(server_id=server, wanted=wanted), "abort()")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True  # so that pytest shows the line of the test
        # The trace is saved first: it must not be lost to a failing check, and a failing write must
        # not hide what the block or the checks raise.
        trouble = self._save_trace()
        if error is not None:
            if trouble is not None:
                error.add_note(f"rollproof: {trouble}")
            return
        try:
            self._conclude()
        except RollproofError as outcome:
            if trouble is not None:
                outcome.add_note(str(trouble))
            raise
        if trouble is not None:
            raise trouble

    def _save_trace(self) -> TraceError | None:
        """Write the trace to its file; returns the error if that failed."""
        return None if self._save is None else save_trace(self.recorded, self._save)

    def _add(self, event: Event, method: str) -> None:
        _refuse_misfit(event, method)
        with self._lock:
            self._recorder.record(event)

    def _record_end(
        self,
        request: Request,
        native: Any,
        to_record: Callable[[Any], Rollout | Sequence[Rollout]],
    ) -> None:
        if native is None:
            self.result(request_id=request.request_id)
            return
        samples = self._samples_of(to_record(native), "to_record")
        # The field's frameworks build samples from batches, where rows are easily swapped.
        for sample in samples:
            if sample.request_id != request.request_id:
                raise SubjectError(
                    f"to_record returned the rollout of request {sample.request_id!r} for request"
                    f" {request.request_id!r}."
                )
        self.result(
            samples if self._header.contract.delivers_several else samples[0],
            request_id=request.request_id,
        )

    def _samples_of(
        self, value: Rollout | Sequence[Rollout] | None, where: str
    ) -> tuple[Rollout, ...]:
        if value is None:
            return ()
        samples = validate_samples(value, where, self._header.contract)
        names = {sample.request_id for sample in samples}
        if len(names) > 1:
            raise SubjectError(
                f"{where} returned samples of the requests {sorted(names)} as those of one request."
            )
        return samples

    def _owners_of(self, handle: str | None, prompt_ids: tuple[int, ...]) -> tuple[str, ...]:
        if handle is None:
            return self._owners.of(prompt_ids)
        # an open request first: ids of ended ones may be the beginning of its own
        named = named_request(handle, self._owners) or named_request(handle, self._submitted)
        return (named or handle,)

    def _record_call(self, call: EngineCall) -> int:
        if not isinstance(call, EngineCall):
            raise SubjectError(
                "to_call must return an EngineCall (rollproof.recording.recorder), not"
                f" {type(call).__name__}."
            )
        prompt_ids = as_tokens(call.prompt_ids, what="prompt_ids of to_call's EngineCall")
        with self._lock:
            owners = self._owners_of(call.request_id, prompt_ids)
            event = call.to_event(self._calls + 1, prompt_ids, owners)
            misfit = misfit_of(event)
            if misfit is not None:
                raise SubjectError(f"to_call returned an unusable EngineCall: {misfit}.")
            self._calls += 1
            # A copy of the sampling parameters: the caller may change its own dictionary.
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
        self._report = report_of(self.recorded, self._registry, self._expected)
        if self._on_report is not None:
            self._on_report(self._report.to_dict())
        raise_for_verdicts(self._report)
        # Last, because findings are more urgent than a test that ended too early.
        if self._owners.ids:
            raise UsageError(
                f"Requests {list(self._owners.ids)[:9]} were submitted and never ended within the"
                " block, so they cannot be judged: wait for them in the block, or report their"
                " end with trace.result(...)."
            )


def _listed(value: Any) -> Any:
    """Return an iterable as a list, and anything else unchanged, to be refused later."""
    return (
        list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value
    )


def _refuse_misfit(event: Event, method: str) -> None:
    misfit = misfit_of(event)
    if misfit is not None:
        raise UsageError(f"{method} was called with a value that no trace can hold: {misfit}.")
