from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.judging.report import ExitCode
from rollproof.layouts.functions import FUNCTIONS
from rollproof.starters.plain_files import PLAIN_FILES, plain_file

ARGUMENTS = [
    ["rollouts"],
    ["rollouts", "--like", "trl"],
    ["http"],
    ["http", "--engine", "vllm"],
    *([what] for what in PLAIN_FILES),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_what_init_writes_passes_at_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """A written file is a test that passes, without a change and without an unknown verdict."""
    monkeypatch.chdir(pytester.path)
    assert ExitCode.PASS == run(["init", *arguments])
    result = pytester.runpytest_subprocess("-q")
    assert pytest.ExitCode.OK == result.ret
    assert result.parseoutcomes()["passed"] > 0


REVERSED = (
    "type('Reversed', (ReplayTrainer,), {'payload': lambda self, sample: sample.routes[::-1]})"
)


@pytest.mark.parametrize(
    ("what", "right", "wrong", "selected", "check"),
    [
        ("rollouts", "routes=sample.routes,", "routes=sample.routes[:-1],", "routes.rows", ""),
        ("http", "tokens += new", "tokens = new", "", "stitch.tokens"),
        ("http", 'reason == "abort"', "not tokens", "", "lifecycle.aborts-do-not-surface"),
        ("trainer", "= ReplayTrainer()", f"= {REVERSED}()", "replay.forward", ""),
    ],
)
def test_a_fault_in_the_users_code_turns_a_written_file_red(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    right: str,
    wrong: str,
    selected: str,
    check: str,
) -> None:
    """What a written file tests is the code at its marks: routes without their last row fail, and
    so do tokens that a resume loses, aborts that are taken for an end, and replay of other rows.
    """
    monkeypatch.chdir(pytester.path)
    assert ExitCode.PASS == run(["init", what])
    file = Path(f"test_{what}.py")
    text = file.read_text(encoding="utf-8")
    assert right in text
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    result = pytester.runpytest_subprocess("-q", "-k", selected)
    assert f"FAIL  {check}" in str(result.stdout) or not check
    assert {"failed": 1} == {
        name: count for name, count in result.parseoutcomes().items() if name == "failed"
    }


def test_a_file_that_does_not_fit_on_the_disk_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or the next try would find a file that it must not change."""
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        code = run(["init"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert ExitCode.USAGE == code
    assert "test_rollouts.py cannot be written: File too large." in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


def test_init_writes_where_tests_are_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder `tests` is used if there is one; a file that exists stays as it is."""
    monkeypatch.chdir(tmp_path)
    Path("tests").mkdir()
    assert ExitCode.PASS == run(["init", "--like", "slime"])
    file = Path("tests/test_rollouts.py")
    written = file.read_text(encoding="utf-8")
    assert "latest-prefill" in written
    assert "tests/test_rollouts.py:OurRollouts" in written.replace("\n# ", " ")
    assert ExitCode.USAGE == run(["init"])
    assert "exists, and nothing was changed" in capsys.readouterr().err
    assert written == file.read_text(encoding="utf-8")
    for arguments, words in (
        (["init", "batches", "--like", "verl"], "options of rollouts"),
        (["init", "http", "--like", "verl"], "init http has no --like"),
        (["init", "http", "--engine", "trtllm"], "init http has sglang and vllm"),
        (["init", "--like", "nothing", "--to", "a.py"], "No preset is named"),
        (["init", "--to", "no/such/folder.py"], "cannot be written"),
        (["init", "--to", "my test.py"], "must name a Python file"),
        (["init", "--like", "trl", "--routes", "--to", "b.py"], "carry no routes"),
    ):
        assert ExitCode.USAGE == run(arguments)
        assert words in capsys.readouterr().err
    assert ["tests"] == [path.name for path in tmp_path.iterdir()]


def test_the_file_of_layouts_lists_every_function_as_a_comment() -> None:
    """With its arguments: a subject may have a method for each."""
    source = plain_file("layouts", path="test_layouts.py")
    listed = [line.removeprefix("# ") for line in source.splitlines() if line.startswith("# ")]
    for name in FUNCTIONS:
        assert 1 == sum(line.startswith(f"{name}(layout") for line in listed), name
