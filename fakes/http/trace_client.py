"""A client that reports requests and samples to a fake server, so that its trace can be judged.

::

    teller = Teller("http://127.0.0.1:30000")
    teller.submit(request)                            # before the first call
    ... the stack's own calls, with teller.headers(request_id) if its client takes headers
    teller.result(rollout)                            # or teller.ended("r1", error="...")
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from rollproof.core.error_text import show
from rollproof.core.events.rollout import Result, Submit
from rollproof.core.record_validation import validate_request, validate_rollout
from rollproof.core.records import Request, Rollout
from rollproof.core.report_headers import OWNER_HEADER
from rollproof.errors import UsageError
from rollproof.store.json_format import wire_of

__all__ = ["Teller"]


class Teller:
    """Reports to the server at ``url``. Methods block.

    Args:
        url: the server's address.
        timeout: seconds to wait for it.

    Raises:
        UsageError: ``url`` is no address, or the server refuses, and says why, or is not reached.
        SubjectError: what is reported is no record.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self._url = _address(url)
        self._timeout = timeout

    def submit(self, request: Request) -> None:
        """Report that the stack was handed ``request``."""
        self._report(
            "submit", wire_of(Submit(request=validate_request(request, "The caller of submit()")))
        )

    def result(self, rollout: Rollout) -> None:
        """Report that the stack returned ``rollout``."""
        rollout = validate_rollout(rollout, "The caller of result()")
        self._report("result", wire_of(Result(request_id=rollout.request_id, rollout=rollout)))

    def ended(self, request_id: str, *, error: str | None = None) -> None:
        """Report that a request ended without a sample: with ``error``, or dropped."""
        self._report("result", wire_of(Result(request_id=request_id, error=error)))

    @staticmethod
    def headers(request_id: str) -> Mapping[str, str]:
        """Return headers that name the request of a call; without them the server goes by the
        call's id and its tokens.
        """
        return {OWNER_HEADER: request_id}

    def _report(self, kind: str, event: Mapping[str, Any]) -> None:
        body = json.dumps(
            {name: value for name, value in event.items() if name not in ("kind", "index", "time")}
        ).encode()
        request = urllib.request.Request(  # noqa: S310 - the address is the caller's
            f"{self._url}/rollproof/{kind}",
            body,
            {"content-type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:  # noqa: S310 - as above
                reply.read()
        except urllib.error.HTTPError as error:
            with error:
                raise UsageError(
                    f"{self._url} refuses this {kind}: {error.read().decode(errors='replace')}"
                ) from error
        except OSError as error:
            raise UsageError(
                f"{self._url} cannot be reached to report this {kind}: {error}."
            ) from error


def _address(url: object) -> str:
    """Return the address without a slash at its end. Raises ``UsageError`` if it is none."""
    try:
        parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
        sound = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port if parts is not None else None  # raises for a port that is no number
    except ValueError:
        sound = False
    if not sound or any(char.isspace() for char in str(url)):
        raise UsageError(
            "Teller takes the address of the server, such as http://127.0.0.1:30000, not"
            f" {show(url)}."
        )
    return str(url).rstrip("/")
