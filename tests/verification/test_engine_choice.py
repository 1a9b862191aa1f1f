"""Doors of engine conformance: the command line and the test class name an engine, and get one
verdict per check.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rollproof.cli.app import run
from rollproof.errors import EngineStartError
from rollproof.verification import engines
from rollproof.verification.engines import EngineChoice
from rollproof.verification.options import Options


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """What a command prints, once it has ended with ``code`` and without a traceback."""
    assert code == run(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def test_verify_judges_an_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is like any other; the traces are stored with the counterexamples."""
    monkeypatch.chdir(tmp_path)
    assert 0 == run(["verify", "--engine", "fake-vllm", "--only", "engine", "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    assert "fake-vllm" == report["subject"]
    assert {"engine"} == {check["id"].partition(".")[0] for check in report["checks"]}
    assert {"pass"} == {check["verdict"] for check in report["checks"]}
    assert (tmp_path / ".rollproof" / "fake-vllm" / "plain.arrow").is_file()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--engine", "vlm"], "No engine is named 'vlm'; choose among"),
        (["--model", "/x"], "give --engine too"),
        (["--engine", "fake-vllm", "--stack", "verl"], "one run judges one of them"),
        (["--engine", "fake-vllm", "--flavour", "sglang"], "an engine has one flavour"),
        (["--engine", "fake-vllm", "--model", "/x"], "has no model to load"),
        (["--engine", "fake-vllm", "--only", "stitch.prompt"], "a check of engines"),
    ],
)
def test_bad_arguments_are_told(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each says what is wrong and what there is, with exit code 254."""
    assert text in told(capsys, "verify", *arguments, "--witness-dir", str(tmp_path), code=254)


def test_a_test_class_has_one_item_per_check(pytester: pytest.Pytester) -> None:
    """The engine is run once for the session; shared checks of other families are items too."""
    pytester.makepyfile(
        test_engine="""
        import rollproof

        class TestEngine(rollproof.EngineConformance):
            engine = "fake-sglang"
            only = ("engine.rows", "routes.dtype", "routes.immutable")
        """
    )
    result = pytester.runpytest_inprocess("-v", "-p", "no:randomly")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(
        ["*test_check*engine.rows*PASSED*", "*test_check*routes.dtype*PASSED*"]
    )


def test_a_target_of_ones_own_is_a_subject(pytester: pytest.Pytester) -> None:
    """A function that returns an EngineTarget is judged as a named engine is, and a fault is told
    with the promise.
    """
    pytester.makepyfile(
        test_engine="""
        import rollproof
        from rollproof.engines.engine_targets import fake_target
        from rollproof.fakes.known_bugs.engines import _ExpertsSortedById

        def faulty():
            return fake_target("vllm", make=lambda settings: _ExpertsSortedById(settings, "vllm"))

        class TestEngine(rollproof.EngineConformance):
            subject = faulty
            only = ("engine.order",)
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the chosen experts are not in the order of their scores*"])


def test_an_engine_that_is_not_installed_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before tiny models are made for it, and with what to do about it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else found(name, *rest),
    )
    with pytest.raises(
        EngineStartError,
        match=r"^vllm is not installed in .*requirements\.txt; from a checkout",
    ):
        engines.run(EngineChoice(engine="vllm-offline"), Options(name="engine"))
