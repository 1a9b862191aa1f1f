from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli import app as app_module
from rollproof.cli.named_targets import target_of_recipe
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.fleet import Fleet
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.report import ExitCode, Report
from tests.support.command_line import output_of, verified
from tests.support.faulty_subjects import CONCAT, CORRECT, Correct

pytestmark = pytest.mark.usefixtures("command_folder")


def test_a_subject_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is imported as pytest imports it: as a module of its package, or from its folder."""
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
    assert f"rollproof replay {witness} --trust-subject\n" in text
    assert (tmp_path / witness).is_file()
    assert "reproduced" in output_of(
        capsys, "replay", witness, "--trust-subject", code=ExitCode.FAIL
    )
    assert "fixed" in output_of(capsys, "replay", witness, "--subject", CORRECT, code=ExitCode.PASS)
    assert "FAIL  routes.rows" in output_of(
        capsys, "check", witness, "--only", "routes.rows", code=ExitCode.FAIL
    )


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


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        (["stitch.tokens"], ExitCode.PASS),
        (["routes.rows"], ExitCode.UNKNOWN),
        (["stitch.tokens", "routes.position"], ExitCode.FAIL),
    ],
    ids=("all", "another", "one that is decided"),
)
def test_unknown_checks_may_be_expected(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listed: list[str],
    code: int,
) -> None:
    """A run passes if the file lists every check that is unknown, and fails if it lists one that is
    decided.
    """
    registry = default_registry()
    results = tuple(
        CheckResult(check=registry[check_id], verdict=verdict, reason="")
        for check_id, verdict in (
            ("stitch.tokens", Verdict.UNKNOWN),
            ("routes.position", Verdict.PASS),
        )
    )
    judged = Report(subject="Correct", profile="pr", seed=0, results=results)
    monkeypatch.setattr("rollproof.cli.verify.judge_all", lambda *args, **options: [judged])
    (tmp_path / "expected.toml").write_text(
        "".join(
            f'[[expected]]\ncheck = "{check}"\nreason = "r"\nverdict = "unknown"\n'
            for check in listed
        )
    )

    output_of(capsys, "verify", "--subject", CORRECT, "--expected", "expected.toml", code=code)


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
    assert f"rollproof replay {saved.relative_to(tmp_path)} --trust-subject\n" in text
    assert "reproduced" in output_of(
        capsys, "replay", str(saved), "--trust-subject", code=ExitCode.FAIL
    )


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
