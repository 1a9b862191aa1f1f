"""Blame: whose doing an exception is that comes out of a subject's code.

What a subject raises is an outcome, whatever its class: also ``CancelledError``, ``GeneratorExit``
and what is no ``Exception``. Only these go through: the user's Ctrl-C, rollproof's own errors, the
end of a step that never ended, and the cancellation of what is left when a run is over.
"""

from __future__ import annotations

import asyncio
import inspect

from rollproof.core.error_text import describe_error
from rollproof.errors import RollproofError, SubjectError
from rollproof.simulation.watchdog import GivenUp

__all__ = ["raise_unless_outcome", "reraise_foreign"]


def raise_unless_outcome(error: BaseException, where: str) -> None:
    """Returns where ``error`` is an outcome of the subject's method ``where``, to be judged or
    told.

    Raises what the subject is not to blame for (``reraise_foreign``), and ``SubjectError`` for what a run
    cannot go on with: a subject that ends the process, or that brings an event loop of its own.
    """
    reraise_foreign(error)
    _refuse_exit(error, where)
    _refuse_own_loop(error, where)


def reraise_foreign(error: BaseException) -> None:
    """Raise ``error``, or what a group holds, where the subject is not to blame for it. Returns
    where it is.
    """
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            reraise_foreign(part)
    elif isinstance(error, KeyboardInterrupt | GivenUp | RollproofError) or (
        isinstance(error, asyncio.CancelledError) and _run_is_over()
    ):
        raise error


def _refuse_exit(error: BaseException, where: str) -> None:
    """A subject that ends the process would end the run as if all were well."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for part in parts:
        if isinstance(part, SystemExit):
            raise SubjectError(
                f"{where} ends the process ({describe_error(part)}): raise an exception instead, so that the"
                " run can be judged."
            ) from error


def _refuse_own_loop(error: BaseException, where: str) -> None:
    text = str(error) if isinstance(error, RuntimeError) else ""
    if not any(
        sign in text
        for sign in (
            "cannot be called from a running event loop",
            "already running",
            "another loop is running",
        )
    ):
        return
    _close_unstarted(error)
    method = where.rpartition(".")[2]
    raise SubjectError(
        f"{where} brings an event loop of its own ({text}). Make `{method}` async so that it runs"
        " on rollproof's loop, or record a real run with `rollproof.record(...)` and judge that."
    ) from error


def _close_unstarted(error: BaseException | None) -> None:
    """Close the coroutines that the frames behind ``error`` made and never began: Python would warn
    of each one by and by.
    """
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


def _run_is_over() -> bool:
    """Whether the running loop is a virtual one that only cancels what is left
    (``VirtualLoop.ending``).
    """
    try:
        return bool(getattr(asyncio.get_running_loop(), "ending", False))
    except RuntimeError:
        return False
