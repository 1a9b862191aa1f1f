"""``rollproof adopt``: what it writes into a repository, and what it refuses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollproof.cli.app import run
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode
from rollproof.stacks import release_of
from rollproof.stacks.matrix import Matrix
from rollproof.stacks.repositories import REPOSITORIES, Repository
from rollproof.stacks.repository_files import EXPECTED_FILE, WORKFLOW_FILE
from rollproof.verification.expected_failures import ExpectedFailures
from tests.support.command_line import output_of

RESULTS = Path(__file__).parents[2] / "docs" / "stack_results"
ALL = pytest.mark.parametrize("name", REPOSITORIES)


def checkout_of(name: str, root: Path) -> Path:
    """Make a folder that looks like a checkout, and return it."""
    module = root / release_of(name).module_file
    module.parent.mkdir(parents=True)
    module.touch()
    (root / REPOSITORIES[name].folders[-1]).mkdir(parents=True)
    return root


def parts_of(repository: Repository) -> dict[str, str]:
    """The kind of each part."""
    return {
        **dict.fromkeys(repository.parts, "rollouts"),
        **dict.fromkeys(repository.batches, "batches"),
        **dict.fromkeys(repository.corrections, "corrections"),
    }


def test_path(name: str) -> Path:
    return Path(REPOSITORIES[name].folders[-1]) / REPOSITORIES[name].file


test_path.__test__ = False  # type: ignore[attr-defined]  # a helper


@ALL
def test_a_written_test_has_an_item_for_each_check_of_each_part(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It is collected where the repository's CI looks for tests, without the framework, and its
    syntax is that of the oldest Python which reads it.
    """
    checkout_of(name, pytester.path)
    text = output_of(capsys, "adopt", name, "--checkout", str(pytester.path), code=ExitCode.PASS)
    file = test_path(name)
    assert f"wrote {file}: " in text
    assert REPOSITORIES[name].collected in text
    ast.parse((pytester.path / file).read_text(encoding="utf-8"), feature_version=(3, 10))

    result = pytester.runpytest_inprocess("--collect-only", "-q", str(file))
    collected = {line.partition("::")[2] for line in result.outlines if "::" in line}
    assert {
        f"test_{part.replace('-', '_')}[{check.id}]"
        for part, kind in parts_of(REPOSITORIES[name]).items()
        for check in default_registry()
        if check.judges(kind)
    } == collected


@ALL
def test_the_expected_failures_are_the_pinned_verdicts(tmp_path: Path, name: str) -> None:
    """For each part of the newest pinned release: the same checks, kinds of findings, situations
    and reasons, and the checks that cannot be decided.
    """
    checkout_of(name, tmp_path)
    assert ExitCode.PASS == run(["adopt", name, "--checkout", str(tmp_path)])

    listed = ExpectedFailures.read(tmp_path / test_path(name).with_name(EXPECTED_FILE))
    matrix = Matrix.read(name)
    version = matrix.pinned[-1]
    for part in parts_of(REPOSITORIES[name]):
        subject = f"{name} {part}"
        assert matrix.known_failures(version, part) == listed.ways(subject)
        assert {*matrix.reasons(version, part)} == {*listed.reasons(subject)}
        may_fail = {
            check for entry in matrix.entries for check in entry.checks("may_fail", version, part)
        }
        lenient = {e.check for e in listed.covering(subject) if not (e.strict or e.undecided)}
        assert may_fail == lenient
        undecided = {
            check for entry in matrix.entries for check in entry.checks("unknown", version, part)
        }
        assert undecided == {*listed.undecided(subject)}


@ALL
def test_every_part_of_the_stack_is_judged(name: str) -> None:
    """The parts are those of the newest pinned release."""
    version = Matrix.read(name).pinned[-1]
    stored = json.loads((RESULTS / f"stack-{name}-{version}.json").read_text(encoding="utf-8"))
    assert {*parts_of(REPOSITORIES[name])} == {*stored["parts"]}


@ALL
def test_the_workflow_installs_and_runs_the_test(tmp_path: Path, name: str) -> None:
    """It is a workflow, and runs the file that was written."""
    checkout_of(name, tmp_path)
    assert ExitCode.PASS == run(["adopt", name, "--checkout", str(tmp_path)])

    workflow = yaml.safe_load((tmp_path / WORKFLOW_FILE).read_text(encoding="utf-8"))
    steps = workflow["jobs"]["rollouts"]["steps"]
    install, judge = (step["run"] for step in steps if "run" in step)
    assert f'requirements_file("{name}")' in install
    assert f"pytest --noconftest {test_path(name)} " in judge
    assert (tmp_path / test_path(name)).is_file()


