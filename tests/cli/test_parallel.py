"""Several targets, judged by worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.cli.named_targets import Target, subject_target
from rollproof.cli.parallel import Settings, judge_all, processors
from rollproof.core.progress import Progress
from rollproof.errors import SubjectError
from rollproof.invariants import default_registry
from rollproof.judging.report import Interrupted, Report

MODULE = """
import os
from itertools import islice
from pathlib import Path
from rollproof.verification.rollouts import cases_for
from rollproof.fakes.trainers.reference_batches import Collator
from rollproof.fakes.clients.reference_clients import AsSampled

class Fails:
    collate = None

class Dies:
    def collate(self, samples): ...
    def __init__(self):
        os._exit(3)

class Blocks:
    def collate(self, samples): ...
    def __init__(self):
        Path("blocking").write_text(str(os.getpid()))
        os.read(os.pipe()[0], 1)  # in the kernel, where no exception reaches it

class Stopped(AsSampled):
    cases_begun = 0
    @staticmethod
    def cases(profile, seed):
        return islice(cases_for(AsSampled, profile=profile, seed=seed), 3)
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

RUN = """
import signal
import sys
from pathlib import Path
from rollproof.cli.named_targets import subject_target
from rollproof.cli.parallel import Settings, judge_all
from rollproof.judging.report import Interrupted

if __name__ == "__main__":
    targets = [subject_target(f"sbj_jobs:{name}") for name in sys.argv[1:]]
    settings = Settings(
        profile="pr", seed=0, only=("batch.tokens",), expected={}, witness_dir=Path.cwd()
    )
    # a shell starts background jobs with SIGINT ignored, and the tests may be one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        judge_all(targets, settings, lambda progress: None, jobs=2)
    except Interrupted as interrupt:
        print(*(report.subject for report in interrupt.reports))
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of subjects, in the current folder."""
    (tmp_path / "sbj_jobs.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "run_jobs.py").write_text(RUN, encoding="utf-8")
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


def started_run(*names: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, whose workers judge ``Blocks`` and others."""
    process = subprocess.Popen(
        [sys.executable, "run_jobs.py", *names],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not Path("blocking").is_file() or not Path("blocking").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    return process


def running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether the process ends within a minute."""
    for _ in range(1200):
        if not running(pid):
            return True
        time.sleep(0.05)
    return False


def test_workers_judge_as_this_process_does(tmp_path: Path) -> None:
    """Reports, findings and counterexamples included, come in the order of the targets, and do not
    depend on the number of processes.
    """
    targets = [target("Concat"), target("Collator"), target("Collator")]
    options = settings(tmp_path, "routes.rows", "batch.tokens")
    alone = judge_all(targets, options, silent, jobs=1)
    messages: list[Progress] = []
    together = judge_all(targets, options, messages.append, jobs=2)

    assert [content(report) for report in alone] == [content(report) for report in together]
    assert ["Concat", "Collator", "Collator"] == [report.subject for report in together]
    assert ("routes.rows",) == tuple(result.id for result in together[0].failed)
    assert {3} == {progress.total for progress in messages}
    assert [] == multiprocessing.active_children()


def test_an_error_of_a_worker_is_the_error_of_the_run(tmp_path: Path) -> None:
    """With its class and its words; no process is left."""
    with pytest.raises(SubjectError, match="made a Fails without"):
        judge_all([target("Fails"), target("Collator")], settings(tmp_path), silent, jobs=2)

    assert [] == multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_of_a_subject_brings_its_report(tmp_path: Path, jobs: int) -> None:
    """Where a subject raises KeyboardInterrupt, here or in a worker, its cases so far count."""
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


def test_finished_reports_survive_ctrl_c() -> None:
    """Ctrl-C ends the workers at once, and the run has the reports of what was finished."""
    # With two workers the third target begins when one of the first two is finished.
    run = started_run("Collator", "Collator", "Blocks")
    worker = int(Path("blocking").read_text())
    time.sleep(1.0)
    os.killpg(run.pid, signal.SIGINT)
    printed, _ = run.communicate(timeout=60)

    assert "Collator" in printed
    assert ends(worker)


def test_workers_end_with_a_parent_that_was_killed() -> None:
    """A worker does not wait for work from a parent that is gone."""
    run = started_run("Blocks", "Collator")
    worker = int(Path("blocking").read_text())
    run.kill()
    run.communicate(timeout=60)

    assert ends(worker)


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    """The run ends and says which subject it was, and how its process ended."""
    with pytest.raises(
        SubjectError, match=r"The process that judged Dies died \(exit code 3\).*--jobs 1"
    ):
        judge_all([target("Collator"), target("Dies")], settings(tmp_path), silent, jobs=2)

    assert [] == multiprocessing.active_children()


def test_a_worker_without_progress_is_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a worker that no exception reaches ends after its limit."""
    monkeypatch.setenv("ROLLPROOF_STUCK_AFTER", "0.2")
    with pytest.raises(
        SubjectError,
        match=r"The process that judged Blocks died \(exit code 1\).*no progress for 1 s",
    ):
        judge_all([target("Collator"), target("Blocks")], settings(tmp_path), silent, jobs=2)

    assert not running(int(Path("blocking").read_text()))


def test_a_processor_is_there() -> None:
    """The default number of jobs is at least one."""
    assert processors() >= 1
