"""The fuzzer: what it finds is reported, with an input that repeats it; every target reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollproof.contracts.contract_file import read_contract
from rollproof.core.model_config import model_of
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.gap.dumps import read_dump
from rollproof.gap.limits import limits_named
from tools.fuzz import file_targets, fuzzing
from tools.fuzz.fuzzing import Shard, State, read_inputs
from tools.fuzz.mutations import Changes, damaged_json
from tools.fuzz.target import Target, run_command


def _inputs(changes: Changes) -> list[int]:
    """Up to six numbers, each of them a change."""
    numbers = [changes.random.randrange(10) for _ in range(6)]
    return [number for number in numbers if changes.made()]


def _read(read: Callable[[list[int]], None], **shard: int) -> State:
    """Read inputs in this process, with a reader of the test; return what became of it."""
    target = Target(inputs=lambda: _inputs, read=lambda data, _: read(data))
    return read_inputs(target, Shard(name="numbers", **{"seed": 0, "inputs": 40, **shard}))


def _seen(**shard: int) -> list[list[int]]:
    seen: list[list[int]] = []
    _read(seen.append, **shard)
    return seen


def _no_nine(numbers: list[int]) -> None:
    if 9 in numbers:
        raise ZeroDivisionError("broken")


def test_inputs_are_counted() -> None:
    """As many inputs are read as are asked for."""
    seen: list[list[int]] = []
    state = _read(seen.append)

    assert (40, 40, None) == (len(seen), state.inputs, state.problem)


def test_what_breaks_is_shown_with_the_changes_that_matter() -> None:
    """An exception is a finding, and its input has no change without which it is one too."""
    problem = _read(_no_nine).problem

    assert problem is not None
    assert problem.endswith("ZeroDivisionError: broken\ninput [9]")


def test_an_input_that_breaks_is_made_again_from_seed_and_number() -> None:
    """The options that are printed are enough."""
    first = _read(_no_nine, seed=3)
    again = _read(_no_nine, seed=3, start=first.inputs - 1, inputs=1)

    assert first.problem is not None
    assert f"--only numbers --seed 3 --start {first.inputs - 1} --inputs 1: " in first.problem
    assert (1, first.problem) == (again.inputs, again.problem)


def test_inputs_depend_on_the_seed_alone() -> None:
    """A finding of the night is repeated by its seed, however many processes share the inputs."""
    assert _seen() == _seen()
    assert _seen() == _seen(inputs=15) + _seen(start=15, inputs=25)
    assert _seen() != _seen(seed=1)


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, since pytest-xdist's has threads and it forks."""
    return subprocess.run(
        [sys.executable, "-m", "tools.fuzz", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_targets_are_fuzzed_in_processes_of_their_own() -> None:
    """Each has one line, with the inputs of all of its processes; all were fine."""
    names = ("expected-failures", "http-bytes")
    done = _command("--inputs", "5", "--processes", "2", "--only", *names)

    assert (0, "") == (done.returncode, done.stderr)
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    found = sorted((line[0], line[1], line[-1]) for line in lines)
    assert [(name, "5", "ok") for name in names] == found


def test_a_process_that_dies_or_hangs_is_a_finding(tmp_path: Path) -> None:
    """The input that it was at is named, with where it was."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "from tools.fuzz import fuzzing\n"
        "from tools.fuzz.target import Target\n"
        "from tools.fuzz.targets import TARGETS\n"
        "counted = iter(range(9))\n"
        "def die(*_):\n"
        "    if next(counted) == 2: os.kill(os.getpid(), 11)\n"
        "def hang(*_):\n"
        "    if next(counted) == 2: time.sleep(60)\n"
        "for name, read in (('dies', die), ('hangs', hang)):\n"
        "    TARGETS[name] = Target(inputs=lambda: lambda changes: 0, read=read)\n"
        "fuzzing._HANG_SECONDS = 0.5\n"
        "fuzzing.fuzz(['dies', 'hangs'], fuzzing.Amount(inputs=5))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "--only dies --seed 0 --start 2 --inputs 1: the process ended with -11" in done.stdout
    assert "--only hangs --seed 0 --start 2 --inputs 1: the process ended with -6" in done.stdout
    assert "line 9 in hang" in done.stdout


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
        ("g.parquet", file_targets.gap_parquet()),
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
    damaged = damaged_json(sound)

    for number in range(200):
        json.dumps(damaged(Changes(f"{number}")))


def test_no_flipped_bit_changes_a_result_in_silence() -> None:
    """Of a trace, a report and a table whose formats have checksums."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.fuzz.bit_flips", "--flips", "20"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert 4 == done.stdout.count(" 0 silent change, 0 crash")
