from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from email.message import Message
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli import app as app_module
from rollproof.cli.app import run
from rollproof.cli.named_targets import target_of_recipe
from rollproof.errors import UsageError
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import ABORTED, CLEAN
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode
from rollproof.store import TraceWriter, dump_trace
from rollproof.verification.kill_matrix import run_kill_matrix
from rollproof.verification.runner import run_case
from tests.support.faulty_subjects import CONCAT, CORRECT, Concat, Correct


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command runs in a folder with one plain file and two modules that cannot be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    (tmp_path / "exiting.py").write_text("raise SystemExit(0)")
    (tmp_path / "broken.py").write_text("raise RuntimeError('one\\ntwo')")


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """What a command prints to both streams, once it has ended with ``code`` and without a
    traceback.
    """
    assert code == run(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def verified(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> dict[str, Any]:
    """The JSON report of ``verify --json -``, which must be alone on standard output."""
    assert code == run(["verify", *arguments, "--json", "-"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


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
            "unable to parse string as an integer. See `rollproof verify --help`.",
        ),
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
        (["check"], "Missing argument 'TRACE...'"),
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
    assert text in output_of(capsys, *arguments, code=ExitCode.USAGE)


def test_the_doctor_says_which_extras_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra needs all its packages, in any version, that a marker asks for on this Python."""
    requires = [
        "numpy>=1.26",
        "pytest==0.1; extra == 'here'",
        "rollproof-nothing==1; extra == 'absent'",
        "rollproof-nothing==1; python_version < '3' and extra == 'here'",
    ]

    class Distribution:
        """What importlib.metadata says of rollproof."""

        version = "0.1"

        def __init__(self) -> None:
            self.requires = requires
            self.metadata = Message()
            for extra in ("here", "absent"):
                self.metadata["Provides-Extra"] = extra

    distribution = metadata.distribution
    monkeypatch.setattr(
        metadata,
        "distribution",
        lambda name: Distribution() if name == "rollproof" else distribution(name),
    )
    printed = output_of(capsys, "doctor", code=ExitCode.PASS)

    assert "extra here     available" in printed
    assert "extra absent   needs rollproof-nothing: pip install 'rollproof[absent]'" in printed


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

    monkeypatch.setattr(app_module, "app", broken)
    text = output_of(capsys, "verify", code=ExitCode.INTERNAL)

    assert (
        "internal error: ZeroDivisionError: division by zero.\nThis is a fault of rollproof, not of"
        " the code under test." in text
    )
    assert ExitCode.INTERNAL == run(["verify", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_a_subject_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is imported as pytest imports it: as a module of its package, or from its folder. A
    trace, which anybody may have written, names none outside of the current folder.
    """
    monkeypatch.setattr("sys.path", list(sys.path))
    for file in ("loose/alone_of_mine.py", "pack_of_mine/__init__.py", "pack_of_mine/part.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("class Mine: flavours = 'vllm'\n")
    for file, module in (
        ("loose/alone_of_mine.py", "alone_of_mine"),
        ("pack_of_mine/part.py", "pack_of_mine.part"),
    ):
        target = target_of_recipe({"subject": f"{file}:Mine"})

        assert module == target.factory.__module__
        assert (("vllm",), "Mine") == (target.flavours, target.name)
        assert f"{file.removesuffix('.py').replace('/', '.')}.Mine" == target.folder
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for outside in ("../loose/alone_of_mine.py", str(tmp_path / "loose" / "alone_of_mine.py")):
        with pytest.raises(UsageError, match="a file outside of the current folder"):
            target_of_recipe({"subject": f"{outside}:Mine"})


def test_verify_judges_a_subject_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    """--subject module:factory runs it on every flavour that fits, and a correct one has no failing
    check.
    """
    report = verified(capsys, "--subject", CORRECT, "--only", "routes.rows", code=0)

    assert ("Correct", 1, 0) == (report["subject"], report["schema"], report["summary"]["fail"])
    assert 1 == report["summary"]["pass"]
    assert report["canary"]["red"]


def test_verify_shows_and_keeps_the_counterexample(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit code 1, a finding in words, and a file that `rollproof replay` reproduces, judges fixed,
    and can take another subject for.
    """
    arguments = ["verify", "--subject", CONCAT, "--only", "routes.rows"]
    text = output_of(capsys, *arguments, code=ExitCode.FAIL)
    witness = f".rollproof/{CONCAT.replace(':', '.')}/routes.rows.json"

    assert "FAIL  routes.rows" in text
    assert f"rollproof replay {witness}" in text
    assert (tmp_path / witness).is_file()
    assert "reproduced" in output_of(capsys, "replay", witness, code=ExitCode.FAIL)
    assert "fixed" in output_of(capsys, "replay", witness, "--subject", CORRECT, code=ExitCode.PASS)
    assert "FAIL  routes.rows" in output_of(
        capsys, "check", witness, "--only", "routes.rows", code=ExitCode.FAIL
    )


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


def test_control_characters_of_a_trace_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A name in a trace that somebody mailed cannot recolour a terminal or move its cursor."""
    dump_trace(run_case(Correct, CLEAN, name="a\x1b[31mred"), tmp_path / "mailed.json")
    text = output_of(capsys, "check", "mailed.json", "--only", "stitch.tokens", code=ExitCode.PASS)

    assert "\x1b" not in text
    assert "a\\x1b[31mred" in text


def test_expected_failures_turn_the_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Accepting writes the file, the next run passes with it, and a fixed subject makes it stale
    (exit code 1).
    """
    common = ["--only", "routes.rows", "--expected", "expected.toml"]
    accepted = output_of(
        capsys, "verify", "--subject", CONCAT, *common, "--accept", code=ExitCode.FAIL
    )

    assert (
        "expected failures: added routes.rows: replace its reason in expected.toml by the true one"
        in accepted
    )
    assert 'check = "routes.rows"' in (tmp_path / "expected.toml").read_text(encoding="utf-8")
    assert "1 expected to fail and did" in output_of(
        capsys, "verify", "--subject", CONCAT, *common, code=ExitCode.UNKNOWN
    )
    stale = output_of(capsys, "verify", "--subject", CORRECT, *common, code=ExitCode.FAIL)
    assert "routes.rows is listed in expected.toml as an expected failure" in stale


def test_verify_judges_conversions_into_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """A factory with `collate` is a BatchSubject: the checks of batches judge it, the others do not
    apply.
    """
    report = verified(
        capsys,
        "--subject",
        "rollproof.fakes.trainers.reference_batches:Collator",
        code=ExitCode.PASS,
    )

    assert {"batch"} == {
        check["id"].partition(".")[0] for check in report["checks"] if check["verdict"] == "pass"
    }
    assert 0 == report["summary"]["unknown"]


def test_unknown_alone_is_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    """A check whose trigger does not fire is told as unknown, and the run is not a success."""
    report = verified(capsys, "--subject", CORRECT, "--only", "versions.unlabelled-update", code=2)

    assert 1 == report["summary"]["unknown"]


def test_known_bugs_in_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The kill matrix has the keys of schema 1, and names can be picked."""
    assert ExitCode.PASS == run(["known-bugs", "concat-on-resume", "--json", "out.json"])
    bugs = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["bugs"]

    assert ["concat-on-resume"] == [bug["id"] for bug in bugs]
    assert {
        "id",
        "refs",
        "killed",
        "by",
        "expected_by",
        "examples",
        "seconds",
        "blamed_wrongly",
    } <= set(bugs[0])
    assert bugs[0]["killed"]
    assert (
        "1 of 1 known bugs detected, 0 with a check that should not fail" in capsys.readouterr().out
    )


def test_known_bugs_are_listed_after_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those with a wrong outcome without -v: a bug that no check detects is never hidden."""
    monkeypatch.setenv("COLUMNS", "140")
    (right,) = run_kill_matrix(["concat-on-resume"])
    (wrong,) = run_kill_matrix(["logprobs-dropped"])
    monkeypatch.setattr(
        "rollproof.cli.known_bugs.run_kill_matrix",
        lambda only, meter: (right, replace(wrong, failed=())),
    )

    assert ExitCode.FAIL == run(["known-bugs"])
    short = capsys.readouterr().out
    assert short.startswith("1 of 2 known bugs detected, 0 with a check that should not fail\n")
    assert "logprobs-dropped" in short and "? stitch.logprobs-present" in short
    assert "concat-on-resume" not in short
    assert ExitCode.FAIL == run(["known-bugs", "-v"])
    assert "concat-on-resume" in capsys.readouterr().out


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


def test_doctor_runs_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Doctor names versions, plugin and GPU, and runs one case."""
    text = output_of(capsys, "doctor", code=0)

    assert "pytest plugin  active" in text
    assert "one case       runs, in " in text
    assert "GPU            " in text


def test_doctor_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plugins switched off it says so and how to go on, and its exit code is 1."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    assert "run pytest with `-p rollproof.plugin`" in output_of(
        capsys, "doctor", code=ExitCode.FAIL
    )


def test_checks_pass_on_an_unfinished_trace_only_if_asked_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What a file without its end does not show may be wrong: a check that passes on the rest is
    unknown, and one that fails fails. ``--unfinished-ok`` takes the rest for all.
    """
    trace = run_case(Correct, CLEAN)
    writer = TraceWriter(tmp_path / "cut.arrow", trace.header)
    for event in trace.events:
        writer.append(event)
    writer.flush()
    (tmp_path / "killed.arrow").write_bytes((tmp_path / "cut.arrow").read_bytes())
    writer.close()
    arguments = ("--only", "stitch.tokens", "--only", "routes.rows")
    assert "2 pass" in output_of(capsys, "check", "cut.arrow", *arguments, code=ExitCode.PASS)
    killed = output_of(capsys, "check", "killed.arrow", *arguments, code=ExitCode.UNKNOWN)
    assert "UNKNOWN  stitch.tokens: a file is unfinished" in killed
    assert "2 unknown" in killed
    accepted = output_of(
        capsys, "check", "killed.arrow", *arguments, "--unfinished-ok", code=ExitCode.PASS
    )
    assert "The writer did not close the file" in accepted


def test_an_unfinished_trace_blames_no_open_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A killed writer's file is judged as far as it goes, its open request is not blamed, and the
    report says that it is cut.
    """
    trace = run_case(Correct, CLEAN)
    writer = TraceWriter(tmp_path / "cut.arrow", trace.header)
    for event in trace.events:
        if event.kind == "result":
            break
        writer.append(event)
    writer.flush()
    (tmp_path / "killed.arrow").write_bytes((tmp_path / "cut.arrow").read_bytes())
    writer.close()
    killed = output_of(
        capsys, "check", "killed.arrow", "--only", "lifecycle", code=ExitCode.UNKNOWN
    )

    assert "The writer did not close the file" in killed
    assert "FAIL" in output_of(
        capsys, "check", "cut.arrow", "--only", "lifecycle", code=ExitCode.FAIL
    )


def test_one_unreadable_trace_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Readable traces are judged, the unreadable one is told, and the exit code is that of bad
    input.
    """
    dump_trace(run_case(Correct, CLEAN), tmp_path / "good.json")
    (tmp_path / "junk.arrow").write_bytes(os.urandom(4096))
    text = output_of(
        capsys, "check", "good.json", "junk.arrow", "--only", "stitch.tokens", code=ExitCode.USAGE
    )

    assert "1 check: 1 pass" in text
    assert "junk.arrow is not a rollproof trace" in text


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from rollproof.cli import main; main()", *arguments]


def test_a_closed_pipe_is_no_error() -> None:
    """`rollproof checks | true` ends quietly, and not with the exit code of a failing check."""
    with subprocess.Popen(
        command("checks"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()

    assert b"" == error
    assert app_module.BROKEN_PIPE == process.returncode


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("rollproof checks stitch >&-", 0, ""),
        (
            "rollproof checks stitch >/dev/full",
            0,
            "standard output could not be written (No space left on device); the exit code",
        ),
        ("rollproof --help >/dev/full", 0, "standard output could not be written"),
        (
            "rollproof check concat.json --only routes.rows >/dev/full",
            1,
            "the exit code is still the verdict",
        ),
        ("rollproof check concat.json --only routes.rows >&- <&-", 1, ""),
        (
            "rollproof check concat.json --only routes.rows --json - >/dev/full",
            1,
            "No space left on device. It was kept as /",
        ),
        (
            "rollproof checks stitch --json - >/dev/full",
            254,
            "The JSON did not fit into standard output: No space left on device",
        ),
        (
            "rollproof checks stitch --json - >&-",
            254,
            "--json - writes to standard output, which cannot be written: it is closed.",
        ),
        ("rollproof checks nosuch 2>&-", 254, ""),
        ("rollproof checks nosuch 2>/dev/full", 254, ""),
        ("PYTHONIOENCODING=ascii rollproof checks stitch >/dev/null", 0, ""),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_broken_streams_cost_no_verdict(
    tmp_path: Path, command: str, code: int, message: str
) -> None:
    """Closed or full standard streams leave the exit code as it is, unless JSON was asked for
    there; then it is kept elsewhere.
    """
    dump_trace(run_case(Concat, ABORTED), tmp_path / "concat.json")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=environment, check=False
    )

    assert (code, "") == (done.returncode, done.stdout)
    assert "Traceback" not in done.stderr
    assert message in done.stderr if message else done.stderr == ""


def test_a_report_whose_place_breaks_during_the_run_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is told and the JSON kept in the folder for temporary files; a failure keeps its
    code, all else becomes 254.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / "out"

    def breaks(subject: Correct) -> None:
        AsSampled.__init__(subject)
        place.unlink(missing_ok=True)
        place.touch()

    monkeypatch.setattr(Correct, "__init__", breaks)
    for subject, only, code in (
        (CORRECT, "stitch.tokens", ExitCode.USAGE),
        (CONCAT, "routes.rows", ExitCode.FAIL),
    ):
        place.unlink(missing_ok=True)
        text = output_of(
            capsys,
            "verify",
            "--subject",
            subject,
            "--only",
            only,
            "--json",
            "out/report.json",
            code=code,
        )

        assert (
            "Cannot write out/report.json: Not a directory. Choose a file in a folder that you may"
            " write to. It was kept as " in text
        )
        assert "1 check: " in text
    assert 2 == len(list(tmp_path.glob("rollproof-*/report.json")))


def test_counterexamples_whose_place_breaks_during_the_run_are_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding names where its counterexample went instead, and a note says why."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rollproof.cli.verify.check_folder", lambda path: None)
    monkeypatch.setattr("rollproof.verification.rollouts.check_folder", lambda path: None)
    text = output_of(
        capsys,
        "verify",
        "--subject",
        CONCAT,
        "--only",
        "routes.rows",
        "--witness-dir",
        "plain",
        code=ExitCode.FAIL,
    )
    (saved,) = tmp_path.glob("rollproof-*/routes.rows.json")

    assert "note: The counterexample of routes.rows could not be kept in plain/" in text
    assert f"rollproof replay {saved.relative_to(tmp_path)}" in text
    assert "reproduced" in output_of(capsys, "replay", str(saved), code=ExitCode.FAIL)


def test_an_interrupt_shows_what_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends a run at once, with code 130, the verdicts until then, and a note of how much was
    judged.
    """
    stop = iter([None, None, KeyboardInterrupt()])

    def start(self: Correct, fleet: Fleet) -> Any:
        if (error := next(stop, None)) is not None:
            raise error
        return AsSampled.start(self, fleet)

    monkeypatch.setattr(Correct, "start", start)
    text = output_of(
        capsys,
        "verify",
        "--subject",
        CORRECT,
        "--only",
        "stitch.tokens",
        code=app_module.INTERRUPTED,
    )

    assert "note: interrupted after 2 of 3 cases: only those were judged" in text
    assert "1 check: 1 pass, 0 fail" in text
    assert text.rstrip().endswith("rollproof: interrupted")


def test_an_interrupt_is_exit_code_130(tmp_path: Path) -> None:
    """Ctrl-C ends a run with one line and the code that shells expect."""
    heed = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a runner in the background hands on an ignored SIGINT
    soak = command("verify", "--profile", "soak")
    with subprocess.Popen(
        soak, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=heed
    ) as process:
        try:
            time.sleep(4)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()

    assert app_module.INTERRUPTED == process.returncode
    assert error.decode().strip().endswith("rollproof: interrupted")
