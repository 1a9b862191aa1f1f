"""Jobs: targets judged one after the other, or side by side in processes of their own.

A worker makes its subjects from their recipes, as ``rollproof replay`` does, so nothing of a
subject crosses a process. Workers are fresh interpreters: no state of the parent's reaches what
they judge, and a verdict does not depend on their number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rollproof.cli.named_targets import Target, target_of_recipe
from rollproof.core.error_text import told
from rollproof.core.files import folder_name
from rollproof.core.progress import Progress
from rollproof.errors import RollproofError, SubjectError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult
from rollproof.judging.known_failures import Ways
from rollproof.judging.report import Interrupted, Report
from rollproof.verification.options import Options
from rollproof.verification.runner import name_of
from rollproof.verification.subject_kinds import run

__all__ = ["Settings", "judge_all", "processors"]

_BETWEEN_REPORTS = 0.2
"""Seconds between two messages of a worker about how far it is."""
_PARTING = 5.0
"""Seconds that workers get to tell what they have found when Ctrl-C ends the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How every target of a run is judged.

    ``expected`` maps names of targets to the checks that are known to fail, with reasons, ``ways``
    to how they are known to.
    """

    profile: str
    seed: int
    only: tuple[str, ...]
    flavours: tuple[str, ...] = ()
    expected: Mapping[str, Mapping[str, str]]
    ways: Mapping[str, Ways] = field(default_factory=dict)
    witness_dir: Path


def processors() -> int:
    """How many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def judge_all(
    targets: Sequence[Target],
    settings: Settings,
    progress: Callable[[Progress], None],
    *,
    jobs: int,
) -> list[Report]:
    """The reports of ``targets``, in their order, by up to ``jobs`` processes at once (1: this
    one).

    Raises what judging a target raises, ``SubjectError`` where a worker dies, and ``Interrupted``
    with what there is where Ctrl-C ends it. However it ends, no worker is left.
    """
    if min(jobs, len(targets)) <= 1:
        return _one_after_the_other(targets, settings, progress)
    run = _SideBySide(targets, progress)
    try:
        run.all(settings, min(jobs, len(targets)))
    except KeyboardInterrupt:
        raise Interrupted(*run.found()) from None
    return run.found()


def _one_after_the_other(
    targets: Sequence[Target], settings: Settings, progress: Callable[[Progress], None]
) -> list[Report]:
    reports: list[Report] = []
    for target in targets:
        try:
            reports.append(_judge(target, settings, progress))
        except KeyboardInterrupt as interrupt:
            raise Interrupted(
                *reports, *(interrupt.reports if isinstance(interrupt, Interrupted) else ())
            ) from None
    return reports


