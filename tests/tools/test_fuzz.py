"""The fuzzer: what it finds is reported, with an input that repeats it; every target reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from tools.fuzz import fuzzing
from tools.fuzz.targets import TARGETS, Target


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


@pytest.mark.parametrize("name", ["expected-failures", "http-bytes"])
def test_a_target_is_fuzzed_in_a_process_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line has the number of inputs, and says that all were fine."""
    assert fuzzing.fuzz(name, seconds=0.0, inputs=5, first=0)
    line = capsys.readouterr().out.split()

    assert (name, "5", "ok") == (line[0], line[1], line[-1])
