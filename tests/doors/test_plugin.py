from __future__ import annotations

import json
from typing import Any

import pytest

SUITE = """
import rollproof

class MyStack:
    verdicts = {verdicts!r}

@rollproof.conformance(MyStack)
def test_rollouts(check):
    "Rollouts keep every promise."
"""


def suite(**verdicts: str) -> str:
    """A test file whose subject has these verdicts, ids written with _ for the dot."""
    return SUITE.format(verdicts={name.replace("_", "."): verdict for name, verdict in verdicts.items()})


def summary(result: pytest.RunResult) -> str:
    """The closing section of rollproof."""
    return str(result.stdout).partition(" rollproof =")[2].partition("\n=")[0]


def runs(pytester: pytest.Pytester) -> list[str]:
    """One line per run of a subject."""
    return (pytester.path / "runs").read_text(encoding="utf-8").splitlines()


def report(pytester: pytest.Pytester, *arguments: str) -> dict[str, Any]:
    """The JSON report of a run."""
    pytester.runpytest_inprocess("--rollproof-report=out.json", *arguments)
    loaded: dict[str, Any] = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))
    return loaded


def test_one_item_per_check_and_one_run_per_subject(fake_runs: pytest.Pytester) -> None:
    """The ids of items are the ids of checks, and all of them share a single run."""
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess("-v")

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*::test_rollouts[[]stitch.a[]] PASSED*", "*::test_rollouts[[]routes.d[]] PASSED*"])
    assert 1 == len(runs(fake_runs))


def test_verdicts_become_outcomes(fake_runs: pytest.Pytester) -> None:
    """A fail fails with the finding, not applicable skips with the reason, unknown is listed apart and fails the session."""
    fake_runs.makepyfile(suite(stitch_a="fail", stitch_b="unknown", routes_c="not applicable"))
    result = fake_runs.runpytest_inprocess("-rs")

    assert {"failed": 1, "unknown": 1, "skipped": 1, "passed": 1} == result.parseoutcomes()
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    result.stdout.fnmatch_lines(
        [
            "Promise of stitch.a.",
            "MyStack does not keep this promise:",
            "  FAIL  stitch.a",
            "    1. Title of stitch.a",
            "       where     request r0",
            "       expected  9 rows",
            "       observed  16 rows",
            "       hint      Keep them.",
            "SKIPPED * not applicable: no routes",
        ]
    )


def test_unknown_alone_fails_the_session(fake_runs: pytest.Pytester) -> None:
    """No failure, one unknown verdict: the exit code is not 0, and the summary says which and why."""
    fake_runs.makepyfile(suite(stitch_b="unknown"))
    result = fake_runs.runpytest_inprocess()

    assert {"unknown": 1, "passed": 3} == result.parseoutcomes()
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    assert "UNKNOWN  stitch.b: not exercised: no events occurred" in summary(result)


def test_unknown_may_be_skipped_by_choice(fake_runs: pytest.Pytester) -> None:
    """With rollproof_unknown = skip the item is skipped, with a reason that begins with the word."""
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
  exercised
    aborts mid-decode ........................................... 7
  canary: a row repeated: caught by routes.c, as it must be
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
    assert "rollproof: profile='pr', unknown='fail'" in str(pytester.runpytest_inprocess("-v").stdout)


def test_the_body_runs_with_the_result_and_other_fixtures(fake_runs: pytest.Pytester) -> None:
    """A body may assert more about the CheckResult, and its failure is an ordinary one."""
    fake_runs.makepyfile(
        """
        import rollproof

        class MyStack: pass

        @rollproof.conformance(MyStack, only=["stitch"])
        def test_rollouts(check, tmp_path):
            assert tmp_path.is_dir()
            assert check.exercised["events"] == 3
            assert check.id != "stitch.b"
        """
    )

    fake_runs.runpytest_inprocess().assert_outcomes(passed=1, failed=1)


def test_a_subclass_is_a_suite_too(fake_runs: pytest.Pytester) -> None:
    """The subject may be a class, a plain function, or a method that makes a fresh subject; ids are the same as of the decorator."""
    fake_runs.makepyfile(
        """
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
        """
    )
    result = fake_runs.runpytest_inprocess("-v")

    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*::TestByMethod::test_check[[]routes.c[]] PASSED*"])
    assert ["TestByClass", "TestByFunction", "TestByMethod"] == [line.split()[0] for line in runs(fake_runs)]


