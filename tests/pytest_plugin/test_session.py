from __future__ import annotations

import json

import pytest

from tests.support.inner_pytest import report, runs, suite, summary


def test_expected_failures_do_not_fail(fake_runs: pytest.Pytester) -> None:
    """A listed check that fails is xfailed with its reason, and counted apart."""
    fake_runs.makefile(
        ".toml",
        expected='[[expected]]\ncheck = "stitch.a"\nreason = "known"\nissue = "verl#6029"\n',
    )
    fake_runs.makepyfile(suite(stitch_a="fail"))
    result = fake_runs.runpytest_inprocess("--rollproof-expected=expected.toml", "-rx")

    result.assert_outcomes(passed=3, xfailed=1)
    assert pytest.ExitCode.OK == result.ret
    result.stdout.fnmatch_lines(["XFAIL *stitch.a*known (verl#6029)"])
    assert (
        "4 checks: 3 pass, 0 fail, 0 unknown, 0 not applicable, 1 expected to fail and did"
        in summary(result)
    )


def test_a_listed_check_that_passes_fails(fake_runs: pytest.Pytester) -> None:
    """Expected failures are strict, in the file and in the decorator."""
    fake_runs.makepyfile(suite().replace("(MyStack)", "(MyStack, expected={'routes.c': 'known'})"))
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(passed=3, failed=1)
    assert (
        "routes.c is listed as an expected failure (known), but its verdict is pass: remove the"
        " entry" in str(result.stdout)
    )


def test_accepting_writes_the_file_and_the_next_session_is_green(
    fake_runs: pytest.Pytester,
) -> None:
    """The accept mode makes a file out of what fails; with it the same session passes without
    accepting.
    """
    fake_runs.makepyfile(suite(stitch_a="fail"))
    first = fake_runs.runpytest_inprocess(
        "--rollproof-expected=expected.toml", "--rollproof-accept"
    )

    assert "added stitch.a: replace its reason in" in str(first.stdout)
    fake_runs.runpytest_inprocess("--rollproof-expected=expected.toml").assert_outcomes(
        passed=3, xfailed=1
    )


def _own_file(pytester: pytest.Pytester, entries: str, **verdicts: str) -> None:
    """A suite that names a file of expected failures next to it."""
    pytester.makefile(".toml", own=entries)
    source = suite(**verdicts).replace(
        "(MyStack)", "(MyStack, expected=Path(__file__).with_name('own.toml'))"
    )
    pytester.makepyfile("from pathlib import Path\n" + source)


def _entry(check: str, *keys: str) -> str:
    return "\n".join(["[[expected]]", f'check = "{check}"', 'reason = "known"', *keys, ""])


def test_a_suite_may_name_its_own_file_of_expected_failures(fake_runs: pytest.Pytester) -> None:
    """Without an option, in any session that collects it. An unknown check that it lists is skipped
    and a check that is not strict may pass, so the session is green.
    """
    entries = (
        _entry("stitch.a", 'shows = ["kind 0"]'),
        _entry("stitch.b", 'verdict = "unknown"'),
        _entry("routes.c", "strict = false"),
    )
    _own_file(fake_runs, "".join(entries), stitch_a="fail", stitch_b="unknown")
    result = fake_runs.runpytest_inprocess("-rsx")

    result.assert_outcomes(passed=2, xfailed=1, skipped=1)
    assert pytest.ExitCode.OK == result.ret
    result.stdout.fnmatch_lines(["SKIPPED *unknown, as listed: known", "XFAIL *stitch.a*known"])


@pytest.mark.parametrize(
    ("entries", "verdict", "words"),
    [
        (_entry("stitch.a"), "pass", "an expected failure (known), but its verdict is pass"),
        (
            _entry("stitch.a", 'verdict = "unknown"'),
            "pass",
            "listed as undecided (known), but its verdict is pass",
        ),
        (_entry("stitch.a", 'shows = ["kind 7"]'), "fail", "does not keep this promise"),
        (
            _entry("stitch.a", 'shows = ["kind 0"]')
            + _entry("stitch.a", 'issue = "#2"', 'shows = ["kind 7"]'),
            "fail",
            "an expected failure (known (#2)), but the check fails without showing it",
        ),
    ],
    ids=("repaired", "decided", "another-kind", "one-of-two-repaired"),
)
def test_news_about_a_listed_check_fails(
    fake_runs: pytest.Pytester, entries: str, verdict: str, words: str
) -> None:
    """A repaired fault, a check that is decided now, and a fault of another kind: each is an item
    that fails and says so.
    """
    _own_file(fake_runs, entries, stitch_a=verdict)
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(passed=3, failed=1)
    assert words in str(result.stdout)


def test_the_option_rewrites_the_file_that_a_suite_names(fake_runs: pytest.Pytester) -> None:
    """Accepting takes its path; the session after that needs no option."""
    _own_file(fake_runs, _entry("stitch.b"), stitch_a="fail")
    fake_runs.runpytest_inprocess("--rollproof-expected=own.toml", "--rollproof-accept")

    fake_runs.runpytest_inprocess().assert_outcomes(passed=3, xfailed=1)


