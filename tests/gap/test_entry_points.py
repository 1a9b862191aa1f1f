"""The doors of the gap: command line, terminal lines, pytest fixture, and a training loop's own
call.
"""

from __future__ import annotations

import json
import re
import runpy
import textwrap
import tomllib
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollproof.cli.app import run
from rollproof.errors import ConformanceError, GapError, UsageError
from rollproof.gap import COLUMNS, GapReport, GapVerdict, gap_lines, measure
from rollproof.gap.diagnosis.causes import CauseName
from rollproof.gap.gap_report import comparison_lines
from rollproof.gap.trainer_comparison import compare
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import text_of
from rollproof.store import dump_trace
from tests.support.gap_faults import GAP_FAULTS, GapWorld, gap_columns
from tests.support.resumed_trace import resumed

SMALL = GapWorld(sequences=20, length=60, layers=3)


@lru_cache
def _report(fault: str = "numerics only") -> GapReport:
    return measure(**gap_columns(fault, seed=2, world=SMALL), resamples=100, subject="a" * 150)


def _file(path: Path, scale: float = 1.0, **changes: Any) -> str:
    columns = gap_columns("version lag", seed=2, world=SMALL) | changes
    gap = columns["trainer_logprob"] - columns["rollout_logprob"]
    columns["trainer_logprob"] = np.minimum(columns["rollout_logprob"] + scale * gap, 0.0)
    pq.write_table(pa.table(dict(columns)), path)
    return str(path)


@pytest.mark.parametrize("fault", GAP_FAULTS)
def test_lines_fit_a_terminal(fault: str) -> None:
    """No line is longer than 120 columns but for one word that cannot be broken, and every limit's
    source has a line of its own.
    """
    report = _report(fault)
    text = text_of(gap_lines(report))
    assert [] == [line for line in text.splitlines() if len(line) > 120 and "a" * 150 not in line]
    assert len(report.verdicts) == sum(
        limit.source[:40] in text
        for name, limit in report.limits.limits.items()
        if name in report.verdicts
    )


def test_lines_of_a_comparison_fit_a_terminal() -> None:
    """So do the lines that tell ratios, with the control's name beside its metric."""
    pairs = _report("version lag").pairs
    lines = text_of(
        comparison_lines(compare(pairs, pairs, controls={"routes shifted by a token": pairs}))
    ).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert 2 == sum("(routes shifted by a token)" in line for line in lines)


def test_require_raises_the_report() -> None:
    """A failed or an undecided gap raises an AssertionError with the whole report; undecided ones
    may be let through by choice.
    """
    failed, open_ = (
        _report("off by one, late"),
        measure(*np.full((2, 9), -1.0), sequence_id=np.zeros(9), mask=np.ones(9)),
    )
    assert (GapVerdict.FAIL, GapVerdict.INCONCLUSIVE) == (failed.verdict, open_.verdict)
    with pytest.raises(ConformanceError, match="diagnosis: off by one"):
        failed.require(inconclusive="allow")
    with pytest.raises(AssertionError, match="1 sequence is too few"):
        open_.require()
    open_.require(inconclusive="allow")
    with pytest.raises(UsageError, match="inconclusive='maybe' is not one of: fail, allow"):
        open_.require(inconclusive="maybe")


def test_the_fixture_measures_and_asserts(pytester: pytest.Pytester) -> None:
    """A healthy gap passes and gives the report, a broken one fails with it, an undecided one fails
    or is skipped as the option says.
    """
    pytester.makepyfile("""
        import numpy as np
        RNG = np.random.default_rng(0)
        ROLLOUT = -RNG.exponential(0.3, 20_000)
        IDS, MASK = np.arange(20_000) // 100, np.ones(20_000)
        COLUMNS = {"sequence_id": IDS, "mask": MASK, "limits": "tiny-bf16"}

        def test_healthy(rollproof_gap):
            trainer = ROLLOUT - 1e-4 * abs(RNG.standard_normal(20_000))
            report = rollproof_gap(ROLLOUT, trainer, **COLUMNS)
            assert report.panel.n_tokens == 20_000 and report.subject.endswith("test_healthy")

        def test_broken(rollproof_gap):
            rollproof_gap(ROLLOUT, np.roll(ROLLOUT, 1), **COLUMNS)

        def test_open(rollproof_gap):
            rollproof_gap(ROLLOUT[:50], ROLLOUT[:50], sequence_id=np.zeros(50), mask=np.ones(50))
    """)
    args = ("-p", "no:hypothesispytest", "-p", "no:cacheprovider")
    result = pytester.runpytest(*args)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*ConformanceError: *test_broken*", "*diagnosis: off by one*"])
    pytester.runpytest(*args, "-o", "rollproof_unknown=skip").assert_outcomes(
        passed=1, failed=1, skipped=1
    )


