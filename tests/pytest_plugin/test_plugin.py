from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rollproof.judging.report import ExitCode
from tests.support.inner_pytest import runs, suite, summary


def test_one_item_per_check_and_one_run_per_subject(fake_runs: pytest.Pytester) -> None:
    """The ids of items are the ids of checks, and all of them share a single run."""
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess("-v")

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        ["*::test_rollouts[[]stitch.a[]] PASSED*", "*::test_rollouts[[]routes.d[]] PASSED*"]
    )
    assert 1 == len(runs(fake_runs))


def test_verdicts_become_outcomes(fake_runs: pytest.Pytester) -> None:
    """A fail fails with the finding, not applicable skips with the reason, unknown is listed apart
    and fails the session.
    """
    fake_runs.makepyfile(suite(stitch_a="fail", stitch_b="unknown", routes_c="not applicable"))
    result = fake_runs.runpytest_inprocess("-rs")

    assert {"failed": 1, "unknown": 1, "skipped": 1, "passed": 1} == result.parseoutcomes()
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    result.stdout.fnmatch_lines(
        [
            "Promise of stitch.a.",
            "MyStack does not keep this promise (profile pr, seed 0):",
            "  FAIL  stitch.a",
            "    1. Title of stitch.a",
            "       where     request r0",
            "       expected  9 rows",
            "       observed  16 rows",
            "       hint      Keep them.",
            "SKIPPED * not applicable: no routes",
        ]
    )


@pytest.mark.parametrize(
    ("options", "shown", "more"),
    [((), 3, "2 more findings of this check, of 2 other kinds too (-v shows"), (("-v",), 5, "")],
)
def test_a_failure_shows_one_finding_a_kind(
    fake_runs: pytest.Pytester, options: tuple[str, ...], shown: int, more: str
) -> None:
    """Three kinds of findings, and a count of the others; with -v one finding of every kind."""
    fake_runs.makepyfile(suite(stitch_a="fail") + "\nMyStack.kinds = 5\n")
    text = str(fake_runs.runpytest_inprocess(*options).stdout)

    assert shown == text.count(". Title of stitch.a")
    assert more in text and ("more findings" in text) == bool(more)


def test_unknown_alone_fails_the_session(fake_runs: pytest.Pytester) -> None:
    """No failure, one unknown verdict: the exit code is not 0, and the summary names it."""
    fake_runs.makepyfile(suite(stitch_b="unknown"))
    result = fake_runs.runpytest_inprocess()

    assert {"unknown": 1, "passed": 3} == result.parseoutcomes()
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    assert "UNKNOWN  stitch.b: not exercised: no events occurred" in summary(result)


