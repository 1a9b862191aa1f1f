"""Layout functions of released frameworks: what holds, what is known to be wrong, and that the
record by hand says the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rollproof.judging.checks import Verdict
from rollproof.verification.layouts import judge_layouts

DOCS = Path(__file__).parents[2] / "docs"
PRINTED = DOCS / "track_record" / "megatron_faults.txt"
KNOWN = {
    "VerlR3": {"layout.stages", "layout.virtual-stages"},
    "VerlR3Contiguous": set(),
    "VerlR2": {"layout.stages", "layout.virtual-stages", "layout.stage-gather"},
    "VerlSamples": set(),
    "VerlPadded": {"layout.targets"},
    "SkyRLPacked": set(),
    "SkyRLPadded": {"layout.targets"},
}
"""The checks that are known to fail, and why: docs/track-record.md, 23 to 25."""

SAMPLES = {
    "layout.microbatches",
    "layout.restore",
    "layout.samples",
    "layout.unpadding",
    "layout.ulysses-slice",
}
"""What verl's functions for samples must have been put to."""


def _subject(name: str) -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    framework = "verl" if name.startswith("Verl") else "skyrl"
    for package in (framework, "megatron.core"):
        pytest.importorskip(
            package,
            reason=f"{package} is not installed: pip install --no-deps {framework} megatron-core",
        )
    module = __import__(f"rollproof.stacks.{framework}.replay_layouts", fromlist=[name])
    return getattr(module, name)


@pytest.mark.filterwarnings(
    "default"
)  # what the frameworks warn of while they are imported is theirs
@pytest.mark.parametrize("name", KNOWN)
def test_released_functions_do_what_the_record_says(name: str) -> None:
    """Every layout that the functions offer is right but for the known faults, the canary is seen,
    and nothing is left undecided.
    """
    report = judge_layouts(_subject(name))
    assert KNOWN[name] == {result.id for result in report.failed}
    assert [] == [
        (result.id, result.reason) for result in report.results if result.verdict is Verdict.UNKNOWN
    ]
    assert (
        name != "VerlSamples"
        or {result.id for result in report.results if result.verdict is Verdict.PASS} >= SAMPLES
    )
    assert report.canary is not None
    assert report.canary.red


@pytest.mark.filterwarnings("default")
def test_the_known_fault_of_stages_needs_a_custom_layout() -> None:
    """Even and uneven stages, with embedding and loss counted, are right: only cases with custom
    stages are blamed.
    """
    result = next(
        result
        for result in judge_layouts(_subject("VerlR2")).results
        if result.id == "layout.stage-gather"
    )
    assert result.found
    from rollproof.layouts.layout_cases import layout_calls
    from rollproof.stacks.verl.replay_layouts import VerlR2

    plain = [
        ("gather_stages", call)
        for call in layout_calls("gather_stages", VerlR2.layout)
        if call.layout.stages.custom is None
    ]
    assert () == judge_layouts(VerlR2, calls=plain).failed


def test_the_record_holds_what_the_scripts_print() -> None:
    """Line by line, where megatron-core, verl and skyrl are all installed; SkyRL's lines are those
    of the installed release.
    """
    _subject("VerlR2")
    _subject("SkyRLPadded")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, str(DOCS / "track_record" / "megatron_faults.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    recorded = [
        line
        for line in PRINTED.read_text(encoding="utf-8").splitlines()
        if "on megatron-core" in line
        and not (line.startswith("skyrl ") and not line.startswith(f"skyrl {version('skyrl')} "))
    ]
    printed = [line for line in done.stdout.splitlines() if "on megatron-core" in line]
    assert sorted(recorded) == sorted(printed)
