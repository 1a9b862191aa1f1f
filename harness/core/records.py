"""Records of a rollout: what was asked, what an engine answered, what a stack handed over.

Arrays are numpy, indexes count from 0. Absolute positions count over prompt + response; *response
indexes* over the response alone. All records are frozen and keyword-only, so that fields can be
added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.errors import SubjectError

__all__ = [
    "BatchRow",
    "EngineOutput",
    "FinishReason",
    "FloatArray",
    "IntArray",
    "LogprobArray",
    "Request",
    "Rollout",
    "Scalar",
    "Span",
    "Version",
    "as_logprobs",
    "as_routes",
    "as_tokens",
    "spread",
]

Scalar: TypeAlias = int | float | str | bool | None
Version: TypeAlias = int | str | None
"""Label of the policy weights. ``None`` is *unknown*: it equals no version, not even another
unknown one.
"""
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
LogprobArray: TypeAlias = npt.NDArray[np.float64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


class FinishReason(StrEnum):
    """Why a call or a rollout ended, in the field's spelling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    COMPLETED = "completed"
    """``stop`` or ``length``: the stack does not say which (verl's vLLM server)."""
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) belong to ``version``."""

    start: int
    end: int
    version: Version


def spread(spans: Sequence[Span], length: int) -> list[Version]:
    """The version of each of ``length`` tokens; tokens that no span covers are ``None`` (unknown)."""
    out: list[Version] = [None] * length
    for span in spans:
        for i in range(max(span.start, 0), min(span.end, length)):
            out[i] = span.version
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a caller asks of a stack: one rollout.

    ``max_tokens`` is the budget that the caller states; ``limit`` the one that holds even where the
    caller states none (the configured response length). ``sampling`` are the other sampling
    parameters, ``media`` an opaque handle of multimodal input: every attempt must carry both
    unchanged. ``group`` names requests that share a prompt (n > 1). ``turns`` are the tokens that
    the environment appends after each natural end of the model's turn, one tuple a turn: a rollout
    of n + 1 model turns has n of them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    limit: int | None = None
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    want_logprobs: bool = True
    want_routes: bool = True
    media: str | None = None
    group: str | None = None
    turns: tuple[tuple[int, ...], ...] = ()

    @property
    def budget(self) -> int | None:
        """The tighter of ``max_tokens`` and ``limit``, in tokens; ``None`` when neither is set."""
        bounds = [bound for bound in (self.max_tokens, self.limit) if bound is not None]
        return min(bounds) if bounds else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineOutput:
    """What an engine returned for one call, as it showed it.

    ``logprobs`` is ``(tokens,)`` float64 or ``None``; NaN marks a missing one. ``routes`` is
    ``(rows, layers, top_k)`` or ``None``; its row 0 belongs to absolute position ``routes_start``.
    ``version`` and ``spans`` (over the tokens of this call) are the tags that the engine showed,
    right or wrong. ``native`` keeps the engine's own spelling of the finish reason.
    """

    token_ids: tuple[int, ...]
    logprobs: LogprobArray | None
    routes: IntArray | None
    finish_reason: FinishReason
    routes_start: int = 0
    version: Version = None
    spans: tuple[Span, ...] = ()
    cached_tokens: int | None = None
    native: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """A finished sample as the stack hands it to its trainer.

    ``response_ids`` holds sampled tokens and, in multi-turn rollouts, tokens of the environment
    (``loss_mask`` 0). ``logprobs`` is ``(response,)`` float64 with NaN where missing, or ``None``;
    ``loss_mask`` is ``(response,)`` of 0/1, or ``None`` for "every token"; ``routes`` is ``(rows,
    layers, top_k)``, row 0 at absolute position ``routes_start``. Of the version tags, those that
    the contract declares are filled: ``version`` (one per sample), ``min_version`` /
    ``max_version``, ``call_versions`` (one per engine call), ``spans`` (over response indexes),
    ``token_versions`` (one per response token). ``extra`` is for the reader of a report, never
    judged.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: LogprobArray | None = None
    loss_mask: IntArray | None = None
    routes: IntArray | None = None
    routes_start: int = 0
    version: Version = None
    min_version: Version = None
    max_version: Version = None
    call_versions: tuple[Version, ...] = ()
    spans: tuple[Span, ...] = ()
    token_versions: tuple[Version, ...] | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """T = prompt_len + response_len, in tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchRow:
    """What one sample became in a training batch, flattened to one axis of ``places`` (prompt,
    response, padding).

    ``token_ids`` is ``(places,)``, ``attention`` ``(places,)`` with 1 where a token of the sample
    stands and 0 where padding does. ``loss_mask`` is ``(places,)`` with 1 where the loss counts,
    ``logprobs`` ``(places,)`` float64; ``None`` where the batch carries none. ``routes`` is
    ``(rows, layers, top_k)`` with row i at place i; ``routed`` is ``(rows,)`` with 0 where the
    batch marks a row as no capture, ``None`` where it marks nothing. Of ``token_ids`` and
    ``attention`` the lengths agree; those of the others are what the stack made of them. A packed
    batch is one ``BatchRow`` per sample.
    """

    request_id: str
    token_ids: IntArray
    attention: IntArray
    loss_mask: IntArray | None = None
    logprobs: LogprobArray | None = None
    routes: IntArray | None = None
    routed: IntArray | None = None


_INTEGERS = frozenset({int})


def as_tokens(value: Any, *, what: str = "token_ids") -> tuple[int, ...]:
    """A tuple of ints from a list, tuple or 1-D integer array or tensor. Raises ``SubjectError``
    for anything else.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and _INTEGERS.issuperset(map(type, value)):
        return tuple(value)
    if not isinstance(value, list | tuple) or any(
        isinstance(token, bool) or not isinstance(token, int | np.integer) for token in value
    ):
        raise SubjectError(f"{what} must be a sequence of integers, not {_describe(value)}.")
    return tuple(int(token) for token in value)


def as_logprobs(value: Any, *, what: str = "logprobs") -> LogprobArray | None:
    """``(tokens,)`` float64 with NaN for ``None`` entries; ``None`` stays ``None``. Raises
    ``SubjectError``.

    The result is a copy: what the stack later does to its own list does not reach the record.
    """
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise SubjectError(f"{what} must be a sequence of numbers, not {_describe(value)}.")
    try:
        return np.array(
            [np.nan if number is None else float(number) for number in value], dtype=np.float64
        )
    except (TypeError, ValueError) as error:
        raise SubjectError(f"{what} must hold numbers or None: {error}.") from error


def as_routes(value: Any, *, what: str = "routes") -> IntArray | None:
    """``(rows, layers, top_k)`` integer copy of an array or CPU tensor; ``None`` stays ``None``.
    Raises ``SubjectError``.
    """
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.array(value)
    except (TypeError, ValueError) as error:
        raise SubjectError(f"{what} cannot be read as an array: {error}.") from error
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise SubjectError(
            f"{what} must be an integer array (rows, layers, top_k), not {_describe(array)}."
        )
    return array


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
