"""Calls alone and beside others: alike on an engine that is invariant, otherwise on one that is
not; and engines that break.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollproof.core.engine_protocol import EngineSettings, Query, Watch
from rollproof.core.records import EngineOutput
from rollproof.errors import EngineError
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.gpu_suites.gap.engine_rollouts import prompts_of
from rollproof.gpu_suites.invariance import INVARIANT, BatchComparison, compare_alone_and_batched
from rollproof.gpu_suites.process_faults import break_children, engine_host, engine_runs
from rollproof.simulation import virtual_loop


class Variant(FakeEngineSubject):
    """An engine whose last bits depend on how many calls it has."""

    calls = 0

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        self.calls += 1
        try:
            (output,) = await super().generate(query, watch)
            crowded = self.calls > 1
        finally:
            self.calls -= 1
        assert output.logprobs is not None
        return [
            replace(output, logprobs=np.nextafter(output.logprobs, -np.inf)) if crowded else output
        ]


class Twofold(FakeEngineSubject):
    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        return [*(await super().generate(query, watch))] * 2


def asked(kind: type[FakeEngineSubject]) -> BatchComparison:
    async def main() -> BatchComparison:
        engine = kind(EngineSettings(model=Path(), max_batch=16), "vllm-0.26", 0)
        await engine.start()
        return await compare_alone_and_batched(
            engine, prompts_of(12, vocab=60, longest=20), probes=4, tokens=6
        )

    return virtual_loop.run(main)


def test_an_invariant_engine_answers_alike() -> None:
    """Tokens, logprobs and routes of the coded policy depend on the call alone."""
    assert BatchComparison(probes=4, differing={}) == asked(FakeEngineSubject)


def test_the_last_bit_of_a_logprob_is_seen() -> None:
    """And told as what it is, for each call that has it."""
    assert set(asked(Variant).differing.values()) == {"logprobs"}


def test_an_engine_that_answers_twice_is_told() -> None:
    """There is nothing to compare then."""
    with pytest.raises(EngineError, match="with 2 samples instead of one"):
        asked(Twofold)


def test_modes_of_engines() -> None:
    """A mode adds to the settings, or to the surroundings, and takes nothing away."""
    settings = EngineSettings(model=Path(), extra={"device": "cuda"})
    assert {"device": "cuda", "enable_deterministic_inference": True} == INVARIANT["sglang"].of(
        settings
    ).extra
    assert settings == INVARIANT["vllm"].of(settings)
    assert {"VLLM_BATCH_INVARIANT": "1"} == INVARIANT["vllm"].environment
    assert all((mode.below is None) == (mode.known == "") for mode in INVARIANT.values())


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="processes below another are found in /proc, which is Linux's",
)
@pytest.mark.parametrize(("how", "state"), [("killed", "gone"), ("stopped", "T")])
def test_what_is_below_a_host_breaks_and_the_host_does_not(how: str, state: str) -> None:
    """Children and their children, and nobody else."""
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(60)']); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 20
        while not (found := break_children(host.pid, how)) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(found) == 1
        time.sleep(0.2)
        assert host.poll() is None
        assert state == _state(found[0])
        assert os.getpid() not in found
        assert not engine_runs(host.pid)
        assert engine_host("vllm") is None
    finally:
        break_children(host.pid, "killed")
        host.kill()
        host.wait()


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return "gone" if letter in "ZX" else letter
