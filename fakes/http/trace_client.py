"""Teller: how a program tells a served engine what it was asked for and what came of it, so that
the server's trace can be judged.

::

    teller = Teller("http://127.0.0.1:30000")
    teller.submit(request)                            # before the first call
    ... the stack's own calls, with teller.headers(request_id) where its client lets headers in
    teller.result(rollout)                            # or teller.ended("r1", error="TimeoutError: ...")
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rollproof.core.events.rollout import Result, Submit
from rollproof.core.records import Request, Rollout
from rollproof.errors import UsageError
from rollproof.fakes.http.asgi import OWNER_HEADER
from rollproof.store.json_format import wire_of

__all__ = ["Teller"]


class Teller:
    """Tells the server at ``url``. Methods block; raise ``UsageError`` with what the server says
    where it refuses, or is not there.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout

    def submit(self, request: Request) -> None:
        """A caller handed ``request`` to the stack."""
        self._tell("submit", wire_of(Submit(request=request)))

    def result(self, rollout: Rollout) -> None:
        """The stack handed ``rollout`` over."""
        self._tell("result", wire_of(Result(request_id=rollout.request_id, rollout=rollout)))

    def ended(self, request_id: str, *, error: str | None = None) -> None:
        """A request ended without a sample: with ``error`` (class and text), or dropped."""
        self._tell("result", wire_of(Result(request_id=request_id, error=error)))

    @staticmethod
    def headers(request_id: str) -> Mapping[str, str]:
        """Headers that say whose a call is; without them the server goes by the call's id and its
        tokens.
        """
        return {OWNER_HEADER: request_id}

    def _tell(self, what: str, event: Mapping[str, Any]) -> None:
        body = json.dumps(
            {name: value for name, value in event.items() if name not in ("kind", "index", "time")}
        ).encode()
        asked = urllib.request.Request(  # noqa: S310 - the address is the caller's
            f"{self._url}/rollproof/{what}",
            body,
            {"content-type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout) as reply:  # noqa: S310 - as above
                reply.read()
        except urllib.error.HTTPError as error:
            with error:
                raise UsageError(
                    f"{self._url} refuses this {what}: {error.read().decode(errors='replace')}"
                ) from error
        except OSError as error:
            raise UsageError(f"{self._url} cannot be told this {what}: {error}.") from error
