"""The machine of a run, for its report; and a watch on GPU memory that is not released."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollproof.engines.gpus import GpuFindings, find_gpus
from rollproof.gpu_suites.requirements import ENGINES, installed

__all__ = ["ENVIRONMENT", "HIDDEN", "PLACE", "MemoryWatch", "described", "without_credentials"]

_GIB = 2**30
ENVIRONMENT: re.Pattern[str] = re.compile(
    r"(CUDA|CUBLAS|NCCL|NVSHMEM|VLLM|SGLANG|TORCH|TORCHDYNAMO|TRITON|PYTORCH|OMP|ROLLPROOF|NVIDIA_TF32)_\w+",
    re.ASCII,
)
"""Environment variables that change what is computed, or on which hardware.

Their values go into every report, and no others do.
"""
PLACE = "(a path)"
"""Replaces a path in a report: the file system of a machine does not change what is computed."""
HIDDEN = "(hidden)"
"""Replaces a credential in a report."""
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|PASS$", re.IGNORECASE)
_SECRET_VALUES: tuple[tuple[re.Pattern[str], str], ...] = (
    # user and password of an address
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), HIDDEN),
    # what an address or a list of settings gives by name
    (
        re.compile(r"(?i)\b(\w*(?:token|key|secret|pass|passwd|password|auth|sig\w*)=)[^&;,\s]+"),
        rf"\1{HIDDEN}",
    ),
    # Hugging Face, OpenAI, GitHub, AWS, and a JSON web token
    (re.compile(r"\b(?:hf_|sk-|gh[a-z]_|github_pat_|AKIA|eyJ)[\w.-]{16,}"), HIDDEN),
)
_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "rollproof",
    "nvidia-ml-py",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


def described(findings: GpuFindings | None = None) -> dict[str, Any]:
    """Return GPUs, driver, clocks, versions and relevant environment, in JSON form."""
    findings = findings or find_gpus()
    engines = {name: installed(name).version for name in ENGINES}
    return {
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "memory_gib": None if gpu.memory is None else round(gpu.memory / _GIB, 1),
                "capability": (
                    None if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}"
                ),
                "clocks_mhz": dict(gpu.clocks),
            }
            for gpu in findings.gpus
        ],
        "no_gpu_because": findings.reason,
        "driver": findings.driver,
        "cuda_of_driver": findings.cuda,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {
            **_versions(),
            **{name: version for name, version in engines.items() if version},
        },
        "environment": {
            # a path differs between machines, and does not change what is computed
            name: PLACE if value.startswith(("/", "~")) else without_credentials(value)
            for name, value in sorted(os.environ.items())
            if ENVIRONMENT.fullmatch(name) and not _SECRET.search(name)
        },
    }


def without_credentials(text: str) -> str:
    """Return the text with credentials hidden: a report is passed on."""
    for pattern, replacement in _SECRET_VALUES:
        text = pattern.sub(replacement, text)
    return text


class MemoryWatch:
    """Records the free memory of each GPU, to report later what was not released.

    Args:
        find: finds the GPUs.
        slack_gib: what may be missing: a CUDA context of this process, fragments of the driver.
        patience_s: how long the driver may take to release the memory of a process that ended.
        nap_s: time between two looks.
    """

    def __init__(
        self,
        find: Callable[[], GpuFindings] = find_gpus,
        *,
        slack_gib: float = 1.0,
        patience_s: float = 20.0,
        nap_s: float = 0.5,
    ) -> None:
        self._find, self._slack, self._patience, self._nap = find, slack_gib, patience_s, nap_s
        self._before = self._free()

    def missing(self) -> str | None:
        """Return what was not released within the patience, in one line; ``None`` if all was."""
        end = time.monotonic() + self._patience
        while True:
            now = self._free()
            lost = {
                index: free - now[index] for index, free in self._before.items() if index in now
            }
            missing = {index: size for index, size in lost.items() if size > self._slack * _GIB}
            if not missing:
                return None
            if time.monotonic() >= end:
                sizes = ", ".join(
                    f"{size / _GIB:.1f} GiB on GPU {index}" for index, size in missing.items()
                )
                return f"not given back within {self._patience:g} s: {sizes}"
            time.sleep(self._nap)

    def _free(self) -> Mapping[int, int]:
        return {gpu.index: gpu.free for gpu in self._find().gpus if gpu.free is not None}


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
