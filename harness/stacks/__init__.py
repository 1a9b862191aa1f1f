"""Stacks: released RL frameworks whose own classes are judged, unmodified, on fake servers.

A stack is several parts, each a subject of its own (``client``, ``tool-agent-loop``, ...). Loading
one imports the framework, which may take half a minute and gigabytes: one process per stack.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollproof.core.error_text import told_with_place
from rollproof.core.subjects import SubjectFactory
from rollproof.errors import RollproofError, StackError, UsageError
from rollproof.stacks.releases import (
    STACKS,
    Found,
    Release,
    changed_files,
    checked_out,
    imported_from,
    installed_version,
    requirements_file,
)

__all__ = [
    "STACKS",
    "Found",
    "Release",
    "Stack",
    "attributes",
    "installed_version",
    "load_stack",
    "missing_dependency",
    "parse_spec",
    "release_of",
    "requirements_file",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A loaded framework.

    ``parts`` maps the name of each judged part to a factory of subjects. A factory may carry
    ``flavours`` (the engine flavours that the part speaks) and ``cases(profile, seed)`` (schedules
    that fit it better than the profile's own). ``batches`` maps the name of each conversion into
    training batches to a factory of batch subjects. ``found`` says which version on which terms;
    ``load_stack`` fills it in.
    """

    name: str
    version: str
    parts: Mapping[str, SubjectFactory]
    batches: Mapping[str, SubjectFactory] = field(default_factory=dict)
    found: Found | None = None

    @property
    def title(self) -> str:
        """``verl 0.9.1``; a version that nobody tested is told as such."""
        if self.found is None or self.found.tested:
            return f"{self.name} {self.version}"
        return f"{self.name} {self.version} (untested, driven as {self.found.line})"

    def subjects(self, only: Iterable[str] = ()) -> Mapping[str, SubjectFactory]:
        """The parts, or those named in ``only``. Raises ``UsageError`` for a part that the stack
        does not have.
        """
        chosen = tuple(only)
        stray = sorted(set(chosen) - set(self.parts))
        if stray:
            raise UsageError(f"{self.name} has no parts {stray}; choose among {list(self.parts)}.")
        return {
            name: factory for name, factory in self.parts.items() if not chosen or name in chosen
        }

    def recipe(self, part: str) -> dict[str, str]:
        """What a trace's header says so that ``rollproof replay`` can make the subject again."""
        made = {"stack": self.name, "version": self.version, "part": part}
        if self.found is not None and self.found.checkout is not None:
            made["checkout"] = str(self.found.checkout)
        if self.found is not None and not self.found.tested:
            made["force"] = "yes"
        return made


_MOVES = (
    "A framework's classes move from release to release: another version needs a line in its table"
    " of versions."
)
_FORCE = (
    "With --force it is driven as the newest known one, and whatever fails then may be the"
    " adapter's fault."
)


def load_stack(spec: str, *, checkout: str | Path | None = None, force: bool = False) -> Stack:
    """Load ``verl`` or ``verl==0.9.1``; the version, where given, must be the one that is there.

    ``checkout`` is the folder of a stack that no package index has; its versions are commits.
    ``force`` drives a version that the adapters do not know as the newest that they know. Raises
    ``UsageError`` for a stack that does not exist or a malformed spec, ``StackError`` where it is
    missing, of another version than asked for, or of one that is not known; the text has the
    command to run.
    """
    name, wanted = parse_spec(spec)
    module = importlib.import_module(STACKS[name])
    release: Release = module.RELEASE
    wanted = None if wanted is None else release.known_as(wanted)
    if wanted is not None and wanted not in release.versions and not force:
        raise StackError(
            f"The adapters of {name} do not know version {wanted}: they know"
            f" {', '.join(release.versions)}. {_MOVES} {_FORCE}"
        )
    version, folder = _look(name, release, wanted, checkout)
    if wanted is not None and wanted != version:
        raise StackError(
            f"{name}=={wanted} was asked for, but {version} is"
            f" {_there(release)}{_because(release, folder)}. Run:\n  {release.install(wanted)}"
        )
    if version not in release.versions and not force:
        raise StackError(
            f"{name} {version} is {_there(release)}{_because(release, folder)}, and the adapters"
            f" know only {', '.join(release.versions)}. {_MOVES} {_FORCE} Run:\n "
            f" {release.install()}"
        )
    found = Found(
        version=version,
        line=version if version in release.versions else release.versions[-1],
        checkout=folder,
    )
    _refuse_another(name, release, folder)
    try:
        stack: Stack = module.load(found)
    except RollproofError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever the framework's modules raise while they are imported
        raise StackError(
            f"{name} {version} is {_there(release)}, but importing it fails:"
            f" {told_with_place(error)}."
        ) from error
    _refuse_another(name, release, folder)
    return replace(stack, found=found)


