"""Judge several targets, one after the other or in worker processes.

A worker makes its subject from the target's recipe, as ``rollproof replay`` does, so nothing of a
subject crosses a process. Workers are fresh interpreters: they see no state of the parent, and a
verdict does not depend on their number.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from rollproof.cli.named_targets import Target, target_of_recipe
from rollproof.core.error_text import describe_error
from rollproof.core.files import folder_name
from rollproof.core.progress import Progress
from rollproof.errors import RollproofError, SubjectError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult
from rollproof.judging.known_failures import KnownFailures
from rollproof.judging.report import Interrupted, Report
from rollproof.simulation.watchdog import VARIABLE, limit
from rollproof.verification.options import ROLLOUTS, Options
from rollproof.verification.runner import name_of
from rollproof.verification.subject_kinds import run

__all__ = ["Outcome", "Settings", "judge_all", "judge_recipe", "processors", "unpacked"]

_REPORT_INTERVAL = 0.2
"""Seconds between two progress messages of a worker."""
_SILENCE = 5
"""A worker is ended after so many times the limit of a step without any progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How every target of a run is judged.

    ``expected`` maps names of targets to the checks that are known to fail, with reasons;
    ``known_failures`` to the kinds of findings that those checks are known to show.
    """

    profile: str
    seed: int
    only: tuple[str, ...]
    flavours: tuple[str, ...] = ()
    expected: Mapping[str, Mapping[str, str]]
    known_failures: Mapping[str, KnownFailures] = field(default_factory=dict)
    witness_dir: Path


def processors() -> int:
    """Return how many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def judge_all(
    targets: Sequence[Target],
    settings: Settings,
    progress: Callable[[Progress], None],
    *,
    jobs: int,
) -> list[Report]:
    """Return the reports of ``targets``, in their order, judged by up to ``jobs`` processes.

    With ``jobs=1`` this process judges them. Raises what judging a target raises, ``SubjectError``
    if a worker dies, and on Ctrl-C ``Interrupted`` with the finished reports. No worker is left.
    """
    if min(jobs, len(targets)) <= 1:
        return _judge_here(targets, settings, progress)
    return _Pool(targets, settings, progress).judge(min(jobs, len(targets)))


def _judge_here(
    targets: Sequence[Target], settings: Settings, progress: Callable[[Progress], None]
) -> list[Report]:
    reports: list[Report] = []
    for target in targets:
        try:
            reports.append(_judge(target, settings, progress))
        except KeyboardInterrupt as interrupt:
            partial = interrupt.reports if isinstance(interrupt, Interrupted) else ()
            raise Interrupted(*reports, *partial) from None
    return reports


class _Message(NamedTuple):
    """What a worker says while it judges: which target, in which process, and how far it is."""

    number: int
    pid: int
    progress: Progress | None = None


class Outcome(NamedTuple):
    """What a worker returns: the report without its results, and those as plain values.

    A check holds functions, which cannot be pickled, so it travels as its id.
    """

    report: Report
    results: list[dict[str, Any]]
    interrupted: bool


_Messages: TypeAlias = "SimpleQueue[_Message]"


class _Pool:
    """Targets that are judged by a pool of processes."""

    def __init__(
        self,
        targets: Sequence[Target],
        settings: Settings,
        progress: Callable[[Progress], None],
    ) -> None:
        self._targets = targets
        self._settings = settings
        self._progress = progress
        self._reports: dict[int, Report] = {}
        self._workers: dict[int | None, BaseProcess] = {}
        self._judging: dict[int, int] = {}

    def judge(self, jobs: int) -> list[Report]:
        """Judge all of them. Ctrl-C ends the workers, and keeps the reports of finished targets."""
        # "spawn", because a fork would copy whatever this process has imported and patched.
        context = multiprocessing.get_context("spawn")
        messages: _Messages = context.SimpleQueue()
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            jobs, context, initializer=_start_worker, initargs=(messages, self._settings)
        )
        try:
            futures = {
                pool.submit(_work, number, dict(target.recipe)): number
                for number, target in enumerate(self._targets)
            }
            workers = set(multiprocessing.active_children()) - others
            self._workers = {worker.pid: worker for worker in workers}
            self._collect(futures, messages)
        except BrokenProcessPool:
            pool.shutdown()  # the exit codes are known once the executor has ended the others
            raise SubjectError(self._death()) from None
        except BaseException as error:
            # The executor itself only waits for running tasks, which may take minutes.
            for worker in self._workers.values():
                worker.kill()
            if isinstance(error, KeyboardInterrupt):
                partial = error.reports if isinstance(error, Interrupted) else ()
                raise Interrupted(*self._finished(), *partial) from None
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            messages.close()
        return self._finished()

    def _finished(self) -> list[Report]:
        return [self._reports[number] for number in sorted(self._reports)]

    def _collect(self, futures: dict[Future[Outcome], int], messages: _Messages) -> None:
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, _REPORT_INTERVAL, FIRST_COMPLETED)
            while not messages.empty():
                self._show(messages.get())
            for future in sorted(done, key=futures.__getitem__):
                number, outcome = futures[future], future.result()
                report = unpacked(outcome)
                if outcome.interrupted:
                    raise Interrupted(report)
                self._reports[number] = report

    def _show(self, message: _Message) -> None:
        self._judging[message.pid] = message.number
        progress = message.progress
        if progress is not None:
            share = f" ({progress.done}/{progress.total})" if progress.total else ""
            self._progress(
                Progress(
                    done=len(self._reports), total=len(self._targets), what=progress.what + share
                )
            )

    def _death(self) -> str:
        """Return which target ended its worker, how, and what to do about it."""
        running = {
            pid: number for pid, number in self._judging.items() if number not in self._reports
        }
        codes = {pid: self._workers[pid].exitcode for pid in running if pid in self._workers}
        # When one worker dies, the executor ends the others with SIGTERM.
        dead = [pid for pid in running if codes.get(pid) != -signal.SIGTERM] or list(running)
        names = " or ".join(dict.fromkeys(self._targets[running[pid]].name for pid in dead))
        code = codes.get(dead[0]) if dead else None
        silence = _SILENCE * limit()
        return (
            f"The process that judged {names or 'a target'} died (exit code {code}): it ran out of"
            " memory, the subject ended it"
            f"{f', or it made no progress for {silence:g} s ({VARIABLE})' if silence else ''}."
            " Run it with `--jobs 1` to see why."
        )


