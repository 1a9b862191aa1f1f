"""Jobs: targets side by side in processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.cli.named_targets import Target, subject_target
from rollproof.cli.parallel import Settings, _SideBySide, _work, judge_all, processors
from rollproof.core.progress import Progress
from rollproof.errors import SubjectError
from rollproof.invariants import default_registry
from rollproof.judging.report import Interrupted, Report

MODULE = """
import os
from itertools import islice
from rollproof.verification.rollouts import cases_for
from rollproof.fakes.trainers.reference_batches import Collator
from rollproof.fakes.clients.reference_clients import AsSampled

class Fails:
    collate = None

class Dies:
    def collate(self, samples): ...
    def __init__(self):
        os._exit(3)

class Stopped(AsSampled):
    cases_begun = 0
    @staticmethod
    def cases(profile, seed):
        from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN, SYNCED
        return [CLEAN, ABORTED, SYNCED]
    def __init__(self):
        super().__init__()
        Stopped.cases_begun += 1
        if Stopped.cases_begun == 3:
            raise KeyboardInterrupt

class Concat(AsSampled):
    flavours = ("vllm",)
    @staticmethod
    def cases(profile, seed):
        return islice(cases_for(Concat, profile=profile, seed=seed), 0, None, 20)
    def routes_start(self, sample):
        return 0
    def merge_routes(self, sample, sent, output):
        import numpy as np
        have = [] if sample.rows is None else [sample.rows]
        sample.rows = np.concatenate([*have, output.routes])
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of subjects, in the current folder."""
    (tmp_path / "sbj_jobs.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def settings(tmp_path: Path, *only: str) -> Settings:
    return Settings(
        profile="pr", seed=0, only=only or default_registry().ids, expected={}, witness_dir=tmp_path
    )


def silent(_: Progress) -> None:
    """No progress."""


def content(report: Report) -> Report:
    return replace(report, seconds=0.0)


def target(name: str) -> Target:
    return subject_target(f"sbj_jobs:{name}")


def test_workers_judge_as_this_process_does(tmp_path: Path) -> None:
    """Reports, findings and witnesses included, come in the order of the targets, and do not depend
    on the number of processes.
    """
    targets = [target("Concat"), target("Collator"), target("Collator")]
    wanted = settings(tmp_path, "routes.rows", "batch.tokens")
    alone = judge_all(targets, wanted, silent, jobs=1)
    said: list[Progress] = []
    together = judge_all(targets, wanted, said.append, jobs=2)

    assert [content(report) for report in alone] == [content(report) for report in together]
    assert ["Concat", "Collator", "Collator"] == [report.subject for report in together]
    assert ("routes.rows",) == tuple(result.id for result in together[0].failed)
    assert {3} == {progress.total for progress in said}


def test_an_error_of_a_worker_is_the_error_of_the_run(tmp_path: Path) -> None:
    """With its class and its words; no process is left."""
    with pytest.raises(SubjectError, match="made a Fails without"):
        judge_all([target("Fails"), target("Collator")], settings(tmp_path), silent, jobs=2)

    assert [] == multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_brings_what_was_found(tmp_path: Path, jobs: int) -> None:
    """Where a run is interrupted, in this process or in a worker, the reports so far come with it."""
    with pytest.raises(Interrupted) as interrupt:
        judge_all(
            [target("Concat"), target("Stopped")],
            settings(tmp_path, "routes.rows"),
            silent,
            jobs=jobs,
        )

    last = interrupt.value.reports[-1]
    assert ("Stopped", ("interrupted after 2 of 3 cases: only those were judged",)) == (
        last.subject,
        last.notes,
    )
    assert [] == multiprocessing.active_children()


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    """The run ends and says which subject it was."""
    with pytest.raises(SubjectError, match=r"The process that judged Dies died .*--jobs 1"):
        judge_all([target("Collator"), target("Dies")], settings(tmp_path), silent, jobs=2)

    assert [] == multiprocessing.active_children()


def test_a_worker_that_dies_before_it_reads_is_named() -> None:
    """What it left unread resets the pipe, where otherwise it just ends."""
    run = _SideBySide([target("Collator")], silent)
    here, there = multiprocessing.Pipe()
    with here:
        run._give(here)
        there.close()
        with pytest.raises(SubjectError, match="The process that judged Collator died"):
            run._take(here)


def test_a_worker_ends_quietly_with_a_parent_that_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that was killed left messages unread, which resets the worker's pipe."""
    monkeypatch.setattr(
        "rollproof.cli.parallel.signal.signal", lambda *_: None
    )  # its handlers are not for this process
    here, there = multiprocessing.Pipe()
    with there:
        there.send("unread")
        here.close()
        _work(there, settings(tmp_path))


def test_a_processor_is_there() -> None:
    """The default number of jobs is at least one."""
    assert processors() >= 1
