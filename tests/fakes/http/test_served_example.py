"""The served example: docs/http.md and docs/entry-points.md show what its client and its trace
really print.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.fakes.http.fault_plan import FaultPlan
from tests.fakes.http.test_serve_command import started

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "example"
PAGE = (DOCS / "http.md").read_text(encoding="utf-8")


def served(
    folder: Path, client: Path, capsys: pytest.CaptureFixture[str]
) -> Mapping[str, str | int]:
    """What the client said, the server at its end, and `check` of the trace, with its exit code."""
    trace = folder / "served.arrow"
    plan, contract = str(EXAMPLE / "served_plan.toml"), str(EXAMPLE / "served_contract.toml")
    with started("--contract", contract, "--fault-plan", plan, "--trace", str(trace)) as (
        process,
        url,
    ):
        said = subprocess.run(
            [sys.executable, str(client), url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(30)
        assert process.stderr is not None
        end = process.stderr.read()
    assert "" == said.stderr
    capsys.readouterr()
    code = run(["check", str(trace)])
    return {"client": said.stdout, "end": end, "check": capsys.readouterr().out, "code": code}


def test_the_plan_aborts_and_cuts_off_a_client_that_survives_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An abort, a resume and a fault of the wire happen, each, and the page shows what is said of
    them.
    """
    output = served(tmp_path, EXAMPLE / "served_client.py", capsys)
    assert 2 == output["code"]
    assert str(output["client"]) in PAGE
    assert f"^C\n{output['end']}$" in PAGE
    check = str(output["check"])
    assert " 0 fail, " in check
    exercised = check[check.index("  exercised ") : check.index("checks: ")].rpartition("\n")[0]
    assert " ".join(exercised.split()) in " ".join(PAGE.split())
    for situation in ("aborts mid-decode", "resumes"):
        assert f" {situation} 1" in exercised


def test_its_known_bug_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the line that the page names, routes are concatenated."""
    lines = (EXAMPLE / "served_client.py").read_text(encoding="utf-8").splitlines(keepends=True)
    bug = tmp_path / "client.py"
    bug.write_text(
        "".join(line for line in lines if '"routed_experts_start_len"' not in line),
        encoding="utf-8",
    )
    output = served(tmp_path, bug, capsys)
    assert 1 == output["code"]
    shown = PAGE[PAGE.index("  FAIL  routes.rows\n") :]
    assert shown[: shown.index("```")] in str(output["check"])


def test_both_pages_show_the_plan_that_is_run() -> None:
    """As it stands in the file, which is read."""
    plan = (EXAMPLE / "served_plan.toml").read_text(encoding="utf-8")
    assert f"```toml\n{plan}```" in PAGE
    assert f"```toml\n{plan}```" in (DOCS / "entry-points.md").read_text(encoding="utf-8")
    assert "r1" == FaultPlan.from_file(EXAMPLE / "served_plan.toml").faults[0].request_id
