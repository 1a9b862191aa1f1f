"""One cause, one failure: subjects that cannot be run, and subjects whose every rollout raises."""

from __future__ import annotations

import pytest

from tests.support.inner_pytest import SUITE, runs, suite, summary

ERRORS = "lifecycle.no-error-without-fault"
STACK = """
import rollproof
from rollproof.fakes.clients.resuming import AsSampled

class MyStack(AsSampled):
    flavours = ("vllm",)
    {method}

@rollproof.conformance(MyStack, only={only!r})
def test_rollouts(check): ...
"""


def stack(method: str, *only: str) -> str:
    """A correct stack but for one method, judged by some checks."""
    return STACK.format(method=method, only=only or ("stitch.prompt", "stitch.tokens", ERRORS))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("broken", "SubjectError: MyStack.start raised ValueError"),
        ("bug", "ZeroDivisionError: division"),
    ],
)
def test_a_run_that_cannot_start_is_one_failure(
    fake_runs: pytest.Pytester, kind: str, message: str
) -> None:
    """The first item says why, the others are skipped with its id, and the subject is run once."""
    fake_runs.makepyfile(test_it=SUITE.format(verdicts=kind))
    result = fake_runs.runpytest_inprocess("-rs")

    result.assert_outcomes(failed=1, skipped=3)
    assert pytest.ExitCode.TESTS_FAILED == result.ret
    assert 1 == len(runs(fake_runs))
    assert 1 == sum(
        message in line and line.startswith(("E  ", "MyStack could not be run: "))
        for line in result.outlines
    )
    assert (
        "SKIPPED [3] test_it.py:6: MyStack could not be run: see"
        " test_it.py::test_rollouts[stitch.a]" in result.outlines
    )


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("def __init__(self): raise OSError('no config')", "__init__"),
        ("def start(self, fleet): raise OSError('no config')", "start"),
        ("def to_record(self, native): raise OSError('no config')", "to_record"),
    ],
)
def test_a_subject_that_cannot_be_built_started_or_recorded(
    pytester: pytest.Pytester, method: str, where: str
) -> None:
    """One failure names the line of the user's code, the next step, and a command that works."""
    pytester.makepyfile(test_it=stack(method))
    result = pytester.runpytest_inprocess("-x")
    text = str(result.stdout)

    result.assert_outcomes(failed=1)
    assert f"OSError: no config (test_it.py:6, in {where})" in text
    assert f'test_it.py", line 6, in {where}' in text
    assert method in text
    assert "next: correct this and run the test again." in text
    assert "rollproof verify --subject test_it:MyStack --debug" in " ".join(text.split())


def test_a_subject_that_cannot_start_fails_on_every_rerun(fake_runs: pytest.Pytester) -> None:
    """An item that is run again (pytest-rerunfailures) fails again: a skip would hide it."""
    fake_runs.makepyfile(SUITE.format(verdicts="broken"))
    fake_runs.makeconftest("""
        import fake_campaign
        from _pytest.runner import runtestprotocol

        fake_campaign.install()

        def pytest_runtest_protocol(item, nextitem):
            runtestprotocol(item, nextitem=nextitem, log=False)
        """)

    fake_runs.runpytest_inprocess().assert_outcomes(failed=1, skipped=3)


def test_rollouts_that_all_raise_are_one_failure(pytester: pytest.Pytester) -> None:
    """The check of errors fails with the error, and what could not be decided for that reason is
    skipped with a pointer to it; with -x the session ends at the cause.
    """
    pytester.makepyfile(test_it=stack("async def rollout(self, request): return nosuch"))
    result = pytester.runpytest_inprocess("-x", "-rs")

    result.assert_outcomes(failed=1, skipped=2)
    assert f"see test_it.py::test_rollouts[{ERRORS}]" in str(result.stdout)
    assert "observed  NameError: name 'nosuch' is not defined (test_it.py:6" in str(result.stdout)
    assert "note: no rollout delivered a sample: each of " in summary(result)


def test_rollouts_that_all_return_nothing_are_one_failure(pytester: pytest.Pytester) -> None:
    """The check of drops fails, and what could not be decided is skipped with a pointer to it."""
    drops = "lifecycle.drops-only-as-declared"
    method = "async def rollout(self, request): return None"
    pytester.makepyfile(test_it=stack(method, "stitch.prompt", "stitch.tokens", drops))
    result = pytester.runpytest_inprocess("-rs")

    result.assert_outcomes(failed=1, skipped=2)
    assert f"see test_it.py::test_rollouts[{drops}]" in str(result.stdout)
    assert "note: no rollout delivered a sample: each of " in summary(result)
    assert " returned nothing" in summary(result)


