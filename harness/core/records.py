"""Records of a rollout: the request, the outputs of engines, the sample that a stack returns.

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

from rollproof.core.number_arrays import FLOATS, INTEGERS, MASKS, to_array
from rollproof.core.sampling_masks import SamplingMask
from rollproof.errors import SubjectError

__all__ = [
    "BatchRow",
    "ColumnArray",
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
    "as_column",
    "as_logprobs",
    "as_mask",
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
ColumnArray: TypeAlias = npt.NDArray[np.number[Any]]


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
    """Return the version of each of ``length`` tokens: ``None`` (unknown) where no span is."""
    versions: list[Version] = [None] * length
    for span in spans:
        for i in range(max(span.start, 0), min(span.end, length)):
            versions[i] = span.version
    return versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of a caller to a stack, for one rollout.

    Attributes:
        max_tokens: The budget that the caller states: of each turn, or of all turns together, or of
            these and the environment's tokens, as the stack chooses. ``RolloutLimits.response``
            declares the last. A call may be granted less, if the sample then goes on.
        limit: The budget that holds even if the caller states none: the configured response length.
        max_length: Tokens of prompt and response together that hold even if the caller states none.
        sampling: The other sampling parameters. Every attempt must carry them unchanged.
        media: An opaque handle of multimodal input. Every attempt must carry it unchanged.
        group: The name of requests that share a prompt (n > 1).
        turns: The tokens that the environment appends after each natural end of the model's turn,
            one tuple a turn: a rollout of n + 1 model turns has n of them.
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
    max_length: int | None = None

    @property
    def budget(self) -> int | None:
        """The tightest of ``max_tokens``, ``limit`` and the room that ``max_length`` leaves after
        the prompt, in tokens; ``None`` when none is set.
        """
        return min(self.bounds, default=None)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Each limit of the response's length, in tokens."""
        room = None if self.max_length is None else self.max_length - len(self.prompt_ids)
        return tuple(bound for bound in (self.max_tokens, self.limit, room) if bound is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineOutput:
    """The reply of an engine to one call, right or wrong.

    Attributes:
        logprobs: ``(tokens,)`` float64, with NaN for a missing one.
        routes: ``(rows, layers, top_k)``.
        routes_start: The absolute position of row 0 of ``routes``.
        version: The tag that the engine showed.
        spans: Tags that the engine showed, over the tokens of this call.
        native: The finish reason in the engine's own spelling.
        sampling_mask: The tokens among which each token was drawn; ``None``: the engine returned
            none.
    """

    token_ids: tuple[int, ...]
    logprobs: LogprobArray | None
    routes: IntArray | None
    finish_reason: FinishReason
    # routed_experts_start_len (SGLang) and routed_experts_prompt_start (vLLM) omit known rows
    routes_start: int = 0
    version: Version = None
    spans: tuple[Span, ...] = ()
    cached_tokens: int | None = None
    native: str = ""
    message: str = ""
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """A finished sample as the stack gives it to its trainer.

    Of the version tags, those that the contract declares are filled.

    Numbers may come as lists, tuples, arrays, or tensors of any device, in one piece or as a list
    with a piece for each engine call. The record that is judged has copies of the types below.

    Attributes:
        request_id: The id of its request, or a name of the stack's own: then samples of other
            prompts have other names. ``""`` if samples have no name.
        response_ids: Sampled tokens and, in multi-turn rollouts, tokens of the environment
            (``loss_mask`` 0).
        logprobs: ``(response,)`` float64, with NaN for a missing one.
        loss_mask: ``(response,)`` of 0 and 1; ``None`` means every token.
        routes: ``(rows, layers, top_k)``.
        routes_start: The absolute position of row 0 of ``routes``.
        version: The tag of the sample.
        call_versions: One tag per engine call.
        spans: Tags over response indexes.
        token_versions: One tag per response token.
        extra: Anything for the reader of a report. It is never judged.
        columns: Further values that a conversion into a batch is given, by the name of a ``Column``
            of the contract: ``(response,)`` or, if it declares so, ``(prompt + response,)``.
        values: Further values of the sample, likewise: a reward, the label of its group.
        sampling_mask: The tokens among which each token of the response was drawn.
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
    columns: Mapping[str, ColumnArray] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)
    sampling_mask: SamplingMask | None = None

    @property
    def total(self) -> int:
        """T = prompt_len + response_len, in tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchRow:
    """One sample in a training batch, flattened to one axis of ``places`` (prompt, response,
    padding). A packed batch has one ``BatchRow`` per sample.

    ``token_ids`` and ``attention`` are of equal length; the lengths of the others are what the
    stack made of them.

    Attributes:
        token_ids: ``(places,)``.
        attention: ``(places,)`` with 1 at a token of the sample and 0 at padding.
        loss_mask: ``(places,)`` with 1 where the loss counts; ``None`` if the batch carries none.
        logprobs: ``(places,)`` float64; ``None`` if the batch carries none.
        routes: ``(rows, layers, top_k)`` with row i at place i.
        routed: ``(rows,)`` with 0 where the batch marks a row as no capture; ``None`` if it marks
            none.
        columns: ``(places,)`` each: the further columns that the contract declares, by name.
        values: Their one value of a row, by name.
        sampling_mask: The tokens among which the token of each place was drawn; ``None`` if the
            batch carries none.
    """

    request_id: str
    token_ids: IntArray
    attention: IntArray
    loss_mask: IntArray | None = None
    logprobs: LogprobArray | None = None
    routes: IntArray | None = None
    routed: IntArray | None = None
    columns: Mapping[str, ColumnArray] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)
    sampling_mask: SamplingMask | None = None


