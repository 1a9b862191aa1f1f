"""The fuzzer: what it finds is reported, with an input that repeats it; every target reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from tools.fuzz import fuzzing
from tools.fuzz.target import Target
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
