"""Gate: which GPUs this host offers, in what state they are, and in one sentence why it offers
none.

Asks the driver through nvidia-ml-py where that is installed, else looks at the device files.
Neither initialises CUDA, so a process may still choose its device afterwards.
``CUDA_VISIBLE_DEVICES`` is obeyed as CUDA obeys it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SHARE", "Gpu", "GpuFindings", "device_files", "find_gpus", "shared"]

_GIB = 2**30
SHARE = "ROLLPROOF_SHARE_GPUS"
"""Environment variable: set to 1 where suites may run beside other processes on a card; its memory
is then not watched either.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU. What only the driver knows is ``None`` (``mig`` false, ``processes`` empty) where
    only its device file was seen.

    ``index`` is the driver's, ``memory`` and ``free`` are bytes, ``capability`` is ``(major,
    minor)``, ``clocks`` the current MHz of ``sm`` and ``memory`` and the largest ones.
    ``processes`` are ids of compute processes on it that are not of this process's session.
    """

    index: int
    name: str | None = None
    memory: int | None = None
    free: int | None = None
    capability: tuple[int, int] | None = None
    mig: bool = False
    processes: tuple[int, ...] = ()
    clocks: tuple[tuple[str, int], ...] = ()
    uuid: str | None = None

    @property
    def taken(self) -> str | None:
        """Why a suite must leave it alone, in a few words; ``None`` where it is free."""
        if self.mig:
            return f"GPU {self.index} is divided by MIG, and suites need whole ones"
        if self.processes and not shared():
            held = (
                ""
                if self.memory is None or self.free is None
                else f", {(self.memory - self.free) / _GIB:.1f} GiB held"
            )
            return (
                f"GPU {self.index} is busy (process"
                f" {', '.join(map(str, self.processes[:3]))}{held})"
            )
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFindings:
    """What was found, and by whom (``source``); ``reason`` says why there is no GPU, and is
    ``None`` where there is one.

    ``driver`` and ``cuda`` are the versions of the driver and of the newest CUDA that it serves.
    """

    gpus: tuple[Gpu, ...]
    source: str
    reason: str | None
    driver: str | None = None
    cuda: str | None = None


def find_gpus(devices: Path = Path("/dev")) -> GpuFindings:
    """Look for GPUs that this process may use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return GpuFindings(
            gpus=(),
            source="environment",
            reason=f"no GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides every device",
        )
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _by_files(devices, hidden)
    return _by_driver(nvml, hidden)


def shared() -> bool:
    """Whether a card may be used beside other processes."""
    return os.environ.get(SHARE, "") == "1"


def device_files(devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Indexes of the NVIDIA device files below ``devices``, ascending."""
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted(int(match[1]) for match in found if match))


def _by_files(devices: Path, visible: str | None) -> GpuFindings:
    gpus = _visible(tuple(Gpu(index=index) for index in device_files(devices)), visible)
    reason = (
        None
        if gpus
        else (
            f"no GPU: there is no {devices}/nvidia0, so no NVIDIA device is visible here"
            " (nvidia-ml-py is not installed)"
        )
    )
    return GpuFindings(gpus=gpus, source="device files", reason=reason)


def _by_driver(nvml: Any, visible: str | None) -> GpuFindings:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuFindings(
            gpus=(),
            source="nvidia-ml-py",
            reason=f"no GPU: the NVIDIA driver does not answer ({error})",
        )
    try:
        found = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        driver = _told(nvml, nvml.nvmlSystemGetDriverVersion)
        number = _told(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    except nvml.NVMLError as error:
        return GpuFindings(
            gpus=(),
            source="nvidia-ml-py",
            reason=f"no GPU: the NVIDIA driver refuses to describe its devices ({error})",
        )
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    gpus = _visible(found, visible)
    reason = None
    if not found:
        reason = "no GPU: the NVIDIA driver lists no device"
    elif not gpus:
        reason = (
            f"no GPU: CUDA_VISIBLE_DEVICES={visible!r} names none of the {len(found)} that the"
            " driver lists"
        )
    return GpuFindings(
        gpus=gpus,
        source="nvidia-ml-py",
        reason=reason,
        driver=None if driver is None else str(driver),
        cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
    )


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = _told(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    running = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    clocks = {
        name: _told(nvml, ask, handle, getattr(nvml, kind, None))
        for name, ask, kind in (
            ("sm", nvml.nvmlDeviceGetClockInfo, "NVML_CLOCK_SM"),
            ("memory", nvml.nvmlDeviceGetClockInfo, "NVML_CLOCK_MEM"),
            ("sm at most", nvml.nvmlDeviceGetMaxClockInfo, "NVML_CLOCK_SM"),
            ("memory at most", nvml.nvmlDeviceGetMaxClockInfo, "NVML_CLOCK_MEM"),
        )
    }
    uuid = _told(nvml, nvml.nvmlDeviceGetUUID, handle)
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory=int(memory.total),
        free=int(memory.free),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        mig=bool(mig and mig[0]),
        processes=tuple(
            sorted(pid for pid in (int(process.pid) for process in running) if not _ours(pid))
        ),
        clocks=tuple((name, int(value)) for name, value in clocks.items() if value is not None),
        uuid=None if uuid is None else str(uuid),
    )


def _told(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or ``None`` where this card or driver does not have it (older cards know no MIG,
    virtual ones no clocks).
    """
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _ours(pid: int) -> bool:
    """Whether a process is this one, or descends from it: an engine that a suite runs makes no card
    busy for that suite.
    """
    seen = 0
    while pid > 1 and seen < 64:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
        seen += 1
    return False


def _visible(gpus: Sequence[Gpu], names: str | None) -> tuple[Gpu, ...]:
    """Those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; like CUDA, nothing behind the first
    name that is no device.
    """
    if names is None:
        return tuple(gpus)
    kept: list[Gpu] = []
    for name in (part.strip() for part in names.split(",")):
        match = [
            gpu
            for gpu in gpus
            if name == str(gpu.index)
            or (name.startswith("GPU-") and str(gpu.uuid).startswith(name))
        ]
        if len(match) != 1 or match[0] in kept:
            break
        kept += match
    return tuple(kept)
