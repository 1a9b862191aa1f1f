"""``record_live``: records a production loop for days, at a bounded cost.

It wraps what the loop calls, and reports what happens to a thread that writes it: nothing that the
loop does waits for the trace, and nothing that goes wrong with it reaches the loop. ``record`` is
for tests: it judges at the end, and raises.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rollproof.core.call_ownership import CURRENT, Owners, here
from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.error_text import describe_error, describe_error_with_place, show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Observation,
    Pause,
    Resume,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import BatchRow, EngineOutput, Request, Rollout, Version
from rollproof.core.report_headers import OWNER_HEADER
from rollproof.core.trace import Header
from rollproof.errors import UsageError
from rollproof.recording.background_writer import BackgroundWriter
from rollproof.recording.live_calls import RecordedActor, watch_live
from rollproof.recording.live_events import LiveEvents
from rollproof.recording.live_trace import Counts, LiveTrace, WallClock
from rollproof.recording.recorder import EngineCall
from rollproof.recording.redaction import Redaction, RequestSample
from rollproof.recording.taken_records import Taken
from rollproof.recording.wire.exchange import Exchange
from rollproof.recording.wire.exchange_recorder import ExchangeRecorder
from rollproof.recording.wrapping import WatchedCall
from rollproof.store.parts import PartLimits
from rollproof.store.stream import made_by

__all__ = ["LiveRecorder", "record_live"]

_T = TypeVar("_T")


def record_live(
    folder: str | Path,
    contract: Contract,
    *,
    name: str | None = None,
    subject: str = "live run",
    engine: Contract | None = None,
    sample: float = 1.0,
    seed: int = 0,
    redact: str = "none",
    part_bytes: int = 1 << 30,
    part_seconds: float = 3600.0,
    total_bytes: int | None = None,
    queue_bytes: int = 256 << 20,
) -> LiveRecorder:
    """Record a production loop into a folder, for ``rollproof check``.

    ::

        recorder = rollproof.record_live("traces", contract)
        generate = recorder.engine(engine.generate, to_call=..., to_output=...)
        rollout = recorder.rollout(rollout, to_request=..., to_record=...)
        ...
        recorder.batch(samples, rows)
        recorder.close()

    Args:
        folder: Where the trace is written; several processes may write into one.
        contract: What the stack promises.
        name: What the names of the files begin with, another one for each writer; by default the
            host and the process.
        subject: The stack's name in reports.
        engine: What the engines promise, if it is known.
        sample: The share of the requests that are recorded: complete ones, on every host the same.
        seed: Another one chooses other requests.
        redact: ``"none"``, ``"drop"`` or ``"hash:KEY"``: what is written of token ids.
        part_bytes: The size of a file at which the next one begins.
        part_seconds: The age of a file at which the next one begins.
        total_bytes: The size of all files at which recording ends; ``None``: no limit.
        queue_bytes: What may wait to be written: beyond it events are dropped, counted, and leave
            what they concern unknown.

    Raises:
        UsageError: An argument is wrong, or the folder has a trace of that name.
        TraceError: The first file cannot be written.
    """
    if not isinstance(contract, Contract):
        raise UsageError(
            f"record_live() takes the Contract that the stack promises, not {show(contract)}."
        )
    if engine is not None and not isinstance(engine, Contract):
        raise UsageError(f"record_live() takes a Contract as `engine`, not {show(engine)}.")
    header = Header(
        subject=subject, contract=contract, engine=engine, profile="recorded", made_by=made_by()
    )
    limits = PartLimits(part_bytes=part_bytes, part_seconds=part_seconds, total_bytes=total_bytes)
    return LiveRecorder(
        Path(folder),
        f"recorder-{socket.gethostname()}-{os.getpid()}" if name is None else name,
        header,
        limits=limits,
        sample=RequestSample(sample, seed),
        redaction=Redaction(redact),
        queue_bytes=queue_bytes,
    )


class LiveRecorder:
    """A recording of a live run; ``record_live`` makes it. Methods may be called from any thread.

    After a wrong argument of a method, as after anything else that cannot be recorded, the run goes
    on: ``counts`` has the number and the first reason. Used as a context manager it is closed at
    the end.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        header: Header,
        *,
        limits: PartLimits,
        sample: RequestSample,
        redaction: Redaction,
        queue_bytes: int,
    ) -> None:
        self._clock = WallClock()
        self._sample = sample
        # shared with the recorders of HTTP clients: one trace must not have a number twice
        self._call_numbers = itertools.count(1)
        self._events = LiveEvents(
            LiveTrace(folder, name, header, limits=limits, sample=sample, redaction=redaction),
            Owners(),
            self._clock,
            lambda: LiveTrace(
                folder,
                f"{name}-batches",
                replace(header, about="batches"),
                limits=limits,
                redaction=redaction,
            ),
        )
        self._writer = BackgroundWriter(
            self._events.handle, self._events.flush, self._events.note_error, max_bytes=queue_bytes
        )
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    @property
    def counts(self) -> Counts:
        """What was written, and what was not."""
        return self._events.trace.counts

    @property
    def paths(self) -> list[Path]:
        """The files so far, those of batches last."""
        return self._events.paths

    def rollout(
        self,
        function: Callable[..., Any],
        *,
        to_request: Callable[..., Request],
        to_record: Callable[[Any], Rollout | Sequence[Rollout]],
    ) -> Callable[..., Any]:
        """Wrap the stack's rollout function, sync or async; each call is one request.

        Args:
            function: The function.
            to_request: Returns the request, of the arguments of a call.
            to_record: Returns the sample, of what the function returned, or a list of samples if
                the contract says that there may be several; not called for ``None`` (the sample
                was dropped).
        """
        _check_callable("rollout()", function=function, to_request=to_request, to_record=to_record)

        def begin(*args: Any, **kwargs: Any) -> WatchedCall:
            request = self._attempt("to_request", to_request, *args, **kwargs)
            if not isinstance(request, Request):
                self._trouble(f"to_request returned {show(request)}")
                return _NOTHING
            self.submit(request)
            request_id = request.request_id

            def take(native: Any) -> None:
                rollout = None
                if native is not None:
                    rollout = self._attempt("to_record", to_record, native)
                    if not isinstance(rollout, Rollout | list | tuple):
                        self._trouble(f"to_record returned {show(rollout)}", request_id)
                        return
                self.result(rollout, request_id=request_id)

            def fail(error: BaseException) -> None:
                self.result(request_id=request_id, error=describe_error_with_place(error))

            return WatchedCall(take=take, fail=fail, request_id=request_id)

        return watch_live(function, begin)

    def engine(
        self,
        function: Callable[..., Any],
        *,
        to_call: Callable[..., EngineCall],
        to_output: Callable[[Any], EngineOutput],
    ) -> Callable[..., Any]:
        """Wrap the function with which the stack calls an engine: sync, async, or a generator, the
        last item of which has all tokens.

        Args:
            function: The function.
            to_call: Returns the call, of the arguments.
            to_output: Returns the output, of what the engine returned.
        """
        _check_callable("engine()", function=function, to_call=to_call, to_output=to_output)
        return watch_live(function, self._begin_call(to_call, to_output))

    def actor(
        self,
        handle: Any,
        method: str,
        *,
        to_call: Callable[..., EngineCall],
        to_output: Callable[[Any], EngineOutput],
    ) -> Any:
        """Wrap a Ray actor handle: calls of ``handle.METHOD.remote(...)`` are recorded, and
        everything else of the handle is as it was. Arguments as for ``engine``.

        Raises:
            UsageError: The handle has no such remote method.
        """
        if not callable(getattr(getattr(handle, method, None), "remote", None)):
            raise UsageError(f"actor() takes a handle with a remote method {method!r}.")
        _check_callable("actor()", to_call=to_call, to_output=to_output)
        return RecordedActor(handle, method, self._begin_call(to_call, to_output))

    def http(self, client: Any, *, server: str | None = None, engine: str = "") -> Any:
        """Record the calls that an httpx client makes to vLLM's and SGLang's endpoints, and its
        aborts, pauses and updates, as a proxy would; returns the client.

        Args:
            client: A ``httpx.Client`` or ``httpx.AsyncClient``.
            server: The server's name in the trace; by default its host and port.
            engine: ``sglang`` or ``vllm``, if that is known: what an endpoint does by default may
                depend on it.

        Raises:
            UsageError: It is no such client. Put ``rollproof proxy`` before the server of others.
        """
        from rollproof.recording.live_http import watch_http

        exchanges = ExchangeRecorder(
            self._events.trace,
            engine,
            owners=self._events.owners,
            call_numbers=self._call_numbers,
        )

        def begun(exchange: Exchange) -> None:
            exchange.caller = (CURRENT.get(), here())
            self._put(_begun, exchanges, exchange, size=len(exchange.body))

        def ended(exchange: Exchange) -> None:
            if not self._put(_ended, exchanges, exchange, size=exchange.size):
                self._put(_forgotten, exchanges, exchange, small=True)

        return watch_http(client, begun, ended, self._clock, server=server)

    @staticmethod
    def headers() -> Mapping[str, str]:
        """Return HTTP headers that name the request in whose context code runs, for a proxy that
        records its calls; none outside of a wrapped rollout.
        """
        running = CURRENT.get()
        return {} if running is None else {OWNER_HEADER: running.request_id}

    def submit(self, request: Request) -> None:
        """Record that a caller submits ``request`` to the stack."""
        taken = Taken(request)
        self._put(self._events.submit, taken, size=taken.size)

    def result(
        self,
        rollout: Rollout | Sequence[Rollout] | None = None,
        *,
        request_id: str | None = None,
        error: str | None = None,
    ) -> None:
        """Record the end of a request: the sample that reaches the trainer (a list of them if the
        contract says that there may be several), an error, or neither if it was dropped.
        """
        samples: Sequence[Any] = rollout if isinstance(rollout, list | tuple) else (rollout,)
        several, taken = samples is rollout, [Taken(sample) for sample in samples]
        ended = request_id
        if ended is None:
            ended = next((sample.request_id for sample in taken if sample.request_id), "")
        size = sum(sample.size for sample in taken)
        self._put(self._events.result, ended, taken, several, error, size=size)

    def batch(
        self, samples: Iterable[Rollout], rows: Iterable[BatchRow], *, name: str = "batch"
    ) -> None:
        """Record that a training step consumed ``samples`` as ``rows``; in files of their own.

        Args:
            samples: The samples, in order.
            rows: What they became: one row for each.
            name: A name for the batch, such as that of the step.
        """
        try:
            taken, made = [*map(Taken, samples)], [*map(Taken, rows)]
        except Exception as error:  # noqa: BLE001 - recording must not end what is recorded
            self._put(
                self._events.refuse, f"batch() got no samples and rows: {describe_error(error)}"
            )
            return
        size = sum(item.size for item in (*taken, *made))
        self._put(self._events.batch, name, taken, made, size=size)

    def observation(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Record tokens that the environment appends to a request's sequence."""
        # its fields may be of any type until the other thread looks at them
        taken = Taken(Observation(request_id=request_id, token_ids=token_ids))  # type: ignore[arg-type]
        self._put(self._events.observation, taken, size=taken.size)

    def update(self, version: Version, label: Version, phase: UpdatePhase | str) -> None:
        """Record that the trainer asks for the weights ``version`` under ``label`` (phase
        ``asked``), or learns that they are published (``ended``) or not (``failed``).
        """
        self._add(Update, version=version, label=label, phase=phase)

    def weights(
        self, version: Version, *, label: Version = None, server: str = "s0", loaded: bool = True
    ) -> None:
        """Record that a server has the weights ``version``, and shows ``label``."""
        self._add(Weights, server_id=server, version=version, label=label, loaded=loaded)

    def pause(self, mode: PauseMode | str = PauseMode.ABORT, *, server: str = "s0") -> None:
        """Record that a server acknowledged a pause."""
        self._add(Pause, server_id=server, mode=mode)

    def resume(self, *, server: str = "s0") -> None:
        """Record that a server was resumed."""
        self._add(Resume, server_id=server)

    def abort(self, wanted: str = "*", *, server: str = "s0") -> None:
        """Record a request to abort ``wanted``: a request id, or ``"*"`` for all."""
        self._add(Abort, server_id=server, wanted=wanted)

    def close(self) -> None:
        """Write what waits, and seal the trace. Closing twice is harmless."""
        with self._lock:
            if self._closed or self._is_forked():
                return
            self._closed = True
        self._writer.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # what follows runs in the loop

    def _begin_call(
        self, to_call: Callable[..., EngineCall], to_output: Callable[[Any], EngineOutput]
    ) -> Callable[..., WatchedCall]:
        def begin(*args: Any, **kwargs: Any) -> WatchedCall:
            call = self._attempt("to_call", to_call, *args, **kwargs)
            running = CURRENT.get()
            if not isinstance(call, EngineCall):
                self._trouble(
                    f"to_call returned {show(call)}", "" if running is None else running.request_id
                )
                return _NOTHING
            # asked here: the writer's thread has another context, and no task of the loop
            place = here()
            # before anything is copied: what is left out must not fill the queue
            if self._is_left_out(call, running.request_id if running is not None else None):
                return _NOTHING
            call_id = next(self._call_numbers)
            taken = Taken(call)
            self._put(self._events.call, call_id, taken, (running, place), size=taken.size)

            def take(native: Any) -> None:
                output = self._attempt("to_output", to_output, native)
                if not isinstance(output, EngineOutput):
                    self._put(
                        self._events.unreadable, f"to_output returned {show(output)}", call_id
                    )
                    return
                taken = Taken(output)
                self._put(self._events.reply, call_id, taken, size=taken.size)

            def fail(error: BaseException) -> None:
                self._put(self._events.lost, call_id, describe_error(error))

            return WatchedCall(take=take, fail=fail)

        return begin

    def _is_left_out(self, call: EngineCall, running: str | None) -> bool:
        """Return whether the call is known to be that of a request that is not recorded."""
        if self._sample.rate >= 1 or call.request_id is not None or running is None:
            return False
        return not self._sample.has(running)

    def _attempt(self, what: str, function: Callable[..., _T], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - recording must not end what is recorded
            return f"an error: {what}: {describe_error(error)}"

    def _add(self, kind: type[Event], **values: Any) -> None:
        self._put(self._events.plain, kind, values, small=True)

    def _trouble(self, text: str, request_id: str = "") -> None:
        self._put(self._events.unreadable, text, None, request_id)

    def _put(
        self, action: Callable[..., None], *args: Any, size: int = 0, small: bool = False
    ) -> bool:
        if self._is_forked():
            counts = self._events.trace.counts
            counts.dropped += 1
            counts.first_trouble = counts.first_trouble or _FORKED
            return False
        return self._writer.put((action, self._clock(), args), size, small=small)

    def _is_forked(self) -> bool:
        """Return whether this process is a copy of the one that records: it has no thread that
        writes, and the file is not its own.
        """
        return os.getpid() != self._process


def _begun(_at: float, exchanges: ExchangeRecorder, exchange: Exchange) -> None:
    exchanges.begun(exchange)


def _ended(_at: float, exchanges: ExchangeRecorder, exchange: Exchange) -> None:
    exchanges.ended(exchange)


def _forgotten(_at: float, exchanges: ExchangeRecorder, exchange: Exchange) -> None:
    exchanges.forget(exchange)


_NOTHING = WatchedCall(take=lambda _native: None, fail=lambda _error: None)


_FORKED = "this process was forked from the one that records: call record_live() in each process"


def _check_callable(method: str, **values: Any) -> None:
    for name, value in values.items():
        if not callable(value):
            raise UsageError(f"{method} takes a function as `{name}`, not {show(value)}.")
