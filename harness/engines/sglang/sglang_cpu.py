"""SGLang on a CPU for which no kernel package exists: what its binary packages would give, written
in Python.

SGLang has a CPU engine, and its published kernels are for CUDA; the CPU ones are built from source,
for AVX512 and AMX. On any other CPU its layers fall back to torch by themselves, except for the few
things below. ``install`` puts them in place, in this process; ``python -m
rollproof.engines.sglang.sglang_host`` calls it in each process that SGLang starts. What is not here
and would be needed raises ``StandInError`` with the name of the missing kernel; nothing gives a
wrong value in silence.

- ``sgl_kernel``, a module, for the wheel ``sglang-kernel``, which is for CUDA: SGLang imports it
  everywhere; on a CPU it calls ``assign_req_to_token_pool_cpu`` only.
- ``sgl_kernel::topk_softmax_cpu`` and ``::topk_sigmoid_cpu``, torch operators of a source build:
  ``fused_topk_cpu`` (srt/layers/moe/topk.py) calls them on any CPU.
- ``torchvision``, a module, where none is installed: SGLang names some of it at import, and
  transformers must think that it is there; its wheels do not load beside torch's CPU build.
- the allocator ``ALLOC_MEMORY_FUNCS["cpu"]`` (srt/mem_cache/pool_host/common.py), for one that
  registers host memory with CUDA: the buffer of routed experts is allocated by it.
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
"""Releases of SGLang on which the stand-ins were run."""
_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")
_PACKAGE = "sgl_kernel"
_VISION = "torchvision"


class StandInError(EngineStartError):
    """SGLang cannot run on this CPU with the stand-ins: another release, another kind of CPU, or a
    kernel that has none.
    """


def install() -> None:
    """Put every stand-in in place. Call it before anything of SGLang is imported; twice is once.

    Raises ``StandInError`` where SGLang is of a release that they were not run on, the CPU is none
    that SGLang knows, or SGLang's own parts are not where they were.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _refuse_others()
    if "sglang.srt" in sys.modules:
        raise StandInError(
            "The stand-ins come too late: something of SGLang is imported already, without them."
        )
    if not _has_kernels():
        _declare_operators()
    sys.meta_path.append(_Finder())
    _allocate_plainly()


def _refuse_others() -> None:
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise StandInError(
            f"SGLang's CPU engine knows the machines {', '.join(_MACHINES)}; this one is"
            f" {machine!r}."
        )
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise StandInError(
            f"SGLang is not installed in {sys.prefix}. Its CPU engine needs sglang=={VERSIONS[-1]}:"
            " `nox -s engines` installs it."
        ) from None
    if found not in VERSIONS:
        raise StandInError(
            f"The stand-ins for SGLang's CPU kernels were run on {', '.join(VERSIONS)}, and {found}"
            f" is installed: what they replace may have moved. Install sglang=={VERSIONS[-1]}, or"
            f" add {found} to rollproof.engines.sglang.sglang_cpu.VERSIONS and run tests/engines."
        )


def _has_kernels() -> bool:
    """Whether kernels for this CPU are installed. Raises ``StandInError`` for those of another
    device.
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
        "The package sgl_kernel is installed, and is not built for a CPU. Run `python -m pip"
        " uninstall sglang-kernel sgl-kernel` in an environment made for SGLang on a CPU"
        f" ({sys.prefix}); `nox -s engines` makes one."
    )


class _Kernels(types.ModuleType):
    """A package that is not installed, or a module below it: any name is there, and raises when it
    is called.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            return _Named(name, (), {})  # named in annotations, tables and isinstance tests only
        return _Missing(f"{self.__name__}.{name}")


class _Named(type):
    """The type of classes that are only named: each attribute of one is its own name
    (``InterpolationMode.BICUBIC``).
    """

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Missing:
    """A name below a package that is not installed: it can be passed around, and raises when it is
    called.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise StandInError(
            f"SGLang called {self._name}, which has no stand-in on a CPU: this model or option"
            " cannot be run here."
        )


class _Finder:
    """Finds ``sgl_kernel``, ``torchvision`` and everything below them, after all other finders:
    what is installed comes first.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module, where it is one of ours."""
        if name.partition(".")[0] not in (_PACKAGE, _VISION):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # duck-typed, as importlib allows

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module whose names raise when called; the package itself holds what was written
        for it.
        """
        module = _Kernels(spec.name)
        module.__path__ = []
        if spec.name == _PACKAGE:
            module.__dict__["assign_req_to_token_pool_cpu"] = _assign_slots
        elif spec.name == _VISION:
            module.__dict__[
                "__version__"
            ] = (  # the release for torch 2.13: transformers asks, and SGLang needs it to say yes
                "0.28.0"
            )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""


def _assign_slots(
    requests: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Write each request's next KV slots into its row of the table ``(requests, width)``, from
    ``start`` to ``end``.
    """
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _declare_operators() -> None:
    """The torch operators, with the signatures by which SGLang calls them."""
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
    _KEPT.append(library)


_KEPT: list[Any] = []
"""Libraries of torch: what they define goes with them."""


def _router(score: Any) -> Any:
    """Top-k of the router's scores in fp32, chosen with the correction bias and weighted without,
    as HF's routers do.
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
    """Give SGLang's buffers on the host an allocator that asks nothing of CUDA."""
    name = "sglang.srt.mem_cache.pool_host.common"
    try:
        table = importlib.import_module(name).ALLOC_MEMORY_FUNCS
    except (ImportError, AttributeError) as error:
        raise StandInError(
            f"{name}.ALLOC_MEMORY_FUNCS, where the stand-ins put a plain allocator, cannot be had:"
            f" {error}"
        ) from error
    torch = importlib.import_module("torch")

    def plain(dims: Sequence[int], dtype: Any, device: str, **_: Any) -> Any:
        return torch.zeros(tuple(dims), dtype=dtype, device=device)

    table["cpu"] = plain
