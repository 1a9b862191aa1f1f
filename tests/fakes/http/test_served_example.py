"""The served example: what its client, its fault plan and its trace print."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.fakes.http.fault_plan import FaultPlan

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "example"
PAGE = (DOCS / "http.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the example."""
    for file in EXAMPLE.glob("*served_*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    return tmp_path


def served(command: str) -> int:
    options = ["--contract", "served_contract.toml", "--fault-plan", "served_plan.toml"]
    return run(
        ["serve", "--as", "sglang", *options, "--run", command.replace("python", sys.executable)]
    )


def without_start(folder: Path) -> None:
    """Plant the bug that the page names."""
    file = folder / "served_client.py"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"routed_experts_start_len"' not in line]
    assert len(kept) == len(lines) - 1
    file.write_text("".join(kept), encoding="utf-8")


@pytest.mark.usefixtures("folder")
def test_the_plan_aborts_and_cuts_off_a_client_that_survives_both(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An abort, a resume and a fault of the wire happen, each, and are reported."""
    assert 0 == served("python served_client.py")
    printed = capfd.readouterr()
    client, check = printed.out[: printed.out.index("served sglang")], printed.out
    address, _, plan = printed.err.partition("\n")
    assert address.startswith("sglang on http://127.0.0.1:")
    assert "2 tokens, abort\nRemoteProtocolError, called again\n6 tokens, length\n" == client
    assert (
        "fault 1 (truncate): applied to 1 of 3 requests to /generate with the id 'r1'\n"
        "action 1 (abort of 'r1' at 2 tokens): happened\n"
    ) == plan
    assert " 0 fail, " in check
    exercised = check[check.index("  exercised ") : check.index("checks: ")].rpartition("\n")[0]
    for situation in ("aborts mid-decode", "resumes"):
        assert f" {situation} 1" in exercised


def test_its_known_bug_is_detected(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without the line that the page names, routes are concatenated, and `routes.rows` fails."""
    without_start(folder)
    assert 1 == served("python served_client.py")
    shown = "  FAIL  routes.rows\n    1. 16 route rows for a sample of 12 tokens\n"
    assert shown in capfd.readouterr().out


def test_the_test_of_the_example_is_green_and_red(
    folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same client under pytest, with the fixture."""
    monkeypatch.chdir(folder)
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_served_client.py")
    assert pytest.ExitCode.OK == pytester.run(*command).ret
    without_start(folder)
    result = pytester.run(*command)
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    result.stdout.fnmatch_lines(["FAILED test_served_client.py::test_generate - routes.rows: *"])


def test_the_page_shows_the_plan_that_is_run() -> None:
    """As it stands in the file, which is read."""
    plan = (EXAMPLE / "served_plan.toml").read_text(encoding="utf-8")
    assert f"```toml\n{plan}```" in PAGE
    assert "r1" == FaultPlan.from_file(EXAMPLE / "served_plan.toml").faults[0].request_id
