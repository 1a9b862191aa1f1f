"""Find the GPUs of this host and their state, or the reason why there is none.

The driver is queried through nvidia-ml-py if that is installed, else the device files are listed.
Neither initialises CUDA, so a process may still choose its device afterwards.
``CUDA_VISIBLE_DEVICES`` has the effect that it has in CUDA.
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
"""Environment variable: set it to 1 if suites may share a card with other processes. Its memory is
not watched then.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU.

    If only its device file was seen, fields that the driver knows are ``None``, false or empty.

    Attributes:
        index: the driver's index.
        name: product name.
        memory: total memory in bytes.
        free: free memory in bytes.
        capability: compute capability, ``(major, minor)``.
        mig: whether it is divided by MIG.
        processes: ids of compute processes that do not descend from this one.
        clocks: current and largest MHz of ``sm`` and ``memory``.
        uuid: the driver's unique id.
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
        """Why a suite must not use it; ``None`` if it is free."""
        if self.mig:
            return f"GPU {self.index} is divided by MIG; suites need undivided GPUs"
        if self.processes and not shared():
            used = (
                ""
                if self.memory is None or self.free is None
                else f", {(self.memory - self.free) / _GIB:.1f} GiB in use"
            )
            return (
                f"GPU {self.index} is busy (process"
                f" {', '.join(map(str, self.processes[:3]))}{used})"
            )
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFindings:
    """The GPUs of a host.

    Attributes:
        gpus: those that this process may use.
        source: where the information comes from.
        reason: why there is no GPU; ``None`` if there is one.
        driver: version of the driver.
        cuda: the newest version of CUDA that the driver supports.
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
    """Whether suites may share a card with other processes."""
    return os.environ.get(SHARE, "") == "1"


def device_files(devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Return the indexes of the NVIDIA device files below ``devices``, ascending."""
    matches = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted(int(match[1]) for match in matches if match))


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
        driver = _query(nvml, nvml.nvmlSystemGetDriverVersion)
        number = _query(nvml, nvml.nvmlSystemGetCudaDriverVersion)
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
    capability = _query(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _query(nvml, nvml.nvmlDeviceGetMigMode, handle)
    running = _query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    clocks = {
        name: _query(nvml, function, handle, getattr(nvml, kind, None))
        for name, function, kind in (
            ("sm", nvml.nvmlDeviceGetClockInfo, "NVML_CLOCK_SM"),
            ("memory", nvml.nvmlDeviceGetClockInfo, "NVML_CLOCK_MEM"),
            ("sm at most", nvml.nvmlDeviceGetMaxClockInfo, "NVML_CLOCK_SM"),
            ("memory at most", nvml.nvmlDeviceGetMaxClockInfo, "NVML_CLOCK_MEM"),
        )
    }
    uuid = _query(nvml, nvml.nvmlDeviceGetUUID, handle)
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


def _query(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's value, or ``None`` if this card or driver does not have it."""
    # older cards have no MIG, virtual ones no clocks
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _ours(pid: int) -> bool:
    """Whether a process is this one, or descends from it."""
    # the engine that a suite runs must not make the card busy for that suite
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
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names, in its order."""
    if names is None:
        return tuple(gpus)
    visible: list[Gpu] = []
    for name in (part.strip() for part in names.split(",")):
        match = [
            gpu
            for gpu in gpus
            if name == str(gpu.index)
            or (name.startswith("GPU-") and str(gpu.uuid).startswith(name))
        ]
        # as in CUDA, an unknown name hides itself and all that follow
        if len(match) != 1 or match[0] in visible:
            break
        visible += match
    return tuple(visible)