def test_options_reach_the_run(fake_runs: pytest.Pytester) -> None:
    """Command line wins over ini file; only= selects which items exist."""
    fake_runs.makeini("[pytest]\nrollproof_profile = soak\nrollproof_seed = 5\nrollproof_only = routes\n")
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess("--rollproof-profile=nightly", "--rollproof-only=stitch.a", "--rollproof-only=routes.d")

    result.assert_outcomes(passed=2)
    assert ["MyStack nightly 5 stitch.a,routes.d MyStack"] == runs(fake_runs)


def test_the_marker_overrides_the_options(fake_runs: pytest.Pytester) -> None:
    """@pytest.mark.rollproof(seed=...) wins over the option, and -m rollproof selects conformance items."""
    marked = suite().replace("@rollproof.conf", "import pytest\n@pytest.mark.rollproof(seed=9)\n@rollproof.conf")
    fake_runs.makepyfile(marked + "\ndef test_other(): pass\n")

    fake_runs.runpytest_inprocess("-m", "rollproof", "--rollproof-seed=3").assert_outcomes(passed=4, deselected=1)
    assert ["MyStack pr 9  MyStack"] == runs(fake_runs)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rollproof-profile=fast"], "--rollproof-profile='fast' is not one of: pr, nightly, soak."),
        (["--rollproof-seed=x"], "--rollproof-seed='x' is not a whole number >= 0, such as 0 or 12345."),
        (["--rollproof-seed=-1"], "--rollproof-seed='-1' is not a whole number"),
        (["--rollproof-unknown=pass"], "--rollproof-unknown='pass' is not one of: fail, skip."),
        (["--rollproof-only=stich.a"], "No check or family is named 'stich.a'. Did you mean stitch.a"),
        (["--rollproof-accept"], "say which one with --rollproof-expected=FILE."),
        (["--rollproof-expected=no.toml"], "There is no file of expected failures at "),
    ],
)
def test_wrong_values_end_the_session_at_once(fake_runs: pytest.Pytester, arguments: list[str], told: str) -> None:
    """A usage error (exit code 4) that lists the valid values, before anything is collected."""
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess(*arguments)

    assert pytest.ExitCode.USAGE_ERROR == result.ret
    assert told in str(result.stderr)
    assert "Traceback" not in str(result.stderr)


@pytest.mark.parametrize(
    ("decorated", "told"),
    [
        ("conformance(MyStack)\nasync def test_a(check): pass", "test_a must be a plain function"),
        ("conformance(MyStack)\ndef test_a(): pass", "test_a must take a parameter named `check`"),
        ("conformance(MyStack())\ndef test_a(check): pass", "conformance() takes a factory"),
        ("conformance(MyStack, profile='fast')\ndef test_a(check): pass", "choose one of ['pr', 'nightly', 'soak']"),
        ("conformance(MyStack, only=['stich'])\ndef test_a(check): pass", "Did you mean stitch"),
        ("conformance(MyStack, expected={'stich.a': 'r'})\ndef test_a(check): pass", "Did you mean stitch"),
    ],
)
def test_a_misused_decorator_is_told_while_collecting(fake_runs: pytest.Pytester, decorated: str, told: str) -> None:
    """What cannot become a suite is a collection error with the next step, never a test that asserts nothing."""
    fake_runs.makepyfile(f"import rollproof\n\nclass MyStack: pass\n\n@rollproof.{decorated}\n")
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(errors=1)
    assert told in str(result.stdout)


def test_a_class_that_is_not_collected_warns(fake_runs: pytest.Pytester) -> None:
    """A subclass with a subject whose name pytest passes over would test nothing: it warns."""
    fake_runs.makepyfile("import rollproof\n\nclass MyStackSuite(rollproof.RolloutConformance):\n    subject = object\n")
    result = fake_runs.runpytest_inprocess()

    result.stdout.fnmatch_lines(["*pytest does not collect MyStackSuite unless `python_classes` matches it: name it TestMyStackSuite*"])


def test_a_class_without_subject_is_an_error(fake_runs: pytest.Pytester) -> None:
    """A collected class without a subject is told while collecting."""
    fake_runs.makepyfile("import rollproof\n\nclass TestIt(rollproof.RolloutConformance):\n    pass\n")
    result = fake_runs.runpytest_inprocess()

    assert "TestIt must set `subject`: a factory, or a method that returns a fresh subject." in str(result.stdout)
    assert pytest.ExitCode.OK != result.ret


@pytest.mark.parametrize(
    ("kind", "told"), [("broken", "SubjectError: MyStack.start raised ValueError"), ("bug", "ZeroDivisionError: division")]
)
def test_a_run_that_cannot_start_is_told_once(fake_runs: pytest.Pytester, kind: str, told: str) -> None:
    """The first item says why, the others refer to it, and the subject is not run again for each."""
    fake_runs.makepyfile(SUITE.format(verdicts=kind))
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(failed=4)
    assert 1 == len(runs(fake_runs))
    assert 1 == sum(told in line and line.startswith(("E  ", "MyStack could not be run: ")) for line in result.outlines)
    assert 3 == sum("MyStack could not be run; the first item of this subject says why." == line for line in result.outlines)


