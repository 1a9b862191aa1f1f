"""Serves the proxy until it is stopped, and records what passes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error
from rollproof.core.events.rollout import Submit
from rollproof.core.trace import Header
from rollproof.errors import RollproofError
from rollproof.fakes.http.listening import listening, stopped_by_signal
from rollproof.fakes.http.serving import address_of
from rollproof.recording.background_writer import BackgroundWriter, Dropped
from rollproof.recording.live_trace import Counts, LiveTrace, WallClock
from rollproof.recording.proxy.app import ProxyApp, Traffic
from rollproof.recording.proxy.detection import ServerFacts
from rollproof.recording.proxy.reports import Report, Reports
from rollproof.recording.redaction import Redaction, RequestSample
from rollproof.recording.wire.exchange import Exchange
from rollproof.recording.wire.exchange_recorder import ExchangeRecorder
from rollproof.store.parts import PartLimits
from rollproof.store.stream import made_by

__all__ = ["ProxyOptions", "RecordingProxy", "run_proxy"]

_SECONDS_TO_END = 3
"""Requests that run when the proxy is stopped have this time to end."""
_KEEP_ALIVE = 75
"""Longer than clients keep an idle connection, so that none meets a proxy that hangs up."""
_UPSTREAM_KEEP_ALIVE = 2.0
"""Shorter than servers do (uvicorn: 5 s), so that no request meets one that hangs up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyOptions:
    """How a proxy records.

    Attributes:
        url: The server's address.
        folder: Where the trace goes.
        name: What the names of its files begin with.
        contract: What the samples of the stack promise.
        server_id: The server's name in the trace.
        engine: What its engine promises, if that is known.
        takes_samples: Whether ``contract`` was declared, so that samples can be judged by it.
        facts: What the server says of itself.
        limits, sample, redaction: As for ``LiveTrace``.
        max_body: Bytes of a request's or a reply's body that are kept.
        queue_bytes: Bytes that may wait to be written.
    """

    url: str
    folder: Path
    name: str
    contract: Contract
    server_id: str
    engine: Contract | None = None
    takes_samples: bool = True
    facts: ServerFacts = field(default_factory=ServerFacts)
    limits: PartLimits = field(default_factory=PartLimits)
    sample: RequestSample = field(default_factory=RequestSample)
    redaction: Redaction = field(default_factory=Redaction)
    max_body: int = 64 << 20
    queue_bytes: int = 256 << 20


