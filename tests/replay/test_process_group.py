from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollproof.errors import UsageError
from rollproof.replay.process_group import RankError, Ranks
from tests.support.rank_tasks import not_starting, summing

pytest.importorskip("torch", reason="ranks meet in a gloo group of torch.distributed")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(summing, limit_s=60, grace_s=0.5) as started:
        yield started


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        yield Path(folder)


def test_results_come_by_rank_and_sizes_may_change(ranks: Ranks) -> None:
    """Jobs of any size run one after the other, and every rank's result comes back in order."""
    assert [[1], [3, 3], [10, 10, 10, 10], [3, 3]] == [
        ranks.run("add", world_size=size) for size in (1, 2, 4, 2)
    ]


def test_ranks_live_on_for_the_next_job_of_their_crew(ranks: Ranks) -> None:
    """The processes of one size and crew are reused; another crew gets fresh ones."""
    first = ranks.run("pid", world_size=2, crew="one")
    assert first == ranks.run("pid", world_size=2, crew="one")
    assert not set(first) & set(ranks.run("pid", world_size=2, crew="other"))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("is killed", r"Rank 1 of 3 was ended by SIGKILL in its job; the other ranks were ended"),
        ("exits", r"Rank 1 of 3 exited with code 3 in its job; .*\n    the last words of rank 1"),
    ],
)
def test_a_rank_that_dies_ends_its_job_at_once(ranks: Ranks, job: str, message: str) -> None:
    """Ranks that wait for a dead one in a collective are ended within a bounded time, and the error
    names the dead one.
    """
    ranks.run("add", world_size=3)
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(job, world_size=3)
    assert 1 == caught.value.rank
    assert [6, 6, 6] == ranks.run("add", world_size=3)


def test_a_rank_that_raises_is_named_with_its_exception(ranks: Ranks) -> None:
    """The error names the rank that raised first, quotes its traceback, and has its exception as
    the cause.
    """
    with pytest.raises(
        RankError,
        match=r"Rank 1 of 2 failed in its job\.\n(.*\n)*ArithmeticError: rank 1 cannot count",
    ) as caught:
        ranks.run("raises", world_size=2)
    assert (1, ArithmeticError) == (caught.value.rank, type(caught.value.__cause__))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("ends", r"Rank 1 of 2 failed in its job\.\n(.*\n)*SystemExit: rank 1 has enough"),
        (
            "gives a function",
            (
                r"Rank 1 of 2 failed in its job\.\n.*What the job returned, a function, cannot be"
                r" sent to the parent: "
            ),
        ),
    ],
)
def test_a_result_that_cannot_return_is_reported(ranks: Ranks, job: str, message: str) -> None:
    """A job that ends its process, or returns what cannot be pickled, is reported as such."""
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(job, world_size=2)
    assert 1 == caught.value.rank
    assert [3, 3] == ranks.run("add", world_size=2)


def test_a_job_that_cannot_be_sent_is_refused(ranks: Ranks) -> None:
    """Jobs are plain data."""
    with pytest.raises(
        UsageError, match="The job, a function, cannot be sent to other processes: "
    ):
        ranks.run(lambda: 1, world_size=2)
    assert [3, 3] == ranks.run("add", world_size=2)


def test_ranks_that_all_raise_go_on(ranks: Ranks) -> None:
    """Where every rank answered, nobody waits in a collective: the processes stay, with their
    state.
    """
    before = ranks.run("pid", world_size=2)
    with pytest.raises(RankError, match="ArithmeticError"):
        ranks.run("all raises", world_size=2)
    assert before == ranks.run("pid", world_size=2)


def test_ranks_that_hang_are_ended_and_say_where_they_were() -> None:
    """A job over its limit ends for all ranks; the error holds the place of each of them."""
    with (
        Ranks(summing, preload=["torch"], limit_s=1.5) as ranks,
        pytest.raises(RankError, match=r"No answer from rank \[0, 1\] of 2 within 1.5 s") as caught,
    ):
        ranks.run("sleeps", world_size=2)
    assert None is caught.value.rank
    assert [True, True] == [
        word in str(caught.value) for word in ("in all_reduce", "rank_tasks.py")
    ]


