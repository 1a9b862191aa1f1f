"""The requirements of a test, and why this host does not meet them.

A test declares its requirements by markers: ``gpus(n)``, ``memory(gib)`` (free, on each of them),
``capability(x)`` (at least) and ``engine(name, spec)``: an engine or trainer, as a version
specifier understands it. Nothing here imports an engine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from rollproof.engines.gpus import Gpu, GpuFindings
from rollproof.errors import UsageError

__all__ = [
    "ENGINES",
    "MARKERS",
    "Installed",
    "Marker",
    "Need",
    "free_gpus",
    "installed",
    "interpreter",
    "needs_of",
    "unmet_need",
]

_GIB = 2**30

ENGINES: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("vllm", "sglang", "transformers", "deepspeed", "torch")}
    | {"megatron": "megatron-core"}
)
"""Engines and trainers that a test may require, with their distributions."""
# Engines that may have their own interpreter: `ROLLPROOF_VLLM_PYTHON`, `ROLLPROOF_SGLANG_PYTHON`
# (default: this one).
_OWN_INTERPRETER = ("vllm", "sglang")
_PRINT_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"

MARKERS: Mapping[str, str] = MappingProxyType(
    {
        "gpus": "gpus(n): the test needs n free GPUs.",
        "memory": "memory(gib): the test needs so much free memory on each of its GPUs.",
        "capability": (
            "capability(x): the test needs GPUs of at least this compute capability, such as 9.0."
        ),
        "engine": (
            "engine(name, spec=''): the test needs this engine or trainer, of a version within the"
            " specifier."
        ),
        "full": "full: the test is run with --rollproof-full only, or if it is named.",
    }
)
"""Markers by name, with their descriptions in pytest."""


class Marker(Protocol):
    """A mark of pytest."""

    @property
    def name(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The requirements of a test.

    Attributes:
        gpus: number of GPUs.
        memory: free memory of each, in GiB.
        capability: compute capability of each, at least.
        engines: engines and trainers, as (name, version specifier).
    """

    gpus: int = 1
    memory: float = 0.0
    capability: tuple[int, int] | None = None
    engines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """A distribution in the interpreter that runs it.

    Attributes:
        version: its version; ``None`` if it is not installed.
        python: the interpreter.
        reason: why there is no version.
    """

    version: str | None
    python: str
    reason: str = ""


def needs_of(marks: Iterable[Marker]) -> Need:
    """Return the requirements of a test's markers, the nearest of each name first.

    Raises ``UsageError`` for a marker with wrong arguments.
    """
    gpus, memory, capability, engines = 1, 0.0, None, []
    seen: set[str] = set()
    for mark in marks:
        if mark.name not in MARKERS or mark.name == "full":
            continue
        if mark.name == "engine":
            name, spec = _engine(mark)
            if name not in seen:
                engines.append((name, spec))
                seen.add(name)
            continue
        if mark.name in seen:
            continue
        seen.add(mark.name)
        value = _number(mark)
        if mark.name == "gpus":
            gpus = int(value)
        elif mark.name == "memory":
            memory = value
        else:
            major, _, minor = f"{value:.1f}".partition(".")
            capability = (int(major), int(minor))
    return Need(gpus=gpus, memory=memory, capability=capability, engines=tuple(engines))


def unmet_need(
    need: Need, findings: GpuFindings, find_version: Callable[[str], Installed] | None = None
) -> str | None:
    """Return why this host cannot run a test, in one line; ``None`` if it can.

    ``find_version`` is ``installed``, or a replacement of it.
    """
    if findings.reason is not None:
        return findings.reason
    free = free_gpus(findings)
    if len(free) < need.gpus:
        taken = [gpu.taken for gpu in findings.gpus if gpu.taken]
        reasons = f": {'; '.join(taken)}" if taken else ""
        return (
            f"needs {need.gpus} free GPU{'s' if need.gpus > 1 else ''}, and {len(free)} of"
            f" {len(findings.gpus)} are{reasons}"
        )
    chosen = free[: need.gpus]
    if need.capability is not None:
        low = [
            gpu for gpu in chosen if gpu.capability is not None and gpu.capability < need.capability
        ]
        if low:
            has = f"GPU {low[0].index} ({low[0].name}) has {_dotted(low[0].capability)}"
            return f"needs compute capability {_dotted(need.capability)}, and {has}"
    # free memory, not all: another process may use a GPU that is shared
    small = [gpu for gpu in chosen if gpu.free is not None and gpu.free < need.memory * _GIB]
    if small:
        return (
            f"needs {need.memory:g} GiB free on a GPU, and GPU {small[0].index} has"
            f" {(small[0].free or 0) / _GIB:.1f}"
        )
    for name, spec in need.engines:
        reason = _unmet_version(name, spec, (find_version or installed)(name))
        if reason:
            return reason
    return None