def _judge(target: Target, settings: Settings, progress: Callable[[Progress], None]) -> Report:
    """Return the report of one target.

    An error names the subject as the command line does, also if it is defined in another module.
    """
    cases = None
    if target.cases is not None and not settings.flavours:
        cases = target.cases(settings.profile, settings.seed)
    options = Options(
        name=target.name,
        profile=settings.profile,
        seed=settings.seed,
        only=settings.only,
        expected=settings.expected.get(target.name, {}),
        known_failures=settings.known_failures.get(target.name, {}),
        recipe=target.recipe,
        counterexample_dir=settings.witness_dir / folder_name(target.folder),
        progress=progress,
        flavours=settings.flavours or target.flavours,
        cases=cases,
    )
    try:
        return run(target.about, target.factory, options)
    except SubjectError as error:
        raise SubjectError(
            str(error).replace(
                name_of(target.factory), str(target.recipe.get("subject", target.name))
            )
        ) from error


def judge_recipe(recipe: Mapping[str, Any], settings: Settings) -> Outcome:
    """Judge the target of a recipe, in whatever process this is."""
    return packed(_judge(target_of_recipe(recipe), settings, lambda _: None), interrupted=False)


class _Worker:
    """The state of a worker process, set by the pool's initializer."""

    messages: ClassVar[_Messages]
    settings: ClassVar[Settings]


def _start_worker(messages: _Messages, settings: Settings) -> None:
    _Worker.messages, _Worker.settings = messages, settings
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker holds both ends of the executor's queues, so it would wait for ever for work from a
    # parent that was killed.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(number: int, recipe: Mapping[str, Any]) -> Outcome:
    """Judge the target of a recipe in this worker."""
    settings, messages, pid = _Worker.settings, _Worker.messages, os.getpid()
    messages.put(_Message(number, pid))
    last = 0.0

    def report_progress(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_INTERVAL:
            last = now
            _exit_without_progress(target.about)
            messages.put(_Message(number, pid, progress))

    try:
        target = target_of_recipe(recipe)
        _exit_without_progress(target.about)
        return packed(_judge(target, settings, report_progress), interrupted=False)
    except Interrupted as interrupt:  # a subject raised KeyboardInterrupt
        return packed(interrupt.reports[0], interrupted=True)
    except RollproofError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a subject raises
        # as text, because the error itself may not be picklable
        raise RuntimeError(describe_error(error)) from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def _exit_without_progress(about: str) -> None:
    """End this worker, with the place on standard error, unless this is called again in time.

    Engines and trainers are left alone: they start for minutes, and have timeouts of their own.
    """
    seconds = _SILENCE * limit()
    if about in (ROLLOUTS, "batches") and seconds and sys.__stderr__ is not None:
        # A C thread, so that it also ends what never gives Python's lock back.
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def packed(report: Report, *, interrupted: bool) -> Outcome:
    names = (
        "verdict",
        "reason",
        "exercised",
        "findings",
        "found",
        "kinds",
        "known",
        "otherwise",
        "flavours",
    )
    results = [
        {"check": result.id, **{name: getattr(result, name) for name in names}}
        for result in report.results
    ]
    return Outcome(replace(report, results=()), results, interrupted)


def unpacked(outcome: Outcome) -> Report:
    """Return the report of an outcome, with the checks that it names."""
    registry = default_registry()
    results = tuple(
        CheckResult(**{**result, "check": registry[result["check"]]}) for result in outcome.results
    )
    return replace(outcome.report, results=results)
