"""The proxy's own endpoints, by which a client reports its requests and samples.

They are those of the fake servers (``rollproof.fakes.http.trace_endpoints``), so that
``rollproof.http_clients`` works unchanged. A report that cannot be taken never fails the client:
the answer says so, and the trace leaves its request unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from rollproof.core.events.rollout import Result, Submit
from rollproof.core.report_headers import ROLLOUT_HEADER
from rollproof.errors import TraceError
from rollproof.store.json_format import event_of

__all__ = ["Report", "Reports"]

_KINDS = ("submit", "result")
_MAX_REPORT = 1 << 28


@dataclass(slots=True, eq=False)
class Report:
    """A report of a client.

    Attributes:
        event: the request or the sample.
        rollout: the rollout that its header names, if it does.
        at: Unix time.
        taken: gets ``""``, or why the report cannot be taken.
    """

    event: Submit | Result
    rollout: str | None
    at: float
    taken: Future[str] = field(default_factory=Future)


class Reports:
    """An ASGI application for paths below ``/rollproof/``.

    Args:
        put: takes a report and its size; returns whether there was room.
        clock: Unix time.
        takes_reports: whether there is a contract to judge samples by.
    """

    def __init__(
        self,
        put: Callable[[Report, int], bool],
        clock: Callable[[], float],
        *,
        takes_reports: bool = True,
    ) -> None:
        self._put = put
        self._takes_reports = takes_reports
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["path"].removeprefix("/rollproof/")
        if kind not in _KINDS or scope["method"] != "POST":
            answer = JSONResponse({"error": {"message": "There is no such report."}}, 404)
        else:
            answer = await self._take(kind, Request(scope, receive))
        await answer(scope, receive, send)

    async def _take(self, kind: str, request: Request) -> JSONResponse:
        try:
            body = await request.body()
        except ClientDisconnect:
            body = b""
        if not self._takes_reports:
            return _answer(
                "samples can only be judged against what the stack promises: start the proxy with"
                " --contract FILE or --like STACK"
            )
        if len(body) > _MAX_REPORT:
            return _answer(f"the report has more than {_MAX_REPORT >> 20} MiB")
        try:
            values: Any = orjson.loads(body)
            if not isinstance(values, dict):
                return _answer("the report is no JSON object")
            event = event_of({"index": -1, "time": 0.0, **values, "kind": kind})
        except (TraceError, ValueError) as error:
            return _answer(f"this is no {kind}: {error}")
        assert isinstance(event, Submit | Result)
        report = Report(event, request.headers.get(ROLLOUT_HEADER), self._clock())
        if not self._put(report, len(body)):
            return _answer("the recorder has no room for it")
        return _answer(await asyncio.wrap_future(report.taken))


def _answer(trouble: str) -> JSONResponse:
    return JSONResponse({"recorded": not trouble, **({"why": trouble} if trouble else {})})
