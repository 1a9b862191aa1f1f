"""Needs: what a suite asks of the host, and in one sentence why this host cannot run it.

A test says what it needs by markers: ``gpus(n)``, ``memory(gib)`` (free, on each of them),
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
from collections.abc import Iterable, Mapping
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
    "unmet",
]

_GIB = 2**30

ENGINES: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("vllm", "sglang", "transformers", "deepspeed", "torch")}
    | {"megatron": "megatron-core"}
)
"""What a suite may need, and the distribution that it is."""
_APART = ("vllm", "sglang")
"""Engines that live in an interpreter of their own: ``ROLLPROOF_VLLM_PYTHON``,
``ROLLPROOF_SGLANG_PYTHON`` (by itself: this one).
"""
_ASK = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"

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
        "full": "full: the test is run with --rollproof-full only, or where it is named.",
    }
)
"""Markers by name, with what pytest tells about them."""


class Marker(Protocol):
    """A mark as pytest has it."""

    @property
    def name(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a suite needs: ``gpus``, each with ``memory`` GiB free and ``capability`` at least;
    ``engines`` are (name, specifier).
    """

    gpus: int = 1
    memory: float = 0.0
    capability: tuple[int, int] | None = None
    engines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """A distribution in the interpreter that is to run it: its ``version``, or why there is none
    (``reason``).
    """

    version: str | None
    python: str
    reason: str = ""


def needs_of(marks: Iterable[Marker]) -> Need:
    """What the markers of a test say, the nearest of each name first. Raises ``UsageError`` for one
    that says nothing sensible.
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


def unmet(need: Need, found: GpuFindings, ask: Any = None) -> str | None:
    """Why this host cannot do it, in one line; ``None`` where it can. ``ask`` is ``installed``, or
    what stands in for it.
    """
    if found.reason is not None:
        return found.reason
    free = free_gpus(found)
    if len(free) < need.gpus:
        taken = [why for gpu in found.gpus if (why := gpu.taken)]
        why = f": {'; '.join(taken)}" if taken else ""
        return (
            f"needs {need.gpus} free GPU{'s' if need.gpus > 1 else ''}, and {len(free)} of"
            f" {len(found.gpus)} are{why}"
        )
    chosen = free[: need.gpus]
    if need.capability is not None:
        low = [
            gpu for gpu in chosen if gpu.capability is not None and gpu.capability < need.capability
        ]
        if low:
            has = f"GPU {low[0].index} ({low[0].name}) has {_dotted(low[0].capability)}"
            return f"needs compute capability {_dotted(need.capability)}, and {has}"
    small = [gpu for gpu in chosen if gpu.free is not None and gpu.free < need.memory * _GIB]
    if small:
        return (
            f"needs {need.memory:g} GiB free on a GPU, and GPU {small[0].index} has"
            f" {(small[0].free or 0) / _GIB:.1f}"
        )
    for name, spec in need.engines:
        reason = _lacking(name, spec, (ask or installed)(name))
        if reason:
            return reason
    return None


def free_gpus(found: GpuFindings) -> tuple[Gpu, ...]:
    """The GPUs that a suite may take."""
    return tuple(gpu for gpu in found.gpus if gpu.taken is None)


def interpreter(name: str) -> str:
    """The Python that runs an engine."""
    return (
        os.environ.get(f"ROLLPROOF_{name.upper()}_PYTHON", sys.executable)
        if name in _APART
        else sys.executable
    )


@functools.cache
def installed(name: str) -> Installed:
    """The version of an engine or trainer, asked of the interpreter that is to run it; the engine
    is not imported.
    """
    distribution, python = ENGINES[name], interpreter(name)
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
        done = subprocess.run(  # noqa: S603 - the interpreter that the user names
            [python, "-c", _ASK, distribution],
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
    if done.returncode:
        return Installed(
            version=None, python=python, reason=f"{distribution} is not installed in {python}"
        )
    return Installed(version=done.stdout.strip(), python=python)


def _lacking(name: str, spec: str, found: Installed) -> str:
    from packaging.specifiers import SpecifierSet

    if found.version is None:
        where = (
            f"; set ROLLPROOF_{name.upper()}_PYTHON to an interpreter that has it"
            if name in _APART
            else ""
        )
        return f"needs {ENGINES[name]}{spec}: {found.reason}{where}"
    if spec and not SpecifierSet(spec, prereleases=True).contains(found.version):
        return f"needs {ENGINES[name]}{spec}, and {found.python} has {found.version}"
    return ""


def _engine(mark: Marker) -> tuple[str, str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    given: list[Any] = [*mark.args, *mark.kwargs.values()]
    if (
        not given
        or len(given) > 2
        or not all(isinstance(one, str) for one in given)
        or given[0] not in ENGINES
    ):
        raise UsageError(
            f"The marker engine(name, spec) takes one of {list(ENGINES)} and a version specifier,"
            f" not {given}."
        )
    spec = given[1] if len(given) > 1 else ""
    try:
        SpecifierSet(spec)
    except InvalidSpecifier as error:
        raise UsageError(
            f"The marker engine({given[0]!r}, {spec!r}) has no version specifier such as"
            f" '>=0.26,<0.30': {error}."
        ) from error
    return given[0], spec


def _number(mark: Marker) -> float:
    given: list[Any] = [*mark.args, *mark.kwargs.values()]
    text = str(given[0]) if len(given) == 1 and not isinstance(given[0], bool) else ""
    whole = mark.name == "gpus"
    if not re.fullmatch(r"[1-9]\d*" if whole else r"\d+(\.\d+)?", text):
        raise UsageError(
            f"The marker {mark.name} takes one number{' of GPUs, at least 1' if whole else ''}, not"
            f" {given}."
        )
    return float(text)


def _dotted(capability: tuple[int, int] | None) -> str:
    return "an unknown one" if capability is None else f"{capability[0]}.{capability[1]}"
