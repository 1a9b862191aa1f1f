"""Run SGLang on a CPU without a kernel package: its missing kernels, written in Python.

SGLang has a CPU engine, but its published kernels are for CUDA; the CPU ones are built from source,
for AVX512 and AMX. On any other CPU its layers fall back to torch by themselves, except for the few
parts below. ``install`` installs them in this process; ``python -m
rollproof.engines.sglang.sglang_host`` calls it in each process that SGLang starts. Any other kernel
that is needed raises ``StandInError`` with its name; nothing returns a wrong value silently.

- ``sgl_kernel``, a module, in place of the wheel ``sglang-kernel``, which is for CUDA: SGLang
  imports it everywhere; on a CPU it calls ``assign_req_to_token_pool_cpu`` only.
- ``sgl_kernel::topk_softmax_cpu`` and ``::topk_sigmoid_cpu``, torch operators of a source build:
  ``fused_topk_cpu`` (srt/layers/moe/topk.py) calls them on any CPU.
- ``torchvision``, a module, if it is not installed: SGLang names some of it at import, and
  transformers must find it; its wheels do not load with torch's CPU build.
- the allocator ``ALLOC_MEMORY_FUNCS["cpu"]`` (srt/mem_cache/pool_host/common.py), in place of one
  that registers host memory with CUDA: the buffer of routed experts is allocated by it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import platform
import sys
import types
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from rollproof.errors import EngineStartError

__all__ = ["VERSIONS", "StandInError", "install"]

VERSIONS = ("0.5.21",)
"""Releases of SGLang on which the stand-ins were tested."""
_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")
_PACKAGE = "sgl_kernel"
_VISION = "torchvision"


class StandInError(EngineStartError):
    """SGLang cannot run on this CPU with the stand-ins.

    It is another release or another kind of CPU, or needs a kernel that has no stand-in.
    """


def install() -> None:
    """Install the stand-ins in this process, before anything of SGLang is imported.

    A second call does nothing. Raises ``StandInError`` for a release of SGLang on which they were
    not tested, for a CPU that SGLang does not support, and if the parts that they replace moved.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _refuse_others()
    if "sglang.srt" in sys.modules:
        raise StandInError(
            "Install the stand-ins before SGLang is imported: one of its modules is already"
            " imported."
        )
    if not _has_kernels():
        _declare_operators()
    sys.meta_path.append(_Finder())
    _allocate_plainly()


def _refuse_others() -> None:
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise StandInError(
            f"SGLang's CPU engine supports the machines {', '.join(_MACHINES)}; this one is"
            f" {machine!r}."
        )
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise StandInError(
            f"SGLang is not installed in {sys.prefix}. Its CPU engine needs sglang=={VERSIONS[-1]}:"
            " `nox -s engines` installs it."
        ) from None
    if installed not in VERSIONS:
        raise StandInError(
            f"The stand-ins for SGLang's CPU kernels were tested on {', '.join(VERSIONS)}, and"
            f" {installed} is installed: the parts that they replace may have moved. Install"
            f" sglang=={VERSIONS[-1]}, or add {installed} to"
            " rollproof.engines.sglang.sglang_cpu.VERSIONS and run tests/engines."
        )


def _has_kernels() -> bool:
    """Whether kernels for this CPU are installed.

    Raises ``StandInError`` for kernels of another device.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        return False
    try:
        importlib.import_module(_PACKAGE)
    except (ImportError, OSError):
        pass
    else:
        if hasattr(importlib.import_module("torch").ops.sgl_kernel, "topk_softmax_cpu"):
            return True
    raise StandInError(
        "The installed package sgl_kernel is not built for a CPU. Run `python -m pip"
        " uninstall sglang-kernel sgl-kernel` in an environment made for SGLang on a CPU"
        f" ({sys.prefix}); `nox -s engines` makes one."
    )


class _Kernels(types.ModuleType):
    """A package that is not installed, or a module below it: every name exists, and raises when it
    is called.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            return _Named(name, (), {})  # used in annotations, tables and isinstance tests only
        return _Missing(f"{self.__name__}.{name}")


class _Named(type):
    """The type of classes that nothing calls: the value of each attribute is its name
    (``InterpolationMode.BICUBIC``).
    """

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Missing:
    """A name below a package that is not installed; it raises when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise StandInError(
            f"SGLang called {self._name}, which has no stand-in on a CPU: this model or option"
            " does not run here."
        )


class _Finder:
    """Finds ``sgl_kernel``, ``torchvision`` and everything below them.

    It comes after all other finders, so that installed packages win.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that this finder makes."""
        if name.partition(".")[0] not in (_PACKAGE, _VISION):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # duck-typed, as importlib allows

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module with names that raise when they are called, and with its stand-ins."""
        module = _Kernels(spec.name)
        module.__path__ = []
        if spec.name == _PACKAGE:
            module.__dict__["assign_req_to_token_pool_cpu"] = _assign_slots
        elif spec.name == _VISION:
            # the release for torch 2.13: transformers looks for it, and SGLang needs it to be there
            module.__dict__["__version__"] = "0.28.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing: the module is complete."""


def _assign_slots(
    requests: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Write each request's next KV slots into its row of ``table`` ``(requests, width)``."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _declare_operators() -> None:
    """Declare the torch operators, with the signatures by which SGLang calls them."""
    torch = importlib.import_module("torch")
    library = torch.library.Library(_PACKAGE, "DEF")
    signature = (
        "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor?"
        " correction_bias=None) -> (Tensor, Tensor)"
    )
    scores = {
        "topk_softmax_cpu": lambda logits: logits.softmax(-1),
        "topk_sigmoid_cpu": lambda logits: logits.sigmoid(),
    }
    for name, score in scores.items():
        library.define(name + signature)
        library.impl(name, _router(score), "CPU")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []
"""Libraries of torch: their operators vanish with the object."""


def _router(score: Any) -> Any:
    """Return a router in fp32 that chooses with the correction bias and weights without it, as HF's
    routers do.
    """

    def route(
        _hidden: Any, gating_output: Any, topk: int, renormalize: bool, correction_bias: Any = None
    ) -> tuple[Any, Any]:
        scores = score(gating_output.float())
        chosen = scores if correction_bias is None else scores + correction_bias
        ids = chosen.topk(topk, dim=-1).indices
        weights = scores.gather(-1, ids)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids.int()

    return route


def _allocate_plainly() -> None:
    """Give SGLang's buffers on the host an allocator that does not use CUDA."""
    name = "sglang.srt.mem_cache.pool_host.common"
    try:
        table = importlib.import_module(name).ALLOC_MEMORY_FUNCS
    except (ImportError, AttributeError) as error:
        raise StandInError(
            f"{name}.ALLOC_MEMORY_FUNCS, which needs a plain allocator on a CPU, is missing:"
            f" {error}"
        ) from error
    torch = importlib.import_module("torch")

    def plain(dims: Sequence[int], dtype: Any, device: str, **_: Any) -> Any:
        return torch.zeros(tuple(dims), dtype=dtype, device=device)

    table["cpu"] = plain
