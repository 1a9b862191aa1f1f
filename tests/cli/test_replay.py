"""Doors of a trainer with routing replay: command line, decorated function and subclass, all with
the checks of its family.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.judging.report import ExitCode
from rollproof.store import load_trace

GOOD = "rollproof.fakes.trainers.replay_trainer:ReplayTrainer"
MINE = """
import numpy as np
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer

class Mine(ReplayTrainer):
    def payload(self, sample):
        return np.roll(super().payload(sample), 1, axis=0)

def unmade():
    raise OSError("no checkpoint")

class NoTrainer:
    pass
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in a folder with a module of trainers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_trainers.py").write_text(MINE)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """What a command prints to both streams, once it has ended with ``code`` and without a
    traceback.
    """
    assert code == run(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def test_verify_judges_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """The report holds the checks of replay alone, what was exercised, and the canary."""
    assert ExitCode.PASS == run(["verify", "--replay", GOOD, "--json", "-"])
    report = json.loads(capsys.readouterr().out)

    assert {"replay"} == {check["id"].partition(".")[0] for check in report["checks"]}
    assert ("ReplayTrainer", 0, True) == (
        report["subject"],
        report["summary"]["fail"],
        report["canary"]["red"],
    )
    assert report["exercised"]["steps, replay"] > 50


def test_a_counterexample_is_kept_run_again_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """A faulty trainer fails in words; its file is reproduced, is fixed by a right trainer, and is
    judged as recorded.
    """
    text = output_of(
        capsys,
        "verify",
        "--replay",
        "my_trainers:Mine",
        "--only",
        "replay.forward",
        code=ExitCode.FAIL,
    )
    witness = ".rollproof/my_trainers.Mine/replay.forward.json"

    assert (
        "FAIL  replay.forward" in text and f"rollproof replay {witness} --trust-subject\n" in text
    )
    assert "reproduced" in output_of(
        capsys, "replay", witness, "--trust-subject", code=ExitCode.FAIL
    )
    assert "fixed" in output_of(capsys, "replay", witness, "--subject", GOOD, code=ExitCode.PASS)
    checked = output_of(capsys, "check", witness, code=ExitCode.FAIL)
    assert "FAIL  replay.forward" in checked and "rows routed in forward" in checked
    assert {"subject": "my_trainers:Mine", "about": "replay"} == load_trace(witness).header.recipe


def test_an_edited_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose case names no episodes cannot be run again, and says so."""
    output_of(
        capsys,
        "verify",
        "--replay",
        "my_trainers:Mine",
        "--only",
        "replay.forward",
        code=ExitCode.FAIL,
    )
    path = Path(".rollproof/my_trainers.Mine/replay.forward.json")
    data = json.loads(path.read_text())
    del data["checksum"]
    data["header"]["case"] = {"episodes": ["nosuch"]}
    path.write_text(json.dumps(data))
    assert "This trainer has no episodes ['nosuch']" in output_of(
        capsys, "replay", str(path), "--trust-subject", code=ExitCode.USAGE
    )
    data["header"]["case"] = {"nosuch": []}
    path.write_text(json.dumps(data))
    assert "names no episodes" in output_of(
        capsys, "replay", str(path), "--trust-subject", code=ExitCode.USAGE
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--replay", "nosuch:thing"],
            "There is no module 'nosuch': --replay searches the current folder",
        ),
        (["--replay", "my_trainers"], "--replay 'my_trainers' must be written module:factory"),
        (["--replay", "my_trainers:Min"], "my_trainers has no 'Min'. Did you mean Mine"),
        (["--replay", "my_trainers:unmade"], "unmade could not be created: OSError: no checkpoint"),
        (
            ["--replay", "my_trainers:NoTrainer"],
            "is not a ReplaySubject: it needs a `contract` with replay terms",
        ),
        (["--replay", GOOD, "--subject", GOOD], "one run judges one of them"),
        (["--replay", GOOD, "--only", "replay.foward"], "Did you mean replay.forward"),
    ],
)
def test_bad_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """What cannot be judged is refused with the next step, and never with a traceback."""
    assert text in output_of(capsys, "verify", *arguments, code=ExitCode.USAGE)


def test_a_trainer_is_a_suite(pytester: pytest.Pytester) -> None:
    """One item per check: of a decorated class, of a function with a kind, and of a subclass."""
    pytester.makepyfile("""
        import rollproof
        from rollproof.fakes.trainers.replay_trainer import ReplayTrainer

        def made():
            return ReplayTrainer()

        @rollproof.conformance(ReplayTrainer, only=["replay.forward"])
        def test_class(check):
            assert check.id == "replay.forward"

        @rollproof.conformance(made, about="replay", only=["replay.drift"])
        def test_function(check):
            pass

        class TestTrainer(rollproof.ReplayConformance):
            subject = ReplayTrainer
            only = ("replay",)
        """)
    result = pytester.runpytest_inprocess("-v", "-rs")

    result.assert_outcomes(passed=26, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_class[[]replay.forward[]] PASSED*",
            "*::TestTrainer::test_check[[]replay.recompute[]] PASSED*",
        ]
    )
    result.stdout.fnmatch_lines(["*not applicable: the contract declares records=False*"])


def test_a_faulty_trainer_fails_its_items(pytester: pytest.Pytester) -> None:
    """The item of a broken promise fails with the finding; what is expected to fail does not."""
    pytester.makepyfile(
        my=MINE,
        test_mine="""
        import rollproof
        from my import Mine

        class TestMine(rollproof.ReplayConformance):
            subject = Mine
            only = ("replay.forward", "replay.self-loss", "replay.residue")
            expected = {"replay.self-loss": "issue 7"}
        """,
    )
    result = pytester.runpytest_inprocess()

    result.assert_outcomes(passed=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*routers executed other experts than their target*"])


def test_the_fixture_judges_within_a_test(pytester: pytest.Pytester) -> None:
    """A trainer may be judged in the middle of a test: what fails is raised, and the report has
    both runs.
    """
    pytester.makepyfile(
        my=MINE,
        test_mine="""
        from my import Mine
        from rollproof.fakes.trainers.replay_trainer import ReplayTrainer

        def test_good(rollproof_replay):
            only = ["replay.forward", "replay.drift"]
            assert rollproof_replay(ReplayTrainer, only=only).exit_code == 0

        def test_bad(rollproof_replay):
            rollproof_replay(Mine, only=["replay.forward"])
        """,
    )
    result = pytester.runpytest_inprocess("--rollproof-report=report.json")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*ConformanceError: test_mine.py::test_bad: *1 fail*",
            "*routers executed other experts than their target*",
        ]
    )
    report = json.loads((pytester.path / "report.json").read_text())
    assert ["test_mine.py::test_good", "test_mine.py::test_bad"] == [
        one["subject"] for one in report["reports"]
    ]


def test_a_kind_that_does_not_exist_is_told(pytester: pytest.Pytester) -> None:
    """A misspelt kind is a collection error."""
    pytester.makepyfile(
        "import rollproof\n@rollproof.conformance(object, about='replays')\ndef test_a(check):"
        " pass\n"
    )
    result = pytester.runpytest_inprocess()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*No kind of subject is named 'replays'; choose one of*"])