def free_gpus(findings: GpuFindings) -> tuple[Gpu, ...]:
    """Return the GPUs that a test may take."""
    return tuple(gpu for gpu in findings.gpus if gpu.taken is None)


def interpreter(name: str) -> str:
    """Return the Python that runs an engine."""
    if name not in _OWN_INTERPRETER:
        return sys.executable
    return os.environ.get(f"ROLLPROOF_{name.upper()}_PYTHON", sys.executable)


@functools.cache
def installed(name: str) -> Installed:
    """Return the version of an engine or trainer, from the interpreter that runs it.

    The engine is not imported.
    """
    distribution, python = ENGINES[name], interpreter(name)
    # no process is needed for what this interpreter has
    if python == sys.executable:
        try:
            return Installed(version=importlib.metadata.version(distribution), python=python)
        except importlib.metadata.PackageNotFoundError:
            return Installed(
                version=None,
                python=python,
                reason=f"{distribution} is not installed in {sys.prefix}",
            )
    try:
        process = subprocess.run(  # noqa: S603 - the interpreter that the user names
            [python, "-c", _PRINT_VERSION, distribution],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Installed(
            version=None,
            python=python,
            reason=f"{python} (ROLLPROOF_{name.upper()}_PYTHON) does not run: {error}",
        )
    if process.returncode:
        return Installed(
            version=None, python=python, reason=f"{distribution} is not installed in {python}"
        )
    return Installed(version=process.stdout.strip(), python=python)


def _unmet_version(name: str, spec: str, distribution: Installed) -> str:
    from packaging.specifiers import SpecifierSet

    if distribution.version is None:
        hint = ""
        if name in _OWN_INTERPRETER:
            hint = f"; set ROLLPROOF_{name.upper()}_PYTHON to an interpreter that has it"
        return f"needs {ENGINES[name]}{spec}: {distribution.reason}{hint}"
    # nightly builds of engines are pre-releases
    if spec and not SpecifierSet(spec, prereleases=True).contains(distribution.version):
        return f"needs {ENGINES[name]}{spec}, and {distribution.python} has {distribution.version}"
    return ""


def _engine(mark: Marker) -> tuple[str, str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    arguments: list[Any] = [*mark.args, *mark.kwargs.values()]
    if (
        not arguments
        or len(arguments) > 2
        or not all(isinstance(argument, str) for argument in arguments)
        or arguments[0] not in ENGINES
    ):
        raise UsageError(
            f"The marker engine(name, spec) takes one of {list(ENGINES)} and a version specifier,"
            f" not {arguments}."
        )
    spec = arguments[1] if len(arguments) > 1 else ""
    try:
        SpecifierSet(spec)
    except InvalidSpecifier as error:
        raise UsageError(
            f"The marker engine({arguments[0]!r}, {spec!r}) has no version specifier such as"
            f" '>=0.26,<0.30': {error}."
        ) from error
    return arguments[0], spec


def _number(mark: Marker) -> float:
    arguments: list[Any] = [*mark.args, *mark.kwargs.values()]
    text = str(arguments[0]) if len(arguments) == 1 and not isinstance(arguments[0], bool) else ""
    count = mark.name == "gpus"
    if not re.fullmatch(r"[1-9]\d*" if count else r"\d+(\.\d+)?", text):
        raise UsageError(
            f"The marker {mark.name} takes one number{' of GPUs, at least 1' if count else ''}, not"
            f" {arguments}."
        )
    return float(text)


def _dotted(capability: tuple[int, int] | None) -> str:
    return "an unknown one" if capability is None else f"{capability[0]}.{capability[1]}"
