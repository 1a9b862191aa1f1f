"""Stacks: released RL frameworks whose own classes are judged, unmodified, on fake servers.

A stack is several parts, each a subject of its own (``client``, ``tool-agent-loop``, ...). Loading one imports the
framework, which may take half a minute and gigabytes: one process per stack.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, resources
from typing import Any

from rollproof.errors import StackError, UsageError
from rollproof.subjects import SubjectFactory

__all__ = ["STACKS", "Release", "Stack", "installed_version", "load_stack", "parse_spec", "requirements_file"]

STACKS: Mapping[str, str] = {"verl": "rollproof.stacks.verl"}
"""Name of each stack, and the module with its ``load(version) -> Stack`` and ``RELEASE``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What must be installed for a stack: its distribution, the versions that the adapters know, and its pinned dependencies."""

    distribution: str
    versions: tuple[str, ...]
    requirements: str

    def install(self, version: str | None = None) -> str:
        """The commands that install ``version`` (default: the newest known) beside rollproof."""
        wanted = version if version in self.versions else self.versions[-1]
        return (
            f"python -m pip install -r {requirements_file(self.requirements)} && "
            f"python -m pip install --no-deps {self.distribution}=={wanted}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A loaded framework.

    ``parts`` maps the name of each judged part to a factory of subjects. A factory may carry ``flavours`` (the engine
    flavours that the part speaks) and ``cases(profile, seed)`` (schedules that fit it better than the profile's own).
    ``batches`` maps the name of each conversion into training batches to a factory of batch subjects.
    """

    name: str
    version: str
    parts: Mapping[str, SubjectFactory]
    batches: Mapping[str, SubjectFactory] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """``verl 0.9.1``."""
        return f"{self.name} {self.version}"

    def subjects(self, only: Iterable[str] = ()) -> Mapping[str, SubjectFactory]:
        """The parts, or those named in ``only``. Raises ``UsageError`` for a part that the stack does not have."""
        chosen = tuple(only)
        stray = sorted(set(chosen) - set(self.parts))
        if stray:
            raise UsageError(f"{self.name} has no parts {stray}; choose among {list(self.parts)}.")
        return {name: factory for name, factory in self.parts.items() if not chosen or name in chosen}

    def recipe(self, part: str) -> dict[str, str]:
        """What a trace's header says so that ``rollproof replay`` can make the subject again."""
        return {"stack": self.name, "version": self.version, "part": part}


_MOVES = "A framework's classes move from release to release: another version needs a line in its table of versions."


def load_stack(spec: str) -> Stack:
    """Load ``verl`` or ``verl==0.9.1``; the version, where given, must be the installed one.

    Raises ``UsageError`` for a stack that does not exist or a malformed spec, ``StackError`` where the package is missing, of
    another version than asked for, or of one that the adapters do not know; the text has the command to run.
    """
    name, wanted = parse_spec(spec)
    module = importlib.import_module(STACKS[name])
    release: Release = module.RELEASE
    found = installed_version(release.distribution)
    if wanted is not None and wanted not in release.versions:
        raise StackError(f"The adapters of {name} do not know version {wanted}: they know {', '.join(release.versions)}. {_MOVES}")
    if found is None:
        raise StackError(f"{name} is not installed here, so it cannot be judged. Run:\n  {release.install(wanted)}")
    if wanted is not None and wanted != found:
        raise StackError(f"{name}=={wanted} was asked for, but {found} is installed. Run:\n  {release.install(wanted)}")
    if found not in release.versions:
        raise StackError(
            f"{name} {found} is installed, and the adapters know only {', '.join(release.versions)}. {_MOVES} Run:\n  {release.install()}"
        )
    stack: Stack = module.load(found)
    return stack


def parse_spec(spec: str) -> tuple[str, str | None]:
    """``"verl==0.9.1"`` -> ``("verl", "0.9.1")``. Raises ``UsageError`` for an unknown name or any other operator."""
    name, operator, version = (part.strip() for part in spec.partition("=="))
    if not name.isidentifier() or (operator and not version) or any(char in version for char in "<>=!~, "):
        raise UsageError(f"{spec!r} names no stack: write NAME or NAME==VERSION, with NAME among {sorted(STACKS)}.")
    if name not in STACKS:
        near = difflib.get_close_matches(name, STACKS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"No stack is named {name!r}.{guess} Stacks: {sorted(STACKS)}. Code of your own is judged with `--subject module:factory`."
        )
    return name, version or None


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution (the one that an import would find first), without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements_file(name: str) -> str:
    """Path of a pinned list of dependencies that is shipped with rollproof."""
    return str(resources.files("rollproof.stacks") / "requirements" / name)


def missing_dependency(name: str, version: str, error: ImportError, release: Release) -> StackError:
    """The error for a framework that is installed while something that it imports is not."""
    gap = f"the package {error.name!r} that it needs is missing" if getattr(error, "name", None) else f"importing it fails: {error}"
    return StackError(f"{name} {version} is installed, but {gap}. Run:\n  {release.install(version)}")


def attributes(module: str, *names: str) -> tuple[Any, ...]:
    """Import ``module`` and take ``names`` from it. Raises ``ImportError`` where one is not there."""
    loaded = importlib.import_module(module)
    absent = [name for name in names if not hasattr(loaded, name)]
    if absent:
        raise ImportError(f"{module} has no {absent}", name=module)
    return tuple(getattr(loaded, name) for name in names)