def test_unknown_may_be_skipped_by_choice(fake_runs: pytest.Pytester) -> None:
    """With rollproof_unknown = skip the item is skipped, and its reason begins with the word."""
    fake_runs.makeini("[pytest]\nrollproof_unknown = skip\n")
    fake_runs.makepyfile(suite(stitch_b="unknown"))
    result = fake_runs.runpytest_inprocess("-rs")

    result.assert_outcomes(passed=3, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * unknown: not exercised: no events occurred"])


def test_the_summary_says_what_was_exercised(fake_runs: pytest.Pytester) -> None:
    """Verdict counts, the exercised table and the canary close the session."""
    fake_runs.makepyfile(suite())
    expected = """
MyStack  [profile pr, seed 0, 12 cases]
  exercised 1 situation: aborts mid-decode 7
  self-test: a row repeated: detected by routes.c, as expected
  4 checks: 4 pass, 0 fail, 0 unknown, 0 not applicable"""

    assert expected in summary(fake_runs.runpytest_inprocess())


def test_a_session_without_items_says_nothing(pytester: pytest.Pytester) -> None:
    """No header, no section, where no item and no option of ours is in use."""
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess()

    assert "rollproof:" not in str(result.stdout)
    assert "= rollproof =" not in str(result.stdout)


def test_the_header_tells_the_values_in_force(pytester: pytest.Pytester) -> None:
    """With an option given, or with -v, one line names profile and the like."""
    pytester.makepyfile("def test_a(): pass")

    assert "rollproof: profile='nightly', seed=3, unknown='fail'" in str(
        pytester.runpytest_inprocess("--rollproof-profile=nightly", "--rollproof-seed=3").stdout
    )
    assert "rollproof: profile='pr', unknown='fail'" in str(
        pytester.runpytest_inprocess("-v").stdout
    )


def test_the_body_runs_with_the_result_and_other_fixtures(fake_runs: pytest.Pytester) -> None:
    """A body may assert more about the CheckResult, and its failure is an ordinary one."""
    fake_runs.makepyfile("""
        import rollproof

        class MyStack: pass

        @rollproof.conformance(MyStack, only=["stitch"])
        def test_rollouts(check, tmp_path):
            assert tmp_path.is_dir()
            assert check.exercised["events"] == 3
            assert check.id != "stitch.b"
        """)

    fake_runs.runpytest_inprocess().assert_outcomes(passed=1, failed=1)


def test_a_subclass_is_a_suite_too(fake_runs: pytest.Pytester) -> None:
    """The subject may be a class, a plain function, or a method that makes a fresh subject; ids are
    the same as of the decorator.
    """
    fake_runs.makepyfile("""
        import rollproof

        class MyStack: pass

        def make(): return MyStack()

        class TestByClass(rollproof.RolloutConformance):
            subject = MyStack

        class TestByFunction(rollproof.RolloutConformance):
            subject = make
            only = ("stitch",)

        class TestByMethod(rollproof.RolloutConformance):
            only = ("routes.c",)

            def subject(self):
                return MyStack()
        """)
    result = fake_runs.runpytest_inprocess("-v")

    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*::TestByMethod::test_check[[]routes.c[]] PASSED*"])
    assert ["TestByClass", "TestByFunction", "TestByMethod"] == [
        line.split()[0] for line in runs(fake_runs)
    ]


def test_subjects_of_one_name_in_two_modules_are_two(fake_runs: pytest.Pytester) -> None:
    """Each is run for itself, and keeps its counterexamples in a folder of its own."""
    text = (
        "import rollproof\nclass TestStack(rollproof.RolloutConformance):\n    def subject(self):"
        " return object()\n"
    )
    fake_runs.makepyfile(test_one=text, test_two=text)

    fake_runs.runpytest_inprocess().assert_outcomes(passed=8)
    assert ["test_one.TestStack", "test_two.TestStack"] == [
        line.split()[-1] for line in runs(fake_runs)
    ]


def test_options_reach_the_run(fake_runs: pytest.Pytester) -> None:
    """Command line wins over ini file; only= selects which items exist."""
    fake_runs.makeini(
        "[pytest]\nrollproof_profile = soak\nrollproof_seed = 5\nrollproof_only = routes\n"
    )
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess(
        "--rollproof-profile=nightly", "--rollproof-only=stitch.a", "--rollproof-only=routes.d"
    )

    result.assert_outcomes(passed=2)
    assert ["MyStack nightly 5 stitch.a,routes.d test_options_reach_the_run.MyStack"] == runs(
        fake_runs
    )


def test_the_marker_overrides_the_options(fake_runs: pytest.Pytester) -> None:
    """@pytest.mark.rollproof(seed=...) wins over the option, and -m rollproof selects conformance
    items.
    """
    marked = suite().replace(
        "@rollproof.conf", "import pytest\n@pytest.mark.rollproof(seed=9)\n@rollproof.conf"
    )
    fake_runs.makepyfile(marked + "\ndef test_other(): pass\n")

    fake_runs.runpytest_inprocess("-m", "rollproof", "--rollproof-seed=3").assert_outcomes(
        passed=4, deselected=1
    )
    (run,) = runs(fake_runs)
    assert run.startswith("MyStack pr 9  test_the_marker_overrides_the_options.MyStack-")


def test_the_markers_values_are_checked(fake_runs: pytest.Pytester) -> None:
    """A seed or a profile that cannot be is told in one line, without a traceback."""
    for argument, message in (
        ("seed='a'", "seed='a' must be an integer >= 0"),
        ("profile='nosuch'", "No profile is named 'nosuch'; choose"),
    ):
        fake_runs.makepyfile(
            suite().replace(
                "@rollproof.conf",
                f"import pytest\n@pytest.mark.rollproof({argument})\n@rollproof.conf",
            )
        )
        result = fake_runs.runpytest_inprocess()

        result.assert_outcomes(failed=4)
        assert f"@pytest.mark.rollproof: {message}" in str(result.stdout)
        assert "Traceback" not in str(result.stdout)
        assert "suites.py" not in str(result.stdout)


def test_a_report_that_cannot_be_written_is_told_before_the_session(
    fake_runs: pytest.Pytester,
) -> None:
    """Neither report nor file of expected failures is found unwritable when everything has run."""
    fake_runs.makepyfile(suite())
    (fake_runs.path / "file").touch()
    for option in (
        ["--rollproof-report=file/report.json"],
        ["--rollproof-accept", "--rollproof-expected=file/expected.toml"],
    ):
        result = fake_runs.runpytest_inprocess(*option)

        assert pytest.ExitCode.USAGE_ERROR == result.ret
        assert "Not a directory" in str(result.stderr)
        assert not (fake_runs.path / "runs").exists()


def test_a_report_whose_place_breaks_during_the_session_is_kept(
    fake_runs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary says where the report went instead; a session that would have passed ends with an
    error.
    """
    monkeypatch.setattr("tempfile.tempdir", str(fake_runs.path))
    fake_runs.makepyfile(suite() + "\ndef test_breaks():\n    open('out', 'w').close()\n")
    result = fake_runs.runpytest_inprocess("--rollproof-report=out/report.json")

    result.assert_outcomes(passed=5)
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    (saved,) = fake_runs.path.glob("rollproof-*/report.json")
    assert f"It was kept as {saved}." in str(result.stdout)
    assert 4 == json.loads(saved.read_text())["summary"]["pass"]


def test_subjects_of_one_name_are_told_apart(fake_runs: pytest.Pytester) -> None:
    """Every lambda has the same name, and names may be given twice: each subject is run, and keeps
    counterexamples of its own.
    """
    other = "\nclass Broken:\n    verdicts = {'stitch.a': 'fail'}\n"
    tests = "".join(
        f"\n@rollproof.conformance({argument})\ndef test_{i}(check):\n    pass\n"
        for i, argument in enumerate(
            ("lambda: MyStack()", "lambda: Broken()", "MyStack, name='one'", "Broken, name='one'")
        )
    )
    fake_runs.makepyfile(suite() + other + tests)
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(passed=19, failed=1)
    folders = [run.rpartition(" ")[2] for run in runs(fake_runs)]
    assert (5, 5) == (len(folders), len(set(folders)))


def test_a_root_folder_that_is_not_ours_costs_no_verdict(fake_runs: pytest.Pytester) -> None:
    """Where nothing can be written below the root folder, counterexamples are not written, and the
    report says so.
    """
    fake_runs.makepyfile(suite())
    (fake_runs.path / ".rollproof").touch()
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(passed=4)
    assert "note: counterexamples are not written. Cannot write into " in str(result.stdout)


def test_the_marker_takes_nothing_else(fake_runs: pytest.Pytester) -> None:
    """An argument that would be ignored is told instead."""
    fake_runs.makepyfile(
        suite().replace(
            "@rollproof.conf",
            "import pytest\n@pytest.mark.rollproof(flavour='vllm')\n@rollproof.conf",
        )
    )
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(failed=4)
    assert "@pytest.mark.rollproof takes profile= and seed=, not ['flavour']." in str(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--rollproof-profile=fast"],
            "--rollproof-profile='fast' is not one of: pr, nightly, soak.",
        ),
        (
            ["--rollproof-seed=x"],
            "--rollproof-seed='x' is not a whole number >= 0, such as 0 or 12345.",
        ),
        (["--rollproof-seed=-1"], "--rollproof-seed='-1' is not a whole number"),
        (["--rollproof-unknown=pass"], "--rollproof-unknown='pass' is not one of: fail, skip."),
        (
            ["--rollproof-only=stich.a"],
            "No check or family is named 'stich.a'. Did you mean stitch.a",
        ),
        (["--rollproof-accept"], "name the file with --rollproof-expected=FILE."),
        (["--rollproof-expected=no.toml"], "There is no file of expected failures at "),
    ],
)
def test_wrong_values_end_the_session_at_once(
    fake_runs: pytest.Pytester, arguments: list[str], message: str
) -> None:
    """A usage error (exit code 4) that lists the valid values, before anything is collected."""
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess(*arguments)

    assert pytest.ExitCode.USAGE_ERROR == result.ret
    assert message in str(result.stderr)
    assert "Traceback" not in str(result.stderr)


@pytest.mark.parametrize(
    ("decorated", "message"),
    [
        (
            "conformance(MyStack, flavours=())\ndef test_a(check): pass",
            "flavours is empty, so nothing would be judged: omit it",
        ),
        ("conformance(MyStack)\nasync def test_a(check): pass", "test_a must be a plain function"),
        ("conformance(MyStack)\ndef test_a(): pass", "test_a must take a parameter named `check`"),
        ("conformance(MyStack())\ndef test_a(check): pass", "conformance() takes a factory"),
        (
            "conformance(MyStack, profile='fast')\ndef test_a(check): pass",
            "choose one of ['pr', 'nightly', 'soak']",
        ),
        ("conformance(MyStack, only=['stich'])\ndef test_a(check): pass", "Did you mean stitch"),
        (
            "conformance(MyStack, expected={'stich.a': 'r'})\ndef test_a(check): pass",
            "Did you mean stitch",
        ),
    ],
)
def test_a_misused_decorator_is_told_while_collecting(
    fake_runs: pytest.Pytester, decorated: str, message: str
) -> None:
    """What cannot become a suite is a collection error with the next step, never a test that
    asserts nothing.
    """
    fake_runs.makepyfile(f"import rollproof\n\nclass MyStack: pass\n\n@rollproof.{decorated}\n")
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(errors=1)
    assert message in str(result.stdout)


def test_a_class_that_is_not_collected_warns(fake_runs: pytest.Pytester) -> None:
    """A subclass with a subject whose name pytest passes over would test nothing: it warns."""
    fake_runs.makepyfile(
        "import rollproof\n\nclass MyStackSuite(rollproof.RolloutConformance):\n    subject ="
        " object\n"
    )
    result = fake_runs.runpytest_inprocess()

    result.stdout.fnmatch_lines(
        [
            (
                "*pytest does not collect MyStackSuite unless `python_classes` matches it: name it"
                " TestMyStackSuite*"
            )
        ]
    )


def test_a_class_without_subject_is_an_error(fake_runs: pytest.Pytester) -> None:
    """A collected class without a subject is told while collecting."""
    fake_runs.makepyfile(
        "import rollproof\n\nclass TestIt(rollproof.RolloutConformance):\n    pass\n"
    )
    result = fake_runs.runpytest_inprocess()

    assert "TestIt must set `subject`: a factory, or a method that returns a fresh subject." in str(
        result.stdout
    )
    assert pytest.ExitCode.OK != result.ret


def test_fixtures_tell_profile_and_seed(pytester: pytest.Pytester) -> None:
    """rollproof_profile and rollproof_seed are the values in force."""
    pytester.makepyfile(
        "def test_a(rollproof_profile, rollproof_seed):\n    assert (rollproof_profile,"
        " rollproof_seed) == ('pr', 0)\n"
    )

    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_collecting_runs_nothing(fake_runs: pytest.Pytester) -> None:
    """--collect-only lists the items without running a subject."""
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess("--collect-only", "-q")

    result.stdout.fnmatch_lines(["*::test_rollouts[[]stitch.a[]]"])
    assert not (fake_runs.path / "runs").exists()


def test_a_conversion_into_batches_is_a_suite(pytester: pytest.Pytester) -> None:
    """A BatchSubject is judged by the checks of batches alone, as decorated function and as
    subclass.
    """
    pytester.makepyfile("""
        import rollproof
        from rollproof.fakes.trainers.reference_batches import ColumnCollator

        @rollproof.conformance(ColumnCollator)
        def test_batches(check):
            assert check.id.startswith("batch.")

        class TestBatches(rollproof.BatchConformance):
            subject = ColumnCollator
        """)
    result = pytester.runpytest_inprocess("-v")
    outcomes = result.parseoutcomes()

    # the check of sampling masks does not apply, in either form
    assert {"passed", "skipped"} == set(outcomes)
    assert (2, True) == (outcomes["skipped"], outcomes["passed"] >= 20)
    result.stdout.fnmatch_lines(
        ["*::test_batches[[]batch.*[]] PASSED*", "*::TestBatches::test_check[[]batch.*[]] PASSED*"]
    )


@pytest.mark.parametrize("options", [("-p", "no:rollproof"), ()], ids=["off", "autoload"])
def test_a_session_without_the_plugin_says_that_nothing_was_judged(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Decorated functions and subclasses fail with the reason and the next step, once each, also
    if another plugin has a fixture of the name ``check`` (pytest-check); with the plugin named
    they are judged.
    """
    pytester.makeconftest("""
        import pytest

        @pytest.fixture
        def check(): return "of pytest-check"
        """)
    pytester.makepyfile("""
        import rollproof
        from rollproof.fakes.trainers.reference_batches import Collator

        @rollproof.conformance(Collator, only=["batch.tokens"])
        def test_batches(check, tmp_path): ...

        class TestBatches(rollproof.BatchConformance):
            subject = Collator
            only = ("batch.tokens",)
        """)
    if not options:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    off = pytester.runpytest_subprocess(*options)

    assert pytest.ExitCode.TESTS_FAILED == off.ret
    assert 2 == sum(
        "The pytest plugin of rollproof is off, so nothing was judged." in line
        for line in off.outlines
        if not line.startswith(("FAILED", "ERROR"))
    )
    assert "passed" not in off.parseoutcomes()
    if not options:
        named = pytester.runpytest_subprocess("-p", "rollproof.plugin")
        assert {"passed": 2} == named.parseoutcomes()


def test_one_string_is_one_flavour(fake_runs: pytest.Pytester) -> None:
    """``flavours = "vllm"`` reads as ("vllm",), in the decorator and in a class."""
    fake_runs.makepyfile("""
        import rollproof

        class MyStack: pass

        @rollproof.conformance(MyStack, flavours="vllm", only=["stitch.a"])
        def test_rollouts(check, request):
            assert request.function._rollproof_suite.flavours == ("vllm",)

        class TestIt(rollproof.RolloutConformance):
            subject = MyStack
            flavours = "vllm"
        """)

    fake_runs.runpytest_inprocess().assert_outcomes(passed=5)


def test_the_printed_command_finds_a_subject_in_a_folder_of_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests in tests/ without __init__.py, pytest called in the root folder: the command that is
    printed with a finding works there, in a process of its own; a module beside it is found, too.
    """
    folder = pytester.mkdir("tests")
    (folder / "helper_of_mine.py").write_text(
        "from tests.support.faulty_subjects import Concat\n", encoding="utf-8"
    )
    (folder / "test_it.py").write_text(
        "import rollproof\nfrom helper_of_mine import Concat\n\nclass MyStack(Concat): pass\n\n"
        "@rollproof.conformance(MyStack, flavours='vllm', only=['routes.rows'])\n"
        "def test_rollouts(check): ...\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    result = pytester.runpytest_subprocess()
    command = next(line for line in result.outlines if line.startswith("       rerun"))
    again = pytester.run(sys.executable, "-m", *command.split()[1:])

    result.assert_outcomes(failed=1)
    assert ExitCode.FAIL == again.ret
    assert "reproduced" in str(again.stdout)


def test_counterexamples_stay_out_of_the_repository(pytester: pytest.Pytester) -> None:
    """.rollproof has a .gitignore of its own, which a user may change."""
    pytester.makepyfile("""
        import rollproof
        from tests.support.faulty_subjects import Concat

        @rollproof.conformance(Concat, flavours="vllm", only=["routes.rows"])
        def test_rollouts(check): ...
        """)
    pytester.runpytest_inprocess().assert_outcomes(failed=1)
    ignore = pytester.path / ".rollproof" / ".gitignore"

    assert "# written by rollproof\n*\n" == ignore.read_text(encoding="utf-8")
    ignore.write_text("mine", encoding="utf-8")
    pytester.runpytest_inprocess().assert_outcomes(failed=1)
    assert "mine" == ignore.read_text(encoding="utf-8")
