"""Results of runs: what is kept of a report, and that rows of one run do not touch those of
another.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollproof.engines.engine_targets import REAL, fake_target
from rollproof.errors import EngineStartError, UsageError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.verification.engines import judged, run_experiments
from tools import judge_table
from tools.engine_results import load_results, row_of, save_results


def test_a_row_holds_verdicts_and_what_fails() -> None:
    """Verdicts by check, the reasons of those that were not reached, and what was exercised; JSON
    as it is.
    """
    run = run_experiments(fake_target("vllm"), only=["plain"])
    row = row_of(judged("fake-vllm", run), run, "a fake")
    assert {"plain"} == set(row["experiments"])
    assert "pass" == row["verdicts"]["engine.rows"]
    assert "unknown" == row["verdicts"]["engine.identity"]
    assert "engine.identity" in row["reasons"]
    assert row["exercised"]["engine.rows"]["rows of finished calls"] > 0
    assert {} == row["findings"]
    assert row == json.loads(json.dumps(row))


def test_rows_are_put_beside_those_that_are_there(tmp_path: Path) -> None:
    """A row of the same name is replaced, others stay, and so does a gap until there is another;
    versions are those of the packages.
    """
    file = tmp_path / "new" / "vllm.json"
    assert {"versions": {}, "runs": {}, "gap": []} == load_results(file)
    save_results(file, ["numpy"], runs={"a": {"about": "1"}, "b": {"about": "2"}})
    save_results(file, ["numpy"], gap=[{"dtype": "float32"}])
    save_results(file, ["numpy"], runs={"b": {"about": "3"}})
    held = load_results(file)
    assert {"a": {"about": "1"}, "b": {"about": "3"}} == held["runs"]
    assert [{"dtype": "float32"}] == held["gap"]
    assert ["numpy"] == list(held["versions"])


def test_the_rows_of_an_engine_are_its_targets_families_and_dtypes() -> None:
    """Each target by its name, then the engine in bfloat16 and each family that a target lists; one
    that does not exist is refused.
    """
    names = judge_table.engine_rows("vllm")
    assert ["vllm", "vllm-offline", "vllm bfloat16"] == names[:3]
    assert {f"vllm-offline {family}" for family in REAL["vllm-offline"].families} == set(names[3:])
    with pytest.raises(UsageError, match="choose among"):
        judge_table.engine_rows("fake-vllm")


class _NoStart(FakeEngineSubject):
    async def start(self) -> None:
        raise EngineStartError("no room\nThe end of its log:\nkilled")


def test_a_table_is_written_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not start is a row with the reason; bad arguments end with 254."""
    fakes = {None: fake_target("vllm"), "olmoe": fake_target("vllm", make=_NoStart)}
    monkeypatch.setattr(
        judge_table,
        "engine_target",
        lambda _name, family, **_: replace(fakes[family], about="a fake"),
    )
    monkeypatch.setattr(judge_table, "REAL", {"vllm": replace(REAL["vllm"], packages=("numpy",))})
    file = tmp_path / "results.json"
    assert 0 == judge_table.main(["vllm", str(file), "vllm", "vllm olmoe"])
    runs = load_results(file)["runs"]
    assert "pass" == runs["vllm"]["verdicts"]["engine.routes"]
    assert {"about": "a fake", "not_started": "no room"} == runs["vllm olmoe"]
    assert "vllm: no check fails" in capsys.readouterr().out
    assert 254 == judge_table.main(["vllm"])
    assert 254 == judge_table.main(["nothing", str(file)])
    assert "choose among" in capsys.readouterr().err
