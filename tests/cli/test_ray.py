"""Commands on a Ray cluster of two workers; skipped without Ray (``nox -s ray`` installs it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli import unit_workers
from rollproof.cli.app import run
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from rollproof.verification import trace_files
from rollproof.verification.runner import run_case
from tests.support import dying_worker
from tests.support.command_line import output_of
from tests.support.faulty_subjects import Concat, Correct

ray = pytest.importorskip("ray", reason="Ray is not installed: nox -s ray")
pytestmark = [
    pytest.mark.usefixtures("command_folder"),
    # Ray's own: sockets and processes that its shutdown leaves to the garbage collector
    pytest.mark.filterwarnings("ignore"),
]
ONLY = ("--only", "stitch", "--only", "routes")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of two workers, which the commands use."""
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20
    )
    yield
    ray.shutdown()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of five traces, judged in three units; one of them has findings."""
    monkeypatch.setattr(trace_files, "_UNIT_FILES", 2)
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("a", "b", "d", "a_once"):
        dump_trace(run_case(Correct, CLEAN, name=name), folder / f"{name}.json")
    dump_trace(run_case(Concat, ABORTED, name="c"), folder / "c.json")
    return folder


def judged(*arguments: str, code: int) -> bytes:
    """The bytes of the JSON report of ``check``."""
    assert code == run(["check", *arguments, *ONLY, "--json", "report.json"])
    return Path("report.json").read_bytes()


def test_the_report_is_that_of_this_machine_to_the_byte(runs: Path) -> None:
    """A partitioned trace judged on a cluster gives the report that it gives here."""
    here = judged("runs", "-j", "1", code=ExitCode.FAIL)
    spread = judged("runs", "--ray", "local", code=ExitCode.FAIL)

    assert here == spread
    report: dict[str, Any] = json.loads(spread)
    assert 5 == report["cases"]


def test_a_killed_worker_loses_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The unit of a worker that SIGKILL ended is judged again; a file that ends all of its workers
    is counted, and its neighbours are judged.
    """
    undisturbed = judged("runs", "-j", "1", code=ExitCode.FAIL)
    monkeypatch.setattr(unit_workers, "_judge_seen", dying_worker.judge)
    assert undisturbed == judged("runs", "--ray", "local", code=ExitCode.FAIL)
    assert (tmp_path / "died").exists()

    dump_trace(run_case(Correct, CLEAN, name="deadly"), runs / "deadly.json")
    deadly = json.loads(judged("runs", "--ray", "local", code=ExitCode.FAIL))
    assert {"its process died": 1} == deadly["inputs"]["unjudged"]
    assert json.loads(undisturbed)["checks"] == deadly["checks"]


def test_a_campaign_is_spread_with_the_same_verdicts(tmp_path: Path) -> None:
    """``verify --ray`` runs each reference on a worker; its verdicts are those of this machine."""
    reports = []
    for arguments in (("-j", "1"), ("--ray", "local")):
        subject = ("--subject", "tests.support.faulty_subjects:Correct", "--flavour", "vllm")
        options = (*subject, "--only", "stitch.tokens", "--json", "report.json")
        assert ExitCode.PASS == run(["verify", *arguments, *options])
        report = json.loads(Path("report.json").read_text(encoding="utf-8"))
        reports.append([report["subject"], report["cases"], report["checks"], report["exercised"]])

    assert reports[0] == reports[1]


def test_wrong_options_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster has its own workers, and a trace that is still written has one reader."""
    for arguments, text in (
        (("--ray", "local", "-j", "2"), "--jobs or --ray, not both"),
        (("--ray", "local", "--follow"), "omit the other options"),
    ):
        assert text in output_of(capsys, "check", str(runs), *arguments, code=ExitCode.USAGE)