def test_a_command_line_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Page, plots, JSON and comparison come from one command; its exit code is the worse of the two
    verdicts.
    """
    pytest.importorskip("matplotlib", reason="the report needs rollproof[report]")
    page, json_file = tmp_path / "page.html", tmp_path / "told.json"
    on, off, bad = (
        _file(tmp_path / name, scale)
        for name, scale in (("on.parquet", 0.3), ("off.parquet", 1.0), ("bad.parquet", 3.0))
    )
    command = [
        "gap",
        on,
        "--against",
        off,
        "--control",
        f"shifted={bad}",
        "--report",
        str(page),
        "--plots",
        str(tmp_path / "plots"),
    ]
    assert ExitCode.UNKNOWN == run([*command, "--json", str(json_file), "--resamples", "100"])
    assert "(shifted)" in capsys.readouterr().out
    assert "comparison-title" in page.read_text(encoding="utf-8")
    assert (tmp_path / "plots" / "comparison.png").is_file()
    data = json.loads(json_file.read_text())
    assert "pass" == data["comparison"]["verdict"]
    assert data["comparison"]["effects"][1]["ratio"] == pytest.approx(0.3, abs=0.02)
    assert ExitCode.FAIL == run(["gap", off, "--against", on, "--resamples", "100"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either RECORDS"),
        (["a.parquet", "--rollout", "t"], "Give either RECORDS"),
        (["a.parquet", "--trainer", "t"], "--trainer goes with --rollout"),
        (["--rollout", "t"], "--rollout needs --trainer SPEC"),
        (["a.parquet", "--control", "x=y"], "--control compares wrong routes with no replay"),
        (
            ["a.parquet", "--against", "b.parquet", "--control", "y"],
            "--control takes NAME=FILE, such as shifted=shifted.parquet, not 'y'",
        ),
        (["a.parquet", "--column", "y"], "--column takes NAME=THEIRS"),
        (["a.parquet", "--report", "."], "Cannot write .: it is a folder"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wrong combination is one line that says what to give, and the exit code of wrong use."""
    monkeypatch.chdir(tmp_path)
    assert ExitCode.USAGE == run(["gap", *arguments])
    error = capsys.readouterr().err
    assert message in error
    assert 1 == len(error.strip().splitlines())


def test_a_trace_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--rollout`` and ``--trainer`` measure a recorded trace against a file; what does not fit is
    an error of one line.
    """
    dump_trace(resumed(), tmp_path / "trace.json")
    pq.write_table(
        pa.table({"sequence_id": ["r0"], "trainer_logprob": [[-1.0, -0.25, -0.5, -0.75]]}),
        tmp_path / "t.parquet",
    )
    arguments = ["gap", "--rollout", str(tmp_path / "trace.json"), "--trainer"]
    assert ExitCode.UNKNOWN == run(
        [*arguments, str(tmp_path / "t.parquet"), "--limits", "tiny-fp32"]
    )
    assert "4 tokens in 1 sequence," in capsys.readouterr().out.replace("\n    ", " ")
    assert ExitCode.USAGE == run([*arguments, "score:fsdp"])
    assert "no score by 'fsdp'" in capsys.readouterr().err


def test_the_page_of_the_docs_is_complete() -> None:
    """The page names every column, profile and cause, and the examples."""
    docs = Path(__file__).parents[2] / "docs"
    if not (docs / "gap.md").is_file():
        pytest.skip("the docs are not shipped with an installed wheel")
    text = (docs / "gap.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `?([^|`]+?)`? \|", text, flags=re.MULTILINE))
    assert set(COLUMNS) | set(CauseName) | set(_profiles()) <= rows
    wrong = set(re.findall(r"^\| ([^|]+?) \| .* \| yes \|$", text, flags=re.MULTILINE))
    assert {name for name in CauseName if name.always_wrong} == wrong
    assert "(example/gap_records.py)" in text
    assert "(example/test_my_gap.py)" in text


def test_the_training_loop_of_the_docs_runs() -> None:
    """The ten lines that docs/gap.md shows are those of the loop that runs, which measures its gap
    at every step.
    """
    pytest.importorskip("torch", reason="the loop trains a model of torch")
    docs = Path(__file__).parents[2] / "docs"
    if not (docs / "gap.md").is_file():
        pytest.skip("the docs are not shipped with an installed wheel")
    source = docs / "example" / "gap_training_loop.py"
    loop = source.read_text(encoding="utf-8").partition("        report = measure(")
    shown = textwrap.dedent("".join(loop[1:]).partition("        advantage")[0])
    assert shown in (docs / "gap.md").read_text(encoding="utf-8")
    assert 10 == len(shown.splitlines())
    logged = runpy.run_path(str(source))["train"]()
    assert 3 == len(logged)
    assert all(0 < row["gen_kl_error"] < 1e-3 for row in logged)


def _profiles() -> list[str]:
    return list(
        tomllib.loads(
            resources.files("rollproof.gap").joinpath("limits.toml").read_text(encoding="utf-8")
        )["profile"]
    )


def test_a_tensor_that_requires_grad_is_an_error_of_ours() -> None:
    """A training loop that forgets detach() is told so, and not by a traceback of torch."""
    torch: Any = pytest.importorskip("torch", reason="needs a tensor of torch")
    with pytest.raises(GapError, match=r"trainer_logprob cannot be made an array of numpy.*detach"):
        measure(
            torch.zeros(4),
            torch.zeros(4, requires_grad=True),
            sequence_id=torch.arange(4),
            mask=torch.ones(4),
        )