@pytest.mark.parametrize("options", [("--deselect", f"test_it.py::test_rollouts[{ERRORS}]"), ()])
def test_the_cause_is_shown_where_its_own_item_does_not_run(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    """If the check of errors is deselected or its item is skipped by a mark, the first item that
    could not be decided fails with the cause: nothing passes silently.
    """
    pytester.makepyfile(test_it=stack("async def rollout(self, request): return nosuch"))
    if not options:
        pytester.makeconftest(f"""
            import pytest

            def pytest_collection_modifyitems(items):
                items[-1].add_marker(pytest.mark.skip(reason="mine"))
                assert "{ERRORS}" in items[-1].nodeid
            """)
    result = pytester.runpytest_inprocess(*options)

    result.assert_outcomes(failed=1, skipped=1 if options else 2, deselected=len(options) // 2)
    assert "stitch.prompt is unknown: no rollout delivered a sample" in str(result.stdout)
    assert "NameError: name 'nosuch' is not defined" in str(result.stdout)


def test_an_unknown_verdict_of_a_subject_that_delivers_stays_unknown(
    pytester: pytest.Pytester,
) -> None:
    """One rollout that raises explains nothing about checks whose situation did not arise."""
    pytester.makepyfile(
        test_it=stack(
            """raised = []
    async def rollout(self, request):
        if not self.raised:
            self.raised.append(1)
            raise OSError("once")
        return await super().rollout(request)""",
            ERRORS,
            "stitch.tokens",
            "stitch.environment-tokens",
        )
    )
    outcomes = pytester.runpytest_inprocess().parseoutcomes()

    assert 1 == outcomes["failed"] and 1 == outcomes["passed"]
    assert "skipped" not in outcomes or "unknown" not in outcomes


@pytest.mark.parametrize("ci", [False, True])
def test_the_short_summary_has_one_line_a_failure(
    fake_runs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *, ci: bool
) -> None:
    """The first finding of each failed check, with its place, also under CI, where pytest prints
    messages in full.
    """
    if ci:
        monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("COLUMNS", "160")
    fake_runs.makepyfile(test_it=suite(stitch_a="fail", routes_d="fail"))
    lines = fake_runs.runpytest_inprocess().outlines
    last = lines[next(i for i, line in enumerate(lines) if "short test summary" in line) + 1 :]

    assert [
        "FAILED test_it.py::test_rollouts[stitch.a] - Title of stitch.a (request r0)",
        "FAILED test_it.py::test_rollouts[routes.d] - Title of routes.d (request r0)",
    ] == last[:-1]


def test_annotations_and_junit_files_name_the_finding_and_the_test(
    fake_runs: pytest.Pytester,
) -> None:
    """What pytest-github-actions-annotate-failures and JUnit files read of a report: one line, and
    the place of the test rather than one in rollproof.
    """
    fake_runs.makeconftest("""
        import fake_campaign
        fake_campaign.install()

        def pytest_runtest_logreport(report):
            if report.failed:
                crash = report.longrepr.reprcrash
                entry = report.longrepr.reprtraceback.reprentries[0]
                print("\\nSEEN", report.location[:2], crash.path, crash.lineno, crash.message)
                assert entry.reprfileloc is None
        """)
    fake_runs.makepyfile(test_it=suite(stitch_a="fail"))
    result = fake_runs.runpytest_inprocess("--junitxml=junit.xml", "-s")
    place = fake_runs.path / "test_it.py"

    assert f"SEEN ('test_it.py', 5) {place} 6 Title of stitch.a (request r0)" in result.outlines
    # the function of a class is rollproof's own: the place is the line of the class
    fake_runs.makepyfile(
        test_it="import rollproof\n\n\nclass TestMine(rollproof.RolloutConformance):\n"
        "    class subject:\n        verdicts = {'stitch.a': 'fail'}\n"
    )
    fake_runs.runpytest_inprocess("-s").stdout.fnmatch_lines(
        [f"SEEN ('test_it.py', 3) {place} 4 *"]
    )
    junit = (fake_runs.path / "junit.xml").read_text(encoding="utf-8")
    assert '<failure message="Title of stitch.a (request r0)">Promise of stitch.a.' in junit


RECORDED = """
import rollproof

def test_mine(rollproof_record):
    contract = rollproof.Contract(
        rows="none", resume="client", versions="none", logprobs="none", abort_surfaces=False,
        kv_policy="recompute",
    )
    with rollproof_record(contract) as trace:
        trace.submit(rollproof.Request(request_id="r0", prompt_ids=(1,), max_tokens=2))
        ids = dict(request_id="r0", prompt_ids=(9,), response_ids=(5, 6, 7))
        trace.result(rollproof.Rollout(**ids, finish_reason="length"))
"""


def test_a_recorded_test_has_one_line_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the user's that raises ConformanceError shows the first failed check, its first
    finding.
    """
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(test_it=RECORDED)
    lines = pytester.runpytest_inprocess().outlines
    last = lines[next(i for i, line in enumerate(lines) if "short test summary" in line) + 1 :]

    assert 2 == len(last)
    assert last[0].startswith(
        "FAILED test_it.py::test_mine - ConformanceError: stitch.prompt: The sample carries"
    )
    assert last[0].endswith("(request r0, position 0)")
