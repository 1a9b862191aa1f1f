"""Turn whatever an engine adapter raises, or returns of a wrong type, into errors of rollproof."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rollproof.core.records import (
    EngineOutput,
    FinishReason,
    Span,
    as_logprobs,
    as_routes,
    as_tokens,
)
from rollproof.errors import (
    EngineDied,
    EngineError,
    EngineHung,
    EngineRefused,
    RollproofError,
    SubjectError,
)

__all__ = ["checked_outputs", "guarded"]

_T = TypeVar("_T")


async def guarded(operation: Callable[[], Awaitable[_T]], name: str, deadline: float | None) -> _T:
    """Return the result of ``operation()``, within ``deadline`` seconds (``None``: no limit).

    ``name`` is the adapter's method, for messages. Raises ``EngineHung`` past the deadline,
    ``EngineDied`` if the engine raises ``SystemExit``, and ``EngineError`` for every other error of
    the engine.
    """
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            return await operation()
    except RollproofError:
        raise
    except SystemExit as error:
        raise EngineDied(
            f"The engine's {name} raised SystemExit({error.code!r}): it would have ended the"
            " program."
        ) from error
    except (Exception, asyncio.CancelledError) as error:
        if limit.expired():
            raise EngineHung(f"The engine's {name} did not return within {deadline:g} s.") from None
        # an engine may let a CancelledError of its own escape, though nobody cancelled this task
        if isinstance(error, asyncio.CancelledError) and _cancelled():
            raise
        raise EngineError(f"The engine's {name} raised {type(error).__name__}: {error}") from error


def _cancelled() -> bool:
    """Whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def checked_outputs(
    generate: Callable[[], Awaitable[Sequence[EngineOutput]]],
) -> tuple[EngineOutput, ...]:
    """Return what ``generate()`` returns, in the types that checks rely on.

    Arrays that have them are not copied. Raises ``EngineRefused`` for any error of the engine, and
    ``SubjectError`` for other types.
    """
    try:
        outputs: object = await guarded(generate, "generate()", None)
    except EngineError as error:
        if type(error) is not EngineError or error.__cause__ is None:
            raise
        raise EngineRefused(str(error.__cause__), kind=type(error.__cause__).__name__) from error
    if not isinstance(outputs, Sequence) or not all(
        isinstance(output, EngineOutput) for output in outputs
    ):
        raise SubjectError(
            "An engine's generate() must return a sequence of EngineOutput, one per sample, not"
            f" {_short(outputs)}."
        )
    return tuple(_checked(output) for output in outputs)


def _checked(output: EngineOutput) -> EngineOutput:
    tokens, logprobs, routes = output.token_ids, output.logprobs, output.routes
    if (
        not isinstance(routes, np.ndarray)
        or routes.ndim != 3
        or not np.issubdtype(routes.dtype, np.integer)
    ):
        routes = as_routes(routes, what="EngineOutput.routes")
    if not isinstance(logprobs, np.ndarray) or logprobs.ndim != 1 or logprobs.dtype != np.float64:
        logprobs = as_logprobs(logprobs, what="EngineOutput.logprobs")
    tokens = () if tokens is None else as_tokens(tokens, what="EngineOutput.token_ids")
    if tokens and min(tokens) < 0:
        raise SubjectError(f"EngineOutput.token_ids must be 0 or more, not {min(tokens)}.")
    try:
        reason = FinishReason(output.finish_reason)
    except ValueError:
        valid = [str(reason) for reason in FinishReason]
        raise SubjectError(
            f"EngineOutput.finish_reason is {output.finish_reason!r}; choose among {valid}."
        ) from None
    if not _is_integer(output.routes_start) or output.routes_start < 0:
        raise SubjectError(
            "EngineOutput.routes_start must be a whole number, 0 or more, not"
            f" {_short(output.routes_start)}."
        )
    if not (output.cached_tokens is None or _is_integer(output.cached_tokens)):
        raise SubjectError(
            "EngineOutput.cached_tokens must be a whole number or None, not"
            f" {_short(output.cached_tokens)}."
        )
    if not isinstance(output.spans, tuple) or not all(
        isinstance(span, Span) for span in output.spans
    ):
        raise SubjectError(
            f"EngineOutput.spans must be a tuple of Span, not {_short(output.spans)}."
        )
    if (
        routes is output.routes
        and logprobs is output.logprobs
        and tokens is output.token_ids
        and reason is output.finish_reason
    ):
        return output
    return replace(output, token_ids=tokens, logprobs=logprobs, routes=routes, finish_reason=reason)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _short(value: object) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