def test_a_task_that_cannot_be_set_up_says_so() -> None:
    """An exception of the set-up is reported as one, not as a hang."""
    with (
        Ranks(not_starting) as ranks,
        pytest.raises(
            RankError, match=r"failed while it started\.\n(.*\n)*LookupError: no such model"
        ),
    ):
        ranks.run("add", world_size=2)


def test_a_module_that_cannot_be_imported_says_so() -> None:
    """A preload that is absent is reported with the import error, before any rank is made."""
    with (
        Ranks(summing, preload=("no_such_module",)) as ranks,
        pytest.raises(RankError, match="No module named 'no_such_module'"),
    ):
        ranks.run("add")


def test_imports_go_on_while_nothing_is_run_yet() -> None:
    """What was prepared runs, ends where nothing was run, and reports a failed import when a
    job is run, each time again.
    """
    with Ranks(summing, preload=("torch",)) as ranks:
        ranks.prepare()
        ranks.prepare()
        assert [3, 3] == ranks.run("add", world_size=2)
    with Ranks(summing, preload=("torch",)) as ranks:
        ranks.prepare()
    with Ranks(summing, preload=("no_such_module",)) as ranks:
        ranks.prepare()
        for _ in range(2):
            with pytest.raises(RankError, match="No module named 'no_such_module'"):
                ranks.run("add")


def test_all_groups_of_a_rank_share_one_device(ranks: Ranks) -> None:
    """Groups beyond the first add no thread that looks for messages."""
    assert [1, 1] == ranks.run("count loops", world_size=2)


def test_a_long_path_of_temporary_files_is_no_hindrance(tmp_path: Path) -> None:
    """The path of a socket is bounded, that of temporary files is not."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    with _program(tmp_path, 'print(*ranks.run("add", world_size=2))', folder) as program:
        output, _ = program.communicate()
    assert (0, b"3 3\n", []) == (program.returncode, output, list(folder.iterdir()))


def test_a_task_must_be_importable() -> None:
    """A lambda, or a function of a script, is refused with the next step."""
    with pytest.raises(UsageError, match="Define it as a plain function at the top of a module"):
        Ranks(lambda rank, world_size: lambda job: job)


def test_a_run_needs_a_process(ranks: Ranks) -> None:
    """A world size of zero is refused."""
    with pytest.raises(UsageError, match="world_size is 0"):
        ranks.run("add", world_size=0)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running_when_the_parent_ends(
    ending: signal.Signals, tmp_path: Path, short_folder: Path
) -> None:
    """Ranks in the middle of a collective end with their parent, also when it is interrupted or
    killed, and remove their files.
    """
    jobs = """
        print(*ranks.run("pid", world_size=2), flush=True)
        ranks.run("sleeps", world_size=2)
    """
    with _program(tmp_path, jobs, short_folder) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(ending)
    deadline = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (2, []) == (len(pids), [pid for pid in pids if _runs(pid)])
    assert [] == list(short_folder.glob("rollproof-ranks-*"))


def _program(folder: Path, jobs: str, temporary: Path) -> subprocess.Popen[bytes]:
    """Start a program with two ranks that writes its temporary files to ``temporary``."""
    program = folder / "program.py"
    program.write_text(
        "from tests.support.rank_tasks import summing\n"
        "from rollproof.replay.process_group import Ranks\n"
        "if __name__ == '__main__':\n"
        "    with Ranks(summing) as ranks:\n" + textwrap.indent(textwrap.dedent(jobs), 8 * " "),
        encoding="utf-8",
    )
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(temporary)},
    )


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return (
            "Z"
            not in Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8")
            .rpartition(")")[2]
            .split()[:1]
        )
    return False
