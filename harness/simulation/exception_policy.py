"""Decide which exceptions from a subject's code are outcomes, and which propagate.

What a subject raises is an outcome, whatever its class: also ``CancelledError``, ``GeneratorExit``
and what is no ``Exception``. Only these propagate: the user's Ctrl-C, rollproof's own errors,
``GivenUp``, and the cancellation, or the closing, of what is left when a run is over.
"""

from __future__ import annotations

import asyncio
import inspect

from rollproof.core.error_text import describe_error
from rollproof.errors import RollproofError, SubjectError
from rollproof.simulation.watchdog import GivenUp

__all__ = ["raise_unless_outcome", "reraise_foreign"]


def raise_unless_outcome(error: BaseException, where: str) -> None:
    """Return if ``error`` is an outcome of the subject's method ``where``, which is judged.

    Raises:
        BaseException: ``error``, if the subject did not cause it (``reraise_foreign``).
        SubjectError: The run cannot go on: the subject ends the process, or brings an event loop of
            its own.
    """
    reraise_foreign(error)
    _refuse_exit(error, where)
    _refuse_own_loop(error, where)


def reraise_foreign(error: BaseException) -> None:
    """Raise ``error``, or an exception of a group, if the subject did not cause it; else return."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            reraise_foreign(part)
    elif (
        isinstance(error, KeyboardInterrupt | GivenUp | RollproofError)
        or (isinstance(error, asyncio.CancelledError) and _run_is_over())
        or (isinstance(error, GeneratorExit) and not _loop_runs())
    ):
        raise error


def _refuse_exit(error: BaseException, where: str) -> None:
    # the run would end as if all were well
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for part in parts:
        if isinstance(part, SystemExit):
            raise SubjectError(
                f"{where} ends the process ({describe_error(part)}): raise an exception instead, so"
                " that the run can be judged."
            ) from error


_LOOP_ERRORS = (
    "cannot be called from a running event loop",
    "already running",
    "another loop is running",
)
"""What asyncio says, in its versions, of a second loop in a thread."""


def _refuse_own_loop(error: BaseException, where: str) -> None:
    text = str(error) if isinstance(error, RuntimeError) else ""
    if not any(phrase in text for phrase in _LOOP_ERRORS):
        return
    _close_unstarted(error)
    method = where.rpartition(".")[2]
    raise SubjectError(
        f"{where} creates its own event loop ({text}). Make `{method}` async so that it runs"
        " on rollproof's loop, or record a real run with `rollproof.record(...)` and judge that."
    ) from error


def _close_unstarted(error: BaseException | None) -> None:
    """Close the coroutines that the frames of a traceback created and never started."""
    # Python warns of each when it is collected
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            for value in traceback.tb_frame.f_locals.values():
                if (
                    inspect.iscoroutine(value)
                    and inspect.getcoroutinestate(value) == inspect.CORO_CREATED
                ):
                    value.close()
            traceback = traceback.tb_next
        error = error.__context__


def _loop_runs() -> bool:
    """Return whether a loop is running: it is not when a coroutine that was left is closed."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_is_over() -> bool:
    """Return whether the running loop is a ``VirtualLoop`` that is ``ending``."""
    try:
        return bool(getattr(asyncio.get_running_loop(), "ending", False))
    except RuntimeError:
        return False
