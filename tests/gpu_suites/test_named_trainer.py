"""``--rollproof-trainer`` with a name of ours: its cells are run, whatever a default run would
leave out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import rollproof.gpu_suites.conftest
from rollproof.gpu_suites.trainer_setups import GAP_RANKED, GAP_TRAINERS
from tests.support.fake_nvml import Card, fake_nvml

GAP = Path(rollproof.gpu_suites.conftest.__file__).with_name("test_gap.py")


@pytest.fixture(autouse=True)
def _one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(Card()))


@pytest.mark.parametrize("name", GAP_TRAINERS)
def test_its_cells_are_there(name: str, pytester: pytest.Pytester) -> None:
    """One for each engine in bfloat16, and of no other trainer."""
    output = pytester.runpytest_inprocess(
        str(GAP), "--co", "-q", f"--rollproof-trainer={name}"
    ).stdout.str()
    cells = re.findall(r"test_replay_lowers\w+\[(.+)\]", output)
    assert {f"{engine}-bfloat16-{name}" for engine in ("vllm", "sglang")} <= set(cells)
    assert all(cell.endswith(f"-{name}") for cell in cells)


def test_without_it_those_are_left_out_that_only_a_full_run_has(pytester: pytest.Pytester) -> None:
    """FSDP2 and Ulysses by themselves take too long for a default run."""
    output = pytester.runpytest_inprocess(str(GAP), "--co", "-q").stdout.str()
    assert "vllm-bfloat16-megatron-tp2" in output
    assert not any(f"-{name}]" in output for name in GAP_RANKED)


def test_one_that_needs_more_cards_is_no_green_run(pytester: pytest.Pytester) -> None:
    """It was asked for by name, and a GPU was required: left out it would be forgotten."""
    pytester.makepyfile(
        "import pytest\n\ndef test_other():\n   "
        " pass\n\n@pytest.mark.gpus(4)\n@pytest.mark.parametrize('trainer', ['megatron-tp4'])\ndef"
        " test_cell(trainer):\n    raise AssertionError('was run')\n"
    )
    options = ("-p", "rollproof.gpu_suites.conftest", "-rA", "--rollproof-trainer=megatron-tp4")
    output = pytester.runpytest_inprocess(*options, "--rollproof-require-gpu")
    output.assert_outcomes(passed=1, errors=1)
    assert "needs 4 free GPUs, and 1 of 1 are; a GPU was required" in output.stdout.str()
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=1, skipped=1)
