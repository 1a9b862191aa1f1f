"""The fuzzer: what it finds is reported, with an input that repeats it; every target reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollproof.contracts.contract_file import read_contract
from rollproof.core.model_config import model_of
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.gap.dumps import read_dump
from rollproof.gap.limits import limits_named
from tools.fuzz import file_targets, fuzzing
from tools.fuzz.mutations import damaged_json
from tools.fuzz.target import Target, run_command
from tools.fuzz.targets import TARGETS


@pytest.fixture
def fuzzed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> Callable[[Callable[[int], None]], Any]:
    """Fuzz whole numbers with a reader of the test, in this process; return what became of it."""

    def fuzz(read: Callable[[int], None], inputs: int = 40) -> Any:
        target = Target(inputs=lambda: st.integers(0, 10**6), read=lambda data, _: read(data))
        monkeypatch.setitem(TARGETS, "numbers", target)
        monkeypatch.setattr(fuzzing.resource, "setrlimit", lambda *_: None)
        fuzzing.child("numbers", f"{inputs} inputs", 0, str(tmp_path / "state.json"))
        return json.loads((tmp_path / "state.json").read_text())

    return fuzz


def test_inputs_are_counted(fuzzed: Any) -> None:
    """As many inputs are read as are asked for."""
    seen: list[int] = []
    state = fuzzed(seen.append)

    assert (40, None) == (state["inputs"], state["problem"])
    assert len(seen) >= 40


def test_what_breaks_is_shown_with_its_smallest_input(fuzzed: Any) -> None:
    """An exception is a finding, and its input is shrunk."""

    def read(number: int) -> None:
        if number >= 1000:
            raise ZeroDivisionError("broken")

    problem = fuzzed(read, 400)["problem"]

    assert "ZeroDivisionError: broken" in problem and "1000" in problem


def test_the_same_seed_gives_the_same_inputs(fuzzed: Any) -> None:
    """A finding of the night is repeated by its seed."""
    runs: list[list[int]] = []
    for _ in range(2):
        seen: list[int] = []
        fuzzed(seen.append)
        runs.append(seen)

    assert runs[0] == runs[1]


def test_targets_are_fuzzed_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has one line, with the inputs of all of its processes; all were fine."""
    monkeypatch.setattr(fuzzing, "_SHARD", 3)
    names = ["expected-failures", "http-bytes"]
    outcomes = fuzzing.fuzz(names, fuzzing.Amount(inputs=5, processes=2))

    assert [(name, 5, []) for name in names] == [(o.name, o.inputs, o.problems) for o in outcomes]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(name, "5", "ok") for name in names] == [(line[0], line[1], line[-1]) for line in lines]


def test_no_process_is_started_after_the_time() -> None:
    """What was not read is not counted."""
    (outcome,) = fuzzing.fuzz(["fault-plan"], fuzzing.Amount(inputs=5, within=-1.0))

    assert (0, []) == (outcome.inputs, outcome.problems)
    assert str(outcome).endswith("not run")


def test_what_is_damaged_was_sound(tmp_path: Path) -> None:
    """Each reader takes the undamaged input: one that refuses it would not be fuzzed at all."""
    for name, content in (
        ("g.csv", file_targets._gap_csv()),
        ("g.jsonl", file_targets._gap_jsonl()),
        ("g.npz", file_targets._gap_npz()),
        ("g.parquet", file_targets._gap_parquet()),
        ("train_data_step1.jsonl", json.dumps(file_targets._NEMO_RL).encode() + b"\n"),
        ("b.pkl", file_targets._skyrl()),
    ):
        (tmp_path / name).write_bytes(content)
        run = ["gap", str(tmp_path / name), "--json", "-", "--resamples", "100"]
        assert '"verdict"' in run_command(*run), name
    (tmp_path / "traces.jsonl").write_text(json.dumps(file_targets._VERIFIERS) + "\n")
    assert read_dump(tmp_path / "traces.jsonl") is not None
    for name, text in (
        ("c.json", json.dumps(file_targets._contract()).encode()),
        ("c.toml", file_targets._CONTRACT_TOML),
    ):
        (tmp_path / name).write_bytes(text)
        assert (0, 1, 2) == read_contract(tmp_path / name).moe_layers
    (tmp_path / "plan.toml").write_bytes(file_targets._PLAN_TOML)
    assert 1 == len(FaultPlan.from_file(tmp_path / "plan.toml").faults)
    (tmp_path / "limits.toml").write_bytes(file_targets._LIMITS)
    assert "mine" == limits_named("mine", override=tmp_path / "limits.toml").profile
    (tmp_path / "config.json").write_text(json.dumps(file_targets._CONFIG))
    assert model_of(tmp_path) is not None


@pytest.mark.parametrize("sound", [{}, {"a": {"b": ["c", 1]}, "d": []}], ids=["empty", "nested"])
def test_any_value_can_be_damaged(sound: Any) -> None:
    """An empty one, and places that an earlier change has removed or replaced by a text."""

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(damaged_json(sound))
    def is_json(value: Any) -> None:
        json.dumps(value)

    is_json()