def release_of(name: str) -> Release:
    """What must be there for the stack ``name``, without importing it. Raises ``UsageError`` for a
    name that is no stack's.
    """
    known, _ = parse_spec(name)
    release: Release = importlib.import_module(STACKS[known]).RELEASE
    return release


def _look(
    name: str, release: Release, wanted: str | None, checkout: str | Path | None
) -> tuple[str, Path | None]:
    """The version that is there, and the folder of its checkout."""
    if release.repository is None:
        if checkout is not None:
            raise UsageError(
                f"{name} is a released package: install it instead of giving --checkout. Run:\n "
                f" {release.install(wanted)}"
            )
        found = installed_version(release.distribution)
        if found is None:
            raise StackError(
                f"{name} is not installed here, so it cannot be judged. Run:\n "
                f" {release.install(wanted)}"
            )
        return found, None
    if checkout is None:
        raise StackError(
            f"{name} is on no package index: it is judged from a checkout, `--stack {name}"
            f" --checkout DIR`. Run:\n  {release.install(wanted)}"
        )
    folder = Path(checkout).expanduser()
    return checked_out(folder, release, name), folder.resolve()


def _because(release: Release, folder: Path | None) -> str:
    """What is known of a checkout that is no commit."""
    changed = () if folder is None else changed_files(folder, release)
    if not changed:
        return ""
    first, *others = changed
    return (
        f" ({first}{f' and {len(others)} more' if others else ''} {'are' if others else 'is'} not"
        " as the commit has it)"
    )


def _refuse_another(name: str, release: Release, folder: Path | None) -> None:
    """Raise ``StackError`` where the framework was imported from elsewhere than ``folder``: that
    would be judged in its place.
    """
    other = None if folder is None else imported_from(folder, release)
    if other is not None:
        raise StackError(
            f"{name} is imported from {other} already, not from {folder}: judge each checkout in a"
            " process of its own."
        )


def _there(release: Release) -> str:
    return "installed" if release.repository is None else "checked out"


def parse_spec(spec: str) -> tuple[str, str | None]:
    """``"verl==0.9.1"`` -> ``("verl", "0.9.1")``. Raises ``UsageError`` for an unknown name or any
    other operator.
    """
    name, operator, version = (part.strip() for part in spec.partition("=="))
    if (
        not name.replace("-", "_").isidentifier()
        or (operator and not version)
        or any(char in version for char in "<>=!~, ")
    ):
        raise UsageError(
            f"{spec!r} names no stack: write NAME or NAME==VERSION, with NAME among"
            f" {sorted(STACKS)}."
        )
    if name not in STACKS:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), STACKS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"No stack is named {name!r}.{guess} Stacks: {sorted(STACKS)}. Code of your own is"
            " judged with `--subject module:factory`."
        )
    return name, version or None


def missing_dependency(name: str, version: str, error: ImportError, release: Release) -> StackError:
    """The error for a framework that is there while something that it imports is not."""
    module = getattr(error, "name", None) or ""
    if (
        release.repository is not None
        and module.partition(".")[0] == release.module.partition(".")[0]
    ):
        return StackError(
            f"{name} {version} is {_there(release)}, but not whole: its module {module} is not"
            f" there, or lacks a name: {error}."
        )
    own = module.partition(".")[0] in (name.replace("-", "_"), release.distribution)
    there = f"{name} {version} is {_there(release)}, but"
    if isinstance(error, ModuleNotFoundError) and module and not own:
        return StackError(
            f"{there} the package {module!r} that it needs is missing. Run:\n "
            f" {release.install(version)}"
        )
    failed = f"{there} importing it fails: {error}."
    if (
        release.repository is None and version not in release.versions
    ):  # no other packages would mend what has moved in it
        known = ", ".join(release.versions)
        return StackError(
            f"{failed} The adapters know {known}, and --force drives it as the newest of them."
            f" Run:\n  {release.install()}"
        )
    return StackError(f"{failed} Run:\n  {release.install(version)}")


def attributes(module: str, *names: str) -> tuple[Any, ...]:
    """Import ``module`` and take ``names`` from it. Raises ``ImportError`` where one is not there."""
    loaded = importlib.import_module(module)
    absent = [name for name in names if not hasattr(loaded, name)]
    if absent:
        raise ImportError(f"{module} has no {absent}", name=module)
    return tuple(getattr(loaded, name) for name in names)