def test_news_of_a_checkout_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stack in the place of TRL that does nothing wrong, what is listed strictly fails, for
    it was repaired, and nothing else fails. Loggers that the adapters silence log again.
    """
    checkout_of("trl", pytester.path)
    monkeypatch.chdir(pytester.path)
    assert ExitCode.PASS == run(["adopt", "trl"])
    pytester.makeconftest(
        """
        from rollproof import stacks
        from rollproof.fakes.clients.reference_clients import REFERENCES
        from rollproof.fakes.trainers.reference_batches import Collator
        from rollproof.stacks._support.part import Part

        def load_stack(name, *, checkout=None):
            make = next(iter(REFERENCES.values()))
            parts = {
                part: Part(name=part, make=make, flavours=("vllm",), thin=40)
                for part in ("rollout-loop", "tool-loop")
            }
            batches = dict.fromkeys(("fixed-count-rows", "token-budget-rows"), Collator)
            return stacks.Stack(name=name, version="2.0", parts=parts, batches=batches)

        stacks.load_stack = load_stack
        """
    )
    result = pytester.runpytest_subprocess("-q", "-rfx", "--tb=line", str(test_path("trl")))

    listed = ExpectedFailures.read(test_path("trl").with_name(EXPECTED_FILE))
    entries = {
        f"test_{entry.subject.partition(' ')[2].replace('-', '_')}[{entry.check}]": entry
        for entry in listed.entries
        if entry.subject
    }
    failed = {
        line.partition("::")[2].partition(" ")[0]
        for line in result.outlines
        if line.startswith("FAILED ")
    }
    assert {name for name, entry in entries.items() if entry.strict} == failed
    assert result.parseoutcomes()["passed"] > 100
    assert "but its verdict is pass: remove the entry" in str(result.stdout)


def test_a_stack_that_replaces_modules_is_judged_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to other tests its file is skipped, before anything is imported."""
    checkout_of("slime", pytester.path)
    monkeypatch.chdir(pytester.path)
    assert ExitCode.PASS == run(["adopt", "slime"])
    pytester.makepyfile(test_other="def test_other(): pass")

    both = pytester.runpytest_inprocess("-q", "-rs", str(test_path("slime")), "test_other.py")
    assert "needs a process of its own" in str(both.stdout)
    assert {"passed", "skipped"} == {*both.parseoutcomes()}
    alone = pytester.runpytest_subprocess("-q", str(test_path("slime")))
    assert "slime partial-rollout could not be run" in str(alone.stdout)


def test_a_script_without_rollproof_is_no_failure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slime's CI runs test files as scripts, in environments that may not have rollproof."""
    checkout_of("slime", pytester.path)
    monkeypatch.chdir(pytester.path)
    assert ExitCode.PASS == run(["adopt", "slime"])
    test_path("slime").with_name("rollproof.py").write_text("raise ModuleNotFoundError")
    environment = {**os.environ, "PYTEST_ADDOPTS": "-p no:rollproof"}
    ended = subprocess.run(
        [sys.executable, str(test_path("slime"))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 skipped" in ended.stdout
    assert 0 == ended.returncode


def test_the_licence_is_that_of_other_tests(tmp_path: Path) -> None:
    """Some repositories demand one of each file."""
    checkout_of("nemo-rl", tmp_path)
    other = tmp_path / "tests/unit/experience/test_other.py"
    other.write_text("# Copyright (c) 2026, Somebody.\n#\n# All rights.\n\nimport os\n# end\n")
    (tmp_path / "tests/unit/experience/test_a.py").write_text("# not a licence\n")
    assert ExitCode.PASS == run(["adopt", "nemo-rl", "--checkout", str(tmp_path)])

    text = (tmp_path / test_path("nemo-rl")).read_text(encoding="utf-8")
    assert text.startswith('# Copyright (c) 2026, Somebody.\n#\n# All rights.\n"""Do our')


def test_the_newest_layout_of_a_repository_is_used(tmp_path: Path) -> None:
    """AReaL has moved its tests."""
    checkout_of("areal", tmp_path)
    newest, oldest = REPOSITORIES["areal"].folders
    assert oldest == REPOSITORIES["areal"].folder_in(tmp_path)
    (tmp_path / newest).mkdir(parents=True)
    assert newest == REPOSITORIES["areal"].folder_in(tmp_path)


def test_a_file_that_exists_is_never_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The difference is shown and the exit code is 1; other files are written. A second time all
    files are there, which is no difference.
    """
    checkout_of("skyrl", tmp_path)
    file = tmp_path / test_path("skyrl")
    file.write_text("import pytest\n# ours\n")
    arguments = ("adopt", "skyrl", "--checkout", str(tmp_path))
    text = output_of(capsys, *arguments, code=ExitCode.FAIL)

    assert f"{test_path('skyrl')} exists, and was not changed" in text
    assert "  -# ours\n" in text
    assert '  +@judged("client")\n' in text
    assert "import pytest\n# ours\n" == file.read_text()
    assert (tmp_path / WORKFLOW_FILE).is_file()
    file.unlink()
    output_of(capsys, *arguments, code=ExitCode.PASS)
    text = output_of(capsys, *arguments, code=ExitCode.PASS)
    assert 3 == text.count(" is there already\n")
    assert "wrote" not in text


def test_bad_input_is_one_clear_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown repository, a stack without one, folders that are no checkout or cannot be
    written to, and files that cannot be read.
    """
    root = checkout_of("trl", tmp_path / "trl")
    before = sorted(root.rglob("*"))
    for arguments, words in (
        (["adopt"], "Missing argument 'repository'"),
        (["adopt", "verll"], "no repository of 'verll'"),
        (["adopt", "verll"], "Did you mean 'verl'?"),
        (["adopt", "roll"], "`rollproof verify --stack roll --checkout DIR` judges"),
        (["adopt", "verl", "--checkout", str(root)], "is not a checkout of verl: it has no"),
        (["adopt", "trl", "--checkout", str(root / "no")], "there is no such folder"),
    ):
        text = output_of(capsys, *arguments, code=ExitCode.USAGE)
        assert words in text
        assert text.startswith("rollproof: error: ")
    assert before == sorted(root.rglob("*"))

    (root / ".github").touch()
    text = output_of(capsys, "adopt", "trl", "--checkout", str(root), code=ExitCode.USAGE)
    assert "rollproof.yml" in text
    assert "Not a directory" in text
    (root / ".github").unlink()
    (root / test_path("trl")).write_bytes(b"\xff")
    text = output_of(capsys, "adopt", "trl", "--checkout", str(root), code=ExitCode.USAGE)
    assert "cannot be read" in text
    assert [test_path("trl").name] == [path.name for path in sorted((root / "tests").rglob("*.*"))]