def test_expected_failures_do_not_fail(fake_runs: pytest.Pytester) -> None:
    """A listed check that fails is xfailed with its reason, and counted apart."""
    fake_runs.makefile(".toml", expected='[[expected]]\ncheck = "stitch.a"\nreason = "known"\nissue = "verl#6029"\n')
    fake_runs.makepyfile(suite(stitch_a="fail"))
    result = fake_runs.runpytest_inprocess("--rollproof-expected=expected.toml", "-rx")

    result.assert_outcomes(passed=3, xfailed=1)
    assert pytest.ExitCode.OK == result.ret
    result.stdout.fnmatch_lines(["XFAIL *stitch.a* - known (verl#6029)"])
    assert "4 checks: 3 pass, 0 fail, 0 unknown, 0 not applicable, 1 expected to fail and did" in summary(result)


def test_a_listed_check_that_passes_fails(fake_runs: pytest.Pytester) -> None:
    """Expected failures are strict, in the file and in the decorator."""
    fake_runs.makepyfile(suite().replace("(MyStack)", "(MyStack, expected={'routes.c': 'known'})"))
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(passed=3, failed=1)
    assert "routes.c is listed as an expected failure (known), but its verdict is pass: remove the entry" in str(result.stdout)


def test_accepting_writes_the_file_and_the_next_session_is_green(fake_runs: pytest.Pytester) -> None:
    """The accept mode makes a file out of what fails; with it the same session passes without accepting."""
    fake_runs.makepyfile(suite(stitch_a="fail"))
    first = fake_runs.runpytest_inprocess("--rollproof-expected=expected.toml", "--rollproof-accept")

    assert "added stitch.a: replace its reason in" in str(first.stdout)
    fake_runs.runpytest_inprocess("--rollproof-expected=expected.toml").assert_outcomes(passed=3, xfailed=1)


def test_the_json_report_of_one_subject_is_its_report(fake_runs: pytest.Pytester) -> None:
    """--rollproof-report writes schema 1."""
    fake_runs.makepyfile(suite(stitch_a="fail"))
    data = report(fake_runs)

    assert (1, "MyStack", "pr") == (data["schema"], data["subject"], data["profile"])
    assert {"pass": 3, "fail": 1, "unknown": 0, "not_applicable": 0, "expected_fail": 0} == data["summary"]
    assert "reports" not in data


def test_the_json_report_of_two_subjects_takes_the_worse_verdict(fake_runs: pytest.Pytester) -> None:
    """Over several subjects unknown outranks pass and fail outranks all, and each subject's own report is kept."""
    fake_runs.makepyfile(
        test_one=suite(stitch_a="fail"), test_two=suite(stitch_a="unknown", stitch_b="unknown").replace("MyStack", "Other")
    )
    data = report(fake_runs)

    assert {"stitch.a": "fail", "stitch.b": "unknown", "routes.c": "pass", "routes.d": "pass"} == {
        c["id"]: c["verdict"] for c in data["checks"]
    }
    assert {"pass": 2, "fail": 1, "unknown": 1, "not_applicable": 0, "expected_fail": 0} == data["summary"]
    assert {"aborts mid-decode": 14} == data["exercised"]
    assert ["MyStack", "Other"] == [one["subject"] for one in data["reports"]]


def test_a_report_of_nothing_is_not_written(pytester: pytest.Pytester) -> None:
    """Asked for a report where nothing was judged, the session says so and writes no empty file."""
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("--rollproof-report=out.json")

    assert "nothing was judged" in str(result.stdout)
    assert not (pytester.path / "out.json").exists()


def test_verdicts_are_properties_of_the_junit_report(fake_runs: pytest.Pytester) -> None:
    """JUnit files carry the verdict of each item, so that unknown can be told from fail there too."""
    fake_runs.makepyfile(suite(stitch_a="fail", stitch_b="unknown"))
    fake_runs.runpytest_inprocess("--junitxml=junit.xml", "-o", "junit_family=xunit1")
    text = (fake_runs.path / "junit.xml").read_text(encoding="utf-8")

    assert 1 == text.count('<property name="rollproof_verdict" value="fail"')
    assert 1 == text.count('<property name="rollproof_verdict" value="unknown"')


