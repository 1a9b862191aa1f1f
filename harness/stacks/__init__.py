"""Released RL frameworks whose own, unmodified classes are judged on fake servers.

A stack has several parts, each a subject of its own (``client``, ``tool-agent-loop``, ...). Loading
a stack imports the framework, which may take half a minute and gigabytes: one process a stack.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollproof.core.error_text import describe_error_with_place
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
    "installed_version",
    "load_stack",
    "parse_spec",
    "release_of",
    "requirements_file",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A loaded framework.

    Fields:
        name: Its name in ``STACKS``.
        version: The version that is installed or checked out.
        parts: Factory of subjects by the name of each judged part. A factory may carry
            ``flavours`` (the engine flavours that the part speaks) and ``cases(profile, seed)``
            (schedules that fit it better than the profile's own).
        batches: Factory of batch subjects by the name of each conversion into training batches.
        found: Which version, and how it is driven; ``load_stack`` sets it.
    """

    name: str
    version: str
    parts: Mapping[str, SubjectFactory]
    batches: Mapping[str, SubjectFactory] = field(default_factory=dict)
    found: Found | None = None

    @property
    def title(self) -> str:
        """``verl 0.9.1``, with a note if the adapters do not know the version."""
        if self.found is None or self.found.tested:
            return f"{self.name} {self.version}"
        return f"{self.name} {self.version} (untested, driven as {self.found.line})"

    def subjects(self, only: Iterable[str] = ()) -> Mapping[str, SubjectFactory]:
        """The parts, or those named in ``only``.

        Raises:
            UsageError: The stack does not have one of these parts.
        """
        chosen = tuple(only)
        unknown = sorted(set(chosen) - set(self.parts))
        if unknown:
            raise UsageError(
                f"{self.name} has no parts {unknown}; choose among {list(self.parts)}."
            )
        return {
            name: factory for name, factory in self.parts.items() if not chosen or name in chosen
        }

    def recipe(self, part: str) -> dict[str, str]:
        """The header of a trace, from which ``rollproof replay`` makes the subject again."""
        recipe = {"stack": self.name, "version": self.version, "part": part}
        if self.found is not None and self.found.checkout is not None:
            recipe["checkout"] = str(self.found.checkout)
        if self.found is not None and not self.found.tested:
            recipe["force"] = "yes"
        return recipe


_MOVES = (
    "A framework's classes move from release to release: another version needs a line in its table"
    " of versions."
)
_FORCE = (
    "With --force it is driven as the newest known one, and whatever fails then may be the"
    " adapter's fault."
)


def load_stack(spec: str, *, checkout: str | Path | None = None, force: bool = False) -> Stack:
    """Load ``verl`` or ``verl==0.9.1``.

    Args:
        spec: Name of the stack, and the version that must be installed.
        checkout: Folder of a stack that is on no package index; its versions are commits.
        force: Drive a version that the adapters do not know as the newest that they know.

    Raises:
        UsageError: There is no such stack, or the spec is malformed.
        StackError: It is not installed, in another version, or in one that the adapters do not
            know; the text has the command to run.
    """
    name, requested = parse_spec(spec)
    module = importlib.import_module(STACKS[name])
    release: Release = module.RELEASE
    requested = None if requested is None else release.known_as(requested)
    if requested is not None and requested not in release.versions and not force:
        raise StackError(
            f"The adapters of {name} do not know version {requested}: they know"
            f" {', '.join(release.versions)}. {_MOVES} {_FORCE}"
        )
    version, folder = _look_up(name, release, requested, checkout)
    if requested is not None and requested != version:
        raise StackError(
            f"{name}=={requested} was requested, but {version} is"
            f" {release.installed}{_changes(release, folder)}. Run:\n "
            f" {release.install(requested)}"
        )
    if version not in release.versions and not force:
        raise StackError(
            f"{name} {version} is {release.installed}{_changes(release, folder)}, and the adapters"
            f" know only {', '.join(release.versions)}. {_MOVES} {_FORCE} Run:\n "
            f" {release.install()}"
        )
    found = Found(
        version=version,
        line=version if version in release.versions else release.versions[-1],
        checkout=folder,
    )
    _refuse_another_checkout(name, release, folder)
    try:
        stack: Stack = module.load(found)
    except RollproofError:
        raise
    # a framework's modules raise anything while they are imported, SystemExit included
    except (Exception, SystemExit) as error:
        raise StackError(
            f"{name} {version} is {release.installed}, but importing it fails:"
            f" {describe_error_with_place(error)}."
        ) from error
    _refuse_another_checkout(name, release, folder)
    return replace(stack, found=found)


def release_of(name: str) -> Release:
    """What must be installed for the stack ``name``; does not import it.

    Raises:
        UsageError: No stack has this name.
    """
    known, _ = parse_spec(name)
    release: Release = importlib.import_module(STACKS[known]).RELEASE
    return release


def _look_up(
    name: str, release: Release, requested: str | None, checkout: str | Path | None
) -> tuple[str, Path | None]:
    """The version that is there, and the folder of its checkout."""
    if release.repository is None:
        if checkout is not None:
            raise UsageError(
                f"{name} is a released package: install it instead of giving --checkout. Run:\n "
                f" {release.install(requested)}"
            )
        version = installed_version(release.distribution)
        if version is None:
            raise StackError(
                f"{name} is not installed here, so it cannot be judged. Run:\n "
                f" {release.install(requested)}"
            )
        return version, None
    if checkout is None:
        raise StackError(
            f"{name} is not on a package index, so it is judged from a checkout, `--stack {name}"
            f" --checkout DIR`. Run:\n  {release.install(requested)}"
        )
    folder = Path(checkout).expanduser()
    return checked_out(folder, release), folder.resolve()


def _changes(release: Release, folder: Path | None) -> str:
    """Which files of a checkout differ from its commit, as a parenthesis."""
    changed = () if folder is None else changed_files(folder, release)
    if not changed:
        return ""
    first, *others = changed
    return (
        f" ({first}{f' and {len(others)} more' if others else ''} {'are' if others else 'is'} not"
        " as the commit has it)"
    )


def _refuse_another_checkout(name: str, release: Release, folder: Path | None) -> None:
    """Raise ``StackError`` if the framework was imported from elsewhere than ``folder``: that one
    would be judged instead.
    """
    other = None if folder is None else imported_from(folder, release)
    if other is not None:
        raise StackError(
            f"{name} is already imported from {other}, not from {folder}: judge each checkout in a"
            " process of its own."
        )


def parse_spec(spec: str) -> tuple[str, str | None]:
    """``"verl==0.9.1"`` -> ``("verl", "0.9.1")``.

    Raises:
        UsageError: No stack has this name, or the operator is not ``==``.
    """
    # the only operator is ==: a range would leave open what was judged
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
        # names have hyphens, packages underscores: both are typed
        near = difflib.get_close_matches(name.lower().replace("_", "-"), STACKS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"No stack is named {name!r}.{guess} Stacks: {sorted(STACKS)}. Code of your own is"
            " judged with `--subject module:factory`."
        )
    return name, version or None
