"""Runner: subjects that end oddly, in a start, an update, a rollout or a stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from typing import Any

import pytest

from rollproof.core.events.rollout import Fault, Result, Update, UpdatePhase
from rollproof.core.records import Request, Rollout
from rollproof.errors import SubjectError
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.verification.runner import run_case
from tests.support.runner_case import CASE, result_of


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_start_or_stop_that_never_ends_is_told(method: str) -> None:
    """Both are bounded by the virtual deadline, whether they poll or wait for nothing."""

    async def polls(self: AsSampled, *_args: Any) -> None:
        if method == "stop" or not hasattr(self, "fleet"):
            while True:  # noqa: ASYNC110 - polling for ever is what is tested
                await asyncio.sleep(0.1)

    polling = type("Polling", (AsSampled,), {method: polls})

    with pytest.raises(
        SubjectError, match=f"`{method}` never ended: the virtual deadline of 500 s passed"
    ):
        run_case(polling, CASE)


@pytest.mark.parametrize("place", ["start", "rollout", "to_record", "stop"])
def test_a_subject_that_exits_is_refused(place: str) -> None:
    """``sys.exit(0)`` in a user's code must not end a run as if it had passed."""

    def exits(*_args: Any) -> None:
        raise SystemExit(0)

    exiting = type("Exiting", (AsSampled,), {place: exits})

    with pytest.raises(SubjectError, match=rf"{place}.*SystemExit"):
        run_case(exiting, CASE)


def test_a_rollout_that_is_cancelled_within_has_ended_with_an_error() -> None:
    """A stack that lets its own cancellation through hands over an error."""

    class Cancelled(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            raise asyncio.CancelledError("by the stack")

    line = Cancelled.rollout.__code__.co_firstlineno + 1
    expected = f"CancelledError: by the stack (test_runner_ends.py:{line}, in rollout)"
    assert expected == result_of(run_case(Cancelled, CASE)).error


class _Odd(BaseException):
    """No ``Exception``: what some libraries stop their workers with."""


ODD = [
    asyncio.CancelledError("by the stack"),
    GeneratorExit("gone"),
    _Odd("odd"),
    BaseExceptionGroup("several", [_Odd("inner")]),
]


def _raising(method: str, error: BaseException) -> type[AsSampled]:
    async def raises(self: AsSampled, *_args: Any) -> None:
        raise error

    return type("Raising", (AsSampled,), {method: raises})


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_an_update_may_fail_in_any_way(error: BaseException) -> None:
    """Whatever an update raises, it has failed, and the run goes on to be judged."""
    events = run_case(_raising("update_weights", error), CASE).events

    assert [UpdatePhase.ASKED, UpdatePhase.FAILED] == [
        event.phase for event in events if isinstance(event, Update)
    ]
    assert [True] == [
        event.detail.startswith(type(error).__name__)
        for event in events
        if isinstance(event, Fault)
    ]
    assert [None] == [event.error for event in events if isinstance(event, Result)]


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_a_rollout_may_end_in_any_way(error: BaseException) -> None:
    """Whatever a rollout raises, it is the end of the request."""
    assert str(result_of(run_case(_raising("rollout", error), CASE)).error).startswith(
        type(error).__name__
    )


@pytest.mark.parametrize("method", ["start", "to_record", "stop", "gauges"])
@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_whatever_a_method_raises_is_told_as_its_own(method: str, error: BaseException) -> None:
    """Methods without which nothing can be judged are named, with what they raised."""
    with pytest.raises(SubjectError, match=rf"Raising\.{method}.* raised {type(error).__name__}: "):
        run_case(_raising(method, error), CASE)


@pytest.mark.parametrize(
    "method", ["start", "rollout", "update_weights", "to_record", "stop", "gauges"]
)
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), BaseExceptionGroup("of tasks", [KeyboardInterrupt()])],
    ids=["bare", "in a group"],
)
def test_an_interrupt_ends_the_run_at_once(method: str, error: BaseException) -> None:
    """Ctrl-C is the user's, wherever it is raised."""
    with pytest.raises(KeyboardInterrupt):
        run_case(_raising(method, error), CASE)


def test_an_exit_in_an_update_is_refused() -> None:
    """``sys.exit(0)`` in an update, or in a task or a callback of the subject's, does not end a run
    as if it had passed.
    """

    async def in_a_task(self: AsSampled, _request: Request) -> None:
        async def work() -> None:
            sys.exit(0)

        await asyncio.create_task(work())

    with pytest.raises(
        SubjectError,
        match=r"update_weights ends the process \(SystemExit: 0\): raise an exception instead",
    ):
        run_case(_raising("update_weights", SystemExit(0)), CASE)
    with pytest.raises(
        SubjectError, match=r"A task or a callback of .* ends the process \(SystemExit: 0\)"
    ):
        run_case(type("Exiting", (AsSampled,), {"rollout": in_a_task}), CASE)


def test_a_subject_that_cancels_every_task_is_told() -> None:
    """Cancelling all tasks of the loop would cancel the caller of a rollout, too."""

    async def cancels(self: AsSampled, _request: Request) -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)

    with pytest.raises(SubjectError, match="cancels tasks that it did not start"):
        run_case(type("Cancels", (AsSampled,), {"rollout": cancels}), CASE)


@pytest.mark.parametrize("method", ["rollout", "start", "stop", "to_record", "gauges"])
def test_what_never_ends_leaves_nothing_to_collect(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subject that ignores its cancellation is left behind, and closed with its run: Python would
    close it in some later test, and report there what it raises.
    """

    async def never_ends(self: AsSampled, *_args: Any) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e9)

    reported: list[str] = []
    monkeypatch.setattr(
        "sys.unraisablehook", lambda unraisable: reported.append(repr(unraisable.exc_value))
    )
    with contextlib.suppress(SubjectError):
        run_case(type("Endless", (AsSampled,), {method: never_ends}), CASE)
    gc.collect()

    assert [] == reported
