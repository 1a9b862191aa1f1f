from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rollproof.cli.app import run
from rollproof.contracts.presets import contract_of
from rollproof.contracts.stand_in import StandIn
from rollproof.core.contract import Contract
from rollproof.core.records import Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.fakes.engine.fleet import Fleet
from rollproof.judging.report import ExitCode
from rollproof.verification.observed_contract import FieldReading, observe_contract
from rollproof.verification.rollouts import cases_for

KEPT = contract_of("prime_rl")
"""One row a token, turns, a mask, bounds, surfacing aborts: much to be seen."""


def declaring(contract: Contract) -> SubjectFactory:
    """A subject that keeps ``KEPT`` and declares another contract."""

    class Subject:
        flavours = ("vllm",)

        def start(self, fleet: Fleet) -> None:
            self.contract = contract
            self.client = StandIn(fleet, KEPT)

        async def rollout(self, request: Request) -> Rollout | None:
            return await self.client.generate(request)

        async def update_weights(self, version: int | None) -> None:
            await self.client.update_weights(version)

        def to_record(self, native: Rollout) -> Rollout:
            return native

        def stop(self) -> None:
            pass

    return Subject


def readings(contract: Contract) -> Mapping[str, FieldReading]:
    """Readings by field, over a part of the schedules."""
    factory = declaring(contract)
    cases = cases_for(declaring(KEPT), profile="pr", seed=0, thin=25)
    return {reading.field: reading for reading in observe_contract(factory, cases=cases)[0]}


def test_a_contract_that_is_kept_looks_right() -> None:
    """No field of a right contract looks wrong, and what a run shows of it is said."""
    found = readings(KEPT)
    assert [] == [field for field, reading in found.items() if reading.fits is False]
    for field in ("rows", "final_row", "layer_axis", "top_k", "dtype", "versions", "loss_mask"):
        assert found[field].fits, field


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": "T-1", "final_row": None},
        {"final_row": "zeros"},
        {"layer_axis": "moe"},
        {"top_k": 3},
        {"num_experts": 4},
        {"dtype": "int32"},
        {"versions": "token"},
        {"loss_mask": False, "missing_logprobs": "nan"},
        {"finish_reason": False},
        {"abort_surfaces": False},
        {"multi_turn": False},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_declaration_looks_wrong(wrong: dict[str, Any]) -> None:
    """A field that most samples contradict looks wrong, and it alone."""
    found = readings(replace(KEPT, **wrong))
    assert [next(iter(wrong))] == [
        field for field, reading in found.items() if reading.fits is False
    ]


def test_the_command_says_which_field_looks_wrong(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`contract explain` ends with 0 for a contract that fits and with 1 for one that does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ExitCode.PASS == run(["init", "--to", "test_observed.py"])
    assert ExitCode.PASS == run(["contract", "explain", "test_observed:OurRollouts"])
    assert "no field looks wrong" in capsys.readouterr().out
    text = (tmp_path / "test_observed.py").read_text(encoding="utf-8")
    (tmp_path / "test_wrong.py").write_text(
        text.replace('dtype="uint8"', 'dtype="int32"').replace(
            "StandIn(fleet, CONTRACT)", "StandIn(fleet, rollproof.contracts.verl())"
        ),
        encoding="utf-8",
    )
    assert ExitCode.FAIL == run(
        ["contract", "explain", "test_wrong:OurRollouts", "--json", "found.json"]
    )
    assert "dtype looks wrong: declared int32" in capsys.readouterr().out
    fields = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["fields"]
    assert ["dtype"] == [field["field"] for field in fields if field["fits"] is False]
    assert ExitCode.USAGE == run(["contract", "explain", "no_such:Thing"])
    (tmp_path / "test_raising.py").write_text(
        text.replace("return await self.client.generate(request)", "raise ValueError('no')"),
        encoding="utf-8",
    )
    capsys.readouterr()
    assert ExitCode.UNKNOWN == run(["contract", "explain", "test_raising:OurRollouts"])
    assert "no sample was delivered" in capsys.readouterr().out
