"""Gate: which GPUs this host offers, and in one sentence why it offers none.

Asks the driver through nvidia-ml-py where that is installed, else looks at the device files. Neither initialises CUDA, so
a process may still choose its device afterwards.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Gpu", "GpuFindings", "device_files", "find_gpus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU. ``name`` and ``memory`` (bytes) are ``None`` where only its device file was seen."""

    index: int
    name: str | None = None
    memory: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFindings:
    """What was found, and by whom (``source``); ``reason`` says why there is no GPU, and is ``None`` where there is one."""

    gpus: tuple[Gpu, ...]
    source: str
    reason: str | None


def find_gpus(devices: Path = Path("/dev")) -> GpuFindings:
    """Look for GPUs that this process may use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return GpuFindings(gpus=(), source="environment", reason=f"no GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides every device")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _by_files(devices)
    return _by_driver(nvml)


def device_files(devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Indexes of the NVIDIA device files below ``devices``, ascending."""
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted(int(match[1]) for match in found if match))


def _by_files(devices: Path) -> GpuFindings:
    gpus = tuple(Gpu(index=index) for index in device_files(devices))
    reason = None if gpus else f"no GPU: there is no {devices}/nvidia0, so no NVIDIA device is visible here (nvidia-ml-py is not installed)"
    return GpuFindings(gpus=gpus, source="device files", reason=reason)


def _by_driver(nvml: Any) -> GpuFindings:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuFindings(gpus=(), source="nvidia-ml-py", reason=f"no GPU: the NVIDIA driver does not answer ({error})")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(index=index, name=str(nvml.nvmlDeviceGetName(handle)), memory=int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
            for index, handle in enumerate(handles)
        )
    finally:
        nvml.nvmlShutdown()
    return GpuFindings(gpus=gpus, source="nvidia-ml-py", reason=None if gpus else "no GPU: the NVIDIA driver lists no device")
