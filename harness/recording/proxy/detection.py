"""What kind of server a proxy is put before, by what the server says of itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from rollproof.core.records import Version
from rollproof.errors import UsageError
from rollproof.recording.wire.sampling_replies import label_of

__all__ = ["ServerFacts", "detect"]

_SECONDS = 10.0
_MAX_ANSWER = 1 << 20
"""Bytes of an answer. One without an end would be waited for, and kept, for as long as it lasts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        engine: ``vllm`` or ``sglang``; empty if it says neither (a router, for instance).
        release: its release; empty if it does not say.
        label: the label of its weights, if they have one.
        newest_only: whether an event of a ``/generate`` stream has all tokens so far.
    """

    engine: str = ""
    release: str = ""
    label: Version = None
    newest_only: bool = True


def detect(url: str) -> ServerFacts:
    """Ask a server what it is.

    Raises:
        UsageError: nothing answers at ``url``, or it is no address.
    """
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UsageError(f"--to {url!r} is no address: {error}.") from error
    if address.scheme not in ("http", "https") or not address.host or address.query:
        raise UsageError(
            f"--to {url!r} must be the address of a server, such as http://127.0.0.1:30000."
        )
    # a proxy of the environment would be asked for an address of this machine
    with httpx.Client(base_url=url, timeout=_SECONDS, trust_env=False) as client:
        try:
            models = _asked(client, "/v1/models")
            # older releases of SGLang have only the names with `get_`
            info = _asked(client, "/server_info") or _asked(client, "/get_server_info")
            model = _asked(client, "/model_info") or _asked(client, "/get_model_info")
            weights = _asked(client, "/weight_info")
            release = _asked(client, "/version")
        except httpx.HTTPError as error:
            raise UsageError(
                f"--to {url} does not answer ({type(error).__name__}: {error}). Start the server"
                " first, and check the address."
            ) from error
    owner = next((card.get("owned_by") for card in _cards(models) if isinstance(card, dict)), "")
    engine = owner if owner in ("vllm", "sglang") else ""
    found = info.get("version") or release.get("version")
    label = model.get("weight_version", weights.get("weight_version"))
    return ServerFacts(
        engine=engine,
        release=found if isinstance(found, str) else "",
        label=label_of(label),
        newest_only=info.get("incremental_streaming_output", info.get("stream_output")) is not True,
    )


def _cards(models: dict[str, Any]) -> list[Any]:
    cards = models.get("data")
    return cards if isinstance(cards, list) else []


def _asked(client: httpx.Client, path: str) -> dict[str, Any]:
    """Return the object at a path; empty if the server has none there.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    body, ends = b"", time.monotonic() + _SECONDS
    try:
        with client.stream("GET", path) as reply:
            if reply.status_code != 200:
                return {}
            for chunk in reply.iter_bytes():
                body += chunk
                if len(body) > _MAX_ANSWER or time.monotonic() > ends:
                    return {}
        value: Any = orjson.loads(body)
    # a busy server may be slow: what it does not say in time stays unknown
    except (ValueError, httpx.ReadTimeout):
        return {}
    return value if isinstance(value, dict) else {}
