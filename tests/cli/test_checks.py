from __future__ import annotations

import json

import pytest

from rollproof.cli.app import run
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode
from tests.support.command_line import output_of

pytestmark = pytest.mark.usefixtures("command_folder")


def test_checks_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    """Every id stands in the table and in the JSON; one id alone is shown in full."""
    assert ExitCode.PASS == run(["checks", "--json", "-"])
    captured = capsys.readouterr()

    assert list(default_registry().ids) == [
        check["id"] for check in json.loads(captured.out)["checks"]
    ]
    assert all(check_id in captured.err for check_id in default_registry().ids)
    assert "exercised by" in output_of(capsys, "checks", "routes.rows", code=0)
    assert 2 == output_of(capsys, "checks", "routes.rows", "stitch.tokens", code=0).count(
        "exercised by"
    )
    assert "exercised by" not in output_of(capsys, "checks", "routes", code=0)