class _SideBySide:
    """Targets that are judged by workers, and the reports that have come back."""

    def __init__(self, targets: Sequence[Target], progress: Callable[[Progress], None]) -> None:
        self._targets = targets
        self._progress = progress
        self._todo: Iterator[tuple[int, Target]] = iter(enumerate(targets))
        self._busy: dict[Connection, int] = {}
        self._reports: dict[int, Report] = {}

    def found(self) -> list[Report]:
        """The reports so far, in the order of the targets."""
        return [self._reports[number] for number in sorted(self._reports)]

    def all(self, settings: Settings, count: int) -> None:
        """Have every target judged. Ctrl-C asks each worker for what it has found so far, before it
        goes on to the caller.
        """
        with _workers(count, settings) as workers:
            for pipe in workers:
                self._give(pipe)
            try:
                self._take_all()
            except KeyboardInterrupt:
                for process in workers.values():
                    process.terminate()
                self._take_rest()
                raise

    def _give(self, pipe: Connection) -> None:
        """Hand a worker the next target, if one is left."""
        number, target = next(self._todo, (None, None))
        if target is None or number is None:
            return
        self._busy[pipe] = number
        with suppress(ConnectionError):  # a worker that died is told apart when its answer is read
            pipe.send(dict(target.recipe))

    def _take_all(self) -> None:
        """Read what the workers say until none is busy."""
        while self._busy:
            for pipe in wait(list(self._busy)):
                assert isinstance(pipe, Connection)
                if not self._take(pipe):
                    raise KeyboardInterrupt

    def _take(self, pipe: Connection) -> bool:
        """Read one message of a worker: how far it is, its report, or why there is none; whether it
        was not interrupted.
        """
        number = self._busy[pipe]
        try:
            message = pipe.recv()
        except (
            EOFError,
            ConnectionError,
        ):  # the latter where it died before it read what it was given
            raise SubjectError(
                f"The process that judged {self._targets[number].name} died (out of memory, or the"
                " subject ended it). Run it with `--jobs 1` to see why."
            ) from None
        if isinstance(message, Progress):
            share = f" ({message.done}/{message.total})" if message.total else ""
            self._progress(
                Progress(
                    done=len(self._reports), total=len(self._targets), what=message.what + share
                )
            )
        elif isinstance(message, BaseException):
            raise message
        else:
            interrupted, report, results = message
            self._reports[number] = _unpacked(report, results)
            del self._busy[pipe]
            self._give(pipe)
            return not interrupted
        return True

    def _take_rest(self) -> None:
        """What the workers have found so far, as far as they tell it soon."""
        self._todo = iter(())
        until = time.monotonic() + _PARTING
        while self._busy and (ready := wait(list(self._busy), max(0.0, until - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    self._take(pipe)
                except Exception:  # noqa: BLE001 - it died, or cannot be run: the user wants to stop, and is not told of it now
                    del self._busy[pipe]


def _judge(target: Target, settings: Settings, progress: Callable[[Progress], None]) -> Report:
    """The report of one target. An error names a subject as the command line does, also one that
    was defined elsewhere.
    """
    try:
        return _judged(target, settings, progress)
    except SubjectError as error:
        raise SubjectError(
            str(error).replace(
                name_of(target.factory), str(target.recipe.get("subject", target.name))
            )
        ) from error


def _judged(target: Target, settings: Settings, progress: Callable[[Progress], None]) -> Report:
    cases = None
    if target.cases is not None and not settings.flavours:
        cases = target.cases(settings.profile, settings.seed)
    options = Options(
        name=target.name,
        profile=settings.profile,
        seed=settings.seed,
        only=settings.only,
        expected=settings.expected.get(target.name, {}),
        known_failures=settings.ways.get(target.name, {}),
        recipe=target.recipe,
        counterexample_dir=settings.witness_dir / folder_name(target.folder),
        progress=progress,
        flavours=settings.flavours or target.flavours,
        cases=cases,
    )
    return run(target.about, target.factory, options)


@contextmanager
def _workers(count: int, settings: Settings) -> Iterator[dict[Connection, BaseProcess]]:
    """``count`` workers by the pipes to them, which end with the context."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, settings), daemon=True)
            process.start()
            there.close()
            workers[here] = process
        yield workers
    finally:
        for running in workers.values():
            running.kill()
        for pipe, running in workers.items():
            running.join()
            pipe.close()


def _work(pipe: Connection, settings: Settings) -> None:
    """The life of a worker: recipes in, progress and reports out, until the parent is gone, or
    wants to hear what there is.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the parent too, which then tells its workers
    signal.signal(signal.SIGTERM, _interrupted)
    said = 0.0

    def tell(progress: Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= _BETWEEN_REPORTS:
            said = time.monotonic()
            pipe.send(progress)

    # a parent that dies with messages unread resets the pipe, and does not just end it
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            recipe = pipe.recv()
            try:
                pipe.send((False, *_packed(_judge(target_of_recipe(recipe), settings, tell))))
            except (EOFError, ConnectionError):
                raise
            except Interrupted as interrupt:
                pipe.send((True, *_packed(interrupt.reports[0])))
                return
            except RollproofError as error:
                pipe.send(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it as it would tell its own
                pipe.send(RuntimeError(told(error)))


def _interrupted(*_: object) -> None:
    """The parent's Ctrl-C, once: what is being put together then is not interrupted again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _packed(report: Report) -> tuple[Report, list[dict[str, Any]]]:
    """A report fit for a pipe: checks hold functions, so they travel by id."""
    names = ("verdict", "reason", "exercised", "findings", "found", "kinds", "known", "otherwise")
    results = [
        {"check": result.id, **{name: getattr(result, name) for name in names}}
        for result in report.results
    ]
    return replace(report, results=()), results


def _unpacked(report: Report, results: list[dict[str, Any]]) -> Report:
    registry = default_registry()
    return replace(
        report,
        results=tuple(
            CheckResult(**{**result, "check": registry[result["check"]]}) for result in results
        ),
    )