class RecordingProxy:
    """A proxy in the running loop.

    Args:
        options: how it records.
        on_failure: is called once, with the reason, when nothing more can be recorded.

    Attributes:
        counts: what the trace has.
        traffic: what passed.

    Raises:
        UsageError, TraceError: the trace cannot be begun.
    """

    def __init__(
        self, options: ProxyOptions, on_failure: Callable[[str], None] = lambda _reason: None
    ) -> None:
        self._options = options
        self._clock = WallClock()
        header = Header(
            subject=f"traffic of {options.url}",
            contract=options.contract,
            engine=options.engine,
            profile="recorded",
            made_by=made_by(),
        )
        self._trace = LiveTrace(
            options.folder,
            options.name,
            header,
            limits=options.limits,
            sample=options.sample,
            redaction=options.redaction,
        )
        self._recorder = ExchangeRecorder(self._trace, options.facts.engine)
        if options.facts.label is not None:
            self._recorder.show_label(options.server_id, options.facts.label, self._clock())
        self._on_failure = on_failure
        self._has_failed = False
        self.counts: Counts = self._trace.counts
        self.traffic: Traffic = Traffic()
        self._writer = BackgroundWriter(
            self._handle, self._flush, self._note_error, max_bytes=options.queue_bytes
        )

    @asynccontextmanager
    async def serving(self, bound: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket within the block; yields the address. At its end the trace is sealed,
        and the socket closed.
        """
        limits = httpx.Limits(
            # a request that waits for a free connection would look like a slow engine
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_UPSTREAM_KEEP_ALIVE,
        )
        # a paused engine, or a long sample, may say nothing for hours
        timeout = httpx.Timeout(None, connect=30.0)
        try:
            async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
                app = ProxyApp(
                    self._options.url,
                    server_id=self._options.server_id,
                    client=client,
                    begun=self._begun,
                    ended=self._ended,
                    unsure=self._unsure,
                    own=Reports(
                        self._reported, self._clock, takes_reports=self._options.takes_samples
                    ),
                    clock=self._clock,
                    max_body=self._options.max_body,
                    newest_only=self._options.facts.newest_only,
                )
                self.traffic = app.traffic
                async with _listening(app, bound):
                    yield address_of(bound)
        finally:
            bound.close()
            await asyncio.to_thread(self._close)

    @property
    def paths(self) -> list[Path]:
        """The files of the trace."""
        return self._trace.paths

    def _close(self) -> None:
        self._writer.close()
        self._trace.close()

    def _begun(self, exchange: Exchange) -> None:
        self._writer.put((self._recorder.begun, exchange), len(exchange.body))

    def _ended(self, exchange: Exchange) -> None:
        if not self._writer.put((self._recorder.ended, exchange), exchange.size):
            self._writer.put((self._recorder.forget, exchange), small=True)

    def _unsure(self, exchange: Exchange) -> None:
        self._writer.put((self._recorder.unsure, exchange), small=True)

    def _reported(self, report: Report, size: int) -> bool:
        return self._writer.put((self._take, report), size)

    def _take(self, report: Report) -> None:
        event = report.event
        trouble = ""
        try:
            if isinstance(event, Submit):
                self._recorder.submit(event.request, report.at, report.rollout)
            else:
                self._recorder.result(
                    event.request_id, event.rollout, event.error, report.at, report.rollout
                )
        except RollproofError as error:
            trouble = describe_error(error)
            self._trace.add_unreadable(
                trouble, report.at, request_id=report.rollout or _request_of(report)
            )
        finally:
            report.taken.set_result(trouble)

    def _handle(self, item: Any) -> None:
        if isinstance(item, Dropped):
            self._trace.add_dropped(item.count, self._clock())
            return
        action, subject = item
        action(subject)
        self._note_failure()

    def _note_error(self, error: Exception) -> None:
        self._trace.add_error(error, self._clock())

    def _flush(self) -> None:
        self._trace.flush()
        self._note_failure()

    def _note_failure(self) -> None:
        if self.counts.failure and not self._has_failed:
            self._has_failed = True
            self._on_failure(self.counts.failure)


def run_proxy(
    options: ProxyOptions,
    bound: socket.socket,
    *,
    ready: Callable[[str], None],
    on_failure: Callable[[str], None],
) -> RecordingProxy:
    """Serve until SIGINT or SIGTERM; return the proxy, with its counts.

    Args:
        options: how it records.
        bound: the socket to serve on.
        ready: is called with the address when requests are answered.
        on_failure: is called once, with the reason, when nothing more can be recorded.
    """

    async def run() -> RecordingProxy:
        stopping = stopped_by_signal()
        try:
            proxy = RecordingProxy(options, on_failure)
        except BaseException:
            bound.close()
            raise
        async with proxy.serving(bound) as address:
            ready(address)
            await stopping.wait()
        return proxy

    return asyncio.run(run())


@asynccontextmanager
async def _listening(app: ProxyApp, bound: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="critical",
        lifespan="off",
        ws="none",
        interface="asgi3",
        proxy_headers=False,
        # the engine's own come through: a second one would change the reply
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_SECONDS_TO_END,
    )
    async with listening(config, [bound]):
        yield


def _request_of(report: Report) -> str:
    event = report.event
    return event.request.request_id if isinstance(event, Submit) else event.request_id
