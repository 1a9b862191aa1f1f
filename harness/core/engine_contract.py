"""The part of a contract that an engine declares about its calls.

Engines differ legitimately in how they pause, abort, stream and refuse. Each difference is a field
here, and part of the engine's ``Contract``: checks and the conformance driver read it, and never
look at an engine's name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rollproof.core.error_text import show
from rollproof.errors import ContractError

__all__ = [
    "LARGEST_TOKEN",
    "EngineTerms",
    "PauseMode",
    "PausedCalls",
    "Refusal",
    "ReplyKey",
    "RoutesSwitch",
    "SamplingOption",
    "StopShown",
    "StreamMode",
]

LARGEST_TOKEN = (1 << 31) - 1
"""Token ids are 32-bit."""


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


class StopShown(StrEnum):
    """What a reply shows of the token that ended its call."""

    KEPT = "kept"
    """It is the last token of the reply (vLLM, SGLang)."""
    STRIPPED = "stripped"
    """The reply ends before it: neither the token nor its logprob and row are returned."""


class SamplingOption(StrEnum):
    """A sampling parameter of a call in addition to temperature and seed, by the name that vLLM and
    SGLang give it.
    """

    TOP_P = "top_p"
    TOP_K = "top_k"
    MIN_P = "min_p"
    REPETITION_PENALTY = "repetition_penalty"
    FREQUENCY_PENALTY = "frequency_penalty"
    PRESENCE_PENALTY = "presence_penalty"

    @property
    def penalty(self) -> bool:
        """Whether it changes the scores; the others leave tokens out."""
        return self in _PENALTIES


_PENALTIES = frozenset(
    {
        SamplingOption.REPETITION_PENALTY,
        SamplingOption.FREQUENCY_PENALTY,
        SamplingOption.PRESENCE_PENALTY,
    }
)


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
        prompt_margin: Tokens by which a prompt must be shorter than ``max_length``.
        spare_positions: Last positions of ``max_length`` that no call fills; ``None``: not
            declared, so calls near the limit are not judged.
        excess_budget: How a call is answered whose prompt and budget together exceed
            ``max_length``; ``IGNORED``: it ends by length there. ``None``: not declared.
        end_tokens: The model's own end tokens.
        end_token: What a reply shows of the end token that ended it; ``None``: not declared, so
            every call is sent with end tokens ignored.
        stop_token: The same for a token among the call's own ``stop_token_ids``.
        stop_string: The same for the token that completes a stop string of the call.
        token_text: The text of a token as a format of its id, such as ``"t{:03d} "``, if texts do
            not depend on their neighbours. Stop strings are made of it.
        sampling: Sampling parameters that a call may have in addition to temperature and seed.
        penalised_logprobs: Whether logprobs that are not ``processed`` are taken after the
            penalties. ``None``: not declared, so those of calls with penalties are not compared.
        repetition_over_prompt: Whether ``repetition_penalty`` also counts the tokens of the prompt.
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
    # SGLang keeps a prompt at least 7 tokens below its context length, vLLM 1
    prompt_margin: int = 1
    # SGLang ends a call 2 tokens before its context length (srt/managers/scheduler.py,
    # init_req_max_new_tokens), vLLM fills all of it
    spare_positions: int | None = None
    excess_budget: Refusal | None = None
    end_tokens: tuple[int, ...] = ()
    end_token: StopShown | None = None
    stop_token: StopShown | None = None
    stop_string: StopShown | None = None
    token_text: str | None = None
    sampling: tuple[SamplingOption, ...] = ()
    # vLLM computes raw logprobs before everything, SGLang after the penalties
    penalised_logprobs: bool | None = None
    # SGLang counts the output alone (srt/sampling/penaltylib/repetition_penalty.py)
    repetition_over_prompt: bool = True

    def __post_init__(self) -> None:
        problems = [*self._sizes(), *self._flags(), *self._tokens()]
        problems += [
            f"{name} holds {show(value)}; choose among {[str(member) for member in kind]}."
            for name, kind in _TUPLES.items()
            if not isinstance(value := getattr(self, name), tuple | list)
        ]
        if problems:
            raise ContractError(" ".join(problems))
        object.__setattr__(self, "end_tokens", tuple(self.end_tokens))
        if self.end_token is not None and not self.end_tokens:
            problems.append("end_token needs end_tokens: the ids of the model's own end tokens.")
        if self.stop_string is not None and self.token_text is None:
            problems.append("stop_string needs token_text: stop strings are made of it.")
        # Otherwise no call can be made at all.
        problems += [
            f"{name}={value} leaves no token of max_length={self.max_length}."
            for name, value in (
                ("prompt_margin", self.prompt_margin),
                ("spare_positions", self.spare_positions or 0),
            )
            if value >= self.max_length
        ]
        if problems:
            raise ContractError(" ".join(problems))
        # contracts come from JSON and TOML, too: plain strings become members
        for name, kind in _TUPLES.items():
            object.__setattr__(
                self, name, tuple(_member(kind, name, value) for value in getattr(self, name))
            )
        for name, kind in _SINGLES.items():
            object.__setattr__(self, name, _member(kind, name, getattr(self, name)))
        for name, kind in _OPTIONAL.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _member(kind, name, value))
        unknown = set(self.recomputing) - set(self.pause_modes)
        if unknown:
            raise ContractError(
                f"recomputing names {sorted(unknown)}, which are not pause modes of the engine:"
                f" {list(self.pause_modes)}."
            )

    def _sizes(self) -> list[str]:
        return [
            f"{name}={show(value)} must be a whole number of tokens, at least {least}."
            for name, least, optional in (
                ("max_length", 2, False),
                ("prompt_margin", 1, False),
                ("spare_positions", 0, True),
            )
            if not _is_int(value := getattr(self, name), least)
            and (value is not None or not optional)
        ]

    def _flags(self) -> list[str]:
        problems = [
            f"{name} must be a bool, not {show(value)}."
            for name in _FLAGS
            if not isinstance(value := getattr(self, name), bool)
        ]
        # a caller without a type checker may have passed anything
        penalised: object = self.penalised_logprobs
        if not isinstance(penalised, bool | None):
            problems.append(f"penalised_logprobs must be a bool or None, not {show(penalised)}.")
        return problems

    def _tokens(self) -> list[str]:
        problems = []
        tokens: object = self.end_tokens
        if not isinstance(tokens, tuple | list):
            problems.append(f"end_tokens must be a tuple of token ids, not {show(tokens)}.")
        else:
            problems += [
                f"end_tokens={show(token)} must be a token id: a whole number from 0 to"
                f" {LARGEST_TOKEN:,}."
                for token in tokens
                if not _is_int(token, 0) or token > LARGEST_TOKEN
            ]
        text: object = self.token_text
        if text is not None and not (isinstance(text, str) and _tells_tokens_apart(text)):
            problems.append(
                f"token_text={show(text)} must be a format of one token id, such as 't{{:03d}} ',"
                " in which different ids give different texts."
            )
        return problems

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that a call may have, in tokens."""
        return self.max_length - self.prompt_margin

    def room_after(self, prompt: int) -> int | None:
        """Return how many tokens a call may sample after ``prompt`` tokens; ``None`` if the terms
        do not say.
        """
        if self.spare_positions is None:
            return None
        return max(0, self.max_length - self.spare_positions - prompt)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form, with lists for tuples; ``EngineTerms(**...)`` reads it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _tells_tokens_apart(text: str) -> bool:
    """Return whether ``text`` formats one token id, and others differently."""
    try:
        return len({text.format(token) for token in _TOKENS}) == len(_TOKENS)
    # whatever a format may do with a number
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError):
        return False


def _member(kind: type[StrEnum], name: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ContractError(
            f"{name} holds {show(value)}; choose among {[str(member) for member in kind]}."
        ) from None


_TUPLES: dict[str, type[StrEnum]] = {
    "pause_modes": PauseMode,
    "recomputing": PauseMode,
    "stream_modes": StreamMode,
    "keys_finished": ReplyKey,
    "keys_aborted": ReplyKey,
    "keys_early": ReplyKey,
    "keys_queued": ReplyKey,
    "sampling": SamplingOption,
}
_SINGLES: dict[str, type[StrEnum]] = {
    "paused_calls": PausedCalls,
    "routes_switch": RoutesSwitch,
    "bad_start": Refusal,
    "zero_budget": Refusal,
    "empty_prompt": Refusal,
}
_OPTIONAL: dict[str, type[StrEnum]] = {
    "excess_budget": Refusal,
    "end_token": StopShown,
    "stop_token": StopShown,
    "stop_string": StopShown,
}
_FLAGS = (
    "routes_start",
    "abort_by_prefix",
    "samples",
    "seeded",
    "aborts",
    "repetition_over_prompt",
)
_TOKENS = (0, 1, 2, 10, 100, 1000)