@pytest.mark.parametrize("workers", [["-n0"], ["-n2"], ["-n2", "--dist=loadfile"], ["-p", "no:xdist"]])
def test_workers_hand_over_and_the_controller_writes(fake_runs: pytest.Pytester, workers: list[str]) -> None:
    """With no, two or absent workers the session ends with the same outcomes, one summary and one report; loadfile runs once."""
    fake_runs.makepyfile(suite(stitch_a="fail", stitch_b="unknown"))
    result = fake_runs.runpytest_subprocess("--rollproof-report=out.json", *workers)

    assert {"failed": 1, "unknown": 1, "passed": 2} == result.parseoutcomes()
    assert 1 == str(result.stdout).count("MyStack  [profile pr, seed 0, 12 cases]")
    assert 1 == json.loads((fake_runs.path / "out.json").read_text(encoding="utf-8"))["summary"]["fail"]
    assert "-n2" in workers or 1 == len(runs(fake_runs))
    assert "--dist=loadfile" not in workers or 1 == len(runs(fake_runs))


def test_workers_share_a_fresh_seed(fake_runs: pytest.Pytester) -> None:
    """A profile without a seed of its own draws one per session, not one per worker."""
    fake_runs.makepyfile(suite())
    fake_runs.runpytest_subprocess("-n2", "--rollproof-profile=nightly")

    assert 1 == len({line.split()[2] for line in runs(fake_runs)})


def test_fixtures_tell_profile_and_seed(pytester: pytest.Pytester) -> None:
    """rollproof_profile and rollproof_seed are the values in force."""
    pytester.makepyfile("def test_a(rollproof_profile, rollproof_seed):\n    assert (rollproof_profile, rollproof_seed) == ('pr', 0)\n")

    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_collecting_runs_nothing(fake_runs: pytest.Pytester) -> None:
    """--collect-only lists the items without running a subject."""
    fake_runs.makepyfile(suite())
    result = fake_runs.runpytest_inprocess("--collect-only", "-q")

    result.stdout.fnmatch_lines(["*::test_rollouts[[]stitch.a[]]"])
    assert not (fake_runs.path / "runs").exists()


RECORDED = """
from rollproof import Contract, FinishReason, Request, Rollout

def test_mine(rollproof_record):
    contract = Contract(
        rows="none", resume="client", versions="none", logprobs="none", abort_surfaces=False, kv_policy="recompute"
    )
    with rollproof_record(contract) as trace:
        trace.submit(Request(request_id="r0", prompt_ids=(1,), max_tokens=2))
        trace.result(Rollout(request_id="r0", prompt_ids=({first},), response_ids=(5, 6), finish_reason=FinishReason.LENGTH))
"""


def test_recordings_appear_in_the_summary_and_the_report(pytester: pytest.Pytester) -> None:
    """The fixture names a recording after its test, and hands its verdicts to the closing summary and the JSON report."""
    pytester.makepyfile(test_it=RECORDED.format(first=1))
    result = pytester.runpytest_inprocess("--rollproof-report=out.json")
    data = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))

    result.assert_outcomes(passed=1)
    assert "test_it.py::test_mine  [profile recorded, seed 0, 1 case]" in summary(result)
    assert ("test_it.py::test_mine", 0) == (data["subject"], data["summary"]["fail"])
    assert data["summary"]["pass"] > 0


def test_a_faulty_recording_fails_its_test(pytester: pytest.Pytester) -> None:
    """A finding fails the test that was recorded, with the finding's text, and is counted in the summary."""
    pytester.makepyfile(test_it=RECORDED.format(first=9))
    result = pytester.runpytest_inprocess()

    result.assert_outcomes(failed=1)
    assert "FAIL  stitch.prompt" in str(result.stdout).partition("= rollproof =")[0]
    assert "FAIL  stitch.prompt: 1 finding" in summary(result)


def test_a_conversion_into_batches_is_a_suite(pytester: pytest.Pytester) -> None:
    """A BatchSubject is judged by the checks of batches alone, as decorated function and as subclass."""
    pytester.makepyfile(
        """
        import rollproof
        from rollproof.fakes.collating import Collator

        @rollproof.conformance(Collator)
        def test_batches(check):
            assert check.id.startswith("batch.")

        class TestBatches(rollproof.BatchConformance):
            subject = Collator
        """
    )
    result = pytester.runpytest_inprocess("-v")
    outcomes = result.parseoutcomes()

    assert {"passed"} == set(outcomes)
    assert outcomes["passed"] >= 20
    result.stdout.fnmatch_lines(["*::test_batches[[]batch.*[]] PASSED*", "*::TestBatches::test_check[[]batch.*[]] PASSED*"])
