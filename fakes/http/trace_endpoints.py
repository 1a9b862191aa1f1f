"""Endpoints by which a client reports its requests and samples to a fake server.

``POST /rollproof/submit`` takes a request, ``POST /rollproof/result`` a sample, both in the JSON
form of the trace's events. The checks of samples need them in the server's trace. With the header
``x-rollproof-rollout`` they are those of the rollout that it names.
``rollproof.fakes.http.trace_client.Teller`` is a client, and ``rollproof.http_clients`` has others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollproof.core.events.rollout import Result, Submit
from rollproof.core.report_headers import ROLLOUT_HEADER
from rollproof.errors import RollproofError, TraceError
from rollproof.fakes.http.fake_server import post
from rollproof.fakes.http.request_body import BadRequest, header_of, json_body
from rollproof.store.json_format import event_of

if TYPE_CHECKING:
    from rollproof.fakes.http.call_samples import Samples
    from rollproof.fakes.http.engine_backend import EngineBackend

__all__ = ["trace_routes"]


def trace_routes(backend: EngineBackend) -> list[Route]:
    """Return the two endpoints; none for an engine of a fleet, which records its samples itself."""
    if backend.samples is None:
        return []
    endpoints = _TraceEndpoints(backend.samples, has_contract=backend.options.contract is not None)
    return [
        post("/rollproof/submit", endpoints.submit),
        post("/rollproof/result", endpoints.result),
    ]


class _TraceEndpoints:
    def __init__(self, samples: Samples, *, has_contract: bool) -> None:
        self._samples = samples
        self._has_contract = has_contract

    async def submit(self, request: Request) -> Response:
        event = await self._event(request, "submit")
        assert isinstance(event, Submit)
        try:
            self._samples.submit(event.request, rollout=header_of(request.scope, ROLLOUT_HEADER))
        # 409: the body is well-formed, and conflicts with what was reported before
        except RollproofError as error:
            raise BadRequest(str(error), 409) from error
        return JSONResponse({"submitted": event.request.request_id})

    async def result(self, request: Request) -> Response:
        event = await self._event(request, "result")
        assert isinstance(event, Result)
        try:
            rollout = header_of(request.scope, ROLLOUT_HEADER)
            if rollout is None:
                self._samples.result(event.request_id, event.rollout, event.error)
            else:
                self._samples.end_rollout(rollout, event.rollout, event.error)
        except RollproofError as error:
            raise BadRequest(str(error), 409) from error
        return JSONResponse({"ended": event.request_id})

    async def _event(self, request: Request, kind: str) -> object:
        if not self._has_contract:
            raise BadRequest(
                "Samples can only be judged against what the stack promises: start the server with"
                " --contract FILE or --like STACK (ServeOptions.contract).",
                409,
            )
        body = json_body(request)
        try:
            # index and time are the server's own: a client may not choose them
            return event_of({"index": -1, "time": 0.0, **body, "kind": kind})
        except TraceError as error:
            raise BadRequest(f"This is no {kind}: {error}", 400) from error
