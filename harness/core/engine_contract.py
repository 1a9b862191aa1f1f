"""The part of a contract that an engine declares about its calls.

Engines differ legitimately in how they pause, abort, stream and refuse. Each difference is a field
here, and part of the engine's ``Contract``: checks and the conformance driver read it, and never
look at an engine's name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rollproof.errors import ContractError

__all__ = [
    "EngineTerms",
    "PauseMode",
    "PausedCalls",
    "Refusal",
    "ReplyKey",
    "RoutesSwitch",
    "StreamMode",
]


class PauseMode(StrEnum):
    """What a pause does to the requests in flight (vLLM: abort, wait, keep; SGLang: abort, retract,
    in_place).
    """

    ABORT = "abort"
    """They end at once with finish reason ``abort`` and what they have."""
    WAIT = "wait"
    """They run to their end; the pause is acknowledged then."""
    KEEP = "keep"
    """They freeze, KV kept, and go on after the resume."""
    RETRACT = "retract"
    """They freeze and lose their KV; after the resume all their tokens are prefilled again."""
    IN_PLACE = "in-place"
    """As ``keep``, and nothing invalidates the prefix cache."""


class PausedCalls(StrEnum):
    """What happens to a call that arrives while the server is paused."""

    PARK = "park"
    REJECT = "reject"
    """It is answered at once with an abort of zero tokens."""
    RAISE = "raise"
    """The caller gets a ``RuntimeError``."""


class StreamMode(StrEnum):
    """What the chunks of a streamed reply hold."""

    FINAL = "final"
    """There is one chunk: the complete reply."""
    CUMULATIVE = "cumulative"
    """Each chunk holds every token so far."""
    DELTA = "delta"
    """Each chunk holds the tokens since the last one."""


class RoutesSwitch(StrEnum):
    """Where the return of routes is switched on."""

    ENGINE = "engine"
    """At the engine's start: every reply carries them, requested or not (vLLM)."""
    REQUEST = "request"
    """By each call: only calls that request them get them (SGLang)."""


class Refusal(StrEnum):
    """How an engine answers a call that it cannot serve."""

    ERROR = "error"
    """The caller gets an error."""
    ABORT = "abort"
    """The call ends with finish reason ``abort`` and no tokens."""
    EMPTY = "empty"
    """The call ends with finish reason ``length`` and no tokens."""
    IGNORED = "ignored"
    """The engine does not look at the value."""


class ReplyKey(StrEnum):
    """A part of a reply that may be absent (``None``, or no span)."""

    LOGPROBS = "logprobs"
    ROUTES = "routes"
    SPANS = "spans"
    CACHED = "cached"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTerms:
    """How an engine's calls behave. Raises ``ContractError`` for a value that is not valid.

    The ``keys_*`` fields are about a call that requests logprobs and routes.

    Attributes:
        max_length: Tokens of prompt and response that a call may have.
        recomputing: Pause modes after which a frozen call's KV is computed again if the cache was
            cleared.
        routes_start: Whether a call may request the rows from a position on.
        bad_start: How a ``routes_start`` beyond the prompt is answered.
        zero_budget: How ``max_tokens=0`` is answered.
        empty_prompt: How a prompt without tokens is answered.
        abort_by_prefix: Whether aborting ``"1"`` also aborts ``"10"``.
        samples: Whether one call may sample several continuations (n > 1).
        seeded: Whether a call with a seed samples the same tokens again.
        aborts: Whether calls can be aborted.
        keys_finished: Parts of a reply that ended by itself.
        keys_aborted: Parts of a reply that was aborted after a token.
        keys_early: Parts of a reply that was aborted before the first token.
        keys_queued: Parts of a reply that was aborted in the waiting queue.
    """

    max_length: int
    pause_modes: tuple[PauseMode, ...]
    # vLLM then keeps the first rows of a token, SGLang overwrites them (sglang#39633)
    recomputing: tuple[PauseMode, ...] = ()
    paused_calls: PausedCalls = PausedCalls.PARK
    stream_modes: tuple[StreamMode, ...] = (StreamMode.FINAL,)
    routes_switch: RoutesSwitch = RoutesSwitch.REQUEST
    routes_start: bool = False
    bad_start: Refusal = Refusal.ERROR
    zero_budget: Refusal = Refusal.ERROR
    empty_prompt: Refusal = Refusal.ERROR
    # SGLang compares ids with startswith (sglang#25561)
    abort_by_prefix: bool = False
    samples: bool = True
    seeded: bool = True
    aborts: bool = True
    keys_finished: tuple[ReplyKey, ...] = ()
    keys_aborted: tuple[ReplyKey, ...] = ()
    keys_early: tuple[ReplyKey, ...] = ()
    # apart: SGLang answers an abort in the queue on another path, without routes and counts
    keys_queued: tuple[ReplyKey, ...] = ()

    def __post_init__(self) -> None:
        if (
            isinstance(self.max_length, bool)
            or not isinstance(self.max_length, int)
            or self.max_length < 2
        ):
            raise ContractError(
                f"max_length={self.max_length!r} must be a whole number of tokens, at least 2."
            )
        # contracts come from JSON and TOML, too: plain strings become members
        for name, kind in _TUPLES.items():
            object.__setattr__(
                self, name, tuple(_member(kind, name, value) for value in getattr(self, name))
            )
        for name, kind in _SINGLES.items():
            object.__setattr__(self, name, _member(kind, name, getattr(self, name)))
        unknown = set(self.recomputing) - set(self.pause_modes)
        if unknown:
            raise ContractError(
                f"recomputing names {sorted(unknown)}, which are not pause modes of the engine:"
                f" {list(self.pause_modes)}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form, with lists for tuples; ``EngineTerms(**...)`` reads it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _member(kind: type[StrEnum], name: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ContractError(
            f"{name} holds {value!r}; choose among {[str(member) for member in kind]}."
        ) from None


_TUPLES: dict[str, type[StrEnum]] = {
    "pause_modes": PauseMode,
    "recomputing": PauseMode,
    "stream_modes": StreamMode,
    "keys_finished": ReplyKey,
    "keys_aborted": ReplyKey,
    "keys_early": ReplyKey,
    "keys_queued": ReplyKey,
}
_SINGLES: dict[str, type[StrEnum]] = {
    "paused_calls": PausedCalls,
    "routes_switch": RoutesSwitch,
    "bad_start": Refusal,
    "zero_budget": Refusal,
    "empty_prompt": Refusal,
}
