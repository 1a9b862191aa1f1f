"""Telling: the endpoints by which a client tells a served engine what it was asked for, and what it
made of the replies.

``POST /rollproof/submit`` takes a request, ``POST /rollproof/result`` a sample, both in the JSON
form of a trace's events. With them a trace that a server wrote has what the checks of samples need.
``rollproof.fakes.http.trace_client.Teller`` sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from rollproof.core.events.rollout import Result, Submit
from rollproof.errors import RollproofError, TraceError
from rollproof.fakes.http.asgi import Answer, Asked, Handler
from rollproof.fakes.http.request_body import BadRequest
from rollproof.store.json_format import event_of

if TYPE_CHECKING:
    from rollproof.fakes.http.call_samples import Samples
    from rollproof.fakes.http.engine_backend import Backing

__all__ = ["told_endpoints"]


def told_endpoints(backing: Backing) -> Mapping[str, Handler]:
    """The endpoints, where the engine stands alone (one of a fleet is told otherwise)."""
    samples = backing.samples
    if samples is None:
        return {}
    told = _Told(samples, declared=backing.options.contract is not None)
    return {"/rollproof/submit": told.submit, "/rollproof/result": told.result}


class _Told:
    def __init__(self, samples: Samples, *, declared: bool) -> None:
        self._samples = samples
        self._declared = declared

    async def submit(self, asked: Asked) -> Answer:
        event = self._event(asked, "submit")
        assert isinstance(event, Submit)
        try:
            self._samples.submit(event.request)
        except RollproofError as error:
            raise BadRequest(str(error), 409) from error
        return JSONResponse({"submitted": event.request.request_id})

    async def result(self, asked: Asked) -> Answer:
        event = self._event(asked, "result")
        assert isinstance(event, Result)
        try:
            self._samples.result(event.request_id, event.rollout, event.error)
        except RollproofError as error:
            raise BadRequest(str(error), 409) from error
        return JSONResponse({"ended": event.request_id})

    def _event(self, asked: Asked, kind: str) -> object:
        if not self._declared:
            raise BadRequest(
                "Samples can only be judged against what the stack promises: start the server with"
                " --contract FILE (ServeOptions.contract).",
                409,
            )
        body = asked.body()
        try:
            return event_of({"index": -1, "time": 0.0, **body, "kind": kind})
        except TraceError as error:
            raise BadRequest(f"This is no {kind}: {error}", 400) from error
