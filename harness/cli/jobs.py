"""Jobs: targets judged one after the other, or side by side in processes of their own.

A worker makes its subjects from their recipes, as ``rollproof replay`` does, so nothing of a subject crosses a process.
Workers are fresh interpreters: no state of the parent's reaches what they judge, and a verdict does not depend on their number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rollproof.batching import judge_batches
from rollproof.campaign import run_conformance
from rollproof.checks import CheckResult, default_registry
from rollproof.cli.targets import Target, target_of_recipe
from rollproof.errors import RollproofError, SubjectError
from rollproof.files import folder_name
from rollproof.progress import Progress
from rollproof.report import Report

__all__ = ["Settings", "judge_all", "processors"]

_BETWEEN_REPORTS = 0.2
"""Seconds between two messages of a worker about how far it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How every target of a run is judged; ``expected`` maps names of targets to the checks that are known to fail, with reasons."""

    profile: str
    seed: int
    only: tuple[str, ...]
    flavours: tuple[str, ...] = ()
    expected: Mapping[str, Mapping[str, str]]
    witness_dir: Path


def processors() -> int:
    """How many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def judge_all(targets: Sequence[Target], settings: Settings, progress: Callable[[Progress], None], *, jobs: int) -> list[Report]:
    """The reports of ``targets``, in their order, by up to ``jobs`` processes at once (1: this one).

    Raises what judging a target raises, and ``SubjectError`` where a worker dies. However it ends, no worker is left.
    """
    if min(jobs, len(targets)) <= 1:
        return [_judge(target, settings, progress) for target in targets]
    reports: dict[int, Report] = {}
    todo = iter(enumerate(targets))
    with _workers(min(jobs, len(targets)), settings) as workers:
        busy = {pipe: number for pipe in workers if (number := _give(pipe, todo)) is not None}
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                number = busy[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    raise SubjectError(
                        f"The process that judged {targets[number].name} died (out of memory, or the subject ended it). "
                        "Run it with `--jobs 1` to see why."
                    ) from None
                if isinstance(message, Progress):
                    share = f" ({message.done}/{message.total})" if message.total else ""
                    progress(Progress(done=len(reports), total=len(targets), what=message.what + share))
                    continue
                if isinstance(message, BaseException):
                    raise message
                reports[number] = _unpacked(*message)
                del busy[pipe]
                following = _give(pipe, todo)
                if following is not None:
                    busy[pipe] = following
    return [reports[number] for number in range(len(targets))]


def _judge(target: Target, settings: Settings, progress: Callable[[Progress], None]) -> Report:
    expected = dict(settings.expected.get(target.name, {})) or None
    if target.batches:
        return judge_batches(target.factory, name=target.name, seed=settings.seed, only=settings.only, expected=expected)
    own = target.cases is not None and not settings.flavours
    return run_conformance(
        target.factory,
        name=target.name,
        profile=settings.profile,
        seed=settings.seed,
        only=settings.only,
        flavours=settings.flavours or target.flavours,
        cases=target.cases(settings.profile, settings.seed) if own and target.cases is not None else None,
        expected=expected,
        progress=progress,
        witness_dir=settings.witness_dir / folder_name(target.folder),
        recipe=target.recipe,
    )


@contextmanager
def _workers(count: int, settings: Settings) -> Iterator[list[Connection]]:
    """Pipes to ``count`` workers, which end with the context."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, settings), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield pipes
    finally:
        for running in processes:
            running.terminate()
        for running in processes:
            running.join()
        for pipe in pipes:
            pipe.close()


def _give(pipe: Connection, todo: Iterator[tuple[int, Target]]) -> int | None:
    """Hand a worker the next target; its number, or ``None`` where none is left."""
    number, target = next(todo, (None, None))
    if target is not None:
        with suppress(BrokenPipeError):  # a worker that died is told apart when its answer is read
            pipe.send(dict(target.recipe))
    return number


def _work(pipe: Connection, settings: Settings) -> None:
    """The life of a worker: recipes in, progress and reports out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    said = 0.0

    def tell(progress: Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= _BETWEEN_REPORTS:
            said = time.monotonic()
            pipe.send(progress)

    with suppress(EOFError, BrokenPipeError):
        while True:
            recipe = pipe.recv()
            try:
                pipe.send(_packed(_judge(target_of_recipe(recipe), settings, tell)))
            except (EOFError, BrokenPipeError):
                raise
            except RollproofError as error:
                pipe.send(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it as it would tell its own
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _packed(report: Report) -> tuple[Report, list[dict[str, Any]]]:
    """A report fit for a pipe: checks hold functions, so they travel by id."""
    names = ("verdict", "reason", "exercised", "findings", "found")
    results = [{"check": result.id, **{name: getattr(result, name) for name in names}} for result in report.results]
    return replace(report, results=()), results


def _unpacked(report: Report, results: list[dict[str, Any]]) -> Report:
    registry = default_registry()
    return replace(report, results=tuple(CheckResult(**{**result, "check": registry[result["check"]]}) for result in results))
