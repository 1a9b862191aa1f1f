from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.fakes.clients.reference_clients import REFERENCES
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import CONCAT, CORRECT, Concat, Correct

pytestmark = pytest.mark.usefixtures("command_folder")


SPY = """
open("imported.txt", "w").close()

class Mine:
    pass
"""


@pytest.mark.parametrize(
    ("recipe", "code"),
    [
        ({"subject": "os:abort"}, "the subject os:abort"),
        ({"subject": "spying:Mine"}, "the subject spying:Mine"),
        ({"subject": "spying.py:Mine"}, "the subject spying.py:Mine"),
        ({"stack": "verl", "checkout": "."}, "the stack verl of the checkout ."),
        ({"stack": "verl", "version": "0.8.0", "part": "x"}, "the stack verl"),
        ({"engine": "vllm", "model": "./m"}, "the engine vllm with the model ./m"),
    ],
)
def test_a_file_runs_no_code(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    recipe: dict[str, str],
    code: str,
) -> None:
    """What a trace names is neither run nor imported: the refusal says what it is, and how to agree
    to it.
    """
    (tmp_path / "spying.py").write_text(SPY)
    dump_trace(run_case(Correct, CLEAN, recipe=recipe), tmp_path / "mailed.json")
    text = output_of(capsys, "replay", "mailed.json", code=ExitCode.USAGE)

    assert f"The file names {code}, and running it again runs that code." in text
    assert "Add --trust-subject if you know where the file comes from" in text
    assert not (tmp_path / "imported.txt").exists()


def test_a_reference_runs_again_without_trust(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A trace of a reference runs with and without --trust-subject: no code but rollproof's own."""
    recipe = {"reference": next(iter(REFERENCES))}
    dump_trace(run_case(Correct, CLEAN, recipe=recipe), tmp_path / "own.json")

    for option in ([], ["--trust-subject"]):
        text = output_of(capsys, "replay", "own.json", *option, code=ExitCode.UNKNOWN)
        assert "judged as recorded" not in text


def test_show_prints_a_command_that_names_what_it_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command below the story of a file names the file's subject instead of trusting the file,
    is quoted for a shell, and works.
    """
    dump_trace(run_case(Concat, ABORTED, recipe={"subject": CONCAT}), tmp_path / "a b.json")
    text = output_of(capsys, "show", "a b.json", code=ExitCode.PASS)
    (line,) = (line for line in text.splitlines() if line.startswith("       rerun"))
    command = shlex.split(line)[1:]

    assert ["rollproof", "replay", "a b.json", "--subject", CONCAT] == command
    assert "reproduced" in output_of(capsys, *command[1:], code=ExitCode.FAIL)


def test_a_trace_without_events_can_be_run_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A case alone reproduces nothing: what fails then is a new fault (1), and where nothing fails
    nothing is decided (2).
    """
    trace = run_case(Concat, ABORTED, recipe={"subject": CONCAT})
    dump_trace(replace(trace, events=()), tmp_path / "empty.json")
    text = output_of(capsys, "replay", "empty.json", "--trust-subject", code=ExitCode.FAIL)

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
    del data["checksum"]
    data["header"]["case"][field] = value
    (tmp_path / "mailed.json").write_text(json.dumps(data))

    assert text in output_of(
        capsys, "replay", "mailed.json", "--trust-subject", code=ExitCode.USAGE
    )


def test_a_mailed_case_of_endless_requests_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A request of a trillion tokens could not end before its deadline."""
    dump_trace(run_case(Correct, CLEAN, recipe={"subject": CORRECT}), tmp_path / "mailed.json")
    data = json.loads((tmp_path / "mailed.json").read_text())
    del data["checksum"]
    data["header"]["case"]["requests"][0]["max_tokens"] = 10**12
    (tmp_path / "mailed.json").write_text(json.dumps(data))

    assert "asks for 1000000000000 tokens; a case holds at most 1,048,576" in output_of(
        capsys, "replay", "mailed.json", "--trust-subject", code=ExitCode.USAGE
    )