def test_a_file_that_cannot_be_read_is_an_error_of_the_suite(fake_runs: pytest.Pytester) -> None:
    """The first item says what is wrong with it."""
    _own_file(fake_runs, _entry("stitch.nothing"))
    result = fake_runs.runpytest_inprocess()

    result.assert_outcomes(failed=1, skipped=3)
    assert "entry 1 (stitch.nothing): no check has this id" in str(result.stdout)


def test_the_json_report_of_one_subject_is_its_report(fake_runs: pytest.Pytester) -> None:
    """--rollproof-report writes schema 1."""
    fake_runs.makepyfile(suite(stitch_a="fail"))
    data = report(fake_runs)

    assert (1, "MyStack", "pr") == (data["schema"], data["subject"], data["profile"])
    assert {"pass": 3, "fail": 1, "unknown": 0, "not_applicable": 0, "expected_fail": 0} == data[
        "summary"
    ]
    assert "reports" not in data


def test_the_json_report_of_two_subjects_takes_the_worse_verdict(
    fake_runs: pytest.Pytester,
) -> None:
    """Over several subjects unknown outranks pass and fail outranks all, and each subject's own
    report is kept.
    """
    fake_runs.makepyfile(
        test_one=suite(stitch_a="fail"),
        test_two=suite(stitch_a="unknown", stitch_b="unknown").replace("MyStack", "Other"),
    )
    data = report(fake_runs)

    assert {"stitch.a": "fail", "stitch.b": "unknown", "routes.c": "pass", "routes.d": "pass"} == {
        c["id"]: c["verdict"] for c in data["checks"]
    }
    assert {"pass": 2, "fail": 1, "unknown": 1, "not_applicable": 0, "expected_fail": 0} == data[
        "summary"
    ]
    assert {"aborts mid-decode": 14} == data["exercised"]
    assert ["MyStack", "Other"] == [one["subject"] for one in data["reports"]]


def test_a_report_of_nothing_is_not_written(pytester: pytest.Pytester) -> None:
    """Asked for a report where nothing was judged, the session says so and writes no empty file."""
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("--rollproof-report=out.json")

    assert "nothing was judged" in str(result.stdout)
    assert not (pytester.path / "out.json").exists()


def test_verdicts_are_properties_of_the_junit_report(fake_runs: pytest.Pytester) -> None:
    """JUnit files have the verdict of each item, so that unknown differs from fail there too."""
    fake_runs.makepyfile(suite(stitch_a="fail", stitch_b="unknown"))
    fake_runs.runpytest_inprocess("--junitxml=junit.xml", "-o", "junit_family=xunit1")
    text = (fake_runs.path / "junit.xml").read_text(encoding="utf-8")

    assert 1 == text.count('<property name="rollproof_verdict" value="fail"')
    assert 1 == text.count('<property name="rollproof_verdict" value="unknown"')


@pytest.mark.parametrize(
    "workers", [["-n0"], ["-n2"], ["-n2", "--dist=loadfile"], ["-p", "no:xdist"]]
)
def test_workers_hand_over_and_the_controller_writes(
    fake_runs: pytest.Pytester, workers: list[str]
) -> None:
    """With no, two or absent workers the session ends with the same outcomes, one summary and one
    report; loadfile runs once.
    """
    fake_runs.makepyfile(suite(stitch_a="fail", stitch_b="unknown"))
    result = fake_runs.runpytest_subprocess("--rollproof-report=out.json", *workers)

    assert {"failed": 1, "unknown": 1, "passed": 2} == result.parseoutcomes()
    assert 1 == str(result.stdout).count("MyStack  [profile pr, seed 0, 12 cases]")
    assert (
        1
        == json.loads((fake_runs.path / "out.json").read_text(encoding="utf-8"))["summary"]["fail"]
    )
    assert "-n2" in workers or 1 == len(runs(fake_runs))
    assert "--dist=loadfile" not in workers or 1 == len(runs(fake_runs))


def test_workers_share_a_fresh_seed(fake_runs: pytest.Pytester) -> None:
    """A profile without a seed of its own draws one per session, not one per worker."""
    fake_runs.makepyfile(suite())
    fake_runs.runpytest_subprocess("-n2", "--rollproof-profile=nightly")

    assert 1 == len({line.split()[2] for line in runs(fake_runs)})


RECORDED = """
from rollproof import Contract, FinishReason, Request, Rollout

def test_mine(rollproof_record):
    contract = Contract(
        rows="none", resume="client", versions="none", logprobs="none", abort_surfaces=False,
        kv_policy="recompute",
    )
    with rollproof_record(contract) as trace:
        trace.submit(Request(request_id="r0", prompt_ids=(1,), max_tokens=2))
        ids = dict(request_id="r0", prompt_ids=({first},), response_ids=(5, 6))
        trace.result(Rollout(**ids, finish_reason=FinishReason.LENGTH))
"""


