"""What a session of the GPU suites runs, leaves out, skips and fails, by its options and by the
cards of the host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pytest

import rollproof.gpu_suites.conftest  # noqa: F401 - numpy cannot be loaded anew in each inner session
from rollproof.gpu_suites.gpu_lock import Claim
from tests.support.fake_nvml import GIB, Card, fake_nvml

Runner: TypeAlias = "Callable[..., tuple[dict[str, int], str]]"

SUITE = """
import pytest

def test_one():
    pass

@pytest.mark.gpus(2)
def test_two():
    pass

@pytest.mark.full
def test_more():
    pass

@pytest.mark.engine("vllm", ">=99")
@pytest.mark.full
def test_missing():
    pass
"""
STRANGER = 1


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs the suite above on a host with these cards."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROLLPROOF_SHARE_GPUS", "ROLLPROOF_VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)

    def on(cards: tuple[Card, ...], *options: str) -> tuple[dict[str, int], str]:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*cards))
        pytester.makepyfile(test_suite=SUITE)
        result = pytester.runpytest_inprocess(
            "-p", "rollproof.gpu_suites.conftest", "-rA", *options
        )
        return result.parseoutcomes(), f"{result.stdout}\nexit {int(result.ret)}"

    return on


def test_a_default_run_leaves_out_what_only_a_full_one_has(run: Runner) -> None:
    """On two cards: the tests without the mark, all of them run."""
    outcomes, _ = run((Card(), Card()), "--rollproof-require-gpu")
    assert {"passed": 2, "deselected": 2} == outcomes


def test_a_full_run_fails_what_is_required_and_missing(run: Runner) -> None:
    """An engine that is not there skips its test, and fails it where a GPU is required."""
    outcomes, output = run((Card(), Card()), "--rollproof-full")
    assert {"passed": 3, "skipped": 1} == outcomes
    outcomes, output = run((Card(), Card()), "--rollproof-full", "--rollproof-require-gpu")
    assert (3, 1) == (
        outcomes["passed"],
        outcomes["failed"] if "failed" in outcomes else outcomes["errors"],
    )
    assert "needs vllm>=99" in output


def test_what_is_named_is_run(run: Runner) -> None:
    """A test that only a full run has, named on the command line, needs no other option."""
    outcomes, _ = run((Card(),), "test_suite.py::test_more")
    assert {"passed": 1} == outcomes


def test_what_needs_more_cards_than_there_are_is_left_out_even_where_gpus_are_required(
    run: Runner,
) -> None:
    """One card is a whole runner; one that says it has two, and has one, is not."""
    outcomes, output = run((Card(),), "--rollproof-require-gpu")
    assert {"passed": 1, "skipped": 1, "deselected": 2} == outcomes
    assert "needs 2 GPUs, and this run counts on 1" in output
    outcomes, output = run((Card(),), "--rollproof-require-gpu", "--rollproof-gpus=2")
    assert outcomes.get("errors", 0) + outcomes.get("failed", 0) == 1
    assert "needs 2 free GPUs, and 1 of 1 are; a GPU was required" in output
    outcomes, _ = run((Card(), Card()), "--rollproof-gpus=1")
    assert {"passed": 1, "skipped": 1, "deselected": 2} == outcomes


def test_a_busy_card_is_left_alone(run: Runner) -> None:
    """Skipped with the process that is on it; failed where a GPU is required."""
    busy = Card(pids=[STRANGER], free=39 * GIB)
    outcomes, output = run((busy,))
    assert {"skipped": 2, "deselected": 2} == outcomes
    assert "GPU 0 is busy (process 1, 41.0 GiB in use)" in output
    outcomes, _ = run((busy,), "--rollproof-require-gpu")
    assert outcomes.get("errors", 0) + outcomes.get("failed", 0) == 1


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_a_number_of_gpus_that_is_none(pytester: pytest.Pytester, value: str) -> None:
    """Misuse is told before anything runs."""
    output = pytester.runpytest_inprocess(f"--rollproof-gpus={value}")
    assert pytest.ExitCode.USAGE_ERROR == output.ret
    output.stderr.fnmatch_lines(
        [f"ERROR: --rollproof-gpus='{value}' is not a number of GPUs, such as 1 or 4."]
    )


def test_a_required_run_of_nothing_is_not_green(run: Runner) -> None:
    """Where a GPU is required and every test that was asked for needs more cards, the session fails
    and says so.
    """
    outcomes, output = run((Card(),), "--rollproof-require-gpu", "-k", "two")
    assert {"skipped": 1, "deselected": 3} == outcomes
    assert "nothing was run, and a GPU was required" in output
    assert output.endswith("exit 1")
    _, output = run((Card(),), "-k", "two")
    assert "nothing was run" not in output
    assert output.endswith("exit 0")


def test_a_busy_card_is_hidden_from_what_needs_one(run: Runner) -> None:
    """Of two cards the first is busy: what needs one runs on the other; what needs both says why it
    cannot.
    """
    busy = Card(pids=[STRANGER], free=39 * GIB)
    outcomes, output = run((busy, Card()), "--rollproof-require-gpu")
    assert (1, 1) == (outcomes["passed"], outcomes.get("failed", 0) + outcomes.get("errors", 0))
    assert (
        "needs 2 free GPUs, and 1 of 1 are; GPU 0 is busy (process 1, 41.0 GiB in use); a GPU was"
        " required" in output
    )
    assert (
        "GPUs: 1 (NVIDIA H100 80GB HBM3); left alone: GPU 0 is busy (process 1, 41.0 GiB in use)"
        in output
    )
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_card_that_is_taken_meanwhile_is_not_used(run: Runner) -> None:
    """Another session begins on the first of two free cards after this one did: CUDA would take
    that card for what needs one.
    """
    late = Card(pids=_Arriving(begins=2))
    outcomes, output = run((late, Card()), "--rollproof-require-gpu")
    assert "GPUs: 0 (NVIDIA H100 80GB HBM3), 1 (NVIDIA H100 80GB HBM3)" in output
    assert 2 == outcomes.get("failed", 0) + outcomes.get("errors", 0)
    assert (
        "GPU 0 is busy (process 1, 1.0 GiB in use), and was free when this session began; a GPU was"
        " required" in output
    )


def test_a_card_that_another_session_claimed_is_not_used(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing is on it yet; where there is no other card, nothing is run, in one line."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(Card(), Card()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    other = Claim.make()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    outcomes, output = run((Card(), Card()))
    assert {"passed": 1, "skipped": 1, "deselected": 2} == outcomes
    told_of = f"GPU 0 is claimed by another session of these suites (process {os.getpid()})"
    assert f"GPUs: 1 (NVIDIA H100 80GB HBM3); left alone: {told_of}" in output
    outcomes, output = run((Card(),), "--rollproof-require-gpu")
    assert 1 == outcomes.get("failed", 0) + outcomes.get("errors", 0)
    assert (
        f"{told_of}: give each session its own by CUDA_VISIBLE_DEVICES; a GPU was required"
        in output
    )
    other.release()
    outcomes, _ = run((Card(), Card()), "--rollproof-require-gpu")
    assert {"passed": 2, "deselected": 2} == outcomes


class _Arriving(Sequence[int]):
    """Processes of a card: a stranger from the ``begins + 1``-th look at it on."""

    def __init__(self, begins: int) -> None:
        self._left = begins

    def __iter__(self) -> Iterator[int]:
        self._left -= 1
        yield from () if self._left >= 0 else (STRANGER,)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return STRANGER


def test_a_session_of_several_processes_is_refused(pytester: pytest.Pytester) -> None:
    """Each would find the GPUs taken by the others, and reports would overwrite each other."""
    pytest.importorskip("xdist", reason="-n is pytest-xdist's")
    pytester.makepyfile("def test_one():\n    raise AssertionError('was run')\n")
    output = pytester.runpytest_inprocess("-p", "rollproof.gpu_suites.conftest", "-n2")
    assert pytest.ExitCode.USAGE_ERROR == output.ret
    output.stderr.fnmatch_lines(["ERROR: The GPU suites run in one process*leave -n out*"])


@pytest.mark.parametrize("cards", [(), (Card(),)], ids=["no card", "one card"])
def test_a_report_that_was_asked_for_is_written_in_any_case(
    run: Runner, pytester: pytest.Pytester, cards: tuple[Card, ...]
) -> None:
    """Also where no test that measures could be run: shards are merged from it, and nothing of an
    earlier run is taken for this one's.
    """
    for _ in range(2):
        run(cards, "--rollproof-gpu-report=out")
        data = json.loads((pytester.path / "out" / "run.json").read_text())
        assert ["Nothing was measured: no test that measures could be run."] == data["notes"]
        assert len(cards) == len(data["machine"]["gpus"])
        data["notes"] = ["of an earlier run"]
        (pytester.path / "out" / "run.json").write_text(json.dumps(data))


def test_a_report_that_cannot_be_written_is_told_at_once(
    run: Runner, pytester: pytest.Pytester
) -> None:
    """Before anything is run, in one line."""
    (pytester.path / "out").write_text("a file")
    outcomes, output = run((Card(),), "--rollproof-gpu-report=out")
    assert {} == outcomes
    assert output.endswith("exit 4")
