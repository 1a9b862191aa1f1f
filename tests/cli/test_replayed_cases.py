from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import CONCAT, CORRECT, Concat, Correct

pytestmark = pytest.mark.usefixtures("command_folder")


def test_a_trace_without_events_can_be_run_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A case alone reproduces nothing: what fails then is a new fault (1), and where nothing fails
    nothing is decided (2).
    """
    trace = run_case(Concat, ABORTED, recipe={"subject": CONCAT})
    dump_trace(replace(trace, events=()), tmp_path / "empty.json")
    text = output_of(capsys, "replay", "empty.json", code=ExitCode.FAIL)

    assert (
        "It has no events, so nothing could be judged as recorded: only the new run counts." in text
    )
    assert "FAIL  routes.rows" in text
    assert text.rstrip().endswith("new fault")
    assert (
        output_of(capsys, "replay", "empty.json", "--subject", CORRECT, code=ExitCode.UNKNOWN)
        .rstrip()
        .endswith("undecided")
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("deadline", -1, "arrivals=[] must be virtual seconds from 0 to 1e+07"),
        ("deadline", 1e300, "deadline=1e+300"),
        ("deadline", "soon", "deadline must be float, not 'soon'"),
        ("arrivals", [1e308], "arrivals=[1e+308] must be virtual seconds"),
    ],
)
def test_a_mailed_case_beyond_all_bounds_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str, value: object, text: str
) -> None:
    """Hostile numbers would make a correct subject seem to hang, and blame it."""
    dump_trace(run_case(Correct, CLEAN, recipe={"subject": CORRECT}), tmp_path / "mailed.json")
    data = json.loads((tmp_path / "mailed.json").read_text())
    data["header"]["case"][field] = value
    (tmp_path / "mailed.json").write_text(json.dumps(data))

    assert text in output_of(capsys, "replay", "mailed.json", code=ExitCode.USAGE)


def test_a_mailed_case_of_endless_requests_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A request of a trillion tokens could not end before its deadline."""
    dump_trace(run_case(Correct, CLEAN, recipe={"subject": CORRECT}), tmp_path / "mailed.json")
    data = json.loads((tmp_path / "mailed.json").read_text())
    data["header"]["case"]["requests"][0]["max_tokens"] = 10**12
    (tmp_path / "mailed.json").write_text(json.dumps(data))

    assert "asks for 1000000000000 tokens; a case holds at most 1,048,576" in output_of(
        capsys, "replay", "mailed.json", code=ExitCode.USAGE
    )
