"""On GitHub Actions failures of rollproof are annotations and a summary, without options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.inner_pytest import SUITE, suite

OTHER = "pytest_github_actions_annotate_failures"


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A job of GitHub Actions, and the file of its summary."""
    file = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-p no:hypothesispytest -p no:{OTHER}")
    return file


def commands(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith("::")]


@pytest.mark.parametrize("workers", [["-n2"], ["-p", "no:xdist"]])
def test_failing_items_are_annotated_once(
    fake_runs: pytest.Pytester, summary: Path, workers: list[str]
) -> None:
    """A failed and an unknown check, and no test that is not rollproof's; also with workers."""
    fake_runs.makepyfile(
        test_it=suite(stitch_a="fail", routes_c="unknown") + "\ndef test_mine(): assert False\n"
    )
    lines = commands(fake_runs.runpytest_subprocess(*workers))
    text = summary.read_text(encoding="utf-8")

    assert 2 == len(lines)
    place = "::error file=test_it.py,line=6,title=test_it.py%3A%3Atest_rollouts"
    assert lines[0].startswith(f"{place}[stitch.a]::Title of stitch.a (request r0)%0A%0APromise")
    assert lines[1].startswith(f"{place}[routes.c]::unknown: routes.c of MyStack was not decided")
    assert text.startswith("## rollproof: FAIL\n")
    assert "<summary><code>stitch.a</code> of MyStack: Title of stitch.a</summary>" in text
    assert "- routes.c: not exercised: no events occurred" in text
    assert "### Not judged" not in text


@pytest.mark.parametrize("workers", [["-n2", "--dist=loadfile"], ["-p", "no:xdist"]])
def test_a_subject_that_cannot_be_run_is_shown(
    fake_runs: pytest.Pytester, summary: Path, workers: list[str]
) -> None:
    """It has no report: the annotation and the summary say why."""
    fake_runs.makepyfile(test_it=SUITE.format(verdicts="broken"))
    lines = commands(fake_runs.runpytest_subprocess(*workers))
    text = summary.read_text(encoding="utf-8")

    assert 1 == len(lines) and "MyStack could not be run: MyStack.start raised" in lines[0]
    assert text.startswith("## rollproof: FAIL\n\n### Not judged\n")
    assert "next: correct this and run the test again." in text


def test_a_test_that_an_error_of_ours_ends_is_annotated(
    pytester: pytest.Pytester, summary: Path
) -> None:
    """At the line of the test, though nothing but the error is rollproof's."""
    pytester.makepyfile(
        test_it="def test_a(): ...\n\ndef test_mine():\n"
        "    from rollproof.errors import ConformanceError\n"
        "    raise ConformanceError('the gap: fail')\n"
    )
    (line,) = commands(pytester.runpytest_subprocess())
    assert line.startswith("::error file=test_it.py,line=3,title=test_it.py%3A%3Atest_mine::")
    assert "ConformanceError: the gap: fail" in line


@pytest.mark.parametrize("how", ["option", "ini", "elsewhere"])
def test_it_can_be_switched_off(
    fake_runs: pytest.Pytester, summary: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """By an option, in the ini file, and everywhere but on GitHub Actions."""
    fake_runs.makepyfile(suite(stitch_a="fail"))
    if how == "ini":
        fake_runs.makeini("[pytest]\nrollproof_github = off\n")
    if how == "elsewhere":
        monkeypatch.delenv("GITHUB_ACTIONS")
    options = ["--rollproof-github=off"] if how == "option" else []
    assert [] == commands(fake_runs.runpytest_inprocess(*options))
    assert not summary.exists()


def test_it_can_be_switched_on_elsewhere(
    fake_runs: pytest.Pytester, summary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service may read these commands too."""
    monkeypatch.delenv("GITHUB_ACTIONS")
    fake_runs.makepyfile(suite(stitch_a="fail"))
    assert 1 == len(commands(fake_runs.runpytest_inprocess("--rollproof-github=on")))
    assert summary.exists()


def test_lines_are_not_doubled_by_another_plugin(
    fake_runs: pytest.Pytester, summary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest-github-actions-annotate-failures annotates calls that fail. What it does not annotate
    stays ours: a failure of a setup.
    """
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    fake_runs.makeconftest(f"""
        import fake_campaign

        fake_campaign.install()

        def pytest_configure(config):
            if not config.pluginmanager.hasplugin("{OTHER}"):
                config.pluginmanager.register(object(), "{OTHER}")
        """)
    fake_runs.makepyfile(
        test_it=suite(stitch_a="fail")
        + """
import pytest
from rollproof.errors import UsageError

@pytest.fixture
def broken():
    raise UsageError("no such thing")

def test_mine(broken): ...
"""
    )
    (line,) = commands(fake_runs.runpytest_inprocess())
    assert "test_mine" in line and "no such thing" in line
    assert "stitch.a" in summary.read_text(encoding="utf-8")


def test_a_green_session_has_a_summary_and_no_annotation(
    fake_runs: pytest.Pytester, summary: Path
) -> None:
    """The verdicts of what was judged; a session without rollproof has none."""
    fake_runs.makepyfile(test_it=suite(), test_other="def test_a(): ...")
    assert [] == commands(fake_runs.runpytest_inprocess("test_other.py"))
    assert not summary.exists()
    assert [] == commands(fake_runs.runpytest_inprocess("test_it.py"))
    assert summary.read_text(encoding="utf-8").startswith("## rollproof: PASS\n")


def test_junit_files_say_what_was_found(fake_runs: pytest.Pytester) -> None:
    """Check, verdict, run and finding are properties of each item, once also if it runs again."""
    fake_runs.makeconftest("""
        import fake_campaign
        from _pytest.runner import runtestprotocol

        fake_campaign.install()

        def pytest_runtest_protocol(item, nextitem):
            runtestprotocol(item, nextitem=nextitem, log=False)
        """)
    fake_runs.makepyfile(suite(stitch_a="fail"))
    fake_runs.runpytest_inprocess("--junitxml=junit.xml", "-k", "stitch.a")
    text = (fake_runs.path / "junit.xml").read_text(encoding="utf-8")
    for name, value in (
        ("check", "stitch.a"),
        ("verdict", "fail"),
        ("subject", "MyStack"),
        ("profile", "pr"),
        ("seed", "0"),
        ("finding", "kind 0"),
    ):
        assert 1 == text.count(f'<property name="rollproof_{name}" value="{value}" />')
