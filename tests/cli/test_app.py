"""What all commands share: bad arguments, help, internal errors, and the completion of shells."""

from __future__ import annotations

import errno
import queue
import sys
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli import app as app_module
from rollproof.cli.app import run
from rollproof.fakes.known_bugs._planting import CLEAN
from rollproof.judging.report import ExitCode
from rollproof.store import dump_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import Correct

pytestmark = pytest.mark.usefixtures("command_folder")

_OLDER_WORDS = {
    "Invalid value for '--seed': it must be a whole number. See `rollproof verify --help`.": (
        "Invalid value for '--seed': 'x' is not a valid integer. See `rollproof verify --help`."
    ),
    "Invalid value for '--seed': it must be a whole number.": (
        "Invalid value for '--seed': 'x' is not a valid integer range."
    ),
    "Invalid value for 'subject': 'list' is not one of 'rollouts', ": (
        "': 'list' is not one of 'rollouts', "
    ),
    "it must be at least 1": "0 is not in the range x>=1",
    "No such option: --bogus": "No such option '--bogus'.",
}
"""What typer printed when its messages were still those of click, as at its lowest version."""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["verify", "--profile", "nosuch"],
            "No profile is named 'nosuch'; choose one of ['pr', 'nightly', 'soak'].",
        ),
        (["verify", "--only", "routs"], "Did you mean routes"),
        (
            ["verify", "--subject", "nosuch:thing"],
            "There is no module 'nosuch': --subject searches the current folder",
        ),
        (["verify", "--subject", "nosuch"], "must be written module:factory"),
        (["verify", "--subject", "no/such.py:X"], "There is no file no/such.py: --subject takes"),
        (["verify", "--subject", "json:dumper"], "json has no 'dumper'. Did you mean dump"),
        (["verify", "--subject", "sys:path"], "sys:path is a list, not a factory"),
        (
            ["verify", "--subject", "tests.support.faulty_subjects:Unfinished"],
            "without ['update_weights', 'to_record', 'stop']",
        ),
        (["verify", "--stack", "nosuch"], "No stack is named 'nosuch'."),
        (["verify", "--stack", "verl", "--subject", "a:b"], "Give --stack or --subject, not both"),
        (["verify", "--part", "client"], "--part is an option of --stack: give --stack too."),
        (["verify", "--flavour", "nosuch"], "No engine flavour is named ['nosuch']"),
        (
            ["verify", "--seed", "x"],
            "Invalid value for '--seed': it must be a whole number. See `rollproof verify --help`.",
        ),
        (
            ["init", "list"],
            "Invalid value for 'subject': 'list' is not one of 'rollouts', ",
        ),
        (["verify", "--jobs", "0"], "it must be at least 1"),
        (["gap", "x", "--seed", "x"], "Invalid value for '--seed': it must be a whole number."),
        ([], "rollproof: error: Name a command. See `rollproof --help`."),
        (["verify", "--subject", "exiting:Subject"], "exiting cannot be imported: SystemExit: 0."),
        (
            ["verify", "--subject", "broken:Subject"],
            "broken cannot be imported: RuntimeError: one two.",
        ),
        (["verify", "--subject", "os.path:join"], "os.path:join could not be created: TypeError"),
        (
            ["verify", "--witness-dir", "plain/deep"],
            "Cannot write into plain/deep: Not a directory. Choose a folder that you may write to.",
        ),
        (["verify", "--accept", "--expected", "plain/deep.toml"], "Cannot write plain/deep.toml"),
        (["verify", "--seed", "-1"], "seed=-1 must be an integer >= 0"),
        (["verify", "--accept"], "name the file with --expected FILE."),
        (["verify", "--expected", "no.toml"], "There is no file of expected failures at no.toml"),
        (["verify", "--bogus"], "No such option: --bogus"),
        (["nosuch"], "No such command 'nosuch'."),
        (["check"], "Missing argument 'PATH...'"),
        (["check", "nosuch.arrow"], "There is no trace at nosuch.arrow"),
        (["replay", "nosuch.json"], "There is no trace at nosuch.json"),
        (["known-bugs", "nosuch"], "No known bug is named 'nosuch'"),
        (["checks", "nosuch"], "No check or family is named 'nosuch'"),
        (["checks", "--json", "plain/out.json"], "Cannot write plain/out.json"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """Exit code 254, and an error that says what is valid."""
    printed = output_of(capsys, *arguments, code=ExitCode.USAGE)
    assert text in printed or _OLDER_WORDS.get(text, text) in printed


def test_a_file_with_the_name_of_an_imported_module_is_not_taken_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither is the other module searched, nor put out of its place."""
    # not in the current folder, which commands search: processes of later tests would take it
    file = tmp_path / "apart" / "queue.py"
    file.parent.mkdir()
    file.write_text("class Stack: ...\n", encoding="utf-8")
    text = output_of(capsys, "verify", "--subject", f"{file}:Stack", code=ExitCode.USAGE)
    assert "queue.py cannot be imported: Python has a module 'queue' already (" in text
    assert str(file.parent) not in sys.path
    assert f"({queue.__file__}). Give the file another name." in text


def test_help_ends_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    """--help and --version print to standard output and end with 0."""
    assert "known-bugs" in output_of(capsys, "--help", code=0)
    assert output_of(capsys, "--version", code=0).startswith("rollproof 0.")


def test_an_internal_error_says_how_to_report_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of our own is exit code 255 and no traceback, which --debug shows, wherever it stands
    among the arguments.
    """

    def broken(**_: Any) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(app_module, "_parser", lambda: broken)
    text = output_of(capsys, "verify", code=ExitCode.INTERNAL)

    assert (
        "internal error: ZeroDivisionError: division by zero.\nThis is a fault of rollproof, not of"
        " the code under test." in text
    )
    assert ExitCode.INTERNAL == run(["verify", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_a_shell_completes_commands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script for a shell can be printed, and the shell's request is answered: exit code 0 and
    nothing on standard error.
    """
    assert ExitCode.PASS == run(["--show-completion", "bash"])
    assert "_ROLLPROOF_COMPLETE=complete_bash" in capfd.readouterr().out
    for name, value in (
        ("_ROLLPROOF_COMPLETE", "complete_bash"),
        ("COMP_WORDS", "rollproof kn"),
        ("COMP_CWORD", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert ExitCode.PASS == run([])
    assert ("known-bugs", "") == tuple(text.strip() for text in capfd.readouterr())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("verify --only rou", ["routes"]),
        ("check --only routes.row", ["routes.rows"]),
        ("checks stitch.tok", ["stitch.tokens"]),
        ("known-bugs concat-on", ["concat-on-resume"]),
        ("verify --stack ver", ["verl", "verifiers"]),
        ("verify --flavour sglang-0.5.1", ["sglang-0.5.17"]),
        ("verify --engine vllm-off", ["vllm-offline"]),
        ("verify --profile n", ["nightly"]),
        ("init --like sky", ["skyrl"]),
        ("init g", ["gap"]),
        ("contract show sky", ["skyrl"]),
        ("verify --stack nosuch", []),
    ],
)
def test_a_shell_completes_targets(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    offered: list[str],
) -> None:
    """Ids and names are offered as the values of arguments and options."""
    monkeypatch.setenv("_ROLLPROOF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"rollproof {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert ExitCode.PASS == run([])
    captured = capfd.readouterr()
    assert (offered, "") == (captured.out.split(), captured.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["gap", "LONG"],
        ["check", "LONG"],
        ["show", "LONG"],
        ["replay", "LONG"],
        ["seal", "LONG"],
        ["serve", "--as", "vllm", "--trace", "LONG"],
        ["serve", "--as", "vllm", "--contract", "LONG"],
        ["serve", "--as", "vllm", "--fault-plan", "LONG"],
        ["verify", "--stack", "trl", "--checkout", "LONG"],
        ["verify", "--subject", "LONG.py:x"],
        ["verify", "--witness-dir", "LONG"],
        ["verify", "--expected", "LONG"],
        ["verify", "--json", "LONG"],
    ],
)
def test_a_name_that_no_file_can_have_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """The error is the user's to correct, and shows the beginning of the name."""
    long = [argument.replace("LONG", "a" * 300) for argument in arguments]
    text = output_of(capsys, *long, code=ExitCode.USAGE)

    # a path of this length is shortened in its middle, so little of the name may be left
    assert text.startswith("rollproof: error: ") and "a" * 5 in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "FIXED", "--slices", "LINK"],
        ["verify", "--witness-dir", "LINK"],
        ["verify", "--witness-dir", "LINK/deep"],
        ["verify", "--subject", "LINK.py:x"],
        ["merge", "FIXED", "--to", "LINK"],
        ["merge", "FIXED", "--to", "LINK/x.arrow"],
    ],
)
@pytest.mark.parametrize("target", ["loop", "nothing"])
def test_a_link_that_leads_nowhere_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], target: str
) -> None:
    """Whatever would be read there or written, and the link stays."""
    links = {tmp_path / "loop", tmp_path / "loop.py"}
    for link in links:
        link.symlink_to(link if target == "loop" else tmp_path / "nothing" / "deep")
    dump_trace(run_case(Correct, CLEAN), tmp_path / "t.arrow")
    names = {"FIXED": tmp_path / "t.arrow", "LINK": tmp_path / "loop"}
    for name, path in names.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    text = output_of(capsys, *arguments, code=ExitCode.USAGE)

    assert text.startswith("rollproof: error: ")
    assert links == {path for path in tmp_path.iterdir() if path.is_symlink()}


def test_a_broken_disk_is_not_a_fault_of_rollproof(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that any read or write may raise names the machine, and the path if there is one."""

    def broken(**_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error", "trace.arrow")

    monkeypatch.setattr(app_module, "_parser", lambda: broken)
    text = output_of(capsys, "verify", code=ExitCode.USAGE)

    assert text.startswith(
        "rollproof: error: trace.arrow: Input/output error. This comes from the machine: its disk,"
    )


def test_a_current_folder_that_was_deleted_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after a clean build in another terminal."""
    dump_trace(run_case(Correct, CLEAN), tmp_path / "t.arrow")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = output_of(capsys, "check", str(tmp_path / "t.arrow"), code=ExitCode.USAGE)

    assert "rollproof: error: The current folder was deleted. Change to one that exists.\n" == text
