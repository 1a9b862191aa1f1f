"""Checksums of JSON files: damage is found, an edit can be sealed, and files without are read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from rollproof.cli.app import run
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace, load_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import CONCAT, Concat

pytestmark = pytest.mark.usefixtures("command_folder")


@pytest.fixture
def trace(command_folder: None, tmp_path: Path) -> Path:
    dump_trace(run_case(Concat, ABORTED, recipe={"subject": CONCAT}), tmp_path / "trace.json")
    return tmp_path / "trace.json"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> Path:
    target = str(tmp_path / "report.json")
    output_of(capsys, "check", str(trace), "--json", target, code=ExitCode.FAIL)
    return Path(target)


def test_an_edited_trace_is_refused_until_it_is_sealed(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    """The refusal names the command, which makes the file readable with the edit in it."""
    data = json.loads(trace.read_text())
    data["header"]["subject"] = "Edited"
    trace.write_text(json.dumps(data))
    for command in ("check", "show", "replay"):
        text = output_of(capsys, command, str(trace), code=ExitCode.USAGE)
        assert "it does not fit its checksum: it is damaged, or was edited" in text
        assert "`rollproof seal FILE` renews the checksum" in text
    assert "new checksum" in output_of(capsys, "seal", str(trace), code=ExitCode.PASS)

    assert "Edited" == load_trace(trace).header.subject
    assert "Edited" in output_of(capsys, "check", str(trace), code=ExitCode.FAIL)
    assert "nothing to do" in output_of(capsys, "seal", str(trace), code=ExitCode.PASS)


def test_a_file_that_is_formatted_anew_keeps_its_checksum(
    capsys: pytest.CaptureFixture[str], trace: Path, report: Path
) -> None:
    """A checksum is of values: editors and tools for JSON may write them as they like."""
    for file in (trace, report):
        data = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(dict(reversed(data.items())), indent=7), encoding="utf-8")
        output_of(capsys, "seal", "--check", str(file), code=ExitCode.PASS)
    assert "no checksum" not in output_of(capsys, "check", str(trace), code=ExitCode.FAIL)


def test_files_without_a_checksum_are_read_and_named_once(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    """Files of earlier releases have none."""
    data = json.loads(trace.read_text())
    del data["checksum"]
    for seed, name in enumerate(("a.json", "b.json", "c.json")):
        data["header"]["seed"] = seed  # a copy would not be judged again
        (tmp_path / name).write_text(json.dumps(data))
    text = output_of(capsys, "check", "a.json", "b.json", "c.json", code=ExitCode.FAIL)

    note = "a.json and 2 more: no checksum, so damage would not be noticed; `rollproof seal FILE`"
    assert 1 == text.count("no checksum") and note in text
    assert "a.json: no checksum" in output_of(capsys, "replay", "a.json", code=ExitCode.USAGE)
    output_of(capsys, "seal", "--check", "a.json", code=ExitCode.USAGE)
    output_of(capsys, "seal", "a.json", code=ExitCode.PASS)
    output_of(capsys, "seal", "--check", "a.json", code=ExitCode.PASS)


def test_no_flipped_bit_changes_a_trace_or_a_report_in_silence(
    capsys: pytest.CaptureFixture[str], trace: Path, report: Path
) -> None:
    """A file with one bit flipped is refused, or says what it said."""
    random, sound = Random(0), load_trace(trace)
    for file in (trace, report):
        data = file.read_bytes()
        meaning = json.loads(data)
        for _ in range(150):
            place = random.randrange(8 * len(data))
            damaged = bytearray(data)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            code = run(["seal", "--check", str(file)])
            capsys.readouterr()
            assert code == ExitCode.USAGE or meaning == json.loads(damaged)
            if code == ExitCode.PASS and file is trace:
                assert sound == load_trace(trace)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is no trace and no report in JSON"),
        ("{", "is no trace and no report in JSON"),
        ("[1]", "is no trace and no report of rollproof: it has no schema"),
        ('{"a": 1}', "is no trace and no report of rollproof: it has no schema"),
        ('{"format": "rollproof-trace", "schema": 1}', "cannot be sealed: it must have a header"),
        ('{"format": "rollproof-trace", "schema": 99}', "cannot be sealed: "),
        ('{"schema": NaN}', "is no trace and no report in JSON"),
    ],
)
def test_what_is_no_such_file_is_not_sealed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, text: str
) -> None:
    """A file that no command would read is refused, and stays as it is."""
    (tmp_path / "x.json").write_text(content)

    assert text in output_of(capsys, "seal", "x.json", code=ExitCode.USAGE)
    assert content == (tmp_path / "x.json").read_text()
    assert "cannot be opened" in output_of(capsys, "seal", "nosuch.json", code=ExitCode.USAGE)