def test_recordings_appear_in_the_summary_and_the_report(pytester: pytest.Pytester) -> None:
    """The fixture names a recording after its test, and hands its verdicts to the closing summary
    and the JSON report.
    """
    pytester.makepyfile(test_it=RECORDED.format(first=1))
    result = pytester.runpytest_inprocess("--rollproof-report=out.json")
    data = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))

    result.assert_outcomes(passed=1)
    assert "test_it.py::test_mine  [profile recorded, seed 0, 1 case]" in summary(result)
    assert ("test_it.py::test_mine", 0) == (data["subject"], data["summary"]["fail"])
    assert data["summary"]["pass"] > 0


def test_a_faulty_recording_fails_its_test(pytester: pytest.Pytester) -> None:
    """A finding fails the test that was recorded, with the finding's text, and is counted in the
    summary.
    """
    pytester.makepyfile(test_it=RECORDED.format(first=9))
    result = pytester.runpytest_inprocess()

    result.assert_outcomes(failed=1)
    assert "FAIL  stitch.prompt" in str(result.stdout).partition("= rollproof =")[0]
    assert "FAIL  stitch.prompt: 1 finding" in summary(result)


def test_a_recording_is_limited_to_the_checks_of_the_session(pytester: pytest.Pytester) -> None:
    """--rollproof-only limits recordings like every other item; where it leaves none, the test is
    skipped and nothing passes.
    """
    pytester.makepyfile(test_it=RECORDED.format(first=1))
    limited = pytester.runpytest_inprocess("--rollproof-only=stitch.prompt")
    others = pytester.runpytest_inprocess("--rollproof-only=replay", "-rs")

    assert "1 check: 1 pass, 0 fail" in summary(limited)
    others.assert_outcomes(skipped=1)
    others.stdout.fnmatch_lines(
        ["*no check of rollouts is among those that --rollproof-only names: replay"]
    )


@pytest.mark.parametrize("workers", [["-n2"], ["-p", "no:xdist"]])
def test_a_report_has_the_form_that_its_name_says(
    fake_runs: pytest.Pytester, workers: list[str]
) -> None:
    """The controller writes each once, with the reports of all workers: every subject and its
    verdicts; a finding of SARIF is at the line of its test. Names in the ini file are one a line.
    """
    pytest.importorskip("jinja2", reason="the page needs rollproof[report]")
    fake_runs.makepyfile(
        test_one=suite(stitch_a="fail"), test_two=suite().replace("MyStack", "Other")
    )
    fake_runs.makeini("[pytest]\nrollproof_report =\n    out.html\n    the findings.sarif\n")
    result = fake_runs.runpytest_subprocess(*workers)
    text = (fake_runs.path / "out.html").read_text(encoding="utf-8")
    findings = (fake_runs.path / "the findings.sarif").read_text(encoding="utf-8")

    assert 1 == str(result.stdout).count("out.html\n")
    (found,) = json.loads(findings)["runs"][0]["results"]
    place = found["locations"][0]["physicalLocation"]
    assert ("stitch.a", "test_one.py", 6) == (
        found["ruleId"],
        place["artifactLocation"]["uri"],
        place["region"]["startLine"],
    )
    assert "<strong>FAIL</strong>" in text
    assert 1 == text.count("MyStack</h3>") == text.count("Other</h3>")
    assert 1 == text.count('<span class="badge fail">FAIL</span> <a href="#c')


def test_a_page_is_no_pass_if_the_session_failed(fake_runs: pytest.Pytester) -> None:
    """A subject that could not be run has no report, so that all others may have passed."""
    pytest.importorskip("jinja2", reason="the page needs rollproof[report]")
    fake_runs.makepyfile(suite() + "\ndef test_other():\n    assert False\n")
    fake_runs.runpytest_inprocess("--rollproof-report=out.HTML")
    text = (fake_runs.path / "out.HTML").read_text(encoding="utf-8")

    assert "<strong>UNKNOWN</strong>" in text
    assert "pytest ended with exit code 1, though no check failed" in text


@pytest.mark.parametrize("workers", [["-n2"], ["-p", "no:xdist"]])
def test_a_measured_gap_is_in_the_report(pytester: pytest.Pytester, workers: list[str]) -> None:
    """What ``rollproof_gap`` measured, with the line of its test, also if it is all there is."""
    pytester.makepyfile(
        test_it="""
        import numpy as np

        def test_mine(rollproof_gap):
            rollout = -np.random.default_rng(0).exponential(1.0, 4000)
            ids = np.arange(4000) // 50
            rollproof_gap(rollout, rollout, sequence_id=ids, mask=np.ones(4000))
        """
    )
    pytester.runpytest_subprocess("--rollproof-report=out.json", *workers).assert_outcomes(passed=1)
    data = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))
    (gap,) = data["gaps"]
    assert ("pass", {"file": "test_it.py", "line": 3}) == (gap["verdict"], gap["location"])
    assert [] == data["checks"]
