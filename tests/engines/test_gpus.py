from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollproof.engines.gpus import Gpu, GpuFindings, find_gpus
from rollproof.errors import UsageError
from rollproof.gpu_suites.report.hardware import PLACE, MemoryWatch, described
from rollproof.gpu_suites.requirements import (
    ENGINES,
    Installed,
    Need,
    free_gpus,
    installed,
    needs_of,
    unmet_need,
)
from tests.support.fake_nvml import GIB, Card, fake_nvml

STRANGER = 1  # init: a process that is certainly not ours


@pytest.fixture(autouse=True)
def _every_device_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def found(monkeypatch: pytest.MonkeyPatch, *cards: Card, broken: str = "") -> GpuFindings:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*cards, broken=broken))
    return find_gpus()


def mark(kind: str, /, *args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(name=kind, args=args, kwargs=kwargs)


def test_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, memory, capability, clocks, driver; a card that knows no MIG and no clocks is a card
    all the same.
    """
    seen = found(monkeypatch, Card(), Card(dumb=True))

    assert (None, "580.1", "13.2") == (seen.reason, seen.driver, seen.cuda)
    first, second = seen.gpus
    assert (80 * GIB, 79 * GIB, (9, 0), False) == (
        first.memory,
        first.free,
        first.capability,
        first.mig,
    )
    assert {"sm": 1980, "memory": 2619, "sm at most": 1980, "memory at most": 2619} == dict(
        first.clocks
    )
    assert ((), False, None) == (second.clocks, second.mig, second.taken)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("nvmlInit", r"no GPU: the NVIDIA driver does not answer \(nvmlInit failed\)"),
        ("nvmlDeviceGetName", r"no GPU: the NVIDIA driver refuses to describe its devices"),
    ],
)
def test_a_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    """The reason is one line; nothing is raised."""
    seen = found(monkeypatch, Card(), broken=broken)
    assert () == seen.gpus
    assert seen.reason is not None
    assert "\n" not in seen.reason
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(seen.reason)


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [("1", [1]), ("2,0", [2, 0]), ("0,7,1", [0]), ("GPU-1abc", [1]), ("0,0", [0]), ("x", [])],
)
def test_visible_devices_are_obeyed_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, visible: str, indexes: list[int]
) -> None:
    """Order counts, and nothing behind a name that is no device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = found(monkeypatch, Card(), Card(), Card())
    assert indexes == [gpu.index for gpu in seen.gpus]
    assert (seen.reason is None) == bool(indexes)


def test_no_driver_library_and_no_device_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without nvidia-ml-py the device files decide; without those there is no GPU, and the reason
    says both.
    """
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in str(find_gpus(tmp_path).reason)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    assert (Gpu(index=0),) == find_gpus(tmp_path).gpus


def test_markers_say_what_is_needed() -> None:
    """The nearest marker of a name wins; engines add up."""
    marks = [
        mark("gpus", 2),
        mark("gpus", 1),
        mark("memory", 20),
        mark("capability", 8.9),
        mark("engine", "vllm", ">=0.26"),
        mark("slow"),
    ]
    assert Need(
        gpus=2, memory=20.0, capability=(8, 9), engines=(("vllm", ">=0.26"), ("megatron", ""))
    ) == needs_of([*marks, mark("engine", name="megatron"), mark("engine", "vllm")])
    assert Need() == needs_of([])


@pytest.mark.parametrize(
    "bad",
    [
        mark("gpus", 0),
        mark("gpus", 1.5),
        mark("gpus"),
        mark("gpus", True),
        mark("memory", "much"),
        mark("memory", -1),
        mark("capability", 8, 9),
        mark("engine"),
        mark("engine", "trtllm"),
        mark("engine", "vllm", "newest"),
    ],
)
def test_a_marker_that_says_nothing_sensible(bad: Any) -> None:
    """Misuse is told with what is valid."""
    with pytest.raises(UsageError, match=f"The marker {bad.name}"):
        needs_of([bad])


BUSY = Card(pids=[STRANGER], free=39 * GIB)


@pytest.mark.parametrize(
    ("cards", "need", "reason"),
    [
        ((Card(),), Need(), None),
        ((Card(), Card()), Need(gpus=2, memory=70, capability=(9, 0)), None),
        ((), Need(), "no GPU: the NVIDIA driver lists no device"),
        ((Card(),), Need(gpus=2), "needs 2 free GPUs, and 1 of 1 are"),
        (
            (BUSY,),
            Need(),
            "needs 1 free GPU, and 0 of 1 are: GPU 0 is busy (process 1, 41.0 GiB in use)",
        ),
        ((BUSY, Card()), Need(), None),
        (
            (Card(mig=1),),
            Need(),
            "needs 1 free GPU, and 0 of 1 are: GPU 0 is divided by MIG; suites need undivided GPUs",
        ),
        ((Card(free=3 * GIB),), Need(memory=20), "needs 20 GiB free on a GPU, and GPU 0 has 3.0"),
        (
            (Card(capability=(7, 5), name="Tesla T4"),),
            Need(capability=(8, 0)),
            "needs compute capability 8.0, and GPU 0 (Tesla T4) has 7.5",
        ),
    ],
)
def test_why_a_host_cannot(
    monkeypatch: pytest.MonkeyPatch, cards: tuple[Card, ...], need: Need, reason: str | None
) -> None:
    """Too few cards, a busy one, MIG, too little memory, an old card: one line each, and none where
    the host can.
    """
    assert reason == unmet_need(need, found(monkeypatch, *cards))


def test_processes_of_a_suite_make_no_card_busy_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is a child of the session that started it."""
    seen = found(monkeypatch, Card(pids=[os.getpid()]))
    assert seen.gpus == free_gpus(seen)


@pytest.mark.parametrize(
    ("version", "spec", "reason"),
    [
        ("0.26.0", ">=0.26,<0.30", None),
        ("0.26.0", "", None),
        ("0.32.0", ">=0.26,<0.30", "needs vllm>=0.26,<0.30, and /venv/python has 0.32.0"),
        (
            None,
            ">=0.26",
            (
                "needs vllm>=0.26: it is not there; set ROLLPROOF_VLLM_PYTHON to an interpreter"
                " that has it"
            ),
        ),
    ],
)
def test_an_engine_that_is_missing_or_another(
    monkeypatch: pytest.MonkeyPatch, version: str | None, spec: str, reason: str | None
) -> None:
    """The engine's version is held against the specifier."""
    told = Installed(version=version, python="/venv/python", reason="it is not there")
    assert reason == unmet_need(
        Need(engines=(("vllm", spec),)), found(monkeypatch, Card()), lambda name: told
    )


def test_an_interpreter_is_asked_for_the_version_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that does not run, or lacks the engine, is told as such."""
    installed.cache_clear()
    try:
        wrapper = tmp_path / "python"
        wrapper.write_text("#!/bin/sh\necho 0.26.0\n")
        wrapper.chmod(0o755)
        monkeypatch.setenv("ROLLPROOF_VLLM_PYTHON", str(wrapper))
        assert Installed(version="0.26.0", python=str(wrapper)) == installed("vllm")
        installed.cache_clear()
        monkeypatch.setenv("ROLLPROOF_VLLM_PYTHON", str(tmp_path / "nowhere"))
        assert "does not run" in installed("vllm").reason
        wrapper.write_text("#!/bin/sh\nexit 1\n")
        monkeypatch.setenv("ROLLPROOF_SGLANG_PYTHON", str(wrapper))
        assert f"sglang is not installed in {wrapper}" == installed("sglang").reason
    finally:
        installed.cache_clear()


def test_memory_that_comes_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is told with its card; a driver may take a while."""
    cards = [Card(), Card()]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*cards))
    watch = MemoryWatch(patience_s=0.05, nap_s=0.01)
    cards[1].free -= 30 * GIB
    assert "not given back within 0.05 s: 30.0 GiB on GPU 1" == watch.missing()
    cards[1].free += 29.5 * GIB
    assert watch.missing() is None


def test_the_machine_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs, driver, versions and the variables that matter are told; others, secrets, and where the
    machine keeps its files are not.
    """
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HOME_OF_SOMEBODY", "x")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/somebody/cache")
    told = described(found(monkeypatch, Card()))

    assert "NVIDIA H100 80GB HBM3" == told["gpus"][0]["name"]
    assert "9.0" == told["gpus"][0]["capability"]
    assert "0" == told["environment"]["VLLM_USE_FLASHINFER_SAMPLER"]
    assert PLACE == told["environment"]["TRITON_CACHE_DIR"]
    assert not {"VLLM_API_KEY", "HOME_OF_SOMEBODY"} & set(told["environment"])
    assert "numpy" in told["versions"]
    assert set(ENGINES) >= {"vllm", "sglang", "megatron"}