_INTEGERS = frozenset({int})


def as_tokens(value: Any, *, what: str = "token_ids") -> tuple[int, ...]:
    """Return a tuple of ints, of a list, a tuple, or a 1-D integer array or tensor of any device.

    Raises:
        SubjectError: ``value`` is anything else; the text calls it ``what``.
    """
    # nearly always: without a look at each token in Python
    if isinstance(value, (list, tuple)) and _INTEGERS.issuperset(map(type, value)):
        return tuple(value)
    tokens: list[int] = to_array(value, name=what, rank=1, numbers=INTEGERS).tolist()
    return tuple(tokens)


def as_logprobs(value: Any, *, what: str = "logprobs") -> LogprobArray | None:
    """Return logprobs as ``(tokens,)`` float64 with NaN for ``None`` entries; ``None`` stays
    ``None``.

    The result is a copy: later changes of the stack's own list do not reach the record.

    Raises:
        SubjectError: ``value`` holds no numbers; the text calls it ``what``.
    """
    if value is None:
        return None
    array = to_array(value, name=what, rank=1, numbers=FLOATS)
    # a longdouble would lose digits, narrower floats are exact
    if array.dtype.itemsize > 8:
        raise SubjectError(f"{what} must fit float64, not be {array.dtype.name}.")
    return array.astype(np.float64, copy=False)


def as_column(value: Any, *, what: str) -> ColumnArray:
    """Return a copy of the values of a further column, ``(values,)``; NaN stands for ``None``.

    Raises:
        SubjectError: ``value`` holds no numbers on one axis; the text calls it ``what``.
    """
    array = to_array(value, name=what, rank=1, numbers=FLOATS)
    if array.dtype.itemsize > 8:
        raise SubjectError(f"{what} must fit float64, not be {array.dtype.name}.")
    return array


def as_mask(value: Any, *, what: str = "loss_mask") -> IntArray | None:
    """Return a mask ``(tokens,)`` of 0 and 1, or of booleans; ``None`` stays ``None``.

    Raises:
        SubjectError: ``value`` has another rank or type; the text calls it ``what``.
    """
    return None if value is None else to_array(value, name=what, rank=1, numbers=MASKS)


def as_routes(value: Any, *, what: str = "routes") -> IntArray | None:
    """Return an integer copy ``(rows, layers, top_k)`` of an array, a tensor of any device, a
    nested list, or a list with the array of each engine call; ``None`` stays ``None``.

    Raises:
        SubjectError: ``value`` has another rank or type; the text calls it ``what``.
    """
    return None if value is None else to_array(value, name=what, rank=3, numbers=INTEGERS)
